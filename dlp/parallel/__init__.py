"""Parallel linears, model conversion, FSDP and the step boundary. Only this package combines recipe, style and overlap."""

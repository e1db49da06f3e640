"""Parallel linears, conversion, FSDP and the step boundary: only this package combines recipe, style and overlap."""

"""The only place where recipe, style and overlap meet: parallel linears, conversion, FSDP, the step boundary."""

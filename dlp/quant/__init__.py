"""Numbers: formats, scales, recipes. Never a process group, never a module."""

"""Typed settings: declaration, check and documentation of a setting, and overrides from the command line."""

"""Typed settings: rules, checks and documentation of a setting, and overrides from the command line."""

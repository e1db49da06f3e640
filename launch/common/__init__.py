"""Helpers without knowledge of training: atomic files, units in messages, optional packages."""

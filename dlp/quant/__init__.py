"""Formats, quantizers and recipes. This package does not use process groups or modules."""

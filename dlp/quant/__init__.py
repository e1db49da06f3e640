"""Formats, quantizers and recipes. This package knows neither process groups nor modules."""

"""Quality study: the cost in loss of recipes, wire formats and optimizers: `python -m bench.quality_study --help`, and
__main__.py."""

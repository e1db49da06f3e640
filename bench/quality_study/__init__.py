"""What recipes, wires and optimizers cost in loss: `python -m bench.quality_study --help`, and __main__.py."""

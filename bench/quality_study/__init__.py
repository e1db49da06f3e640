"""Quality study: how much recipes, wire formats and optimizers raise the loss. See __main__.py."""

"""Optimizers that torch does not have for sharded parameters, and encodings of optimizer states in few bits."""

"""Weights without optimizer states: checkpoints of weights and Hugging Face folders."""

"""Weights without optimizer states: checkpoints that hold only weights, and Hugging Face folders."""

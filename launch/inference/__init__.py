"""Trained models for evaluation and generation, without optimizer and training state."""

"""Trained models without their training, for evaluation and generation."""

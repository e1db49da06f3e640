"""Flows: quantize a trained model for forward passes, calibrate static scales, save and load codes, export QAT models, LoRA."""

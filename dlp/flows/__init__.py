"""Flows: quantize an existing model, converted or plain, for forward passes; calibrate scales, save codes, export QAT
models."""

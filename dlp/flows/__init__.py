"""Flows: a model that exists, converted or plain, quantized for forward passes; scales found, codes saved, QAT exported."""

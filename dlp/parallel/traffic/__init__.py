"""Predict the bytes that a step sends from the plan, and compare them with the counted bytes."""

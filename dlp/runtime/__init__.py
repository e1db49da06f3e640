"""Execution of forward and backward: autograd functions and captured launches. Imports kernels only."""

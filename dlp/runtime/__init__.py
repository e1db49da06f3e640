"""Execution of forward and backward: autograd functions and captured launches. Of dlp, this package imports only kernels."""

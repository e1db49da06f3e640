"""Execution of forward and backward: autograd functions and captured launches. This package imports no package of dlp except
dlp.kernels."""

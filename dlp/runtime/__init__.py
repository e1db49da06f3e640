"""How forward and backward run: autograd functions, captured launches, CUDA graphs. Imports kernels only."""

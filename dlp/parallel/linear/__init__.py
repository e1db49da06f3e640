"""The parallel linear: what a layer is, its three GEMMs, autograd, modules."""

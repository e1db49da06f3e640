"""The parallel linear: definition of a layer, its three GEMMs, autograd, modules."""

"""The parallel linear: spec, plan, the three GEMMs, autograd functions and modules."""

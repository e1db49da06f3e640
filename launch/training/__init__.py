"""Training loop and its parts: construction of the model, optimizer, gradients, update, recipe schedule, sentinel."""

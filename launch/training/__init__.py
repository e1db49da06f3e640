"""The training step and the training loop: building the model, optimizer, gradients, update, recipe schedule."""

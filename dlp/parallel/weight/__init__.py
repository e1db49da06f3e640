"""Storage of weights, and the casts of weights at a step boundary."""

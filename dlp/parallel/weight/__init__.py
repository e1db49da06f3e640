"""Where a weight lives, and the casts that a step boundary makes of it."""

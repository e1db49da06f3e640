"""Movement: groups, collectives, amax agreement. Never a format name, never a GEMM."""

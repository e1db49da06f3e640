"""Estimates without ranks: memory of each rank, and whether a run fits a named GPU."""

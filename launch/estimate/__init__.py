"""Estimates of memory per rank and seconds per step, computed from a config without starting ranks. A board is a GPU product.

memory        bytes of a rank at four moments of a step
memory_check  whether a run fits into the memory of a board
rates         measured speeds of a board, from a file in `tables` that `python -m launch.measure` writes
step_work     operations of a step (GEMMs, casts, attention, transfers), each with seconds and stream
timeline      schedule of the operations on a compute stream and one stream per link
step_time     seconds per step, tokens per second, shares of device time, largest costs
few_blocks    memory and time of a model, extrapolated from a few of its blocks
"""

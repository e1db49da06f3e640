"""Estimates of a run from its config alone, without ranks: memory of each rank, and seconds of a step.

memory        bytes of a rank at four moments of a step; memory_check: whether a run fits a named board
rates         speeds of one board, which `python -m launch.measure` measures and `tables` holds
step_work     operations of a step: GEMMs, casts, attention, transfers, each with seconds and a stream
timeline      schedule of the operations on streams: a compute stream, and a stream for each link
step_time     seconds per step, tokens per second, shares of device time, largest costs
"""

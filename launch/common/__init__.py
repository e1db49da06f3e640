"""General helpers: atomic files, tables of GPUs, units in messages, optional packages, main functions."""

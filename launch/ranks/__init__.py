"""Ranks and processes: exchange of Python objects, speeds of links, detection of hangs, exit of a process."""

"""Ranks and processes: objects exchanged between ranks, links, hang detection, how a process ends."""

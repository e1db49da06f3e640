"""Benchmarks, one program per file; `python -m bench` runs the benchmarks of one GPU. Launch never imports them. Not a
public API."""

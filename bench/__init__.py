"""Benchmarks, a program a file; `python -m bench` runs those of one GPU. Launch never imports them. Not a public API."""

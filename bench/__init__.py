"""Benchmarks, one program per file; `python -m bench` runs the benchmarks of one GPU. Not a public API, and not imported
by the package `launch`."""

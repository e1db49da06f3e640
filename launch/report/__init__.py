"""Reports of a run: run folder, metrics, plots, profiles and memory snapshots."""

"""Parallelism that proves itself: meshes compared with one rank, tensor by tensor (`dlp.prove`, docs/prove.md)."""

"""Comparison of meshes with one rank, tensor by tensor (`dlp.prove`, docs/prove.md)."""

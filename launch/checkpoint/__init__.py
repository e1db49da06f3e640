"""Checkpoints: manifest with hashes, saving in the foreground or background, loading on any mesh."""

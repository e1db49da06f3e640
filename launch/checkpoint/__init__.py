"""Checkpoints: manifest and hashes, saving and loading on any mesh, saving in the background."""

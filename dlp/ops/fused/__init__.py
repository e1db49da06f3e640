"""The fusions that dlp ships, one file each, found by listing this folder."""

"""The basic ops that dlp ships."""

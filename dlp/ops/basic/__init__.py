"""The basic ops of dlp."""

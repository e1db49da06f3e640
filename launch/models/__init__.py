"""Models: decoders of one architecture; families of published weights differ only in settings."""

"""Models: decoders of one architecture, of which the families of published weights are settings."""

"""The models that are trained: decoders of one shape, of which families of published weights are settings."""

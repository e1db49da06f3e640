"""Programs above `dlp`: configuration, data, model, training loop, checkpoints, metrics. Not a public API."""

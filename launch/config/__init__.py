"""Configuration of a training run: the sections of the TOML file, and the checks across sections."""

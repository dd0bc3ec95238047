"""Configuration: options, files, environment, URLs."""

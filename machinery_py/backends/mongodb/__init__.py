"""Results in MongoDB."""

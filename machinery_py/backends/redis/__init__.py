"""Results in Redis."""

"""Messages in Redis."""

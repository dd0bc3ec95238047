"""Messages in MongoDB."""

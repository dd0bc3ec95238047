"""Messages in SQLite."""

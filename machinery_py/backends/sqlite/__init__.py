"""Results in SQLite."""

"""Connections to SQLite."""

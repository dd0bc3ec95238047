"""Connections to MongoDB."""

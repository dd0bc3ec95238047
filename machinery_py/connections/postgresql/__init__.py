"""Connections to PostgreSQL."""

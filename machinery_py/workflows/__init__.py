"""Workflows that were sent: looked at, cancelled and retried from any process."""

"""Connections to each server, and what its client library does not do by itself."""

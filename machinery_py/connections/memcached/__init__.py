"""Connections to memcached."""

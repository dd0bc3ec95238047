"""Results in memcached."""

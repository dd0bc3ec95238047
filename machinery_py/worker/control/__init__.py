"""Orders to a worker, and signs of its life."""

"""A prototype: what the guarantees cost at least. Measure against it; build nothing on it."""

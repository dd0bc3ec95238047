"""A broker and a backend, changed together."""

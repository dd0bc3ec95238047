"""One file a service, shared by its broker, backend and lock."""

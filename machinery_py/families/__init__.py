"""What one URL opens: broker, backend, lock, and all of them as one store where that is possible."""

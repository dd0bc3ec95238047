"""Links to other libraries. Each module needs an extra of its own, and nothing here imports it."""

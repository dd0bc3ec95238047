"""machinery_py with task processes."""

"""machinery_py itself."""

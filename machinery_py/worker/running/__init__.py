"""Executions, and the runs that call the functions for them."""

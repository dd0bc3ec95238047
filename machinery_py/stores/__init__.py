"""Stores: broker, result backend and lock, opened from one URL or several, and settlements."""

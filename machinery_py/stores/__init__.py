"""Stores: a broker, a result backend and a lock that were opened from one URL or several, and their settlements."""

# mypy: ignore-errors
"""Sends as the other Celery does."""

import benchmarks.peers.celery.send  # noqa: F401

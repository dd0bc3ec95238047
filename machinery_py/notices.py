"""Notes in the log on how a program uses this library."""

from __future__ import annotations

from machinery_py.backends.base import BackendFeatures
from machinery_py.texts import get_logger

logger = get_logger(__name__)


def note_memory(features: BackendFeatures) -> None:
    """Warn that the members of a chord are counted where they may be forgotten."""
    if features.keeps and not features.durable and not features.embedded:
        logger.warning(
            "a chord was sent whose members are counted in %s, which forgets when it restarts "
            "or is full: then its callback is never called "
            "(name another result backend for chords that matter)",
            features.name,
        )

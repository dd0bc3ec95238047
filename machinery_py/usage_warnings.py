"""Warnings to a programmer about how calls are sent; each is logged once."""

from __future__ import annotations

from machinery_py.backends.base import BackendFeatures
from machinery_py.texts import get_logger

logger = get_logger("machinery_py.server")  # under which they always were


class UsageWarnings:
    """Warnings of one Server."""

    def __init__(self) -> None:
        self._noted_loop = self._noted_chord = False

    def sent_in_loop(self) -> None:
        """Note that a call was sent in a running event loop, which it blocks."""
        if self._noted_loop:
            return
        self._noted_loop = True
        logger.debug(
            "send() was called in a running event loop; it blocks it for one write (use send_async)"
        )

    def sent_chord(self, features: BackendFeatures) -> None:
        """Note that a chord was sent whose members are counted where they may be forgotten."""
        if self._noted_chord:
            return
        self._noted_chord = True
        if features.keeps and not features.durable and not features.embedded:
            logger.warning(
                "a chord was sent whose members are counted in %s, which forgets when it restarts "
                "or is full: then its callback is never called "
                "(name another result backend for chords that matter)",
                features.name,
            )

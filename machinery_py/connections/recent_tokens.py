"""Tokens of recent submissions, for stores inside this process, which lose no reply."""

from __future__ import annotations

from machinery_py.clock import Clock

TOKEN_LIFE = 600.0  # seconds; longer than anybody repeats a submission


class RecentTokens:
    """A set that forgets. The owner's lock guards it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}

    def add(self, token: str) -> bool:
        """Remember the token; False if it was known. "" is no token."""
        if not token:
            return True
        now = self._clock.monotonic()
        for old in list(self._seen):
            if self._seen[old] > now - TOKEN_LIFE:
                break
            del self._seen[old]
        if token in self._seen:
            return False
        self._seen[token] = now
        return True

    def forget(self, token: str) -> None:
        """Forget a token whose submission was rolled back."""
        self._seen.pop(token, None)

"""Tokens of recent submissions, for stores inside this process, which lose no reply."""

from __future__ import annotations

from itertools import takewhile

from machinery_py.bounds import TOKEN_LIFE
from machinery_py.clock import Clock
from machinery_py.connections.forks import ForkLock


class RecentTokens:
    """A set that forgets. May be used from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}
        self._lock = ForkLock()

    def add(self, token: str) -> bool:
        """Remember the token; False if it was known. "" is no token."""
        if not token:
            return True
        seen, now = self._seen, self._clock.monotonic()
        with self._lock:
            for old in list(takewhile(lambda one: seen[one] <= now - TOKEN_LIFE, seen)):
                del seen[old]
            if token in seen:
                return False
            seen[token] = now
            return True

    def __contains__(self, token: str) -> bool:
        """Return whether the token is remembered, perhaps past its life."""
        return token in self._seen

    def __bool__(self) -> bool:
        """Return whether any token is remembered, perhaps one past its life."""
        return bool(self._seen)

    def forget(self, token: str) -> None:
        """Forget a token whose submission was rolled back."""
        with self._lock:
            self._seen.pop(token, None)

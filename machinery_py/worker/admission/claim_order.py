"""Order of claims: threads of one worker ask for the runs of one key in the order of their claims.

The executor's threads take executions in order, and may be switched before they ask the store,
which gives the first turn to the first to ask. So the receiver hands out tickets. Whoever has one
first waits until the ticket before has said its key, and then until the one before of its own key
has asked: calls of other keys are asked for at the same time.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator

from machinery_py.connections.forks import ForkLock

PATIENCE = 1.0  # seconds for a ticket whose execution ended elsewhere, in case nobody says so


class Ticket:
    """Place of one execution."""

    def __init__(self, order: ClaimOrder, before: Ticket | None) -> None:
        self._order = order
        self._before = before
        self._known = threading.Event()
        self._asked = threading.Event()

    @contextlib.contextmanager
    def turn(self, key: Hashable) -> Iterator[None]:
        """Wait until those before it with this key have asked; at the end of the block it has."""
        before, self._before = self._before, None
        if before is not None:
            before._known.wait(PATIENCE)
        same = self._order.replace_last(key, self)
        self._known.set()
        try:
            if same is not None:
                same._asked.wait(PATIENCE)
            yield
        finally:
            self.end()
            self._order.forget(key, self)

    def end(self) -> None:
        """Let those behind it go on: it has asked, or never will."""
        self._before = None
        self._known.set()
        self._asked.set()


class ClaimOrder:
    """Tickets of one process. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = ForkLock()
        self._newest: dict[str, Ticket] = {}  # by task
        self._last: dict[Hashable, Ticket] = {}  # by key, while there is one that asks

    def ticket(self, name: str) -> Ticket:
        """Return a ticket behind those of the same task."""
        with self._lock:
            ticket = self._newest[name] = Ticket(self, self._newest.get(name))
        return ticket

    def replace_last(self, key: Hashable, ticket: Ticket) -> Ticket | None:
        with self._lock:
            before = self._last.get(key)
            self._last[key] = ticket
        return before

    def forget(self, key: Hashable, ticket: Ticket) -> None:
        with self._lock:
            if self._last.get(key) is ticket:
                del self._last[key]

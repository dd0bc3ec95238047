"""Which tasks are revoked: a queue that keeps it for three days, and in each process that asks a copy of what it holds.

A revocation goes to an exchange, and from there to the queue and to one queue of each process, which it empties whenever it
is asked: so to know that there is nothing new costs one round trip, however many there are.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from machinery_py._drivers.amqp_link import Channel
from machinery_py._drivers.amqp_reader import Reader
from machinery_py._drivers.amqp_turns import Turn, TurnLost, Turns
from machinery_py.backends.amqp_records import (
    REVOCATIONS,
    REVOKED,
    REVOKED_LIFE,
    REVOKED_LOCK,
    decode_names,
    name_of,
    pack,
)
from machinery_py.forks import ForkLock

CHUNK = 1000  # names in one message


class Revocations:
    """May be used from any thread."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._lock = ForkLock()
        self._names: dict[str, float] = {}  # → when it was heard, oldest first
        self._reader: Reader | None = None
        self._queue = ""

    def add(self, turn: Turn, uuids: Sequence[str]) -> None:
        """May be repeated: to be revoked twice is to be revoked."""
        names = [name_of(uuid) for uuid in uuids]
        for start in range(0, len(names), CHUNK):
            turn.tell(REVOCATIONS, "", pack(names[start:start + CHUNK]))

    def among(self, uuids: Sequence[str]) -> set[str]:
        """Those of them that are revoked."""
        try:
            return self._among(uuids)
        except TurnLost:
            return self._among(uuids)  # a new subscription begins with all that there is

    def _among(self, uuids: Sequence[str]) -> set[str]:
        with self._lock, self._turns.translated("reading revocations"):
            if self._reader is None or not self._reader.channel.is_open:
                self._subscribe()
            assert self._reader is not None
            found = self._reader.all([self._queue], self._turns.driver.timeout, auto_ack=True)
            self._hear(one.body for one in found[self._queue])
            return {uuid for uuid in uuids if name_of(uuid) in self._names} if self._names else set()

    def _subscribe(self) -> None:
        """First the news, then what there is: so nothing is missed."""
        timeout = self._turns.driver.timeout
        channel = self._turns.link().channel(timeout)
        self._queue = own_queue(channel, timeout)
        channel.rpc("queue_bind", queue=self._queue, exchange=REVOCATIONS, timeout=timeout)
        with self._turns.turn([REVOKED_LOCK], "reading revocations") as turn:
            turn.read([REVOKED])
            self._hear(one.body for one in turn.held(REVOKED))
        self._reader = Reader(channel)

    def _hear(self, bodies: Iterable[bytes]) -> None:
        now = time.monotonic()
        for body in bodies:
            self._names.update(dict.fromkeys(decode_names(body), now))
        for name, heard_at in list(self._names.items()):
            if heard_at > now - REVOKED_LIFE / 1000:
                break
            del self._names[name]


def own_queue(channel: Channel, timeout: float) -> str:
    """A queue that goes with the connection; its name."""
    frame = channel.rpc("queue_declare", queue="", exclusive=True, auto_delete=True, timeout=timeout)
    return str(frame.method.queue)

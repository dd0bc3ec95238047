"""Revocations: a queue that keeps them, and a copy of it in each process that asks.

A revocation goes to an exchange, and from there to the queue and to one queue of each process,
which the process empties whenever it is asked: so to know that there is nothing new costs one
round trip. Each new revocation removes expired ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from machinery_py.backends.rabbitmq.documents import (
    REVOKED,
    REVOKED_LOCK,
    Revocation,
    decode_revocation,
    name_of,
    pack,
)
from machinery_py.bounds import in_steps
from machinery_py.clock import micros
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.rabbitmq.io_thread import Channel
from machinery_py.connections.rabbitmq.queue_records import (
    QueueTransaction,
    QueueTransactionLost,
    QueueTransactions,
)
from machinery_py.connections.rabbitmq.queues import REVOCATIONS
from machinery_py.connections.rabbitmq.reader import QueueReader


class Revocations:
    """The revoked tasks, as this process knows them. May be used from any thread."""

    def __init__(self, transactions: QueueTransactions) -> None:
        self._transactions = transactions
        self._lock = ForkLock(reentrant=True)
        self._names: dict[str, int] = {}  # → until when, in µs
        self._reader: QueueReader | None = None
        self._queue = ""

    def add(self, transaction: QueueTransaction, uuids: Sequence[str], until: int) -> None:
        """Keep revocations until `until` (µs). The transaction holds REVOKED_LOCK."""
        transaction.read([REVOKED])
        transaction.drop(
            one
            for one in transaction.held(REVOKED)
            if decode_revocation(one.body).until <= self._now()
        )
        names = [name_of(uuid) for uuid in uuids]
        for some in in_steps(names):
            transaction.publish(REVOCATIONS, "", pack(Revocation(until, some)))

    def _now(self) -> int:
        return micros(self._transactions.driver.clock.now())

    def is_entered(self) -> bool:
        """Return whether this thread is reading."""
        return self._lock.is_mine()

    def among(self, uuids: Sequence[str]) -> set[str]:
        """Return those of these tasks that are revoked."""
        try:
            return self._among(uuids)
        except QueueTransactionLost:
            return self._among(uuids)  # a new subscription begins with all that there is

    def _among(self, uuids: Sequence[str]) -> set[str]:
        with self._lock, self._transactions.translated("reading revocations"):
            if self._reader is None or not self._reader.channel.is_open:
                self._subscribe()
            assert self._reader is not None
            found = self._reader.all(
                [self._queue], self._transactions.driver.timeout, auto_ack=True
            )
            self._hear(one.body for one in found[self._queue])
            return (
                {uuid for uuid in uuids if name_of(uuid) in self._names} if self._names else set()
            )

    def _subscribe(self) -> None:
        """Subscribe first, then read what there is: so nothing is missed."""
        timeout = self._transactions.driver.timeout
        channel = self._transactions.link().channel(timeout)
        self._queue = own_queue(channel, timeout)
        channel.rpc("queue_bind", queue=self._queue, exchange=REVOCATIONS, timeout=timeout)
        with self._transactions.transaction([REVOKED_LOCK], "reading revocations") as transaction:
            transaction.read([REVOKED])
            self._hear(one.body for one in transaction.held(REVOKED))
        self._reader = QueueReader(channel)

    def _hear(self, bodies: Iterable[bytes]) -> None:
        news = [decode_revocation(body) for body in bodies]
        if news:
            now = self._now()
            for one in news:
                self._names.update(dict.fromkeys(one.names, one.until))
            self._names = {name: until for name, until in self._names.items() if until > now}


def own_queue(channel: Channel, timeout: float) -> str:
    """Declare a queue that goes with the connection; return its name."""
    frame = channel.rpc(
        "queue_declare", queue="", exclusive=True, auto_delete=True, timeout=timeout
    )
    return str(frame.method.queue)

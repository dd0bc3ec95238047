"""Records of schedules and claims of unique tasks, in transactions that hold their lock.

Names: connections/rabbitmq/queues.py.

A change becomes true with the states and the outbox that go with it.

Limits: all records travel together, whenever one of them is changed or has to be read. A claim is
forgotten CLAIM_LIFE after the last request for it. And it stands no longer than the state of its
task, which RabbitMQ forgets `results_expire_in` after it was written, and when it restarts: then
another call is let in.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

import msgspec

from machinery_py.backends.rabbitmq.documents import name_of, pack
from machinery_py.connections.rabbitmq.queue_records import OURS, Queue, QueueTransaction
from machinery_py.connections.rabbitmq.queues import RESULTS

CLAIM_LIFE = 49 * 86_400_000  # ms; RabbitMQ's clocks do not reach further than 2**32

SCHEDULES_LOCK = f"{RESULTS}lock.schedules"
SCHEDULES = Queue(f"{RESULTS}schedules", OURS)

_CLAIM_ARGUMENTS = {**OURS, "x-expires": CLAIM_LIFE}


class RecordTable(msgspec.Struct, array_like=True, gc=False):
    """All records, by their names in UTF-8."""

    version: str = "0"
    bodies: dict[bytes, bytes] = {}

    def by_name(self) -> Mapping[str, bytes]:
        return {name.decode("utf-8", "surrogatepass"): body for name, body in self.bodies.items()}


class _Claim(msgspec.Struct, array_like=True, gc=False):
    """The content of a claim. `until` in µs."""

    body: bytes
    until: int


_table = msgspec.msgpack.Decoder(RecordTable).decode
_claim = msgspec.msgpack.Decoder(_Claim).decode


def claim_queue(claim: str) -> Queue:
    return Queue(f"{RESULTS}claim.{name_of(claim)}", _CLAIM_ARGUMENTS)


class RabbitMQRecords:
    """Changes of records and claims in a transaction. `now`: µs.

    Of several messages the last counts: a server that died in the middle of a transaction may have
    kept the one before.
    """

    def __init__(self, transaction: QueueTransaction, now: int) -> None:
        self._transaction = transaction
        self._now = now

    # Records: the transaction holds SCHEDULES_LOCK

    def table(self) -> RecordTable:
        self._transaction.read([SCHEDULES])
        held = self._transaction.held(SCHEDULES)
        return _table(held[-1].body) if held else RecordTable()

    def record(self, name: str) -> bytes | None:
        return self.table().bodies.get(name.encode("utf-8", "surrogatepass"))

    def keep_record(self, name: str, body: bytes | None) -> None:
        bodies, key = dict(self.table().bodies), name.encode("utf-8", "surrogatepass")
        if body is None:
            bodies.pop(key, None)
        else:
            bodies[key] = body
        table = RecordTable(version=secrets.token_hex(8), bodies=bodies)
        self._transaction.replace(SCHEDULES, pack(table))

    # Claims: the transaction holds the lock of each

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the content of each claim."""
        queues = [claim_queue(name) for name in names]
        self._transaction.read(queues)
        return [self._holds(queue) for queue in queues]

    def _holds(self, queue: Queue) -> bytes | None:
        claims = [_claim(one.body) for one in self._transaction.held(queue)]
        return claims[-1].body if claims and claims[-1].until > self._now else None

    def keep_claim(self, name: str, body: bytes | None, life: float) -> None:
        """Let a claim that was read hold this. `life`: seconds until it is forgotten."""
        queue = claim_queue(name)
        held = self._transaction.held(queue)
        if body is not None:
            claim = _Claim(body=body, until=self._now + int(life * 1e6))
            self._transaction.replace(queue, pack(claim))
        elif held:
            self._transaction.drop(held)
            self._transaction.delete(queue)

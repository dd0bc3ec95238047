"""Records of schedules and claims of unique tasks in RabbitMQ. All of it inside a transaction that holds their lock.

    machinery.results.schedules        one message: all records, and a version that changes with each of them
    machinery.results.claim.<claim>    one message: what the claim holds, and until when; no claim, no queue

A change is part of its transaction's transaction, with the states and the outbox that go with it.

Limits: the records of a fleet travel together, whenever one of them is changed or has to be read. A claim is forgotten
CLAIM_LIFE after anybody has asked for it. And it stands no longer than the state of its task, which RabbitMQ forgets
`results_expire_in` after it was written, and when it restarts: then another call is let in.
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


class Table(msgspec.Struct, array_like=True, gc=False):
    """All records, by their names in UTF-8."""

    version: str = "0"
    bodies: dict[bytes, bytes] = {}

    def by_name(self) -> Mapping[str, bytes]:
        return {name.decode("utf-8", "surrogatepass"): body for name, body in self.bodies.items()}


class _Claim(msgspec.Struct, array_like=True, gc=False):
    """`until` in µs."""

    body: bytes
    until: int


_table = msgspec.msgpack.Decoder(Table).decode
_claim = msgspec.msgpack.Decoder(_Claim).decode


def place_of(claim: str) -> Queue:
    return Queue(f"{RESULTS}claim.{name_of(claim)}", _CLAIM_ARGUMENTS)


class RabbitMQRecords:
    """Changes of records and claims in a transaction. `now`: µs.

    Of several messages the last counts: a server that died in the middle of a transaction may have kept the one before.
    """

    def __init__(self, transaction: QueueTransaction, now: int) -> None:
        self._turn = transaction
        self._now = now

    # Records: the transaction holds SCHEDULES_LOCK

    def table(self) -> Table:
        self._turn.read([SCHEDULES])
        held = self._turn.held(SCHEDULES)
        return _table(held[-1].body) if held else Table()

    def swap_record(self, name: str, expected: bytes | None, body: bytes | None) -> bool:
        """Let the record hold `body` if it holds `expected`; whether it did. None is no record."""
        table, key = self.table(), name.encode("utf-8", "surrogatepass")
        if table.bodies.get(key) != expected:
            return False
        bodies = (
            {**table.bodies, key: body}
            if body is not None
            else {k: v for k, v in table.bodies.items() if k != key}
        )
        self._turn.drop(self._turn.held(SCHEDULES))
        self._turn.put(SCHEDULES, pack(Table(version=secrets.token_hex(8), bodies=bodies)))
        return True

    # Claims: the transaction holds the lock of each

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        """Return the content of each of them."""
        places = [place_of(name) for name in names]
        self._turn.read(places)
        return [self._holds(place) for place in places]

    def _holds(self, place: Queue) -> bytes | None:
        claims = [_claim(one.body) for one in self._turn.held(place)]
        return claims[-1].body if claims and claims[-1].until > self._now else None

    def swap_claim(
        self, name: str, expected: bytes | None, body: bytes | None, life: float
    ) -> bool:
        """As `swap_record`. `life`: seconds until it is forgotten."""
        place, [found] = place_of(name), self.claims([name])
        if found != expected:
            return False
        held = self._turn.held(place)
        self._turn.drop(held)
        if body is not None:
            self._turn.put(place, pack(_Claim(body=body, until=self._now + int(life * 1e6))))
        elif held:
            self._turn.delete(place)
        return True

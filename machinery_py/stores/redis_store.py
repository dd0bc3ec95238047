"""Settlement where broker and backend are one Redis, or one cluster.

On one Redis each batch is one script, and one round trip. A delivery is removed from this session's hold before
anything is written for it. If it was not there, the lease is lost: that is lease, acknowledgement and fence at
once. The steps and their crash points: docs/explanation/redis-protocol.md.

In a cluster the message is in the slot of its queue, the state in the slot of its task; the steps are those of
outbox.py (docs/explanation/redis-cluster.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from machinery_py.backends.base import Amendment, Verdict
from machinery_py.backends.redis.backend import VERDICTS, RedisBackend
from machinery_py.backends.redis.cluster import ClusterBackend
from machinery_py.backends.redis.documents import Changes, packed_states
from machinery_py.backends.redis.scripts import CONSTANTS as STATES
from machinery_py.brokers.base import Delivery, Fate, Message, mark_of
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.brokers.redis.cluster import ClusterBroker
from machinery_py.brokers.redis.consumer import RedisConsumer, end_of
from machinery_py.brokers.redis.messages import Queues, packed
from machinery_py.brokers.redis.scripts import CONSTANTS as MESSAGES
from machinery_py.brokers.redis.scripts import TOKEN_LIFE
from machinery_py.clock import Clock
from machinery_py.connections.redis.scripts import Folder
from machinery_py.errors import BrokerUnavailable, PublishUnknown
from machinery_py.stores.base import (
    Firing,
    Mark,
    Session,
    Settlement,
    Store,
    Submission,
    disposal_of,
)
from machinery_py.stores.outbox import TwoStores
from machinery_py.tasks.states import State

BUSY = 32  # settlements and marks in a batch from which RECEIVED is not written

# Queues and messages are as brokers/redis/lua/putting.lua says, changes and states as backends/redis/lua/changes.lua.
_lua = Folder("stores/lua", MESSAGES | STATES, away=BrokerUnavailable)

SUBMIT = _lua.script("submit", "publishing", TOKEN_LIFE=TOKEN_LIFE)
SETTLE = _lua.script("settle", "settling")
FIRE = _lua.script("fire", "settling a group or a task")
AMEND = _lua.script("amend", "changing a schedule")

_pack = msgspec.json.Encoder().encode


class RedisStore(Store):
    """A broker and a backend on one server."""

    def __init__(self, broker: RedisBroker, backend: RedisBackend) -> None:
        if broker.driver is not backend.driver:
            raise ValueError("a RedisStore needs a broker and a backend of one driver")
        self.broker = broker
        self.backend = backend
        self.messages = broker
        self.states = backend
        self.driver = broker.driver

    def submit(self, submission: Submission) -> None:
        queues = Queues()
        rows = [packed(message, queues) for message in submission.messages]
        change = Changes(self.driver.clock.now(), self.states.seconds)
        if submission.states or submission.groups:
            change.add(
                key=f"submit {submission.token}",
                states=submission.states,
                groups=submission.groups,
                force=submission.replay,
            )
        to_wake = self.driver.run(
            SUBMIT,
            self.driver.now(),
            self.states.seconds,
            submission.token,
            queues.keys,
            rows,
            change.changes,
            change.states,
            again=bool(submission.token),
            lost=PublishUnknown,
        )
        if to_wake:
            self.driver.unblock(to_wake)

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return RedisSession(self, self.messages.consume(queues, worker=worker))

    def fire(self, firing: Firing) -> bool:
        queues = Queues()
        rows = [packed(message, queues) for message in firing.send]
        change = Changes(self.driver.clock.now(), self.states.seconds)
        change.add(
            key=firing.task_uuid or firing.group_uuid,
            fires=firing.group_uuid,
            states=firing.states,
            groups=firing.groups,
            arrivals=firing.arrivals,
        )
        to_wake = self.driver.run(
            FIRE,
            self.driver.now(),
            self.states.seconds,
            queues.keys,
            rows,
            change.changes,
            change.states,
            again=False,
        )
        if to_wake is None:
            return False
        self.driver.unblock(to_wake)
        return True

    def amend(self, amendment: Amendment, send: Sequence[Message] = ()) -> bool:
        queues = Queues()
        rows = [packed(message, queues) for message in send]
        values = self.states.packed_amendment(amendment)
        to_wake = self.driver.run(AMEND, *values, queues.keys, rows)
        if to_wake is None:
            return False
        self.driver.unblock(to_wake)
        return True

    def tend(self) -> float:
        return min(self.broker.tend(), self.backend.tend())


class RedisSession(Session):
    """A consumer of the one store."""

    def __init__(self, store: RedisStore, consumer: RedisConsumer) -> None:
        self._store = store
        super().__init__(consumer)
        self.consumer: RedisConsumer = consumer
        # With their packed states, by id.
        self._prepared: dict[int, tuple[Settlement, list[object]]] = {}

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        deliveries = self.consumer.receive(limit, timeout, order)
        self.none_revoked = self.consumer.none_revoked
        return deliveries

    def prepare(self, settlement: Settlement) -> None:
        backend = self._store.states
        if settlement.states:
            try:
                now = self._store.driver.clock.now()
                packed = packed_states(settlement.states, now, backend.seconds)
            except Exception:  # `settle` raises it, where it is dealt with
                return
            self._prepared[id(settlement)] = settlement, packed

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        backend, driver = self._store.states, self._store.driver
        consumer, prepared = self.consumer, self._prepared
        place_of = consumer.place_of
        queues = Queues(consumer.queues) if any(one.send for one in settlements) else None
        changes = Changes(driver.clock.now(), backend.seconds)
        ends: list[object] = []
        for one in settlements:
            change = (
                changes.add(
                    key=one.uuid,
                    mark=mark_of(one.delivery),
                    states=one.states,
                    groups=one.groups,
                    arrivals=one.arrivals,
                    packed=prepared.pop(id(one), (one, None))[1],
                )
                if one.states or one.groups or one.arrivals
                else 0
            )
            if one.send or one.fate is not Fate.DONE:
                fate, due, head = end_of(disposal_of(one))
                send = [packed(message, queues) for message in one.send] if queues else []
                ends += (*place_of(one.delivery), fate, change, (due, head, send))
            else:
                ends += (*place_of(one.delivery), "done", change, False)
        # A worker that holds this much in advance has short tasks: STARTED or the end follows within its prefetch window.
        busy = len(settlements) + len(marks) >= BUSY
        seen: list[object] = []
        for mark in marks:
            if not busy or mark.state.state is not State.RECEIVED:
                change = changes.add(key=mark.state.task_uuid, states=(mark.state,))
                seen += (*place_of(mark.delivery), change)
        if not ends and not seen:
            return []
        letters, to_wake = driver.run(
            SETTLE,
            driver.now(),
            backend.seconds,
            consumer.session,
            queues.keys if queues is not None else consumer.keys,
            ends,
            seen,
            changes.changes,
            changes.states,
        )
        if to_wake:
            driver.unblock(to_wake)
        return [VERDICTS[letter] for letter in letters]


class ClusterStore(TwoStores):
    """A broker and a backend in one cluster."""

    def __init__(self, broker: ClusterBroker, backend: ClusterBackend, clock: Clock) -> None:
        super().__init__(broker, backend, clock)
        self._messages = broker

    def put(self, messages: Sequence[Message]) -> None:
        """Put each message under a name of its own, in the queue's slot: publishing an outbox again puts nothing twice."""
        self._messages.put_once(
            [(f"out {hashlib.sha1(_pack(message)).hexdigest()}", message) for message in messages]
        )

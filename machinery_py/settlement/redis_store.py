"""Settlement where broker and backend are one Redis: one script, and one round trip, for each batch.

A delivery is removed from this session's hold before anything is written for it. If it was not there, the lease is lost: that
is lease, acknowledgement and fence at once. The steps and their crash points: docs/explanation/redis-protocol.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from machinery_py._drivers.redis_lua import pack
from machinery_py.backends.base import Amendment, Change, Verdict
from machinery_py.backends.redis import VERDICTS, RedisBackend
from machinery_py.backends.redis_records import packed_change
from machinery_py.brokers.base import Delivery, Fate, Message
from machinery_py.brokers.redis import RedisBroker
from machinery_py.brokers.redis_consumer import RedisConsumer, end_of
from machinery_py.brokers.redis_messages import EMPTY, Queues, packed
from machinery_py.errors import BrokerUnavailable, PublishUnknown
from machinery_py.settlement import redis_amend, redis_scripts
from machinery_py.settlement.base import ConsumerSession, Firing, Mark, Session, Settlement, Store, Submission
from machinery_py.settlement.one_store import disposal_of, mark_of
from machinery_py.states import State

BUSY = 32  # settlements and marks in a batch from which RECEIVED is not written

_DONE = ("done", 0, EMPTY)


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
        argument = pack((
            self.driver.now(), self.states.seconds, submission.token, queues.keys, rows,
            self._change(Change(key=f"submit {submission.token}", states=submission.states, groups=submission.groups,
                                force=submission.replay)),
        ))
        rung = self.driver.run(
            redis_scripts.SUBMIT, argument, doing="publishing", away=BrokerUnavailable, again=bool(submission.token),
            lost=PublishUnknown,
        )
        if rung:
            self.driver.unblock(rung)

    def _change(self, change: Change) -> tuple[object, ...]:
        return packed_change(change, self.states.now(), self.states.seconds)

    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        return RedisSession(self, self.messages.consume(queues, worker=worker))

    def fire(self, firing: Firing) -> bool:
        queues = Queues()
        rows = [packed(message, queues) for message in firing.send]
        change = Change(
            key=firing.group_uuid, fires=firing.group_uuid, states=firing.states, groups=firing.groups,
            arrivals=firing.arrivals,
        )
        argument = pack((self.driver.now(), self.states.seconds, queues.keys, rows, self._change(change)))
        rung = self.driver.run(
            redis_scripts.FIRE, argument, doing="settling a group", away=BrokerUnavailable, again=False
        )
        if rung is None:
            return False
        self.driver.unblock(rung)
        return True

    def amend(self, amendment: Amendment, send: Sequence[Message] = ()) -> bool:
        queues = Queues()
        rows = [packed(message, queues) for message in send]
        argument = pack((*self.states.packed_amendment(amendment), queues.keys, rows))
        rung = self.driver.run(redis_amend.AMEND, argument, doing="changing a schedule", away=BrokerUnavailable)
        if rung is None:
            return False
        self.driver.unblock(rung)
        return True

    def tend(self) -> float:
        return min(self.broker.tend(), self.backend.tend())


class RedisSession(ConsumerSession):
    """A consumer of the one store."""

    def __init__(self, store: RedisStore, consumer: RedisConsumer) -> None:
        self._store = store
        super().__init__(consumer)
        self._consumer: RedisConsumer = consumer
        self.receive = consumer.receive  # type: ignore[method-assign]  # nothing to add on the hot path

    def receive(self, limit: int, timeout: float) -> list[Delivery]:
        return self._consumer.receive(limit, timeout)

    def settle(self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()) -> list[Verdict]:
        if not settlements and not marks:
            return []
        store, consumer = self._store, self._consumer
        backend, driver = store.states, store.driver
        now, expire, place_of = backend.now(), backend.seconds, consumer.place_of
        queues = Queues(consumer.queues)
        ends: list[object] = []
        for one in settlements:
            index, receipt = place_of(one.delivery)
            end = _DONE if one.fate is Fate.DONE else end_of(disposal_of(one))
            change = packed_change(
                Change(key=one.uuid, mark=mark_of(one.delivery), states=one.states, groups=one.groups,
                       arrivals=one.arrivals), now, expire,
            ) if one.states or one.groups or one.arrivals else False
            ends.append((index, receipt, *end, change, _messages(one.send, queues) if one.send else ()))
        # Who holds this much in advance has short tasks: STARTED or the end follows within the receiver's prefetch window.
        busy = len(settlements) + len(marks) >= BUSY
        seen = [
            (*place_of(mark.delivery),
             packed_change(Change(key=mark.state.task_uuid, states=(mark.state,)), now, expire))
            for mark in marks
            if not busy or mark.state.state is not State.RECEIVED
        ]
        if not ends and not seen:
            return []
        argument = pack((driver.now(), expire, consumer.session, queues.keys, ends, seen))
        letters, rung = driver.run(redis_scripts.SETTLE, argument, doing="settling", away=BrokerUnavailable)
        if rung:
            driver.unblock(rung)
        return [VERDICTS[letter] for letter in letters]


def _messages(messages: Sequence[Message], queues: Queues) -> list[tuple[int, int, int, msgspec.Raw, int, msgspec.Raw]]:
    return [packed(message, queues) for message in messages]

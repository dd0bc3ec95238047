"""Stores with injected faults, ordered by the test or random from a seed.

A call can fail in two ways that its caller cannot tell apart: it was refused before it was carried
out, or it was carried out and its reply was lost. Wrap a store to test that its users survive both:

    flaky = FlakyStore(store)
    flaky.next_call("settle", lose_reply=True)  # carried out, then BrokerUnavailable

    # 2 % of all calls, half of them each way
    flaky = FlakyStore(store, Faults(rng=random.Random(7), probability=0.02))

The calls are named after the methods: submit, receive, settle, beat, fire, tend for a store; put,
receive, dispose, beat, tend for a broker; apply, begin, get_states and the like for a backend.
"""

from __future__ import annotations

import datetime as dt
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeVar

from machinery_py.backends.base import (
    REVOKED_LIFE,
    Backend,
    BackendFeatures,
    Begun,
    Change,
    Listener,
    OutboxBackend,
    ReadyGroup,
    Records,
    Verdict,
    outbox_of,
)
from machinery_py.backends.listings import Count, Listing, Place
from machinery_py.brokers.base import (
    Broker,
    BrokerFeatures,
    Consumer,
    DeadLetter,
    Delivery,
    Disposal,
    Message,
    QueueStats,
    WorkerInfo,
)
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.brokers.topics import Subscription
from machinery_py.errors import BackendUnavailable, BrokerUnavailable, PublishUnknown
from machinery_py.stores.base import Firing, Mark, Session, Settlement, Store, Submission
from machinery_py.tasks.signature import RunNumber
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState

T = TypeVar("T")


class Faults:
    """Injected faults. May be shared by several wrappers and used from any thread.

    Attributes:
        failed: every fault so far, as (call, whether it was carried out).
    """

    def __init__(self, *, rng: random.Random | None = None, probability: float = 0.0) -> None:
        self.failed: list[tuple[str, bool]] = []
        self._rng = rng or random.Random(0)
        self._probability = probability
        self._planned: dict[str, list[bool]] = {}
        self._lock = threading.Lock()

    def next_call(self, call: str, *, lose_reply: bool = False) -> None:
        """Let the next call of this name fail; several orders for one name are carried out in turn.

        Args:
            lose_reply: carry it out first. Otherwise it is refused and nothing happens.
        """
        with self._lock:
            self._planned.setdefault(call, []).append(lose_reply)

    def heal(self) -> None:
        """End all faults, ordered and random ones."""
        with self._lock:
            self._planned.clear()
            self._probability = 0.0

    def around(
        self, call: str, function: Callable[[], T], *, refused: Exception, unknown: Exception
    ) -> T:
        """Carry out the call, or raise its fault."""
        lose_reply = self._draw(call)
        if lose_reply is None:
            return function()
        if lose_reply:
            function()
            raise unknown
        raise refused

    def _draw(self, call: str) -> bool | None:
        with self._lock:
            planned = self._planned.get(call)
            if planned:
                lose_reply = planned.pop(0)
            elif self._probability and self._rng.random() < self._probability:
                lose_reply = self._rng.random() < 0.5
            else:
                return None
            self.failed.append((call, lose_reply))
            return lose_reply

    def publish(self, call: str, function: Callable[[], T]) -> T:
        return self.around(
            call,
            function,
            refused=BrokerUnavailable(f"{call}: refused on command; nothing was stored"),
            unknown=PublishUnknown(f"{call}: reply lost on command"),
        )

    def broker(self, call: str, function: Callable[[], T]) -> T:
        error = BrokerUnavailable(f"{call}: no answer, on command")
        return self.around(call, function, refused=error, unknown=error)

    def backend(self, call: str, function: Callable[[], T]) -> T:
        error = BackendUnavailable(f"{call}: no answer, on command")
        return self.around(call, function, refused=error, unknown=error)


class FlakyStore(Store):
    """Store with faults in submit, fire and tend, and in the calls of its sessions."""

    def __init__(self, store: Store, faults: Faults | None = None) -> None:
        self.store = store
        self.faults: Faults = faults or Faults()
        self.broker: Broker = store.broker
        self.backend: Backend = store.backend

    def next_call(self, call: str, *, lose_reply: bool = False) -> None:
        """Order a fault, as Faults.next_call does."""
        self.faults.next_call(call, lose_reply=lose_reply)

    def submit(self, submission: Submission) -> bool:
        return self.faults.publish("submit", lambda: self.store.submit(submission))

    def open_session(self, queues: Sequence[str], *, worker: str) -> FlakySession:
        return FlakySession(self.store.open_session(queues, worker=worker), self.faults)

    def fire(self, firing: Firing) -> bool:
        return self.faults.broker("fire", lambda: self.store.fire(firing))

    def publish_left(self, key: str) -> None:
        self.store.publish_left(key)

    def ready_groups(self, limit: int = 100) -> list[ReadyGroup]:
        return self.faults.backend("ready_groups", lambda: self.store.ready_groups(limit))

    def tend(self) -> float:
        return self.faults.broker("tend", self.store.tend)

    def attach(self, drain: Callable[[], object]) -> None:
        self.store.attach(drain)

    def close(self) -> None:
        self.store.close()


class FlakySession(Session):
    """Session of a FlakyStore."""

    def __init__(self, session: Session, faults: Faults) -> None:
        super().__init__(session.consumer)
        self.session = session
        self.faults = faults

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        return self.faults.broker("receive", lambda: self.session.receive(limit, timeout, order))

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        return self.faults.broker("settle", lambda: self.session.settle(settlements, marks))

    def beat(self) -> bool:
        return self.faults.broker("beat", self.session.beat)

    def close(self) -> None:
        self.session.close()


class FlakyBroker(Broker):
    """Broker with faults in put, in tend and in the calls of its consumers: tests of two stores."""

    def __init__(self, broker: Broker, faults: Faults | None = None) -> None:
        self.inner = broker
        self.faults: Faults = faults or Faults()
        self.features: BrokerFeatures = broker.features

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        return self.faults.publish("put", lambda: self.inner.put(messages, token=token))

    def put_within(
        self, messages: Sequence[Message], limits: Sequence[QueueLimit], *, token: str
    ) -> bool:
        return self.faults.publish(
            "put", lambda: self.inner.put_within(messages, limits, token=token)
        )

    def waiting(self, queue: str) -> int:
        return self.inner.waiting(queue)

    def beat_for(self, session: str, queues: Sequence[str], *, stalled: bool) -> bool:
        return self.faults.broker(
            "beat_for", lambda: self.inner.beat_for(session, queues, stalled=stalled)
        )

    def consume(self, queues: Sequence[str], *, worker: str) -> FlakyConsumer:
        return FlakyConsumer(self.inner.consume(queues, worker=worker), self.faults)

    def tend(self) -> float:
        return self.faults.broker("tend", self.inner.tend)

    def pending(self, queue: str, limit: int) -> list[Message]:
        return self.inner.pending(queue, limit)

    def delayed(self, limit: int) -> list[Message]:
        return self.inner.delayed(limit)

    def stats(self) -> list[QueueStats]:
        return self.inner.stats()

    def workers(self) -> list[WorkerInfo]:
        return self.inner.workers()

    def purge(self, queue: str) -> int:
        return self.inner.purge(queue)

    def purge_each(
        self, queue: str, before: Callable[[Sequence[Message]], object]
    ) -> Iterator[Sequence[Message]]:
        return self.inner.purge_each(queue, before)

    def forget_queue(self, queue: str) -> bool:
        return self.inner.forget_queue(queue)

    def pause(self, queue: str) -> None:
        self.faults.broker("pause", lambda: self.inner.pause(queue))

    def resume(self, queue: str) -> None:
        self.faults.broker("resume", lambda: self.inner.resume(queue))

    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        return self.inner.dead_letters(limit=limit, queue=queue)

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        self.faults.broker(
            "bury", lambda: self.inner.bury(message, queue=queue, reason=reason, error=error)
        )

    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        return self.inner.take_dead(ids)

    def broadcast(self, topic: str, records: Sequence[bytes], *, ttl: float) -> None:
        self.faults.broker("broadcast", lambda: self.inner.broadcast(topic, records, ttl=ttl))

    def subscribe(self, topic: str, *, since: float = 0.0) -> Subscription:
        return self.faults.broker("subscribe", lambda: self.inner.subscribe(topic, since=since))

    def close(self) -> None:
        self.inner.close()


class FlakyConsumer(Consumer):
    """Consumer of a FlakyBroker."""

    def __init__(self, consumer: Consumer, faults: Faults) -> None:
        self.inner = consumer
        self.faults = faults

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        return self.faults.broker("receive", lambda: self.inner.receive(limit, timeout, order))

    def serve(self, queues: Sequence[str]) -> None:
        self.faults.broker("serve", lambda: self.inner.serve(queues))

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        return self.faults.broker("dispose", lambda: self.inner.dispose(disposals))

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        return self.faults.broker("holds", lambda: self.inner.holds(deliveries))

    def run_begins(self, delivery: Delivery) -> None:
        self.inner.run_begins(delivery)

    def run_ends(self, delivery: Delivery) -> None:
        self.inner.run_ends(delivery)

    def is_lost(self, delivery: Delivery) -> bool:
        return self.inner.is_lost(delivery)

    def beat(self) -> bool:
        return self.faults.broker("beat", self.inner.beat)

    def wake(self) -> None:
        self.inner.wake()

    def close(self) -> None:
        self.inner.close()


class FlakyBackend(Backend, OutboxBackend):
    """Backend with faults in every call that a worker makes, for tests of two stores."""

    def __init__(self, backend: Backend, faults: Faults | None = None) -> None:
        self.inner = backend
        self._outbox = outbox_of(backend)
        self.faults: Faults = faults or Faults()
        self.features: BackendFeatures = backend.features

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        return self.faults.backend("apply", lambda: self.inner.apply(changes))

    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        return self.faults.backend("begin", lambda: self._outbox.begin(keys))

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        return self.faults.backend("outboxes", lambda: self._outbox.outboxes(keys))

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        self.faults.backend("clear_outbox", lambda: self._outbox.clear_outbox(sent))

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        return self.faults.backend(
            "unsent", lambda: self._outbox.unsent(limit, older_than=older_than, skip=skip)
        )

    def records(self, known: str = "") -> Records:
        return self.faults.backend("records", lambda: self.inner.records(known))

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        return self.faults.backend("claims", lambda: self.inner.claims(names))

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        self.faults.backend("release", lambda: self.inner.release(claims))

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        return self.faults.backend("settled_by", lambda: self._outbox.settled_by(uuids))

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        return self.faults.backend("get_states", lambda: self.inner.get_states(uuids))

    def member_states(self, group_uuid: str, uuids: Sequence[str]) -> dict[str, TaskState]:
        return self.faults.backend(
            "member_states", lambda: self.inner.member_states(group_uuid, uuids)
        )

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        return self.faults.backend("get_group", lambda: self.inner.get_group(group_uuid))

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        return self.faults.backend("ready_groups", lambda: self.inner.ready_groups(limit))

    def partial_groups(self, limit: int) -> list[Arrival]:
        return self.faults.backend("partial_groups", lambda: self.inner.partial_groups(limit))

    def drop_partial(self, group_uuids: Sequence[str]) -> None:
        self.faults.backend("drop_partial", lambda: self.inner.drop_partial(group_uuids))

    def list_states(
        self,
        *,
        states: Collection[State] = (),
        name: str = "",
        since: dt.datetime | None = None,
        after: Place | None = None,
        limit: int = 100,
    ) -> Listing:
        return self.inner.list_states(
            states=states, name=name, since=since, after=after, limit=limit
        )

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        return self.inner.find(prefix, limit)

    def finished_since(self, moment: dt.datetime, step: int = 3600) -> list[Count]:
        return self.inner.finished_since(moment, step)

    def delete_finished(self, uuids: Sequence[str]) -> list[str]:
        return self.inner.delete_finished(uuids)

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        self.faults.backend("revoke", lambda: self.inner.revoke(uuids, life))

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        return self.faults.backend("revoked", lambda: self.inner.revoked(uuids))

    def purge_state(self, task_uuid: str) -> None:
        self.inner.purge_state(task_uuid)

    def purge_group_meta(self, group_uuid: str) -> None:
        self.inner.purge_group_meta(group_uuid)

    def listener(self) -> Listener:
        return self.inner.listener()

    def tend(self) -> float:
        return self.faults.backend("tend", self.inner.tend)

    def now(self) -> dt.datetime:
        return self.inner.now()

    def close(self) -> None:
        self.inner.close()

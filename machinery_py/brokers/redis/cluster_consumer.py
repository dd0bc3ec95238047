"""A consumer of queues in a Redis Cluster: a part for each queue, all with one session.

A part is a RedisConsumer in the slot of its queue. With one queue it blocks as on one Redis. With
several, `receive` repeats this until something was found:

    1  a claim at each queue, in the wanted order; one that finds nothing adds the blocked client
       to its queue's sets
    2  BLMOVE at the blocking queue, and the claim behind it

The blocking queue is the first whose node is there and which is not paused. The blocked client is
the connection there, as `client@queue`: when something is put into another queue,
that unblocks it. At the end it is taken out of the sets. Where all queues are paused, it blocks at
the arrivals of the first, where nothing comes.

Limits: what a Go program puts on another queue than the blocking queue is noticed within BLOCK.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from machinery_py.brokers.base import Consumer, Delivery, Disposal
from machinery_py.brokers.entries import close_all
from machinery_py.brokers.redis import scripts
from machinery_py.brokers.redis.consumer import KIND, RedisConsumer, client_of
from machinery_py.brokers.redis.mover import DueMover
from machinery_py.connections.redis.client import TIMEOUT
from machinery_py.connections.redis.cluster import PAUSE, RedisClusterDriver, SlotDriver
from machinery_py.connections.redis.connection import RedisConnection
from machinery_py.connections.redis.keys import queue_keys
from machinery_py.connections.redis.requests import Request, command_at, is_refused_for_now
from machinery_py.connections.session_files import SessionFile, host_file
from machinery_py.errors import BrokerUnavailable, MachineryError
from machinery_py.texts import get_logger

logger = get_logger(__name__)

AWAY_PAUSE = 1.0  # seconds until a queue whose node is away is tried again, if others are there

Place = tuple[str, SlotDriver, DueMover]
"""A queue, its driver, and what brings its due messages to it."""


class QueueConsumer(RedisConsumer):
    """A consumer of one queue, with the session that its owner gives it."""

    def __init__(self, owner: ClusterConsumer, place: Place, *, worker: str) -> None:
        self._owner = owner
        queue, driver, mover = place
        self.queue: str = queue
        self.driver: SlotDriver = driver
        self._refused_since = 0.0
        self.failure: BrokerUnavailable | None = None  # of the last claim
        self.due_in: float = 0.0  # seconds until something is due, by the last claim
        self._claim_at = 0.0
        super().__init__(self.driver, (self.queue,), worker=worker, mover=mover, own={})

    def _new_file(self) -> SessionFile:
        return self._owner.file

    def _is_timed(self) -> bool:
        return self._owner.is_timed

    def _registered(self) -> tuple[Sequence[str], Sequence[str]]:
        return self._owner.queues, tuple(self._owner.by_queue)

    def _fences_key(self) -> str:
        # The result backend's epochs count here: a queue's own fences know of no other queue.
        return f"{queue_keys(self.queue)[1]}fence"

    def restart(self) -> None:
        """Give everything back, if that was not done, and register as the owner's next session."""
        self._give_up(scripts.TOMBSTONE)
        self._start_session()

    def _blocked_client(self, link: RedisConnection) -> tuple[str, bool]:
        owner = self._owner
        if owner.blocking_part is None:
            return super()._blocked_client(link)
        return owner.client, owner.blocking_part is not self

    def _claim(
        self, limit: int, queues: Sequence[str], *, sleep: float, will_sleep: bool
    ) -> tuple[list[Delivery], float]:
        """As the base class; nothing for TIMEOUT, while the slot is on its way to another node."""
        try:
            claimed = super()._claim(limit, queues, sleep=sleep, will_sleep=will_sleep)
        except BrokerUnavailable as error:
            now = time.monotonic()
            self._refused_since = self._refused_since or now
            cause = error.__cause__
            if not isinstance(cause, Exception) or not is_refused_for_now(cause):
                raise
            if now - self._refused_since > TIMEOUT:
                raise
            time.sleep(PAUSE)
            return [], self._block
        self._refused_since = 0.0
        return claimed

    def show_queues(self) -> None:
        """Note the queues that the owner serves now, unless the session was given up here."""
        if self._beats():
            self._register(self.session)

    def clear_wake(self) -> None:
        """Let the next call block again, after a wake."""
        self._woken = False

    @property
    def is_paused(self) -> bool:
        """Whether the last claim saw the queue paused."""
        return self._blocking_queue is None

    def blocked_client(self) -> str:
        """Return `client@queue`, by which other processes can wake its connection."""
        try:
            link = self._open_link()
        except MachineryError:
            raise
        except Exception as error:  # redis-py's, sorted by `fail`
            self.driver.fail(error, doing="preparing to block", away=BrokerUnavailable)
        client = client_of(link)
        return f"{client}@{queue_keys(self.queue)[1]}" if client else ""

    def removal_of(self, client: str) -> list[Request]:
        """Return requests that take a client out of the sets to which the last claim added it."""
        if not self._noted or not client:
            return []
        self._noted = False
        prefix = queue_keys(self.queue)[1]
        return [command_at(b"SREM", f"{prefix}{set_}".encode(), client.encode()) for set_ in "vw"]

    def claim_now(self, limit: int, *, will_sleep: bool = False) -> list[Delivery]:
        """Claim what is there now; nothing while the queue's node is away (see `failure`)."""
        if self.failure is not None and time.monotonic() < self._claim_at:
            return []
        try:
            deliveries, self.due_in = self._claim(
                limit, self._queues, sleep=0.0, will_sleep=will_sleep
            )
            if not deliveries and self.due_in <= 0.0:
                deliveries, self.due_in = self._claim(
                    limit, self._queues, sleep=0.0, will_sleep=will_sleep
                )
        except BrokerUnavailable as error:
            if self.failure is None:
                logger.warning("queue %s: %s (other queues go on)", self.queue, error)
            self.failure, self._claim_at = error, time.monotonic() + AWAY_PAUSE
            return []
        self.failure = None
        return deliveries

    def claim_blocking(self, limit: int, seconds: float, *, due_in: float) -> list[Delivery]:
        """Block at the queue until something is due in any, for so long at most, and claim."""
        self._due_at = time.monotonic() + due_in if due_in < self._block else math.inf
        sleep = min(seconds, due_in, self._block)
        return self._claim(limit, self._queues, sleep=sleep, will_sleep=False)[0]


def ask_beats(
    cluster: RedisClusterDriver, requests: Sequence[Request], *, patience: float
) -> list[Any]:
    """Send beats to the slots of several queues in one round trip; return the replies.

    With little patience: a node that is away must not delay the beats of others.
    """
    return cluster.ask(
        requests, doing=scripts.BEAT.doing, away=BrokerUnavailable, patience=patience
    )


class ClusterConsumer(Consumer):
    """Consumer of several queues of a cluster."""

    def __init__(
        self,
        queues: Sequence[str],
        places_of: Callable[[Sequence[str]], list[Place]],
        *,
        worker: str,
        patience: float,
    ) -> None:
        """`places_of` makes queues known; `patience`: seconds for a beat."""
        self._places_of = places_of
        self._worker = worker
        self._starting = threading.Lock()
        places = places_of(queues)
        self.queues: tuple[str, ...] = tuple(queue for queue, _, _ in places)
        self.file: SessionFile = host_file(
            KIND
        )  # of its session, or of the next one while that begins
        self.session: str = self.file.key
        self.blocking_part: QueueConsumer | None = None  # while `receive` may block
        self.client: str = ""  # the blocked client
        self.by_queue: dict[str, QueueConsumer] = {}
        self._parts: list[QueueConsumer] = []
        try:
            for place in places:
                self._parts.append(QueueConsumer(self, place, worker=worker))
        except MachineryError:
            with contextlib.suppress(MachineryError):
                close_all(self._parts)
            raise
        self.by_queue = {part.queue: part for part in self._parts}
        self._serving = self._parts  # the others are queues that it served before
        self._woken = False
        self._closed = False
        self._restarting = False
        self._patience = patience
        self._pid = os.getpid()

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        if self._closed:
            return []
        serving = self._serving
        if len(serving) == 1:
            return serving[0].receive(limit, timeout)
        parts = [part for queue in order if (part := self.by_queue.get(queue)) in serving]
        parts = parts or serving
        found = self._claim(limit, parts)
        deadline = time.monotonic() + timeout
        try:
            while not found and not self._woken and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                blocking_part = self._prepare_to_block()
                found = self._claim(limit, parts, will_sleep=True)
                if not found and not self._woken and blocking_part is self._choose_part():
                    due = (part.due_in for part in parts if part.failure is None)
                    found = blocking_part.claim_blocking(limit, left, due_in=min(due, default=left))
        finally:
            self._remove_client()
        self._woken = False
        for part in self._parts:
            part.clear_wake()
        return found

    def _claim(
        self, limit: int, parts: Sequence[QueueConsumer], *, will_sleep: bool = False
    ) -> list[Delivery]:
        """Claim at each queue whose node is there.

        Raises:
            BrokerUnavailable: none of them is.
        """
        found: list[Delivery] = []
        for part in parts:
            if len(found) < limit:
                found += part.claim_now(limit - len(found), will_sleep=will_sleep and not found)
        if not found:
            self._choose_part()
        return found

    def _choose_part(self) -> QueueConsumer:
        """Return where to block, whatever the order is, so that the client stays the same."""
        there = [part for part in self._serving if part.failure is None]
        if not there:
            raise self._serving[0].failure or AssertionError("unreachable")
        return next((part for part in there if not part.is_paused), there[0])

    def _prepare_to_block(self) -> QueueConsumer:
        """Choose where to block, and the client that the next claims add to the sets."""
        blocking_part = self._choose_part()
        client = blocking_part.blocked_client()
        if (blocking_part, client) != (self.blocking_part, self.client):
            self._remove_client()
            self.blocking_part, self.client = blocking_part, client
        return blocking_part

    def _remove_client(self) -> None:
        """Take the blocked client out of all sets, or it would be woken in place of another."""
        if self.blocking_part is None:
            return
        requests = [
            request
            for part in self._parts
            for request in part.removal_of(self.client)
            if part.failure is None
        ]
        self.blocking_part = None
        try:
            self._parts[0].driver.cluster.ask(
                requests, doing="leaving the blocked clients", away=BrokerUnavailable, patience=0.0
            )
        except MachineryError:
            pass  # one wake-up goes astray, and the client that it was for looks again within BLOCK

    def serve(self, queues: Sequence[str]) -> None:
        places = self._places_of(queues)
        with self._starting:
            before, self.queues = self.queues, tuple(queue for queue, _, _ in places)
            parts = dict(self.by_queue)
            try:
                for part in self._parts:
                    part.show_queues()
                for place in places:
                    if place[0] not in parts:
                        parts[place[0]] = QueueConsumer(self, place, worker=self._worker)
            except MachineryError:
                self.queues = before
                raise
            self.by_queue, self._parts = parts, list(parts.values())
            self._serving = [parts[queue] for queue in self.queues]
        self.wake()

    def _part_of(self, delivery: Delivery) -> QueueConsumer:
        return self.by_queue.get(delivery.queue, self._parts[0])

    def _queue_by_queue(
        self,
        deliveries: Sequence[Delivery],
        ask: Callable[[QueueConsumer, list[int]], list[bool]],
    ) -> list[bool]:
        """Ask each part once about its deliveries, by their places; return all answers in order."""
        answers = [False] * len(deliveries)
        for part in self._parts:
            places = [index for index, one in enumerate(deliveries) if self._part_of(one) is part]
            for index, answer in zip(places, ask(part, places), strict=True):
                answers[index] = answer
        return answers

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        return self._queue_by_queue(
            [one.delivery for one in disposals],
            lambda part, places: part.dispose([disposals[index] for index in places]),
        )

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        return self._queue_by_queue(
            deliveries, lambda part, places: part.holds([deliveries[index] for index in places])
        )

    def run_begins(self, delivery: Delivery) -> None:
        self._part_of(delivery).run_begins(delivery)

    def run_ends(self, delivery: Delivery) -> None:
        self._part_of(delivery).run_ends(delivery)

    def beat(self) -> bool:
        if self._closed:
            return True
        with self._starting:
            return self._beat()

    def _beat(self) -> bool:
        self.file.touch()
        requests = [
            part.driver.request(scripts.BEAT, part.driver.now(), part.session, part.keys, False)
            for part in self._parts
        ]
        registered = ask_beats(self._parts[0].driver.cluster, requests, patience=self._patience)
        if all(registered) and not self._restarting:
            for part in self._parts:
                part.give_back_forgotten()
            return True
        # A session that was given up in one queue is over in all: it changes nothing any more.
        self._restarting = True
        self.file.end()
        self.file = host_file(KIND)
        self.session = self.file.key
        for part in self._parts:
            part.restart()
        self._restarting = False
        return False

    def wake(self) -> None:
        self._woken = True
        for part in self._parts:
            part.wake()

    def close(self) -> None:
        if not self._closed and self._pid == os.getpid():
            self._closed = True
            close_all(self._parts)

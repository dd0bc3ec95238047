"""A consumer of queues in a Redis Cluster: a part for each queue, all with one session.

A part is a RedisConsumer in the slot of its queue. With one queue it sleeps as on one Redis. With several, it
is asleep at its blocking queue, the first whose node is there and which is not paused; the others, when
something is put there, end its sleep: its connection is in their sets of blocked clients, as `number@queue`.

    look      a claim at each queue, in the order that is wanted
    lie down  the same; a claim that finds nothing puts the connection into its queue's sets, in one step
    nap       BLMOVE at the blocking queue, and the claim behind it; then it looks again
    get up    the connection is taken out of those sets, when something was found

Where all are paused, it is blocked at the arrivals of the first, where nothing comes.

Limits: what a Go program puts on another queue than the blocking queue is noticed within BLOCK.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from machinery_py.brokers.base import Consumer, Delivery, Disposal
from machinery_py.brokers.redis import scripts
from machinery_py.brokers.redis.consumer import KIND, RedisConsumer
from machinery_py.connections.redis.client import TIMEOUT, RedisConnection
from machinery_py.connections.redis.cluster import PAUSE, SlotDriver
from machinery_py.connections.redis.keys import queue_keys
from machinery_py.connections.redis.requests import Request, command_at, passing, script_at
from machinery_py.connections.redis.scripts import pack
from machinery_py.connections.redis.slots import clustered
from machinery_py.connections.session_files import SessionFile, host_file
from machinery_py.errors import BrokerUnavailable, MachineryError
from machinery_py.texts import get_logger

logger = get_logger(__name__)

AWAY_PAUSE = 1.0  # seconds until a queue whose node is away is tried again, if others are there

Place = tuple[str, SlotDriver, Callable[[float], object]]
"""A queue, its driver, and what brings its due messages to it."""


class _Part(RedisConsumer):
    """A consumer of one queue, with the session that its owner gives it."""

    def __init__(self, owner: ClusterConsumer, place: Place, *, worker: str) -> None:
        self._owner = owner
        self.queue, self.driver, move_due = place
        self._refused_since = 0.0
        self.failure: BrokerUnavailable | None = None  # of the last look at this queue
        self.due_in = 0.0  # seconds until something is due, by the last look
        self._look_at = 0.0
        super().__init__(self.driver, (self.queue,), worker=worker, move_due=move_due)

    def _new_file(self) -> SessionFile:
        return self._owner.file

    def _listed(self) -> tuple[str, ...]:
        return self._owner.queues

    def beat_request(self) -> Request:
        """Answered with 0 if this session was given up."""
        argument = pack((self.driver.now(), self.session, self.keys))
        return script_at(self.driver.prefix, clustered(scripts.BEAT), argument)

    def restart(self) -> None:
        """Give everything back, if that was not done, and register as the owner's next session."""
        self._give_up(scripts.TOMBSTONE)
        self._start_session()

    def _blocked_client(self, link: RedisConnection) -> tuple[str, bool]:
        owner = self._owner
        return (
            (owner.client, owner.blocking_part is not self)
            if owner.blocking_part is not None
            else super()._blocked_client(link)
        )

    def _claim(
        self, limit: int, queues: Sequence[str], *, sleep: float, will_sleep: bool
    ) -> tuple[list[Delivery], float]:
        """As the base class. While the slot is on its way to another node, there is nothing to be had, for a while."""
        try:
            claimed = super()._claim(limit, queues, sleep=sleep, will_sleep=will_sleep)
        except BrokerUnavailable as error:
            now = time.monotonic()
            self._refused_since = self._refused_since or now
            if not isinstance(error.__cause__, Exception) or not passing(error.__cause__):
                raise
            if now - self._refused_since > TIMEOUT:
                raise
            time.sleep(PAUSE)
            return [], self._block
        self._refused_since = 0.0
        return claimed

    def settle_down(self) -> None:
        """Sleep again, after a wake."""
        self._woken = False

    @property
    def is_paused(self) -> bool:
        """As the last claim saw it."""
        return self._blocking_queue is None

    def number(self) -> str:
        """Under which others can wake it."""
        try:
            link = self._open_link()
        except MachineryError:
            raise
        except Exception as error:  # redis-py's, sorted by `fail`
            self.driver.fail(error, doing="going to sleep", away=BrokerUnavailable)
        return f"{link.number.decode()}@{queue_keys(self.queue)[1]}"

    def get_up(self, number: str) -> list[Request]:
        """Return the requests that take this number out of the sets that the last claim may have put it into."""
        if not self._noted:
            return []
        self._noted = False
        prefix = queue_keys(self.queue)[1]
        return [command_at(b"SREM", f"{prefix}{set_}".encode(), number.encode()) for set_ in "uvw"]

    def look(self, limit: int, *, will_sleep: bool = False) -> list[Delivery]:
        """Claim what is there now: nothing while the queue's node is away, and `failure` says why."""
        if self.failure is not None and time.monotonic() < self._look_at:
            return []
        try:
            deliveries, self.due_in = self._claim(
                limit, self._queues, sleep=0.0, will_sleep=will_sleep
            )
            if not deliveries and self.due_in <= 0.0:
                self._move_due(0.0)
                deliveries, due_in = self._claim(
                    limit, self._queues, sleep=0.0, will_sleep=will_sleep
                )
                self.due_in = max(due_in, 0.01)  # another mover is at it
        except BrokerUnavailable as error:
            if self.failure is None:
                logger.warning("queue %s: %s (other queues go on)", self.queue, error)
            self.failure, self._look_at = error, time.monotonic() + AWAY_PAUSE
            return []
        self.failure = None
        if deliveries and self.due_in <= 0.0:
            try:
                self._move_due(0.0)
            except MachineryError:
                pass  # what was claimed is ours; the next mover does its part
        return deliveries

    def nap(self, limit: int, seconds: float) -> list[Delivery]:
        return self._claim(limit, self._queues, sleep=min(seconds, self._block), will_sleep=False)[
            0
        ]


class ClusterConsumer(Consumer):
    """Consumer of several queues of a cluster."""

    def __init__(self, places: Sequence[Place], *, worker: str, patience: float) -> None:
        """`patience`: seconds for a beat."""
        self.queues = tuple(queue for queue, _, _ in places)
        self.file = host_file(KIND)  # of its session, or of the next one while that begins
        self.blocking_part: _Part | None = None  # where it sleeps, while it does
        self.client = ""  # the number of its connection there
        self._parts: list[_Part] = []
        try:
            for place in places:
                self._parts.append(_Part(self, place, worker=worker))
        except MachineryError:
            self._leave(self._parts)
            raise
        self._by_queue = {part.queue: part for part in self._parts}
        self._woken = False
        self._closed = False
        self._restarting = False
        self._patience = patience
        self._pid = os.getpid()

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        if self._closed:
            return []
        if len(self._parts) == 1:
            return self._parts[0].receive(limit, timeout)
        parts = [self._by_queue[queue] for queue in order] if order else self._parts
        found = self._look(limit, parts)
        deadline = time.monotonic() + timeout
        try:
            while not found and not self._woken and not self._closed:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                blocking_part = self._lie_down()
                found = self._look(limit, parts, will_sleep=True)
                if not found and not self._woken and blocking_part is self._choose_part():
                    found = blocking_part.nap(
                        limit, min(left, *(part.due_in for part in parts if part.failure is None))
                    )
        finally:
            self._get_up()
        self._woken = False
        for part in self._parts:
            part.settle_down()
        return found

    def _look(
        self, limit: int, parts: Sequence[_Part], *, will_sleep: bool = False
    ) -> list[Delivery]:
        """Claim at each queue whose node is there.

        Raises:
            BrokerUnavailable: none of them is.
        """
        found: list[Delivery] = []
        for part in parts:
            if len(found) < limit:
                found += part.look(limit - len(found), will_sleep=will_sleep and not found)
        if not found:
            self._choose_part()
        return found

    def _choose_part(self) -> _Part:
        """Where to sleep: the same place for every order, so that the number in the sets is the same."""
        there = [part for part in self._parts if part.failure is None]
        if not there:
            raise self._parts[0].failure or AssertionError("unreachable")
        return next((part for part in there if not part.is_paused), there[0])

    def _lie_down(self) -> _Part:
        """Choose where to sleep, and under which number."""
        blocking_part = self._choose_part()
        number = blocking_part.number()
        if (blocking_part, number) != (self.blocking_part, self.client):
            self._get_up()
            self.blocking_part, self.client = blocking_part, number
        return blocking_part

    def _get_up(self) -> None:
        """Nobody needs to wake it any more; a number that stayed would be woken in the place of another's."""
        if self.blocking_part is None:
            return
        requests = [
            request
            for part in self._parts
            for request in part.get_up(self.client)
            if part.failure is None
        ]
        self.blocking_part = None
        try:
            self._parts[0].driver.cluster.ask(
                requests, doing="getting up", away=BrokerUnavailable, patience=0.0
            )
        except MachineryError:
            pass  # somebody wakes nobody, and whoever sleeps there looks again within BLOCK

    def _part_of(self, delivery: Delivery) -> _Part:
        return self._by_queue.get(delivery.queue, self._parts[0])

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        """As the base class; queue by queue, each in one step."""
        ours = [False] * len(disposals)
        for part in self._parts:
            places = [
                index for index, one in enumerate(disposals) if self._part_of(one.delivery) is part
            ]
            for index, mine in zip(
                places, part.dispose([disposals[index] for index in places]), strict=True
            ):
                ours[index] = mine
        return ours

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        ours = [False] * len(deliveries)
        for part in self._parts:
            places = [index for index, one in enumerate(deliveries) if self._part_of(one) is part]
            for index, mine in zip(
                places, part.holds([deliveries[index] for index in places]), strict=True
            ):
                ours[index] = mine
        return ours

    def run_begins(self, delivery: Delivery) -> None:
        self._part_of(delivery).run_begins(delivery)

    def run_ends(self, delivery: Delivery) -> None:
        self._part_of(delivery).run_ends(delivery)

    def beat(self) -> bool:
        if self._closed:
            return True
        self.file.touch()
        # All in one round trip, and soon: a node that is away must not keep the queues of others from hearing of us.
        cluster = self._parts[0].driver.cluster
        registered = cluster.ask(
            [part.beat_request() for part in self._parts],
            doing="beating",
            away=BrokerUnavailable,
            patience=self._patience,
        )
        if all(registered) and not self._restarting:
            return True
        # Given up in one queue is given up in all: a session that is over changes nothing any more.
        self._restarting = True
        self.file.end()
        self.file = host_file(KIND)
        for part in self._parts:
            part.restart()
        self._restarting = False
        return False

    def wake(self) -> None:
        self._woken = True
        for part in self._parts:
            part.wake()

    def close(self) -> None:
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        failure = self._leave(self._parts)
        if failure is not None:
            raise failure

    @staticmethod
    def _leave(parts: Sequence[_Part]) -> MachineryError | None:
        """Close them all; the last failure."""
        failure: MachineryError | None = None
        for part in parts:
            try:
                part.close()
            except MachineryError as error:
                failure = error
        return failure

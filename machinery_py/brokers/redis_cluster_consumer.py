"""A consumer of queues in a Redis Cluster: a part for each queue, all with one session.

A part is a RedisConsumer in the slot of its queue. With one queue it sleeps as on one Redis. With several, it is asleep at the
first whose node is there; the others, when something is put there, end its sleep: its connection is in their set of sleepers,
as `number@queue`.

    ring    our connection into the sets of the other queues
    look    a claim at each queue: what came before the ring is found now
    nap     BLMOVE at the first queue

Limits: what a Go program puts on another than the first queue is noticed within BLOCK.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence

from machinery_py._drivers.redis import TIMEOUT
from machinery_py._drivers.redis_cluster import PAUSE, Request, SlotDriver, passing, script_at
from machinery_py._drivers.redis_keys import queue_keys
from machinery_py._drivers.redis_lua import pack
from machinery_py._drivers.redis_slots import clustered
from machinery_py.brokers import redis_scripts
from machinery_py.brokers.base import Consumer, Delivery, Disposal
from machinery_py.brokers.redis_consumer import BLOCK, RedisConsumer
from machinery_py.errors import BrokerUnavailable, MachineryError

logger = logging.getLogger(__name__)

AWAY_PAUSE = 1.0  # seconds until a queue whose node is away is tried again, if others are there

Place = tuple[str, SlotDriver, Callable[[], object]]
"""A queue, its driver, and what brings its due messages to it."""


class _Part(RedisConsumer):
    """A consumer of one queue, with the session that its owner gives it."""

    def __init__(self, owner: ClusterConsumer, place: Place, *, worker: str) -> None:
        self._owner = owner
        self.queue, self.driver, move_due = place
        self._refused_since = 0.0
        self.failure: BrokerUnavailable | None = None  # of the last look at this queue
        self._look_at = 0.0
        super().__init__(self.driver, (self.queue,), worker=worker, move_due=move_due)

    def _new_session(self) -> str:
        return self._owner.next_session

    def _listed(self) -> tuple[str, ...]:
        return self._owner.queues

    def beat_request(self) -> Request:
        """Answered with 0 if this session was given up."""
        argument = pack((self.driver.now(), self.session, self._keys))
        return script_at(self.driver.prefix, clustered(redis_scripts.BEAT), argument)

    def restart(self) -> None:
        """Give everything back, if that was not done, and register as the owner's next session."""
        self._give_up(redis_scripts.GRAVE)
        self._start_session()

    def _claim(self, limit: int, *, sleep: float, will_sleep: bool) -> tuple[list[Delivery], float]:
        """As the base class. While the slot is on its way to another node, there is nothing to be had, for a while."""
        try:
            claimed = super()._claim(limit, sleep=sleep, will_sleep=will_sleep)
        except BrokerUnavailable as error:
            now = time.monotonic()
            self._refused_since = self._refused_since or now
            if not isinstance(error.__cause__, Exception) or not passing(error.__cause__):
                raise
            if now - self._refused_since > TIMEOUT:
                raise
            time.sleep(PAUSE)
            return [], BLOCK
        self._refused_since = 0.0
        return claimed

    def settle_down(self) -> None:
        """Sleep again, after a wake."""
        self._woken = False

    def number(self) -> bytes:
        """Under which others can wake it."""
        return self._open_link().number + b"@" + queue_keys(self.queue)[1].encode()

    def look(self, limit: int) -> list[Delivery]:
        """What can be claimed now. While the queue's node is away that is nothing, and why is told in `failure`."""
        if self.failure is not None and time.monotonic() < self._look_at:
            return []
        try:
            deliveries, due_in = self._claim(limit, sleep=0.0, will_sleep=False)
        except BrokerUnavailable as error:
            if self.failure is None:
                logger.warning("queue %s: %s (other queues go on)", self.queue, error)
            self.failure, self._look_at = error, time.monotonic() + AWAY_PAUSE
            return []
        self.failure = None
        if due_in <= 0.0:
            try:
                self._move_due()
            except MachineryError:
                pass  # what was claimed is ours; the next mover does its part
        return deliveries

    def nap(self, limit: int, seconds: float) -> list[Delivery]:
        return self._claim(limit, sleep=min(seconds, BLOCK), will_sleep=False)[0]


class ClusterConsumer(Consumer):
    """What a worker holds of several queues."""

    def __init__(self, places: Sequence[Place], *, worker: str, patience: float) -> None:
        """`patience`: seconds for a beat."""
        self.queues = tuple(queue for queue, _, _ in places)
        self.next_session = secrets.token_hex(12)
        self._parts = [_Part(self, place, worker=worker) for place in places]
        self._by_queue = {part.queue: part for part in self._parts}
        self._woken = False
        self._closed = False
        self._restarting = False
        self._patience = patience
        self._pid = os.getpid()

    def receive(self, limit: int, timeout: float) -> list[Delivery]:
        if self._closed:
            return []
        if len(self._parts) == 1:
            return self._parts[0].receive(limit, timeout)
        found = self._look(limit)
        deadline = time.monotonic() + timeout
        while not found and not self._woken and not self._closed:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._ring()
            found = self._look(limit)
            if not found and not self._woken:
                found = self._bed().nap(limit, left)
            found = found or self._look(limit)
        self._woken = False
        for part in self._parts:
            part.settle_down()
        return found

    def _look(self, limit: int) -> list[Delivery]:
        """Claim at each queue whose node is there.

        Raises:
            BrokerUnavailable: none of them is.
        """
        found: list[Delivery] = []
        for part in self._parts:
            if len(found) < limit:
                found += part.look(limit - len(found))
        if not found:
            self._bed()
        return found

    def _bed(self) -> _Part:
        """Where to sleep."""
        for part in self._parts:
            if part.failure is None:
                return part
        raise self._parts[0].failure or AssertionError("unreachable")

    def _ring(self) -> None:
        bed = self._bed()
        number = bed.number()
        for part in self._parts:
            if part is not bed and part.failure is None:
                part.driver.ask(b"SADD", f"{queue_keys(part.queue)[1]}w".encode(), number, doing="going to sleep",
                                away=BrokerUnavailable)

    def _part_of(self, delivery: Delivery) -> _Part:
        return self._by_queue.get(delivery.queue, self._parts[0])

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        """As the base class; queue by queue, each in one step."""
        ours = [False] * len(disposals)
        for part in self._parts:
            places = [index for index, one in enumerate(disposals) if self._part_of(one.delivery) is part]
            for index, mine in zip(places, part.dispose([disposals[index] for index in places]), strict=True):
                ours[index] = mine
        return ours

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        ours = [False] * len(deliveries)
        for part in self._parts:
            places = [index for index, one in enumerate(deliveries) if self._part_of(one) is part]
            for index, mine in zip(places, part.holds([deliveries[index] for index in places]), strict=True):
                ours[index] = mine
        return ours

    def run_begins(self, delivery: Delivery) -> None:
        self._part_of(delivery).run_begins(delivery)

    def beat(self) -> bool:
        if self._closed:
            return True
        # All in one round trip, and soon: a node that is away must not keep the queues of others from hearing of us.
        cluster = self._parts[0].driver.cluster
        registered = cluster.ask([part.beat_request() for part in self._parts], doing="beating", away=BrokerUnavailable,
                                 patience=self._patience)
        if all(registered) and not self._restarting:
            return True
        # Given up in one queue is given up in all: a session that is over changes nothing any more.
        self._restarting = True
        self.next_session = secrets.token_hex(12)
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
        failure: MachineryError | None = None
        for part in self._parts:
            try:
                part.close()
            except MachineryError as error:
                failure = error
        if failure is not None:
            raise failure

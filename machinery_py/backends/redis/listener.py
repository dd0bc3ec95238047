"""Waiting for tasks of a Redis to finish: a channel for each task, and no polling.

The end of a plain task is told with its state, if that is short: nobody needs to read it then.

Limits: nothing is published of a task that a Go program ends; the waiter looks now and then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from machinery_py.backends.base import Listener
from machinery_py.backends.redis.documents import state_of
from machinery_py.bounds import in_steps
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.connection import RedisConnection, command
from machinery_py.errors import BackendUnavailable, MachineryError
from machinery_py.tasks.states import TaskState
from machinery_py.texts import get_logger
from machinery_py.values.malformed import MALFORMED

logger = get_logger(__name__)

PING = command(b"PING")
REPLY = 5.0  # seconds for Redis to confirm a subscription


class RedisListener(Listener):
    """A subscribed connection. `wait` reads from it, or `watch` until it is confirmed."""

    def __init__(self, driver: RedisDriver) -> None:
        self._driver = driver
        self._reading = threading.RLock()
        self._changing = threading.Lock()
        self._watched: set[bytes] = set()
        self._confirmed = 0
        self._asked = 0
        self._woken = False
        self._told: list[tuple[bytes, bytes]] = []  # channel and news
        self._link: RedisConnection | None = None

    def watch(self, uuids: Iterable[str]) -> None:
        channels = list(map(self._driver.channel, uuids))
        with self._changing:
            new = [channel for channel in channels if channel not in self._watched]
            self._watched.update(new)
            try:
                wanted = self._subscribe(new)
            except Exception as error:  # redis-py's, sorted by `fail`
                self._lose()
                self._driver.fail(error, doing="listening for results", away=BackendUnavailable)
        self._await(wanted)

    def _subscribe(self, channels: Sequence[bytes]) -> int:
        """Subscribe to these; return the number of the last confirmation. `_changing` is held."""
        if self._link is None:
            self._link = self._driver.take_subscriber()
            self._asked = self._confirmed = 0
            channels = [*self._watched]
        for step in in_steps(channels):
            self._link.send(command(b"SUBSCRIBE", *step))
            self._asked += len(step)
        return self._asked

    def _await(self, wanted: int) -> None:
        """Return when the subscriptions are confirmed: a task that ends after that wakes us."""
        deadline = time.monotonic() + REPLY
        while self._confirmed < wanted and time.monotonic() < deadline and self._link is not None:
            # If the owner blocks in `wait`, it reads the confirmation.
            if self._reading.acquire(timeout=0.001):
                try:
                    if self._confirmed < wanted:
                        self._read(0.01)
                finally:
                    self._reading.release()

    def _read(self, timeout: float) -> None:
        """Read what has come, or wait for it. `_reading` is held."""
        link = self._link
        if link is None:
            return
        if self._driver.is_stale(link):
            self._lose()
            self._woken = True
            return
        try:
            more = link.has_news(timeout)
            while more:
                kind, channel, *news = link.read()  # a PONG has nothing else
                if kind == b"subscribe":
                    self._confirmed += 1
                elif kind == b"message" and channel in self._watched:
                    self._watched.discard(channel)
                    self._woken = True
                    self._told += [(channel, one) for one in news if one]
                more = link.has_more
        except Exception as error:  # the waiter looks again, and then subscribes anew
            self._lose(error)
            self._woken = True

    def _lose(self, error: Exception | None = None) -> None:
        """Close the connection. An error that is not of the connection is a mistake, and logged."""
        link, self._link = self._link, None
        if link is None:
            return  # another thread has closed it, and the error may come of that
        link.close()
        if error and not (isinstance(error, MachineryError) or self._driver.sorts(error)):
            logger.error("results are looked for, and not listened for", exc_info=error)

    def unwatch(self, uuids: Iterable[str]) -> None:
        with self._changing:
            channels = list(map(self._driver.channel, uuids))
            self._watched.difference_update(channels)
            self._drop(channels)

    def _drop(self, channels: Sequence[bytes]) -> None:
        link = self._link
        try:
            for step in in_steps(channels):
                if link is not None:
                    link.send(command(b"UNSUBSCRIBE", *step))
        except Exception as error:  # then nobody listens any more
            self._lose(error)

    def wait(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._reading:
            while not self._woken:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                if self._link is None:
                    self._reconnect(left)
                    return
                self._read(left)
            self._woken = False

    def told(self) -> Sequence[TaskState]:
        told, self._told = self._told, []
        return [state for one in told if (state := self._state_in(*one)) is not None]

    def _state_in(self, channel: bytes, news: bytes) -> TaskState | None:
        """Return the final state of the channel's task; None: others may publish what they like."""
        document, _, companion = news.partition(b"\n")
        try:
            state = state_of("", document, companion)
        except MALFORMED:  # a DecodeError among them
            return None
        is_news = state.is_finished and self._driver.channel(state.task_uuid) == channel
        return state if is_news else None

    def _reconnect(self, left: float) -> None:
        try:
            with self._changing:
                self._subscribe(())
        except Exception as error:  # Redis is away: the waiter's next look says so
            self._lose(error)
            threading.Event().wait(min(left, 0.1))

    def wake(self) -> None:
        self._woken = True
        with self._changing:
            if self._link is not None:
                try:
                    self._link.send(PING)  # the answer ends the owner's waiting
                except Exception as error:  # the connection is gone: that ends it, too
                    self._lose(error)

    def close(self) -> None:
        with self._changing:
            link, self._link = self._link, None
        if link is None:
            return
        try:
            link.send(command(b"UNSUBSCRIBE"))
        except Exception:  # then the next one opens its own
            link.close()
            return
        self._driver.give_subscriber(link)

"""Wake-up by LISTEN and NOTIFY: one connection a process, and a row for each topic it waits for.

A NOTIFY makes all commits of the server wait for each other, so a transaction sends one only to a
process that has said, by a row in `watches`, that it waits for the topic. A transaction that looked
there before the row came may commit after the waiter has looked: so the first wait for a new topic
is short (AGAIN), and the waiter looks once more.

Behind a pooler nothing is listened for: a wait ends after POLL. LISTEN raises nothing there, so a
connection, which may not know of the pooler, first sends itself a notification.

Limits: if the connection is lost, waits end after POLL until there is a new one; if the network
drops it without a word, it is seen after RENEW, and waits end after LONGEST until then.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import psycopg

from machinery_py.errors import MachineryError
from machinery_py.texts import get_logger

logger = get_logger(__name__)

AGAIN = 0.05  # seconds of the first wait for a new topic
LONGEST = 2.0  # seconds of one wait, where notifications come
POLL = 0.1  # seconds, where they do not
START = 1.0  # seconds for the first connection, and for its first notification
SOONEST, LATEST = 0.1, 10.0  # seconds until there is another try to listen
TICK = 1.0  # seconds between two looks for topics that nobody waits for any more
LIFE = 30_000_000  # µs that a row in `watches` counts
RENEW = 10.0  # seconds

_WATCH = """
INSERT INTO machinery.watches (topic, channel, until)
SELECT t, %s, machinery.moment(%s) + %s FROM unnest(%s::bytea[]) t
ON CONFLICT (topic, channel) DO UPDATE SET until = excluded.until
"""
_LISTEN = b"LISTEN machinery"  # of transactions that are not only ours
_WAKE = "SELECT pg_notify(%s, '')"
_UNWATCH = "DELETE FROM machinery.watches WHERE channel = %s AND topic = ANY(%s::bytea[])"


Link = psycopg.Connection[tuple[Any, ...]]


class Driver(Protocol):
    """PostgreSQLDriver of client.py, which opens the connections."""

    is_pooled: bool

    def open(self) -> Link: ...

    def given_now(self) -> int | None: ...

    def run(self, sql: str, arguments: Sequence[object], /, *, doing: str) -> object: ...


class Waiter:
    """Topics that one thread waits for. Any thread may call any method; one waits."""

    def __init__(self, ear: Ear) -> None:
        self._ear = ear
        self._event = threading.Event()
        self._topics: set[bytes] = set()
        self._is_new = False

    def watch(self, topics: Iterable[bytes]) -> None:
        """Wait for these as well. The caller looks once after it."""
        if new := set(topics) - self._topics:
            self._topics |= new
            self._is_new |= self._ear.add(self, new)

    def unwatch(self, topics: Iterable[bytes]) -> None:
        if old := self._topics.intersection(topics):
            self._topics -= old
            self._ear.remove(self, old)

    def wait(self, timeout: float) -> None:
        """Return when a topic was told, or after a `wake`; perhaps earlier."""
        longest = LONGEST if self._ear.hears else POLL
        if self._is_new:
            longest, self._is_new = min(longest, AGAIN), False
        self._event.wait(min(timeout, longest))
        self._event.clear()

    def wake(self) -> None:
        self._event.set()

    def close(self) -> None:
        self.unwatch(self._topics)


class Ear:
    """The notifications of a process, for its waiters. A thread listens while there are some.

    Attributes:
        hears: whether there is a connection by which notifications come.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._begin_process()

    def _begin_process(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._waiters: dict[bytes, set[Waiter]] = {}
        self._noted: dict[bytes, float] = {}  # topics in `watches`, and when each was wanted last
        self._channel = f"machinery_{secrets.token_hex(8)}"
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._tried = threading.Event()  # there is a connection, or none can be had now
        self._pause = SOONEST
        self.hears: bool = False

    def waiter(self) -> Waiter:
        return Waiter(self)

    def add(self, waiter: Waiter, topics: set[bytes]) -> bool:
        """Let a waiter wait for topics; return whether one of them was not watched before."""
        if self._pid != os.getpid():
            self._begin_process()
        with self._lock:
            for topic in topics:
                self._waiters.setdefault(topic, set()).add(waiter)
            if self._driver.is_pooled:
                return False
            if self._thread is None:
                name = "machinery postgresql listener"
                self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
                self._thread.start()
                self._tried.wait(START)
            new = topics - self._noted.keys()
            with contextlib.suppress(MachineryError):  # it is away: the waiter's look will say so
                self._note(new)
                self._noted.update(dict.fromkeys(topics, time.monotonic()))
        return bool(new)

    def remove(self, waiter: Waiter, topics: set[bytes]) -> None:
        """Let a waiter wait for these topics no more. Others go on telling of them for TICK."""
        if self._pid != os.getpid():
            return
        with self._lock:
            for topic in topics:
                there = self._waiters.get(topic, set())
                there.discard(waiter)
                if not there:
                    self._waiters.pop(topic, None)

    def _note(self, topics: Iterable[bytes]) -> None:
        """Let others tell this process of topics, until LIFE is over."""
        if found := list(topics):
            arguments = (self._channel, self._driver.given_now(), LIFE, found)
            self._driver.run(_WATCH, arguments, doing="watching topics")

    def close(self) -> None:
        """End the thread. May be called twice; the next waiter starts it again."""
        if self._pid != os.getpid():
            return
        self._stopping.set()
        self._tried.set()
        if self._thread is not None:
            with contextlib.suppress(MachineryError):
                if self.hears:
                    self._driver.run(_WAKE, (self._channel,), doing="ending")
            self._thread.join(2 * TICK)
        self._begin_process()

    # The thread

    def _listen(self) -> None:
        stopping, tried = self._stopping, self._tried
        while not stopping.is_set():
            try:
                with contextlib.closing(self._driver.open()) as link:
                    if self._driver.is_pooled:
                        return
                    self._hear(link, stopping, tried)
            except (psycopg.Error, MachineryError) as error:
                logger.debug("no notifications of PostgreSQL: %s", error)
            finally:
                self.hears = False
                tried.set()
                self._wake(None)
            stopping.wait(self._pause)
            self._pause = min(2 * self._pause, LATEST)

    def _hear(self, link: Link, stopping: threading.Event, tried: threading.Event) -> None:
        """Hand on what comes. What was told while there was no connection is looked for."""
        link.execute(f"LISTEN {self._channel}".encode())
        link.execute(_LISTEN)
        self._driver.run(_WAKE, (self._channel,), doing="listening")
        if not list(link.notifies(timeout=START, stop_after=1)):
            raise psycopg.OperationalError("LISTEN has no effect (is there a pooler in between?)")
        self.hears, self._pause = True, SOONEST
        if tried.is_set():
            with self._lock:
                self._note(list(self._noted))  # a crash of the server has emptied the table
            self._wake(None)
        tried.set()
        renew_at, forget_at = time.monotonic() + RENEW, 0.0
        while not stopping.is_set():
            for one in link.notifies(timeout=TICK, stop_after=1):
                self._wake(_topic_in(one.payload))
            if (now := time.monotonic()) >= forget_at:
                self._forget(now)
                forget_at = now + TICK
            if now >= renew_at:
                link.execute(_LISTEN)  # it fails if the connection is lost, which else nobody sees
                with self._lock:
                    self._note(list(self._noted))
                renew_at = now + RENEW
        with self._lock:
            self._drop(list(self._noted))

    def _wake(self, topic: bytes | None) -> None:
        """Wake those that wait for a topic; None: all."""
        with self._lock:
            if topic is None:
                waiters = {one for some in self._waiters.values() for one in some}
            else:
                waiters = set(self._waiters.get(topic, ()))
        for waiter in waiters:
            waiter.wake()

    def _forget(self, now: float) -> None:
        """Drop topics that nobody has waited for of late."""
        with self._lock:
            self._noted.update(dict.fromkeys(self._waiters.keys() & self._noted.keys(), now))
            self._drop([topic for topic, at in self._noted.items() if now - at > TICK])

    def _drop(self, topics: list[bytes]) -> None:
        for topic in topics:
            del self._noted[topic]
        if topics:
            self._driver.run(_UNWATCH, (self._channel, topics), doing="watching topics")


def _topic_in(payload: str) -> bytes | None:
    try:
        return bytes.fromhex(payload)
    except ValueError:  # a stranger's
        return None

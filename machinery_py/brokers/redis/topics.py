"""Topics in Redis: a stream for each, with `r` (the record) and `u` (the ms until which it counts).

The id of an entry is `<ms>-<number>`, and the numbers of a stream have no gaps: a reader that finds
one has missed what was trimmed. The stream expires when the last of its records is over.

A subscription has a connection of its own, on which it blocks in XREAD. TIME behind it, in the same
packet, says how old the records are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from machinery_py.brokers.redis import scripts
from machinery_py.brokers.topics import READ, KeptRecord, KeptSubscription
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.redis.client import RedisDriver, raw
from machinery_py.connections.redis.connection import RedisConnection, command
from machinery_py.connections.redis.keys import topic_key
from machinery_py.errors import BrokerUnavailable, MachineryError, PublishUnknown

BLOCK = 1.0  # seconds of one sleep
LINK_TIMEOUT = 3.0  # seconds for a reply, beyond its sleep
DOING = "reading a topic"


def append_records(driver: RedisDriver, topic: str, records: Sequence[bytes], ttl: float) -> None:
    """Append the records to the topic's stream."""
    values = (driver.now(), topic_key(topic), int(ttl * 1000), list(map(raw, records)))
    driver.run(scripts.BROADCAST, *values, again=False, lost=PublishUnknown)


class RedisSubscription(KeptSubscription):
    """The id of the last entry that was read, and a connection."""

    def __init__(self, driver: RedisDriver, topic: str, since: float) -> None:
        super().__init__()
        self._driver = driver
        self._key = topic_key(topic).encode()
        self._block = min(BLOCK, driver.limits.block)
        self._link: RedisConnection | None = None
        self._asleep = b""  # the number of the connection while it blocks
        self._reading = ForkLock()
        self._failing_since = math.inf  # monotonic second of the first look that did
        self._after = b"0-0"
        self._next = 1
        if last := self._ask_once(*self._last()):
            self._after = last[0][0]
            self._next = _number(self._after) + 1
            if since > 0:
                now = driver.now() or _micros(self._ask_once(b"TIME"))
                begin = b"%d-0" % max(0, int(now) // 1000 - int(since * 1000) - 1)
                self._after, self._next = min(self._after, begin, key=_place), 0

    def _last(self) -> tuple[bytes, ...]:
        """Return the question for the last entry."""
        return b"XREVRANGE", self._key, b"+", b"-", b"COUNT", b"1"

    def _ask_once(self, *parts: bytes) -> Any:
        return self._driver.ask(*parts, doing="subscribing to a topic", away=BrokerUnavailable)

    def _fetch(self, wait: float) -> list[KeptRecord]:
        with self._reading:
            try:
                streams, now = self._ask(min(wait, self._block))
            except Exception as error:  # redis-py's, sorted by `fail`, or ours
                self._drop_link()
                if isinstance(error, MachineryError):
                    raise
                self._failing_since = min(self._failing_since, time.monotonic())
                if self._driver.waits(error, self._failing_since):
                    return []
                self._driver.fail(error, doing=DOING, away=BrokerUnavailable)
        self._failing_since = math.inf
        return (
            [(id, _number(id), _body(pairs, now)) for id, pairs in streams[0][1]] if streams else []
        )

    def _ask(self, sleep: float) -> tuple[Any, int]:
        """Return the reply to XREAD, and the time behind it in ms."""
        timeout = self._block + min(LINK_TIMEOUT, self._driver.limits.read)
        if self._closed:
            return None, 0
        link, self._link = self._link, None
        link = self._link = self._driver.numbered(link, timeout=timeout)
        block = (b"BLOCK", b"%d" % math.ceil(sleep * 1000)) if sleep else ()
        read = self._driver.command(
            b"XREAD", *block, b"COUNT", b"%d" % READ, b"STREAMS", self._key, self._after
        )
        self._asleep = link.number if sleep else b""
        try:
            if sleep and (self._woken or self._closed):
                return None, 0
            link.send(read + command(b"TIME"))
            streams = link.read()
        finally:
            self._asleep = b""
        time_there = _micros(link.read())
        if not streams and self._after != b"0-0":
            # Its ids are moments: a stream that begins anew may begin before what we have read,
            # if the server's clock was ahead then.
            last = link.exchange(self._driver.command(*self._last()))
            if not last or _place(last[0][0]) < _place(self._after):
                self._after, self._next = b"0-0", 1
        return streams, int(self._driver.now() or time_there) // 1000

    def wake(self) -> None:
        super().wake()
        self._driver.unblock_while(lambda: self._asleep, doing="waking a reader")

    def close(self) -> None:
        super().close()
        with self._reading:
            self._drop_link()

    def _drop_link(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


def _place(id: bytes) -> tuple[int, int]:
    moment, _, number = id.partition(b"-")
    return int(moment), int(number)


def _number(id: bytes) -> int:
    return int(id.partition(b"-")[2])


def _micros(reply: Any) -> int:
    return int(reply[0]) * 1_000_000 + int(reply[1])


def _body(pairs: Sequence[bytes], now: int) -> bytes | None:
    """Return the body of an entry; None if it is over, or is no record."""
    fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
    until = fields.get(b"u", b"")
    is_over = until.isdigit() and len(until) < 20 and int(until) <= now
    return None if is_over else fields.get(b"r")

"""A TCP proxy that misbehaves on command, for tests of network faults at a client and its server.

    with Proxy(redis.port) as proxy:
        client = Redis(port=proxy.url_port)
        proxy.drop_next_reply(matching=b"EVALSHA")     # it is executed, and nobody hears of it
        ...
        proxy.heal()

    slow, chop, black_hole                     until healed; in one direction or in both
    refuse, drop_replies                       until healed
    reset, finish, half_close                  at once, to every open connection
    reset_after, drop_next_reply, answer_next  once, to whom it meets first

A fault is in force when its method returns. Methods may be called from any thread. A "request" is
one read from the client, a "reply" one read from the server: whole below 64 KiB on one machine.

Limits: a black hole makes bytes wait (they arrive after `heal`, like retransmitted ones), and the
kernel still accepts connections for it. A delay is waited for between reads, so it limits bandwidth
too.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from machinery_py.testing.waiting import HANG
from tests.support.private import HOST, free_port

CHUNK = 65_536  # bytes a read may give
TICKS = 20.0  # pieces a second, when the bandwidth is limited
Answer = Callable[[bytes], bytes]  # request → reply
RST_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER for no time at all


class Direction(StrEnum):
    """Which way bytes go."""

    REQUESTS = "requests"
    REPLIES = "replies"


REQUESTS, REPLIES = Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyEvent:
    """Something that was switched, or that happened to a connection."""

    after: float  # seconds since the proxy was made
    connection: int  # counted from 1; 0 is the proxy itself
    what: str


@dataclass(slots=True)
class _Flow:
    """What happens to the bytes of one direction."""

    latency: float = 0.0
    jitter: float = 0.0
    bandwidth: float = 0.0  # bytes/s; 0 is unlimited
    is_chopped: bool = False
    is_hole: bool = False
    reset_after: int | None = None  # bytes, then a reset


@dataclass(slots=True)
class _Traps:
    """What waits for a request or a reply."""

    drop_probability: float = 0.0
    drops: int = 0
    drop_matching: bytes | None = None
    answers: int = 0
    answer: str = ""
    make_answer: Answer | None = None
    answer_matching: bytes = b""
    is_executed: bool = False


class _Reset(Exception):
    """This connection is to be reset."""


@dataclass(slots=True, eq=False)
class _Connection:
    """A client and its own connection to the server."""

    number: int
    client: socket.socket
    server: socket.socket = field(default_factory=socket.socket)
    is_reset: bool = False
    answer: bytes = b""  # to be sent in the place of the next reply
    drops_reply: bool = False  # it has sent the request that drop_next_reply(matching=…) waited for
    finished: set[Direction] = field(
        default_factory=set
    )  # by half_close: what still comes is swallowed

    def prepare(self) -> None:
        for end in (self.client, self.server):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ends(self, direction: Direction) -> tuple[socket.socket, socket.socket]:
        """From where to where."""
        return (self.client, self.server) if direction is REQUESTS else (self.server, self.client)

    def finish(self, direction: Direction) -> None:
        self.finished.add(direction)
        try:
            self.ends(direction)[1].shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it is closed, or was never connected

    def close(self) -> None:
        for end in (self.client, self.server):
            if self.is_reset:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RST_ON_CLOSE)
            end.close()


class Proxy:
    """Forwards connections from a port of its own to a server's, as well or as badly as it is told.

    Attributes:
        url_port: where clients connect, on 127.0.0.1.
        target_port: where the server listens; may be changed, for the connections to come.
        counts: connections, requests, replies, request_bytes, reply_bytes, resets, dropped,
            answered, unreachable.
    """

    def __init__(self, target_port: int, *, seed: int = 0) -> None:
        """`seed` fixes the jitter, and the dropped replies if their order is fixed."""
        self.target_port = target_port
        self.url_port = free_port()
        self.counts: Counter[str] = Counter()
        self._random, self._seed = random.Random(seed), seed
        self._events: list[ProxyEvent] = []
        self._flows = {direction: _Flow() for direction in Direction}
        self._traps = _Traps()
        self._tasks: dict[_Connection, asyncio.Task[None]] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()  # new at every heal: what waits in a black hole looks again
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"proxy to {target_port}", daemon=True
        )
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        self._do("started", self._heal)
        return self

    def __exit__(self, *_: object) -> None:
        self._do("stopped", self._stop_listening)
        self._run(self._reset_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG)
        self._loop.close()

    @property
    def events(self) -> list[ProxyEvent]:
        """What happened so far, oldest first."""
        return list(self._events)

    @property
    def open_connections(self) -> int:
        return len(self._tasks)

    def through(self, url: str) -> str:
        """The same URL by way of this proxy."""
        parts = urlsplit(url)
        login, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{login}{at}{HOST}:{self.url_port}"))

    # Faults that last

    def heal(self) -> None:
        """End every fault: a black hole's bytes go on their way; closed connections stay so."""
        self._do("heal", self._heal)

    def slow(
        self,
        direction: Direction | None = None,
        *,
        latency: float = 0,
        jitter: float = 0,
        bandwidth: float = 0,
    ) -> None:
        """Hold back what is read for `latency` ± `jitter` seconds.

        At most `bandwidth` bytes/s pass (0: any number).
        """
        self._change(direction, latency=latency, jitter=jitter, bandwidth=bandwidth)

    def chop(self, direction: Direction | None = None) -> None:
        """Send each byte by itself."""
        self._change(direction, is_chopped=True)

    def black_hole(self, direction: Direction | None = None) -> None:
        """Let nothing through, neither bytes nor FIN; both sides still look connected."""
        self._change(direction, is_hole=True)

    def refuse(self) -> None:
        """Listen no more, so that new connections are refused; open ones live on."""
        self._do("refuse", self._stop_listening)

    def drop_replies(self, probability: float) -> None:
        """Drop each reply with this probability, and reset its connection."""
        self._set_trap(drop_probability=probability)

    # Faults at once

    def reset(self) -> None:
        """RST to both ends of every connection; returns when they are sent."""
        self._log(0, "reset all")
        self._run(self._reset_all())

    def finish(self) -> None:
        """FIN to both ends of all connections: each side reads the rest, then the end."""
        for direction in Direction:
            self.half_close(direction)

    def half_close(self, direction: Direction) -> None:
        """FIN to the receivers of this direction; the other direction still works."""

        def finish() -> None:
            for connection in self._tasks:
                connection.finish(direction)

        self._do(f"half-close {direction}", finish)

    # Faults that wait for whom they meet

    def reset_after(self, length: int, direction: Direction = REPLIES) -> None:
        """Let `length` more bytes of this direction pass, then reset the next one's connection."""
        self._change(direction, reset_after=length)

    def drop_next_reply(self, *, matching: bytes | None = None, times: int = 1) -> None:
        """Forward a request, let it be executed, swallow its reply and reset the connection.

        With `matching` it is the next request with these bytes; without, the next reply, perhaps
        to a request that is already waiting.
        """
        self._set_trap(drops=times, drop_matching=matching)

    def answer_next(
        self, error: str | Answer, *, matching: bytes = b"", times: int = 1, executed: bool = False
    ) -> None:
        """Answer the next request that contains `matching` with a Redis error; do not forward it.

        The error is, for example, "LOADING wait". A pipeline gets one error a command. For other
        servers `error` makes the reply from the request. `executed`: forward the request after all,
        and replace its reply by the answer.
        """
        text, make = (error.removeprefix("-"), None) if isinstance(error, str) else ("", error)
        self._set_trap(
            answer=text,
            make_answer=make,
            answer_matching=matching,
            answers=times,
            is_executed=executed,
        )

    # From any thread to the loop

    def _do(self, what: str, change: Callable[[], object]) -> None:
        async def run() -> None:
            change()

        self._log(0, what)
        self._run(run())

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(HANG)

    def _change(self, direction: Direction | None, **values: object) -> None:
        for one in list(Direction) if direction is None else [direction]:
            self._do(f"{one}: {values}", partial(_set, self._flows[one], values))

    def _set_trap(self, **values: object) -> None:
        self._do(str(values), partial(_set, self._traps, values))

    def _log(self, connection: int, what: str) -> None:
        self._events.append(
            ProxyEvent(after=time.monotonic() - self._started, connection=connection, what=what)
        )

    # On the loop

    def _heal(self) -> None:
        for flow in self._flows.values():
            _set(flow, asdict(_Flow()))
        self._traps = _Traps()
        self._random.seed(self._seed)
        self._changed.set()
        self._changed = asyncio.Event()
        if self._listener is None:
            self._listener = socket.create_server((HOST, self.url_port), backlog=1024)
            self._listener.setblocking(False)
            self._accepting = self._loop.create_task(self._accept(self._listener))

    def _stop_listening(self) -> None:
        if self._listener is not None and self._accepting is not None:
            self._loop.remove_reader(self._listener)
            self._accepting.cancel()
            self._listener.close()
            self._listener = None

    async def _reset_all(self) -> None:
        for connection, task in self._tasks.items():
            connection.is_reset = True
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            client, _ = await self._loop.sock_accept(listener)
            self.counts["connections"] += 1
            connection = _Connection(self.counts["connections"], client)
            connection.prepare()
            self._log(connection.number, "connected")
            self._tasks[connection] = task = self._loop.create_task(self._serve(connection))
            # Not in a `finally` of _serve: a task cancelled before its first step never gets there.
            task.add_done_callback(partial(self._ended, connection))

    def _ended(self, connection: _Connection, _: asyncio.Task[None]) -> None:
        del self._tasks[connection]
        self.counts["resets"] += connection.is_reset
        self._log(connection.number, "reset" if connection.is_reset else "closed")
        connection.close()

    async def _serve(self, connection: _Connection) -> None:
        try:
            await self._loop.sock_connect(connection.server, (HOST, self.target_port))
        except OSError:
            self.counts["unreachable"] += 1
            connection.is_reset = True
            return
        try:
            async with asyncio.TaskGroup() as pumps:
                for direction in Direction:
                    pumps.create_task(self._pump(connection, direction))
        except* (OSError, _Reset):
            connection.is_reset = True

    async def _pump(self, connection: _Connection, direction: Direction) -> None:
        flow = self._flows[direction]
        source, target = connection.ends(direction)
        while True:
            read = await self._loop.sock_recv(source, CHUNK)
            if flow.latency or flow.jitter:
                await asyncio.sleep(
                    max(0.0, flow.latency + self._random.uniform(-flow.jitter, flow.jitter))
                )
            while flow.is_hole:
                await self._changed.wait()
            if not read:
                connection.finish(direction)
                return
            if direction is REPLIES:
                self._drop_perhaps(connection, read)
                if connection.answer:
                    read, connection.answer = connection.answer, b""
            elif answer := self._answer_to(connection, read):
                await self._loop.sock_sendall(connection.client, answer)
                continue
            if direction not in connection.finished:
                await self._forward(flow, target, read)
                self.counts[direction] += 1
                self.counts["request_bytes" if direction is REQUESTS else "reply_bytes"] += len(
                    read
                )

    def _answer_to(self, connection: _Connection, request: bytes) -> bytes:
        """Return the error to send instead of forwarding, if any; note a reply to drop."""
        traps = self._traps
        if traps.drops and traps.drop_matching is not None and traps.drop_matching in request:
            traps.drops -= 1
            connection.drops_reply = True
        if not traps.answers or traps.answer_matching not in request:
            return b""
        traps.answers -= 1
        self.counts["answered"] += 1
        self._log(connection.number, f"answered: {traps.answer}")
        commands = len(re.findall(rb"(?:^|\r\n)\*\d+(?=\r\n)", request))
        make = traps.make_answer or (lambda _: f"-{traps.answer}\r\n".encode() * max(1, commands))
        connection.answer = make(request) if traps.is_executed else b""
        return b"" if traps.is_executed else make(request)

    def _drop_perhaps(self, connection: _Connection, reply: bytes) -> None:
        traps = self._traps
        is_next = traps.drops > 0 and traps.drop_matching is None
        traps.drops -= is_next
        if (
            connection.drops_reply
            or is_next
            or (traps.drop_probability and self._random.random() < traps.drop_probability)
        ):
            self.counts["dropped"] += 1
            self._log(connection.number, f"reply dropped: {reply[:60]!r}")
            raise _Reset

    async def _forward(self, flow: _Flow, target: socket.socket, read: bytes) -> None:
        allowed = len(read) if flow.reset_after is None else flow.reset_after
        passing = memoryview(read)[:allowed]
        while passing:
            size = (
                1
                if flow.is_chopped
                else max(1, int(flow.bandwidth / TICKS))
                if flow.bandwidth
                else CHUNK
            )
            await asyncio.sleep(min(size, len(passing)) / flow.bandwidth if flow.bandwidth else 0)
            await self._loop.sock_sendall(target, passing[:size])
            passing = passing[size:]
        if len(read) > allowed:
            flow.reset_after = None
            raise _Reset
        if flow.reset_after is not None:
            flow.reset_after = allowed - len(read)


def _set(record: _Flow | _Traps, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        setattr(record, name, value)

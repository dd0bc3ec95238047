"""Connections to memcached servers, in its text protocol.

A key lies on server CRC-32(key) mod number of servers, in the order of the URL, as with Go's
client; there is no failover. Commands go out in batches, to one server after the other. A
connection is closed after any error. A batch is sent once more if the server had closed the
connection while it was idle: every use of a command here allows that it comes twice. After a fork
the child opens its own.

Limits: no authentication and no TLS. Values up to the server's item size (1 MiB, its option -I).
"""

from __future__ import annotations

import functools
import math
import os
import random
import socket
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn, TypeVar

from machinery_py.bounds import in_steps, pieces
from machinery_py.clock import SYSTEM_CLOCK, Clock
from machinery_py.config.server_urls import Address
from machinery_py.connections import descriptors
from machinery_py.connections.plain_words import plain
from machinery_py.errors import (
    ArgumentError,
    BackendUnavailable,
    MachineryError,
    StoreUnusable,
    for_good,
)

TIMEOUT = 1.0  # seconds for a connection, and for each piece of a reply (Go: 0.1)
IDLE = 64  # connections to a server that are kept
KEYS = 200  # in one `gets`
COMMANDS = 256  # on their way at once; their replies are short and fit into the buffers
BYTES = 512 * 1024  # likewise
ROUNDS = 60  # tries to change an item that others change as well
MONTH = 30 * 86400  # seconds; what is longer memcached takes for a Unix time

STORED = b"STORED"

T = TypeVar("T")


class Item(NamedTuple):
    """A value and the number that `cas` compares."""

    value: bytes
    cas: int


class MemcachedConnection:
    """One connection, for one thread at a time."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._timeout = timeout
        self._socket = socket.create_connection(address, timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._file = self._socket.makefile("rb", 64 * 1024)
        descriptors.keep(self._socket)
        self.used = False  # before: the server may have closed it since

    def send(self, packet: bytes) -> None:
        self._socket.sendall(packet)

    def line(self) -> bytes:
        line = self._file.readline(4096)
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection")
        return line[:-2]

    def lines(self, count: int) -> list[bytes]:
        return [self.line() for _ in range(count)]

    def items(self) -> dict[bytes, Item]:
        """Return what the reply to a `gets` holds."""
        found: dict[bytes, Item] = {}
        while (line := self.line()) != b"END":
            word, *parts = line.split(b" ")
            if word != b"VALUE" or len(parts) != 4:
                raise ProtocolError(line.decode(errors="replace"))
            key, _, size, cas = parts
            value = self._file.read(int(size) + 2)
            if len(value) != int(size) + 2:
                raise ConnectionError("the server closed the connection")
            found[key] = Item(value[:-2], int(cas))
        return found

    def is_broken(self) -> bool:
        """Return whether the server has closed it: it can be read though nothing was asked."""
        try:
            self._socket.settimeout(0.0)
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            self._socket.settimeout(self._timeout)
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self._file.close()
        self._socket.close()


class ProtocolError(Exception):
    """A line that is no reply to what was asked."""


class LineCommand(NamedTuple):
    """A command with one line for a reply."""

    key: bytes
    packet: bytes


def seconds(length: float) -> bytes:
    """Return an expiry for memcached: seconds from now, or Unix time if longer than a month."""
    whole = max(1, math.ceil(length))
    return b"%d" % (whole if whole <= MONTH else min(2**31 - 1, math.ceil(time.time()) + whole))


def add(key: bytes, value: bytes, expiry: bytes) -> LineCommand:
    return LineCommand(key, b"add %b 0 %b %d\r\n%b\r\n" % (key, expiry, len(value), value))


def append(key: bytes, value: bytes) -> LineCommand:
    return LineCommand(key, b"append %b 0 0 %d\r\n%b\r\n" % (key, len(value), value))


def swap(key: bytes, value: bytes, expiry: bytes, item: Item | None) -> LineCommand:
    """Write over the item that was read (`cas`), or `add` if there was none."""
    if item is None:
        return add(key, value, expiry)
    line = b"cas %b 0 %b %d %d\r\n%b\r\n" % (key, expiry, len(value), item.cas, value)
    return LineCommand(key, line)


def touch(key: bytes, expiry: bytes) -> LineCommand:
    return LineCommand(key, b"touch %b %b\r\n" % (key, expiry))


def delete(key: bytes) -> LineCommand:
    return LineCommand(key, b"delete %b\r\n" % key)


#: Return the command that writes over an item, or None to leave it as it is.
ItemChange = Callable[[bytes, Item | None], LineCommand | None]


def rounds(doing: str) -> Iterator[int]:
    """Count the tries to change an item; pause before each but the first three.

    Raises:
        BackendUnavailable: too many others change it at the same time.
    """
    for number in range(ROUNDS):
        if number > 2:
            time.sleep(random.uniform(0.0, min(0.05, 0.001 * number)))
        yield number
    raise BackendUnavailable(f"memcached: {doing}: others were faster {ROUNDS} times")


class MemcacheDriver:
    """Opens connections when they are needed, and keeps them. May be used from any thread."""

    def __init__(
        self, servers: Sequence[Address], *, clock: Clock = SYSTEM_CLOCK, timeout: float = TIMEOUT
    ) -> None:
        self.servers: tuple[Address, ...] = tuple(servers)
        self.clock = clock
        self._timeout = timeout
        self._idle: list[list[MemcachedConnection]] = [[] for _ in self.servers]
        self._pid = os.getpid()

    def server_of(self, key: bytes) -> int:
        """Return the index of the server that has this key."""
        return zlib.crc32(key) % len(self.servers)

    def fetch(self, keys: Iterable[bytes], *, doing: str) -> dict[bytes, Item]:
        """Return the items that there are."""
        shares: dict[int, list[bytes]] = {}
        for key in dict.fromkeys(keys):
            shares.setdefault(self.server_of(key), []).append(key)
        found: dict[bytes, Item] = {}
        for server, share in shares.items():
            for some in in_steps(share, KEYS):
                packet = b"gets %b\r\n" % b" ".join(some)
                found |= self._talk(server, packet, MemcachedConnection.items, doing=doing)
        return found

    def send(self, commands: Sequence[LineCommand], *, doing: str) -> list[bytes]:
        """Send commands, and return the reply to each.

        Raises:
            BackendUnavailable: some of them may have been carried out.
            ArgumentError: a value is too large; all others have been carried out.
        """
        replies = [b""] * len(commands)
        shares: dict[int, list[int]] = {}
        for index, command in enumerate(commands):
            shares.setdefault(self.server_of(command.key), []).append(index)
        for server, share in shares.items():
            for some in pieces(
                share, lambda at: len(commands[at].packet), most=COMMANDS, most_bytes=BYTES
            ):
                packet = b"".join(commands[at].packet for at in some)
                read = functools.partial(MemcachedConnection.lines, count=len(some))
                for at, line in zip(
                    some, self._talk(server, packet, read, doing=doing), strict=True
                ):
                    replies[at] = line
        for command, reply in zip(commands, replies, strict=True):
            if b"ERROR" in reply:
                self._refused(command, reply, doing)
        return replies

    def edit(self, keys: Iterable[bytes], change: ItemChange, *, doing: str) -> None:
        """Change items by compare-and-swap, each until nobody else has changed it in between.

        Args:
            change: called with the key and what there is now; again after others were faster.

        Raises:
            BackendUnavailable: as `send`; or too many others change them at the same time.
        """
        waiting = list(dict.fromkeys(keys))
        if not waiting:
            return
        for _ in rounds(doing):
            items = self.fetch(waiting, doing=doing)
            changes = ((key, change(key, items.get(key))) for key in waiting)
            commands = {key: command for key, command in changes if command is not None}
            replies = self.send(list(commands.values()), doing=doing)
            waiting = [key for key, reply in zip(commands, replies, strict=True) if reply != STORED]
            if not waiting:
                return

    def _refused(self, command: LineCommand, reply: bytes, doing: str) -> NoReturn:
        text = reply.decode(errors="replace")
        if reply.startswith(b"SERVER_ERROR object too large"):
            raise for_good(
                ArgumentError(
                    f"{doing}: the item {command.key.decode(errors='replace')!r} has "
                    f"{len(command.packet)} bytes, more than memcached takes (1 MiB, see its "
                    "option -I): return less, or keep large results elsewhere"
                )
            )
        place = self._place(self.server_of(command.key))
        if reply.startswith(b"SERVER_ERROR"):
            raise BackendUnavailable(f"memcached at {place}: {doing}: {text}")
        raise StoreUnusable(
            f"memcached at {place}: {doing}: {text} (is it a memcached, 1.4.8 or newer?)"
        )

    def _talk(
        self, server: int, packet: bytes, read: Callable[[MemcachedConnection], T], *, doing: str
    ) -> T:
        """Send a packet, and return what `read` reads of the replies."""
        while True:
            link = None
            try:
                link = self._take(server)
                link.send(packet)
                found = read(link)
            except BaseException as error:
                if link is not None:
                    link.close()
                if not isinstance(error, (OSError, ValueError, ProtocolError)):
                    raise
                if isinstance(error, TimeoutError) or link is None or not link.used:
                    raise self._away(server, error, doing) from error
                self._forget(server)  # so that the next one is new
            else:
                self._give(server, link)
                return found

    def _take(self, server: int) -> MemcachedConnection:
        if os.getpid() != self._pid:
            self._idle, self._pid = [[] for _ in self.servers], os.getpid()
        while True:
            try:
                link = self._idle[server].pop()
            except IndexError:
                return MemcachedConnection(self.servers[server], self._timeout)
            if not link.is_broken():
                link.used = True
                return link
            link.close()

    def _give(self, server: int, link: MemcachedConnection) -> None:
        if len(self._idle[server]) < IDLE and os.getpid() == self._pid:
            self._idle[server].append(link)
        else:
            link.close()

    def _forget(self, server: int) -> None:
        """Close idle connections: the server was restarted, and they are dead as well."""
        stale, self._idle[server] = self._idle[server], []
        for link in stale:
            link.close()

    def _place(self, server: int) -> str:
        host, port = self.servers[server]
        return f"{host}:{port}"

    def _away(self, server: int, error: Exception, doing: str) -> MachineryError:
        text = str(error) or type(error).__name__
        return BackendUnavailable(f"memcached at {self._place(server)}: {doing}: {plain(text)}")

    def close(self) -> None:
        """Close what is idle. May be called twice; the next use opens anew."""
        for server in range(len(self.servers)):
            self._forget(server)

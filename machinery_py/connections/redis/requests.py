"""Requests in slots of a Redis Cluster, one attempt at them, and what a refusal says.

A node refuses a request when its slot has moved (MOVED), is moving (ASK, TRYAGAIN) or is served by
no node just now (CLUSTERDOWN). Such a request was not carried out: any of them may be repeated. A
request whose connection broke may have been carried out.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from machinery_py.connections.redis.client import RedisDriver, evalsha
from machinery_py.connections.redis.cluster_nodes import Address, Nodes
from machinery_py.connections.redis.connection import RedisConnection, command
from machinery_py.connections.redis.discovery import fatal
from machinery_py.connections.redis.errors import ErrorKind, kind_of
from machinery_py.connections.redis.scripts import Script
from machinery_py.connections.redis.slots import guard, slot_of
from machinery_py.errors import MachineryError


@dataclass(slots=True)
class Request:
    """A request in a slot. `full` is sent when the node does not know the `script` of `packet`."""

    slot: int
    packet: bytes
    script: bytes = b""
    full: bytes = b""
    reply: Any = None


def script_at(prefix: bytes, script: Script, argument: bytes) -> Request:
    """Make the request that runs a script on the keys of the prefix's slot."""
    full = command(b"EVAL", script.body, b"1", guard(prefix), argument)
    return Request(slot_of(prefix), evalsha(script, argument, guard(prefix)), script.sha, full)


def command_at(*parts: bytes) -> Request:
    """Make the request for a command whose second word is a key."""
    return Request(slot_of(parts[1]), command(*parts))


class RequestAttempt:
    """One attempt at some requests. Those in `left` may be repeated."""

    def __init__(
        self, nodes: Nodes, driver_of: Callable[[Address], RedisDriver], *, again: bool
    ) -> None:
        """`again`: a request that may have been carried out may be repeated."""
        self._nodes = nodes
        self._driver_of = driver_of
        self._again = again
        self.left: list[Request] = []
        self._sent_in_full: set[tuple[RedisDriver, bytes]] = set()
        self.trouble: Exception | None = None  # will pass
        self.refused: Exception | None = None  # for good, or lost and not to be repeated
        self.unknown: bool = False  # some may have been carried out whose reply did not come

    def ask(self, requests: Sequence[Request]) -> None:
        parts: dict[Address, list[Request]] = {}
        for request in requests:
            try:
                parts.setdefault(self._nodes.address_of(request.slot), []).append(request)
            except MachineryError:
                raise
            except Exception as error:  # redis-py's
                if fatal(error):
                    self.refused = error
                    return
                self._later([request], error)
        sent: list[tuple[RedisDriver, RedisConnection, list[Request]]] = []
        for address, part in parts.items():
            driver = self._driver_of(address)
            link: RedisConnection | None = None
            try:
                link = driver._take()
                link.send(b"".join(request.packet for request in part))
            except MachineryError:
                raise
            except Exception as error:  # redis-py's
                self._broken(driver, link, part, error)
                continue
            sent.append((driver, link, part))
        for driver, link, part in sent:
            self._read(driver, link, part)

    def _read(self, driver: RedisDriver, link: RedisConnection, part: list[Request]) -> None:
        import redis

        for index, request in enumerate(part):
            try:
                request.reply = link.read()
            except redis.ResponseError as error:
                self._sort(driver, request, error)
            except Exception as error:  # redis-py's: the connection is gone
                self._broken(driver, link, part[index:], error)
                return
        driver._give(link)

    def _sort(self, driver: RedisDriver, request: Request, error: Exception) -> None:
        if request.full and kind_of(str(error)) is ErrorKind.SCRIPT:
            self.left.append(request)
            # The first one brings the script, and the others find it: their order stays the same.
            if (driver, request.script) not in self._sent_in_full:
                self._sent_in_full.add((driver, request.script))
                request.packet, request.full = request.full, b""
        elif is_refused_for_now(error):
            self._nodes.learn(error)
            self._later([request], error)
        else:
            self.refused = error

    def _later(self, requests: Sequence[Request], error: Exception) -> None:
        self.left += requests
        self.trouble = error

    def _broken(
        self,
        driver: RedisDriver,
        link: RedisConnection | None,
        part: Sequence[Request],
        error: Exception,
    ) -> None:
        unknown = driver.after(error, link)
        self.unknown = self.unknown or unknown
        is_of_connection = isinstance(error, connection_errors()) and not fatal(error)
        if not is_of_connection or (unknown and not self._again):
            self.refused = error
        else:
            self._later(part, error)


def is_refused_for_now(error: Exception) -> bool:
    """Whether a node refused a request because of its slot or role: it was not carried out."""
    import redis
    from redis.exceptions import AskError, ClusterDownError, TryAgainError

    if isinstance(error, AskError | ClusterDownError | TryAgainError):  # and MOVED, MASTERDOWN
        return True
    # redis-py 5 has no classes for what a connection of no RedisCluster is told.
    text = str(error)
    return isinstance(error, redis.ResponseError | redis.ConnectionError) and (
        kind_of(text) in (ErrorKind.ROLE, ErrorKind.SLOT)
        or text.startswith(("ASK ", "TRYAGAIN "))
        or "MOVED " in text
    )


_REDIRECTION = re.compile(r"(ASK|MOVED) (\d+) (\S+)")


def described(error: Exception) -> str:
    """Return the text of an error, for people."""
    from redis.exceptions import AskError, MovedError

    if isinstance(error, AskError):
        word = "has moved" if isinstance(error, MovedError) else "is on its way"
        return f"slot {error.slot_id} {word} to {error.host}:{error.port}"
    if redirection := _REDIRECTION.fullmatch(str(error)):  # redis-py 5
        kind, slot, node = redirection.groups()
        return f"slot {slot} {'has moved' if kind == 'MOVED' else 'is on its way'} to {node}"
    return str(error) or type(error).__name__


@functools.cache
def connection_errors() -> tuple[type[Exception], ...]:
    import redis

    return (redis.ConnectionError, redis.TimeoutError, OSError)

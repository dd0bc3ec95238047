"""One application in a Redis Cluster: all its keys have one hash tag, so it is on one master.

A ClusterDriver is a RedisDriver for that master. A node refuses a request when the slot of the tag
has moved (MOVED), is moving (ASK, TRYAGAIN) or is served by no node just now (CLUSTERDOWN). Such a
request was not carried out: it is repeated until the timeout, and meanwhile the nodes are asked who
has the slot. ASK is not followed, on purpose: see tags.py.
"""

from __future__ import annotations

import functools
import math
import re
import time
from typing import Any, NoReturn

from machinery_py.clock import SYSTEM_CLOCK, Clock
from machinery_py.config.server_urls import RedisUrl
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.redis.client import TIMEOUT, RedisDriver
from machinery_py.connections.redis.connection import command
from machinery_py.connections.redis.discovery import (
    SHORTEST,
    Servers,
    ask,
    connected,
    fatal,
    must_be_master,
    said_by,
)
from machinery_py.connections.redis.errors import ErrorKind, kind_of
from machinery_py.connections.redis.keys import companion_key
from machinery_py.connections.redis.pool import NO_LIMITS, PoolLimits
from machinery_py.connections.redis.scripts import Script
from machinery_py.connections.redis.tags import (
    DEFAULT,
    GUARD,
    slot_of,
    tagged_command,
    tagged_script,
)
from machinery_py.errors import MachineryError, StoreUnusable
from machinery_py.texts import get_logger

logger = get_logger(__name__)

Address = tuple[str, int]

LOOK_PAUSE = 0.1  # seconds between two questions who has the slot
PAUSE = 0.02  # seconds until a request that was refused is repeated


class ClusterServers(Servers):
    """The master that has the slot of a tag, as far as it is known. May be used from any thread."""

    def __init__(self, url: str, *, timeout: float, client_name: str = "machinery") -> None:
        """`url` lists nodes of the cluster; one that answers is enough.

        Raises:
            BadUrl: it makes no sense.
        """
        super().__init__([url], timeout=timeout, client_name=client_name)
        self.may_move = True
        (self._url,) = self._parsed.values()
        self.tag = f"{{{self._url.tag or DEFAULT}}}"
        self._slot = slot_of(self.tag.encode())
        self._nodes = self._url.hosts  # those that may be asked; who answered last comes first
        self._owner: Address | None = None
        self._is_doubtful = True  # whether the nodes are asked before the next connection
        self._failure: Exception | str = ""
        self._looked_at = -math.inf
        self._looking = ForkLock()

    @property
    def place(self) -> str:
        if not isinstance(self._address, tuple):
            return f"cluster {self._url.place}"
        return "{}:{}".format(*self._address)

    def look(self) -> None:
        owner = self._owner
        if self._address and owner is not None and owner != self._address:
            self.number += 1
            logger.warning(
                "the keys %s… are at another master of the cluster: %s:%d, before %s",
                self.tag,
                *owner,
                self.place,
            )
            self._address = owner

    def find(self) -> None:
        """Ask one node after the other who has the slot, not more often than every LOOK_PAUSE.

        Raises:
            StoreUnusable: a password, user or certificate is wrong, or this is no cluster.
            Exception: redis-py's; none of them knows.
        """
        with self._looking:
            if time.monotonic() - self._looked_at >= LOOK_PAUSE:
                try:
                    self._failure = self._find()
                finally:
                    self._looked_at = time.monotonic()
                self._is_doubtful = bool(self._failure)
            failure = self._failure  # of another thread, perhaps, a moment ago
        if failure:
            import redis

            raise redis.ConnectionError(
                f"no node of the cluster {self._url.place} tells who has the slot of {self.tag}: "
                f"{failure}"
            )

    def _find(self) -> Exception | str:
        """Return why nothing was learned."""
        failure: Exception | str = ""
        nodes = dict.fromkeys((*self._nodes, *self._url.hosts))
        for node in nodes:
            try:
                ranges = self._slots_of(node, max(SHORTEST, self.timeout / len(nodes)))
            except StoreUnusable:
                raise
            except Exception as error:  # redis-py's
                if fatal(error):
                    raise
                if "cluster support disabled" in str(error):
                    raise StoreUnusable(
                        "Redis at {}:{} is no node of a cluster (expected redis://host/0, one "
                        "host, without redis.cluster_mode)".format(*node)
                    ) from error
                failure = said_by(error)
                continue
            known = {node: None}
            for first, last, *members in ranges:
                # A node that does not know its own name is the one that was asked.
                found = [((one[0] or b"").decode() or node[0], int(one[1])) for one in members]
                known.update(dict.fromkeys(found))
                if first <= self._slot <= last:
                    self._owner, failure = found[0], ""
                    break
            else:
                failure = f"CLUSTERDOWN no node has slot {self._slot}"
                continue
            self._nodes = tuple(dict.fromkeys((*known, *nodes)))
            return ""
        return failure

    def _slots_of(self, node: Address, patience: float) -> list[Any]:
        connection = connected(self._connection(self._url, node, patience))
        try:
            found: list[Any] = ask(connection, "CLUSTER", "SLOTS")
            return found
        finally:
            connection.disconnect()

    def _reach(self, url: RedisUrl, patience: float) -> tuple[Address, Any]:
        owner = self._owner
        if owner is None or self._is_doubtful:
            self.find()
            owner = self._owner
            assert owner is not None, "find raises if no node knows"
        try:
            connection = connected(self._connection(url, owner, patience))
            must_be_master(connection, owner)
        except BaseException:
            self._is_doubtful = True
            raise
        return owner, connection


class ClusterDriver(RedisDriver):
    """A driver whose keys all have the tag of the URL."""

    servers: ClusterServers

    def __init__(
        self,
        url: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        timeout: float = TIMEOUT,
        connect_timeout: float = TIMEOUT,
        client_name: str = "machinery",
        strict: bool = False,
        limits: PoolLimits = NO_LIMITS,
    ) -> None:
        """Nothing is connected yet. `strict`: refuse a master that may lose what it stores.

        Raises:
            BadUrl: the URL makes no sense.
        """
        servers = ClusterServers(
            url, timeout=min(timeout, connect_timeout), client_name=client_name
        )
        super().__init__(
            clock=clock, timeout=timeout, servers=servers, strict=strict, limits=limits
        )
        self._tag = servers.tag.encode()
        self._guards = (self._tag + GUARD,)

    def adapted(self, script: Script) -> Script:
        return tagged_script(super().adapted(script), self.servers.tag)

    def command(self, *parts: bytes) -> bytes:
        return command(*tagged_command(self._tag, parts))

    def channel(self, uuid: str) -> bytes:
        return self._tag + companion_key(uuid)

    def waits(self, error: Exception, since: float) -> bool:
        return is_refused_for_now(error) and self._looks_again(since)

    def _tries_again(self, error: Exception, since: float) -> bool:
        passes = is_refused_for_now(error) or isinstance(error, _connection_errors())
        return passes and not fatal(error) and self._looks_again(since)

    def _looks_again(self, since: float) -> bool:
        """Ask who has the slot; return whether there is time for another attempt."""
        is_over = time.monotonic() - since > self._timeout
        if not is_over:
            time.sleep(PAUSE)
        try:
            # The last time, too: the next call must not go to a master that hangs.
            self.servers.find()
        except MachineryError:
            raise
        except Exception as error:  # redis-py's: no node answers; the next attempt says so
            logger.debug("%s: %s", self.servers.place, error)
        return not is_over

    def fail(self, error: Exception, *, doing: str, away: type[MachineryError]) -> NoReturn:
        if is_refused_for_now(error):
            import redis

            error = redis.ConnectionError(described(error))
        super().fail(error, doing=doing, away=away)


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
def _connection_errors() -> tuple[type[Exception], ...]:
    import redis

    return (redis.ConnectionError, redis.TimeoutError, OSError)

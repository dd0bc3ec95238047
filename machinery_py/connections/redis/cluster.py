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
from machinery_py.connections.redis.pool import NO_LIMITS, PoolLimits, too_many_connections
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
        self.tag: str = f"{{{self._url.tag or DEFAULT}}}"
        self._slot = slot_of(self.tag.encode())
        self._nodes = self._url.hosts  # those that may be asked, in this order
        self._owner: Address | None = None
        self._teller: Address | None = None  # who has told that
        self._named: Address | None = None  # the owner in the last MOVED
        self._is_doubtful = True  # whether the nodes are asked before the next connection
        self._failure = ""
        self._looked_at = -math.inf
        self._looking = ForkLock()

    @property
    def place(self) -> str:
        if not isinstance(self._address, tuple):
            return f"cluster {self._url.place}"
        return "{}:{}".format(*self._address)

    def look(self) -> None:
        owner = self._owner
        with self._changing:
            if self._address and owner is not None and owner != self._address:
                logger.warning(
                    "the keys %s… are at another master of the cluster: %s:%d, before %s",
                    self.tag,
                    *owner,
                    self.place,
                )
                self._has_changed(owner)

    def doubt(self, error: BaseException) -> None:
        """Ask the nodes before the next connection, because of what the owner said, or did not say.

        The node that MOVED names is asked first, and who named the old owner last: it may be cut
        off from the others, and would name it for ever.
        """
        named = _named_by(error)
        if named is not None and named == self._owner:
            return  # the error is of an older connection
        self._named = named or self._named
        if teller := self._teller:
            self._nodes = (*(one for one in self._nodes if one != teller), teller)
        self._is_doubtful = True

    def find(self, patience: float = math.inf) -> None:
        """Ask one node after the other who has the slot, not more often than every LOOK_PAUSE.

        Args:
            patience: seconds, about, until the next node is left for another time.

        Raises:
            StoreUnusable: a password, user or certificate is wrong, or this is no cluster.
            Exception: redis-py's; none of them knows.
        """
        with self._looking:
            if time.monotonic() - self._looked_at >= LOOK_PAUSE:
                self._is_doubtful = False  # another thread may doubt meanwhile
                try:
                    self._failure = "it was not asked to the end"
                    self._failure = self._find(min(patience, self.timeout))
                finally:
                    self._looked_at = time.monotonic()
                    self._is_doubtful = self._is_doubtful or bool(self._failure)
            failure = self._failure  # of another thread, perhaps, a moment ago
        if failure:
            import redis

            raise redis.ConnectionError(
                f"no node of the cluster {self._url.place} tells who has the slot of {self.tag}: "
                f"{failure}"
            )

    def _find(self, patience: float) -> str:
        """Return why nothing was learned."""
        deadline = time.monotonic() + patience
        named, self._named = self._named, None
        first = () if named is None else (named,)
        nodes = tuple(dict.fromkeys((*first, *self._nodes, *self._url.hosts)))
        fault: Exception | None = None
        asked, failure = 0, "no node is known"
        for asked, node in enumerate(nodes, 1):
            try:
                ranges = self._slots_of(node, max(SHORTEST, patience / len(nodes)))
            except Exception as error:  # redis-py's, or ours
                failure = said_by(error)
                fault = fault or self._fault_of(node, error)
            else:
                members, owner = self._read(ranges, node)
                if owner is not None:
                    self._owner, self._teller = owner, node
                    known = {*members, *self._url.hosts}
                    order = dict.fromkeys((*nodes[asked - 1 :], *nodes[: asked - 1], *members))
                    self._nodes = tuple(one for one in order if one in known)
                    return ""
                failure = f"CLUSTERDOWN no node has slot {self._slot}"
            if time.monotonic() > deadline:
                break
        else:
            if fault is not None:
                raise fault
        self._nodes = (*nodes[asked:], *nodes[:asked])
        return failure

    def _read(self, ranges: list[Any], asked: Address) -> tuple[list[Address], Address | None]:
        """Return the nodes in the reply to CLUSTER SLOTS, and the master that has our slot."""
        nodes: list[Address] = []
        owner: Address | None = None
        for first, last, *members in ranges:
            found = [_address_of(member, asked) for member in members]
            nodes += found
            if first <= self._slot <= last:
                owner = found[0]
        return nodes, owner

    def _fault_of(self, node: Address, error: Exception) -> Exception | None:
        """Return what somebody must change, if nothing else helps.

        Only at the nodes of the URL: the address of one that was learned may be another program's
        by now.
        """
        if node not in self._url.hosts:
            return None
        if "cluster support disabled" in str(error):
            fault = StoreUnusable(
                "Redis at {}:{} is no node of a cluster (expected redis://host/0, one "
                "host, without redis.cluster_mode)".format(*node)
            )
            fault.__cause__ = error
            return fault
        return error if isinstance(error, StoreUnusable) or fatal(error) else None

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
            self.find(patience)
            owner = self._owner
            assert owner is not None, "find raises if no node knows"
        try:
            connection = connected(self._connection(url, owner, patience))
            must_be_master(connection, owner)
        except BaseException as error:
            self.doubt(error)
            raise
        return owner, connection


class ClusterDriver(RedisDriver):
    """A driver whose keys all have the tag of the URL."""

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
        self._cluster = servers
        self._tag = servers.tag.encode()
        self._guards = (self._tag + GUARD,)

    def adapted(self, script: Script) -> Script:
        return tagged_script(super().adapted(script), self._cluster.tag)

    def command(self, *parts: bytes) -> bytes:
        return command(*tagged_command(self._tag, parts))

    def channel(self, uuid: str) -> bytes:
        return self._tag + companion_key(uuid)

    def passes(self, error: Exception) -> bool:
        return super().passes(error) or is_refused_for_now(error)

    def waits(self, error: Exception, since: float) -> bool:
        return is_refused_for_now(error) and self._looks_again(error, since + self._timeout)

    def _tries_again(self, error: Exception, until: float) -> bool:
        return _is_worth_a_repeat(error) and self._looks_again(error, until)

    def _looks_again(self, error: Exception, until: float) -> bool:
        """Ask who has the slot; return whether there is time for another attempt."""
        self._cluster.doubt(error)
        left = until - time.monotonic()
        is_over = left < 0
        if not is_over:
            time.sleep(PAUSE)
        try:
            # The last time, too: the next call must not go to a master that hangs.
            self._cluster.find(max(left, SHORTEST))
        except MachineryError:
            raise
        except Exception as error:  # redis-py's: no node answers; the next attempt says so
            logger.debug("%s: %s", self.servers.place, error)
        return not is_over

    def fail(self, error: Exception, *, doing: str, away: type[MachineryError]) -> NoReturn:
        if _is_worth_a_repeat(error):
            self._cluster.doubt(error)
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
        or text.startswith("TRYAGAIN ")
        or _REDIRECTION.search(text) is not None
    )


def _is_worth_a_repeat(error: Exception) -> bool:
    """Whether another node may do it, or the same one later."""
    if isinstance(error, too_many_connections()) or fatal(error):
        return False
    return is_refused_for_now(error) or isinstance(error, _connection_errors())


def _named_by(error: BaseException) -> Address | None:
    """Return the master that MOVED names."""
    from redis.exceptions import MovedError

    if isinstance(error, MovedError):
        host, port = error.host, int(error.port)
    elif (found := _REDIRECTION.search(str(error))) and found["kind"] == "MOVED":
        host, _, digits = found["node"].rpartition(":")
        port = int(digits)
    else:
        return None
    return (host, port) if host not in _NAMELESS else None


_NAMELESS = ("", "?")  # in place of a host: the node does not know, or was told not to say


def _address_of(member: list[Any], asked: Address) -> Address:
    """Return the address of a node in the reply to CLUSTER SLOTS."""
    host = (member[0] or b"").decode()
    if host in _NAMELESS and len(member) > 3:
        # cluster-preferred-endpoint-type hostname, and this one announces none.
        more = dict(zip(member[3][::2], member[3][1::2], strict=False))
        host = more.get(b"ip", b"").decode()
    # A node that does not know its own name is the one that was asked.
    return (asked[0] if host in _NAMELESS else host), int(member[1])


# At the beginning, or in what a script says that was refused.
_REDIRECTION = re.compile(r"(?:\A|[ :]-?)(?P<kind>ASK|MOVED) (?P<slot>\d+) (?P<node>\S*:\d+)")


def described(error: Exception) -> str:
    """Return the text of an error, for people."""
    from redis.exceptions import AskError, MovedError

    if isinstance(error, AskError):
        word = "has moved" if isinstance(error, MovedError) else "is on its way"
        return f"slot {error.slot_id} {word} to {error.host}:{error.port}"
    if redirection := _REDIRECTION.match(str(error)):  # redis-py 5
        kind, slot, node = redirection.groups()
        return f"slot {slot} {'has moved' if kind == 'MOVED' else 'is on its way'} to {node}"
    return str(error) or type(error).__name__


@functools.cache
def _connection_errors() -> tuple[type[Exception], ...]:
    import redis

    return (redis.ConnectionError, redis.TimeoutError, OSError)

"""Connections to a Redis Cluster, and what is asked of it, slot by slot.

A request that a node refuses, because the slot has moved (MOVED), is moving (ASK, TRYAGAIN) or is served by nobody just now
(CLUSTERDOWN), was not carried out: it is asked again until the timeout, whatever it is. A request whose connection broke is
asked again only if it can stand that. redis-py's own cluster client repeats all of them, and is not used.

    RedisCluster    many requests at once, in any slots: one round trip to each node
    SlotDriver      a RedisDriver for one slot, in which a queue finds all its keys
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from machinery_py._drivers.redis import TIMEOUT, Link, RedisDriver, command, evalsha, micros, read_script
from machinery_py._drivers.redis_errors import Kind, as_ours, kind_of
from machinery_py._drivers.redis_lua import Script
from machinery_py._drivers.redis_nodes import Address, Nodes
from machinery_py._drivers.redis_servers import fatal
from machinery_py._drivers.redis_slots import clustered, guard, local_key, slot_of
from machinery_py.clock import SYSTEM_CLOCK, Clock
from machinery_py.errors import BackendUnavailable, MachineryError

logger = logging.getLogger(__name__)

PAUSE = 0.02  # seconds until a slot that was on its way is asked for again
STEP = 1000  # requests in one packet


@dataclass(slots=True)
class Request:
    """Something to be asked in a slot. `full` is sent when the node does not know the `script` of `packet`."""

    slot: int
    packet: bytes
    script: bytes = b""
    full: bytes = b""
    reply: Any = None


def script_at(prefix: bytes, script: Script, argument: bytes) -> Request:
    """A script that works on the keys of the prefix's slot."""
    full = command(b"EVAL", script.body, b"1", guard(prefix), argument)
    return Request(slot_of(prefix), evalsha(script, argument, guard(prefix)), script.sha, full)


def command_at(*parts: bytes) -> Request:
    """A command whose second word is a key."""
    return Request(slot_of(parts[1]), command(*parts))


class RedisCluster:
    """The nodes of a cluster, each with its connections. May be used from any thread."""

    def __init__(
        self, url: str, *, clock: Clock = SYSTEM_CLOCK, timeout: float = TIMEOUT, client_name: str = "machinery"
    ) -> None:
        """Nothing is connected yet.

        Raises:
            BadRedisUrl: the URL makes no sense.
        """
        self.nodes = Nodes(url, timeout=timeout, client_name=client_name)
        self.clock = clock
        self.timeout = timeout
        self._drivers: dict[Address, RedisDriver] = {}
        self._slots: dict[bytes, SlotDriver] = {}
        self._changing = threading.Lock()

    def now(self) -> str:
        """As RedisDriver.now."""
        return "" if self.clock is SYSTEM_CLOCK else str(micros(self.clock.now()))

    def at(self, prefix: bytes) -> SlotDriver:
        """The driver of this prefix's slot; the same each time."""
        with self._changing:
            driver = self._slots.get(prefix)
            if driver is None:
                driver = self._slots[prefix] = SlotDriver(self, prefix)
            return driver

    def _driver(self, address: Address) -> RedisDriver:
        with self._changing:
            driver = self._drivers.get(address)
            if driver is None:
                driver = RedisDriver(clock=self.clock, timeout=self.timeout, servers=self.nodes.servers(lambda: address))
                self._drivers[address] = driver
            return driver

    # Asking

    def ask(
        self, requests: Sequence[Request], *, doing: str, away: type[MachineryError] = BackendUnavailable, again: bool = True,
        lost: type[MachineryError] | None = None, patience: float | None = None,
    ) -> list[Any]:
        """The replies to all of them; all that go to one node are one round trip.

        Args:
            again, away, lost: as RedisDriver.run. When one is refused for good, others may have been carried out.
            patience: seconds until what will pass is waited for no more; the timeout, if not given.
        """
        lost = lost or away
        left = list(requests)
        deadline = time.monotonic() + (self.timeout if patience is None else patience)
        unknown = False  # whether something was carried out, perhaps, whose reply was lost
        while left:
            try_ = _Try(self, again=again)
            for start in range(0, len(left), STEP):
                try_.ask(left[start : start + STEP])
            left, unknown = try_.left, unknown or try_.unknown
            if try_.refused is not None:
                self.fail(try_.refused, doing=doing, away=lost if unknown else away)
            if try_.trouble is not None:
                if time.monotonic() > deadline:
                    self.fail(try_.trouble, doing=doing, away=lost if unknown else away)
                self._look_again()
        return [request.reply for request in requests]

    def _look_again(self) -> None:
        time.sleep(PAUSE)
        try:
            self.nodes.look()
        except MachineryError:
            raise
        except Exception as error:  # redis-py's: no node answers; the next try says so
            logger.debug("%s: %s", self.nodes.place, error)

    def fail(self, error: Exception, *, doing: str, away: type[MachineryError]) -> NoReturn:
        """Raise our error for one of redis-py's."""
        import redis

        if not isinstance(error, redis.RedisError | OSError):
            raise error
        text = told(error)
        kind = kind_of(text)
        known = isinstance(error, redis.ResponseError | redis.AuthenticationError) and not passing(error)
        if kind is Kind.OTHER and not known:
            kind = Kind.AWAY
        raise as_ours(kind, text, place=self.nodes.place, doing=doing, away=away) from error

    def close(self) -> None:
        """Close what is idle. May be called twice; the next use opens anew."""
        for driver in list(self._drivers.values()):
            driver.close()
        for slot in list(self._slots.values()):
            slot.close()


class _Try:
    """One try at some requests. What is `left` may be asked again."""

    def __init__(self, cluster: RedisCluster, *, again: bool) -> None:
        self._cluster = cluster
        self._again = again
        self.left: list[Request] = []
        self._brought: set[tuple[RedisDriver, bytes]] = set()
        self.trouble: Exception | None = None  # will pass
        self.refused: Exception | None = None  # for good, or lost and not to be repeated
        self.unknown = False  # some may have been carried out whose reply did not come

    def ask(self, requests: Sequence[Request]) -> None:
        parts: dict[Address, list[Request]] = {}
        for request in requests:
            try:
                parts.setdefault(self._cluster.nodes.address_of(request.slot), []).append(request)
            except MachineryError:
                raise
            except Exception as error:  # redis-py's
                if fatal(error):
                    self.refused = error
                    return
                self._later([request], error)
        sent: list[tuple[RedisDriver, Link, list[Request]]] = []
        for address, part in parts.items():
            driver = self._cluster._driver(address)
            link: Link | None = None
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

    def _read(self, driver: RedisDriver, link: Link, part: list[Request]) -> None:
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
        if request.full and kind_of(str(error)) is Kind.SCRIPT:
            self.left.append(request)
            # The first one brings the script, and the others find it: they are asked in the same order again.
            if (driver, request.script) not in self._brought:
                self._brought.add((driver, request.script))
                request.packet, request.full = request.full, b""
        elif passing(error):
            learn(self._cluster.nodes, error)
            self._later([request], error)
        else:
            self.refused = error

    def _later(self, requests: Sequence[Request], error: Exception) -> None:
        self.left += requests
        self.trouble = error

    def _broken(self, driver: RedisDriver, link: Link | None, part: Sequence[Request], error: Exception) -> None:
        unknown = driver.after(error, link)
        self.unknown = self.unknown or unknown
        if fatal(error) or not isinstance(error, _connection_errors()) or (unknown and not self._again):
            self.refused = error
        else:
            self._later(part, error)


class SlotDriver(RedisDriver):
    """One slot of a cluster, as if it were a Redis of its own: scripts see its keys only, and those of no queue are its own."""

    def __init__(self, cluster: RedisCluster, prefix: bytes) -> None:
        self.cluster = cluster
        self.prefix = prefix
        self._slot = slot_of(prefix)
        super().__init__(
            clock=cluster.clock, timeout=cluster.timeout,
            servers=cluster.nodes.servers(lambda: cluster.nodes.address_of(self._slot)),
        )

    def run(
        self, script: Script, argument: bytes, *keys: bytes, doing: str, away: type[MachineryError] = BackendUnavailable,
        again: bool = True, lost: type[MachineryError] | None = None,
    ) -> Any:
        request = script_at(self.prefix, clustered(script), argument)
        return self.cluster.ask([request], doing=doing, away=away, again=again, lost=lost)[0]

    def ask(self, *parts: bytes, doing: str, away: type[MachineryError] = BackendUnavailable) -> Any:
        """As the base class; a key that belongs to no queue is that of this slot."""
        words = (parts[0], local_key(self.prefix, parts[1]), *parts[2:]) if len(parts) > 1 else parts
        return self.cluster.ask([Request(self._slot, command(*words))], doing=doing, away=away)[0]

    def open(self, *, timeout: float | None = None) -> Link:
        try:
            return super().open(timeout=timeout)
        except MachineryError:
            raise
        except Exception as error:  # redis-py's: another node may have the slot now
            self._relearn(error)
            raise

    def packed_script(self, script: Script, argument: bytes) -> bytes:
        return evalsha(clustered(script), argument, guard(self.prefix))

    def read_script(self, link: Link, script: Script, argument: bytes) -> Any:
        return read_script(link, clustered(script), argument, guard(self.prefix))

    def fail(self, error: Exception, *, doing: str, away: type[MachineryError]) -> NoReturn:
        if passing(error) or isinstance(error, _connection_errors()):
            self._relearn(error)
        self.cluster.fail(error, doing=doing, away=away)

    def _relearn(self, error: Exception) -> None:
        learn(self.cluster.nodes, error)
        try:
            self.cluster.nodes.look()
        except Exception:  # then no node answers, and `error` is reason enough
            logger.debug("%s cannot be asked for its slots", self.cluster.nodes.place)

    def unblock(self, numbers: Sequence[bytes]) -> None:
        """As the base class; a sleeper at another queue gives its number as `number@prefix of that queue`."""
        for number in numbers:
            digits, _, elsewhere = number.partition(b"@")
            driver = self.cluster.at(elsewhere) if elsewhere else self
            super(SlotDriver, driver).unblock([digits])


def passing(error: Exception) -> bool:
    """Whether a node refused something because of its slot or its role: it was not carried out, and will be later."""
    import redis
    from redis import exceptions

    if isinstance(error, exceptions.AskError | exceptions.ClusterDownError | exceptions.TryAgainError):  # and MOVED, MASTERDOWN
        return True
    return isinstance(error, redis.ResponseError | redis.ConnectionError) and any(
        word in str(error) for word in ("CLUSTERDOWN", "MOVED ", "READONLY", "You can't write against a read only", "LOADING",
                                        "Redis is loading", "UNBLOCKED")
    )


def told(error: Exception) -> str:
    """The text of an error, for people."""
    from redis.exceptions import AskError, MovedError

    if isinstance(error, AskError):
        word = "has moved" if isinstance(error, MovedError) else "is on its way"
        return f"slot {error.slot_id} {word} to {error.host}:{error.port}"
    return str(error) or type(error).__name__


def learn(nodes: Nodes, error: Exception) -> None:
    """If the error tells who has a slot, remember it."""
    from redis.exceptions import MovedError

    if isinstance(error, MovedError) and error.host:
        nodes.moved(error.slot_id, (error.host, error.port))


@functools.cache
def _connection_errors() -> tuple[type[Exception], ...]:
    import redis

    return (redis.ConnectionError, redis.TimeoutError, OSError)

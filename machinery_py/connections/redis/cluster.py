"""Connections to a Redis Cluster, and what is asked of it, slot by slot.

What a node refuses because of its slot is asked again until the timeout. What may have been carried out is asked again only if it
can stand that. redis-py's own cluster client repeats both, and is not used.

    RedisClusterDriver    many requests at once, in any slots: one round trip to each node
    NodeDriver      a RedisDriver for one node
    SlotDriver      a RedisDriver for one slot, in which a queue finds all its keys

The connections of all of them are counted together. Each master is looked at (does it keep what it is told?) once, at the first
connection; with `strict`, all of them before anything is asked.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from machinery_py.clock import SYSTEM_CLOCK, Clock, micros
from machinery_py.config.urls import without_secrets
from machinery_py.connections.durability import Concern
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.plain_words import plain
from machinery_py.connections.redis.client import (
    TIMEOUT,
    RedisConnection,
    RedisDriver,
    command,
    evalsha,
    read_script,
)
from machinery_py.connections.redis.cluster_nodes import Address, Nodes, NodeServers
from machinery_py.connections.redis.errors import Kind, as_ours, kind_of
from machinery_py.connections.redis.pool import DELAYED, NO_LIMITS, Limits, Room
from machinery_py.connections.redis.requests import (
    Request,
    Try,
    connection_errors,
    learn,
    passing,
    script_at,
    told,
)
from machinery_py.connections.redis.scripts import Script
from machinery_py.connections.redis.slots import clustered, guard, local_key, slot_of
from machinery_py.errors import BackendUnavailable, MachineryError
from machinery_py.texts import get_logger

logger = get_logger(__name__)

STEP = 1000  # requests in one packet
PAUSE = 0.02  # seconds until a slot that was on its way is asked for again


class RedisClusterDriver:
    """The nodes of a cluster, each with its connections. May be used from any thread."""

    def __init__(
        self,
        url: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        timeout: float = TIMEOUT,
        connect_timeout: float = TIMEOUT,
        client_name: str = "machinery",
        strict: bool = False,
        limits: Limits = NO_LIMITS,
    ) -> None:
        """Nothing is connected yet. `strict`: refuse a cluster of which a master may lose what it stores.

        Raises:
            BadUrl: the URL makes no sense.
        """
        self.nodes = Nodes(url, timeout=min(timeout, connect_timeout), client_name=client_name)
        self.clock = clock
        self.timeout = timeout
        self.limits = limits
        self.strict = strict
        self._drivers: dict[Address, NodeDriver] = {}
        self._slots: dict[bytes, SlotDriver] = {}
        self._changing = ForkLock()
        self._room, self._pid = Room(limits), os.getpid()
        self._checked: set[str] = set()  # masters that were looked at
        self._looked = not strict  # at all of them

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

    def _driver(self, address: Address) -> NodeDriver:
        with self._changing:
            driver = self._drivers.get(address)
            if driver is None:
                driver = self._drivers[address] = NodeDriver(self, address)
            return driver

    # What the drivers have in common

    def room(self) -> Room:
        """Where this process counts its connections."""
        with self._changing:
            if os.getpid() != self._pid:
                self._room, self._pid = Room(self.limits), os.getpid()
            return self._room

    def drop_idle(self) -> None:
        """Close a connection to any node that is not used, so that one to another may be opened."""
        for driver in (*self._drivers.values(), *self._slots.values()):
            if driver.drop_idle():
                return

    def was_checked(self, place: str) -> bool:
        return place in self._checked

    def is_news(self, place: str) -> bool:
        """Whether this master is checked for the first time by this process."""
        with self._changing:
            is_news = place not in self._checked
            self._checked.add(place)
            return is_news

    def concerns(self) -> list[Concern]:
        """Return what is wrong with the masters now, or cannot be known.

        Raises:
            BackendUnavailable, StoreUnusable: one of them cannot be asked.
        """
        found: list[Concern] = []
        for address in self._masters():
            found += [
                replace(one, text="{}:{}: ".format(*address) + one.text)
                for one in self._driver(address).concerns()
            ]
        return found

    def _masters(self) -> tuple[Address, ...]:
        try:
            return self.nodes.masters()
        except MachineryError:
            raise
        except Exception as error:  # redis-py's
            self.fail(error, doing="looking at its settings", away=BackendUnavailable)

    def _look_at_all(self) -> None:
        """Refuse the cluster if one of its masters may lose what it stores. One that is away is looked at when it is back."""
        try:
            addresses = self.nodes.masters()
        except MachineryError:
            raise
        except Exception:  # redis-py's: who asks will find the same
            return
        for address in addresses:
            driver = self._driver(address)
            try:
                driver._give(driver._take())
            except MachineryError:
                raise
            except Exception as error:  # redis-py's
                logger.debug("{}:{} cannot be looked at: %s".format(*address), error)
        self._looked = True

    # Asking

    def ask(
        self,
        requests: Sequence[Request],
        *,
        doing: str,
        away: type[MachineryError] = BackendUnavailable,
        again: bool = True,
        lost: type[MachineryError] | None = None,
        patience: float | None = None,
    ) -> list[Any]:
        """The replies to all of them; all that go to one node are one round trip.

        Args:
            again, away, lost: as RedisDriver.run. When one is refused for good, others may have been carried out.
            patience: seconds until what will pass is waited for no more; the timeout, if not given.
        """
        lost = lost or away
        if not self._looked:
            self._look_at_all()
        left = list(requests)
        deadline = time.monotonic() + (self.timeout if patience is None else patience)
        unknown = False  # whether something was carried out, perhaps, whose reply was lost
        while left:
            try_ = Try(self.nodes, self._driver, again=again)
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
        said = told(error)
        text, kind = without_secrets(said, self.nodes.url), kind_of(said)
        known = isinstance(error, redis.ResponseError | redis.AuthenticationError) and not passing(
            error
        )
        if kind is Kind.OTHER and not known:
            kind, text = Kind.AWAY, plain(text)
        raise as_ours(kind, text, place=self.nodes.place, doing=doing, away=away) from error

    def close(self) -> None:
        """Close what is idle. May be called twice; the next use opens anew."""
        for driver in list(self._drivers.values()):
            driver.close()
        for slot in list(self._slots.values()):
            slot.close()


class _PartDriver(RedisDriver):
    """A driver that shares what the drivers of a cluster have in common."""

    def __init__(self, cluster: RedisClusterDriver, servers: NodeServers) -> None:
        self.cluster = cluster
        # What is delayed is the slot's own, whatever Go's key is called.
        super().__init__(
            clock=cluster.clock,
            timeout=cluster.timeout,
            servers=servers,
            strict=cluster.strict,
            limits=replace(cluster.limits, delayed_key=DELAYED),
        )

    def _enter(self) -> RedisConnection | None:
        self._room = self.cluster.room()
        return self._room.enter(self._timeout, self._spare_or_drop)

    def _spare_or_drop(self) -> RedisConnection | None:
        link = self._spare()
        if link is None:
            self.cluster.drop_idle()
        return link

    def drop_idle(self) -> bool:
        """Close a connection that is not used, if there is one."""
        link = self._spare() if os.getpid() == self._pid else None
        if link is not None:
            link.close()
        return link is not None

    def _check(self, link: RedisConnection) -> None:
        if self.cluster.was_checked(self.servers.place):
            self._checked = link.server
        else:
            super()._check(link)

    def _is_news(self, link: RedisConnection) -> bool:
        return super()._is_news(link) and self.cluster.is_news(self.servers.place)


class NodeDriver(_PartDriver):
    """One node of a cluster."""

    def __init__(self, cluster: RedisClusterDriver, address: Address) -> None:
        super().__init__(cluster, cluster.nodes.servers(lambda: address))


class SlotDriver(_PartDriver):
    """One slot of a cluster, as if it were a Redis of its own: scripts see its keys only, and those of no queue are its own."""

    def __init__(self, cluster: RedisClusterDriver, prefix: bytes) -> None:
        self.prefix = prefix
        self._slot = slot_of(prefix)
        super().__init__(
            cluster, cluster.nodes.servers(lambda: cluster.nodes.address_of(self._slot))
        )

    def run(
        self,
        script: Script,
        argument: bytes,
        *keys: bytes,
        doing: str,
        away: type[MachineryError] = BackendUnavailable,
        again: bool = True,
        lost: type[MachineryError] | None = None,
    ) -> Any:
        request = script_at(self.prefix, self.adapted(script), argument)
        return self.cluster.ask([request], doing=doing, away=away, again=again, lost=lost)[0]

    def ask(
        self, *parts: bytes, doing: str, away: type[MachineryError] = BackendUnavailable
    ) -> Any:
        """As the base class; a key that belongs to no queue is that of this slot."""
        words = (
            (parts[0], local_key(self.prefix, parts[1]), *parts[2:]) if len(parts) > 1 else parts
        )
        return self.cluster.ask([Request(self._slot, command(*words))], doing=doing, away=away)[0]

    def open(self, *, timeout: float | None = None) -> RedisConnection:
        try:
            return super().open(timeout=timeout)
        except MachineryError:
            raise
        except Exception as error:  # redis-py's: another node may have the slot now
            self._relearn(error)
            raise

    def adapted(self, script: Script) -> Script:
        return clustered(script)

    def packed_script(self, script: Script, argument: bytes) -> bytes:
        return evalsha(self.adapted(script), argument, guard(self.prefix))

    def read_script(self, link: RedisConnection, script: Script, argument: bytes) -> Any:
        return read_script(link, self.adapted(script), argument, guard(self.prefix))

    def fail(self, error: Exception, *, doing: str, away: type[MachineryError]) -> NoReturn:
        if passing(error) or isinstance(error, connection_errors()):
            self._relearn(error)
        self.cluster.fail(error, doing=doing, away=away)

    def _relearn(self, error: Exception) -> None:
        learn(self.cluster.nodes, error)
        try:
            self.cluster.nodes.look()
        except Exception:  # then no node answers, and `error` is reason enough
            logger.debug("%s cannot be asked for its slots", self.cluster.nodes.place)

    def unblock(self, numbers: Sequence[bytes]) -> None:
        """As the base class; a client that blocks at another queue gives its number as `number@prefix of that queue`."""
        for number in numbers:
            digits, _, elsewhere = number.partition(b"@")
            driver = self.cluster.at(elsewhere) if elsewhere else self
            super(SlotDriver, driver).unblock([digits])

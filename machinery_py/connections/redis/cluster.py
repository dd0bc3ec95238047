"""Connections to a Redis Cluster, and requests to it, slot by slot.

A request that a node refuses because of its slot is repeated until the timeout. One that may have
been carried out is repeated only if the caller allows it. redis-py's own cluster client repeats
both, and is not used.

    RedisClusterDriver    many requests at once, in any slots: one round trip to each node
    NodeDriver            a RedisDriver for one node
    SlotDriver            a RedisDriver for one slot, in which a queue finds all its keys

The connections of all of them are counted together. The durability of each master is checked once,
at the first connection; with `strict`, that of all masters before the first request.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from machinery_py.bounds import in_steps
from machinery_py.clock import SYSTEM_CLOCK, Clock, micros
from machinery_py.config.urls import without_secrets
from machinery_py.connections.durability import Concern
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.plain_words import plain
from machinery_py.connections.redis.client import TIMEOUT, RedisDriver
from machinery_py.connections.redis.cluster_nodes import Address, Nodes, NodeServers
from machinery_py.connections.redis.connection import RedisConnection, command
from machinery_py.connections.redis.errors import ErrorKind, as_ours, kind_of
from machinery_py.connections.redis.keys import DELAYED
from machinery_py.connections.redis.pool import NO_LIMITS, PoolLimits, Quota
from machinery_py.connections.redis.requests import (
    Request,
    RequestAttempt,
    command_at,
    connection_errors,
    described,
    is_refused_for_now,
    script_at,
)
from machinery_py.connections.redis.scripts import Script, pack
from machinery_py.connections.redis.slots import clustered, guard, local_key, slot_of
from machinery_py.connections.server_clock import ServerClock
from machinery_py.errors import BackendUnavailable, MachineryError
from machinery_py.texts import get_logger

logger = get_logger(__name__)

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
        limits: PoolLimits = NO_LIMITS,
    ) -> None:
        """Nothing is connected yet. `strict`: refuse a master that may lose what it stores.

        Raises:
            BadUrl: the URL makes no sense.
        """
        self.nodes: Nodes = Nodes(
            url, timeout=min(timeout, connect_timeout), client_name=client_name
        )
        self.clock: ServerClock = ServerClock(clock, self._look)
        self.timeout = timeout
        self.limits = limits
        self.strict = strict
        self._drivers: dict[Address, NodeDriver] = {}
        self._slots: dict[bytes, SlotDriver] = {}
        self._changing = ForkLock()
        self._quota, self._pid = Quota(limits), os.getpid()
        self.checked: set[str] = set()  # masters whose settings were checked
        self._are_all_checked = not strict

    def now(self) -> str:
        """Return the time as scripts take it: "" is the server's own clock."""
        return "" if self.clock.is_system else str(micros(self.clock.now()))

    def _look(self) -> None:
        self.command(b"EXISTS", b"{}", doing="looking at a clock")

    def at(self, prefix: bytes) -> SlotDriver:
        """Return the driver of this prefix's slot; the same each time."""
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

    def quota(self) -> Quota:
        """Return what counts the connections of this process."""
        with self._changing:
            if os.getpid() != self._pid:
                self._quota, self._pid = Quota(self.limits), os.getpid()
            return self._quota

    def drop_idle(self) -> None:
        """Close a connection to any node that is not used, so that one to another may be opened."""
        for driver in (*self._drivers.values(), *self._slots.values()):
            if driver.drop_idle():
                return

    def is_news(self, place: str) -> bool:
        """Whether this master is checked for the first time by this process."""
        with self._changing:
            is_news = place not in self.checked
            self.checked.add(place)
            return is_news

    def concerns(self) -> list[Concern]:
        """Return what is wrong with the masters now, or cannot be known.

        Raises:
            BackendUnavailable, StoreUnusable: one of them cannot be asked.
        """
        try:
            masters = self.nodes.masters()
        except MachineryError:
            raise
        except Exception as error:  # redis-py's
            self.fail(error, doing="looking at its settings", away=BackendUnavailable)
        return [
            replace(one, text="{}:{}: ".format(*address) + one.text)
            for address in masters
            for one in self._driver(address).concerns()
        ]

    def _check_all(self) -> None:
        """Refuse the cluster if a master that answers may lose what it stores."""
        try:
            addresses = self.nodes.masters()
        except MachineryError:
            raise
        except Exception:  # redis-py's: the next request finds the same
            return
        for address in addresses:
            driver = self._driver(address)
            try:
                driver._give(driver._take())
            except MachineryError:
                raise
            except Exception as error:  # redis-py's
                logger.debug("{}:{} cannot be looked at: %s".format(*address), error)
        self._are_all_checked = True

    # Requests

    def run(
        self, script: Script, calls: Iterable[tuple[bytes, Sequence[object]]], *, again: bool = True
    ) -> list[Any]:
        """Run a script in the slots of prefixes, each with its values; return the replies."""
        requests = [script_at(prefix, script, pack(values)) for prefix, values in calls]
        return self.ask(requests, doing=script.doing, away=script.away, again=again)

    def command(
        self, *parts: bytes, doing: str, away: type[MachineryError] = BackendUnavailable
    ) -> Any:
        """Send a command that may be carried out twice, whose second word is a key."""
        return self.ask([command_at(*parts)], doing=doing, away=away)[0]

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
        """Return the replies to all of them; all that go to one node are one round trip.

        When one is refused for good, others may have been carried out.

        Args:
            away: raised when nothing was written.
            again, lost: as RedisDriver.run.
            patience: seconds until a refusal that will pass is raised; the timeout, if not given.
        """
        if not requests:
            return []
        lost = lost or away
        if not self._are_all_checked:
            self._check_all()
        left = list(requests)
        deadline = time.monotonic() + (self.timeout if patience is None else patience)
        unknown = False  # whether something was carried out, perhaps, whose reply was lost
        while left:
            attempt = RequestAttempt(self.nodes, self._driver, again=again)
            for some in in_steps(left):
                attempt.ask(some)
            left, unknown = attempt.left, unknown or attempt.unknown
            if attempt.refused is not None:
                self.fail(attempt.refused, doing=doing, away=lost if unknown else away)
            if attempt.trouble is not None:
                is_over = time.monotonic() > deadline
                # The last time, too: a master that hangs takes all the time that there is, and the
                # next call must not go to it again.
                self._look_again()
                if is_over:
                    self.fail(attempt.trouble, doing=doing, away=lost if unknown else away)
        return [request.reply for request in requests]

    def unblock(self, slot: int, clients: Sequence[bytes]) -> None:
        """Wake clients of the node that serves this slot."""
        try:
            address = self.nodes.address_of(slot)
        except Exception:  # no node serves it now, so nobody blocks there
            return
        self._driver(address).unblock(clients)

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
        said = described(error)
        text, kind = without_secrets(said, self.nodes.url), kind_of(said)
        is_reply = isinstance(error, redis.ResponseError | redis.AuthenticationError)
        if kind is ErrorKind.OTHER and (not is_reply or is_refused_for_now(error)):
            kind, text = ErrorKind.AWAY, plain(text)
        raise as_ours(kind, text, place=self.nodes.place, doing=doing, away=away) from error

    def close(self) -> None:
        """Close what is idle. May be called twice; the next use opens anew."""
        for driver in list(self._drivers.values()):
            driver.close()
        for slot in list(self._slots.values()):
            slot.close()


class _PartDriver(RedisDriver):
    """A driver that shares the quota and the checks of a cluster."""

    def __init__(self, cluster: RedisClusterDriver, servers: NodeServers) -> None:
        self.cluster = cluster
        # Each slot has a set of delayed messages of its own, whatever Go's key is called.
        super().__init__(
            clock=cluster.clock,
            timeout=cluster.timeout,
            servers=servers,
            strict=cluster.strict,
            limits=replace(cluster.limits, delayed_key=DELAYED),
        )

    def _enter(self) -> RedisConnection | None:
        self._quota = self.cluster.quota()
        return self._quota.enter(self._timeout, self._spare_or_drop)

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
        if self.servers.place in self.cluster.checked:
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
    """One slot of a cluster, used like one Redis: keys that belong to no queue are this slot's."""

    def __init__(self, cluster: RedisClusterDriver, prefix: bytes) -> None:
        self.prefix = prefix
        self._slot = slot_of(prefix)
        super().__init__(
            cluster, cluster.nodes.servers(lambda: cluster.nodes.address_of(self._slot))
        )
        self._guards = (guard(prefix),)

    def run(
        self,
        script: Script,
        *values: object,
        more: Sequence[bytes] = (),
        again: bool = True,
        lost: type[MachineryError] | None = None,
    ) -> Any:
        if more:
            raise ValueError(f"{script.path}: it cannot be run in a slot")
        request = self.request(script, *values)
        return self.cluster.ask(
            [request], doing=script.doing, away=script.away, again=again, lost=lost
        )[0]

    def request(self, script: Script, *values: object) -> Request:
        """Make the request that runs a script in this slot."""
        return script_at(self.prefix, self.adapted(script), pack(values))

    def ask(
        self, *parts: bytes, doing: str, away: type[MachineryError] = BackendUnavailable
    ) -> Any:
        if len(parts) > 1:
            parts = parts[0], local_key(self.prefix, parts[1]), *parts[2:]
        return self.cluster.ask([Request(self._slot, command(*parts))], doing=doing, away=away)[0]

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

    def fail(self, error: Exception, *, doing: str, away: type[MachineryError]) -> NoReturn:
        if is_refused_for_now(error) or isinstance(error, connection_errors()):
            self._relearn(error)
        self.cluster.fail(error, doing=doing, away=away)

    def _relearn(self, error: Exception) -> None:
        self.cluster.nodes.learn(error)
        try:
            self.cluster.nodes.look()
        except Exception:  # then no node answers, and `error` is reason enough
            logger.debug("%s cannot be asked for its slots", self.cluster.nodes.place)

    def unblock(self, clients: Sequence[bytes]) -> None:
        """As the base class; one that blocks at another queue is `client@prefix of that queue`."""
        by_slot: dict[int, list[bytes]] = {}
        for client in clients:
            there, _, elsewhere = client.partition(b"@")
            slot = slot_of(elsewhere) if elsewhere else self._slot
            by_slot.setdefault(slot, []).append(there)
        for slot, ours in by_slot.items():
            self.cluster.unblock(slot, ours)

"""The node of each slot of a Redis Cluster, as far as it is known.

Any node tells the whole map. It may be old: a node that does not have a slot any more refuses
requests in that slot, and says which node has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from machinery_py.config.server_urls import parse_redis_url
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.redis.discovery import (
    SHORTEST,
    Servers,
    ask,
    connected,
    fatal,
    must_be_master,
    said_by,
)
from machinery_py.connections.redis.slots import SLOTS
from machinery_py.errors import StoreUnusable
from machinery_py.texts import get_logger

logger = get_logger(__name__)

Address = tuple[str, int]

LOOK_PAUSE = 0.1  # seconds between two looks at the map, when slots move or nodes fail


class NodeServers(Servers):
    """The node that `choose` names now; when that changes, connections to the old one are stale."""

    number: int

    def __init__(
        self,
        url: str,
        choose: Callable[[], Address],
        *,
        timeout: float,
        client_name: str = "machinery",
    ) -> None:
        super().__init__([url], timeout=timeout, client_name=client_name)
        self.may_move = True
        self._choose = choose

    def _reach(self, url: Any, patience: float) -> tuple[Address, Any]:
        address = self._choose()
        connection = connected(self._connection(url, address, patience))
        must_be_master(connection, address)
        return address, connection

    def open_any(self, address: Address, patience: float) -> Any:
        """A connection to this node, whatever it is."""
        return connected(self._connection(next(iter(self._parsed.values())), address, patience))

    def look(self) -> None:
        if self._address and self._choose() != self._address:
            self.number += 1
            self._address = ""

    @property
    def place(self) -> str:
        address = self._address or self._choose()
        return address if isinstance(address, str) else "{}:{}".format(*address)


class Nodes:
    """The map of slots. May be used from any thread."""

    def __init__(self, url: str, *, timeout: float, client_name: str = "machinery") -> None:
        """`url` lists nodes of the cluster; one that answers is enough.

        Raises:
            BadUrl: it makes no sense.
        """
        self.url = url
        self.timeout = timeout
        self.client_name = client_name
        self._any_node = self.servers(lambda: (self._known or self.seeds)[0])
        self.seeds: tuple[tuple[str, int], ...] = parse_redis_url(url).hosts
        self._slots: list[Address | None] = [None] * SLOTS
        self._known: tuple[Address, ...] = ()
        self._looked_at = -LOOK_PAUSE
        self._failure: Exception | str | None = None
        self._looking = ForkLock()

    @property
    def place(self) -> str:
        """For texts."""
        return "cluster " + ",".join("{}:{}".format(*seed) for seed in self.seeds)

    def servers(self, choose: Callable[[], Address]) -> NodeServers:
        return NodeServers(self.url, choose, timeout=self.timeout, client_name=self.client_name)

    def masters(self) -> tuple[Address, ...]:
        """Return the masters that have slots.

        Raises:
            Exception: redis-py's; no node can be reached.
        """
        if not self._known:
            self.look()
        return tuple(dict.fromkeys(filter(None, self._slots)))

    def address_of(self, slot: int) -> Address:
        """Return the address of a slot's master, as far as it is known.

        Raises:
            Exception: redis-py's; no node can be reached, or none has this slot.
        """
        address = self._slots[slot]
        if address is None:
            self.look()
            address = self._slots[slot]
        if address is None:
            import redis

            raise redis.ConnectionError(f"CLUSTERDOWN no node of the {self.place} has slot {slot}")
        return address

    def learn(self, error: Exception) -> None:
        """If the error says who has a slot, remember it."""
        from redis.exceptions import MovedError

        if isinstance(error, MovedError) and error.host:
            self._slots[error.slot_id] = error.host, error.port

    def look(self) -> None:
        """Ask one node after the other for the map, not more often than every LOOK_PAUSE.

        Raises:
            StoreUnusable: a password, user or certificate is wrong.
            Exception: redis-py's; none of them has answered.
        """
        with self._looking:
            if time.monotonic() - self._looked_at >= LOOK_PAUSE:
                try:
                    self._failure = self._look()
                finally:
                    self._looked_at = time.monotonic()
            failure = self._failure  # of another thread, perhaps, a moment ago
        if failure is not None:
            import redis

            raise redis.ConnectionError(
                f"no node of the {self.place} tells who has which slot: {failure}"
            )

    def _look(self) -> Exception | str | None:
        """Why nothing was learned."""
        failure: Exception | str = "they have none"
        addresses = tuple(dict.fromkeys([*self._known, *self.seeds]))
        for address in addresses:
            try:
                ranges = self._ask(address, max(SHORTEST, self.timeout / len(addresses)))
            except StoreUnusable:
                raise
            except Exception as error:  # redis-py's
                if fatal(error):
                    raise
                if "cluster support disabled" in str(error):
                    raise StoreUnusable(
                        "Redis at {}:{} is no node of a cluster (expected redis://host/0, one "
                        "host, without redis.cluster_mode)".format(*address)
                    ) from error
                failure = said_by(error)
                continue
            if ranges:
                self._learn(ranges, address)
                return None
        return failure

    def _ask(self, address: Address, patience: float) -> list[Any]:
        connection = self._any_node.open_any(address, patience)
        try:
            found: list[Any] = ask(connection, "CLUSTER", "SLOTS")
            return found
        finally:
            connection.disconnect()

    def _learn(self, ranges: list[Any], asked: Address) -> None:
        slots: list[Address | None] = [None] * SLOTS
        known: dict[Address, None] = {}
        for first, last, *nodes in ranges:
            # A node that does not know its own name is the one that was asked.
            found = [((node[0] or b"").decode() or asked[0], int(node[1])) for node in nodes]
            slots[first : last + 1] = [found[0]] * (last + 1 - first)
            known.update(dict.fromkeys(found))
        before = self.masters() if self._known else ()
        self._slots, self._known = slots, tuple(known)
        after = self.masters()
        if before and set(before) != set(after):
            logger.warning(
                "%s: its masters are now %s",
                self.place,
                ", ".join("{}:{}".format(*one) for one in after),
            )

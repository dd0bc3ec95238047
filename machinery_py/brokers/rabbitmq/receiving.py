"""How a consumer comes by messages: one queue after the other, and then all of them, until something comes."""

from __future__ import annotations

from collections.abc import Sequence

from machinery_py.brokers.rabbitmq.fetch import Fetch, drained
from machinery_py.brokers.rabbitmq.gets import GetClaim, Getter
from machinery_py.brokers.rabbitmq.holding import Holding
from machinery_py.brokers.rabbitmq.messages import Taken
from machinery_py.brokers.rabbitmq.pauses import Gates
from machinery_py.connections.rabbitmq.io_thread import AmqpConnection, Channel

FULL_BURST = 100  # messages; RabbitMQ hands over some 200 in one go, though more are there


class ConsumerConnection:
    """A connection and its channels. What was delivered on it ends with it."""

    def __init__(
        self, link: AmqpConnection, main: Channel, holding: Holding, getter: Getter | None
    ) -> None:
        self.link = link
        self.main = main
        self.holding = holding
        self.getter = getter  # with quorum queues

    @property
    def is_open(self) -> bool:
        return self.main.is_open


class Taking:
    """The claims of one consumer. `claim` is the one that is under way, `woken` whether nobody waits for it any more."""

    def __init__(self, gates: Gates, timeout: float) -> None:
        self._gates = gates
        self._timeout = timeout
        self.claim: Fetch | None = None
        self.woken = False

    def take(
        self, life: ConsumerConnection, queues: Sequence[str], limit: int, wait: float
    ) -> list[Taken]:
        """Return what was there at once, or came within `wait`, except from paused queues.

        Raises:
            LinkLost, ChannelLost: what had come goes back.
        """
        if len(queues) == 1:
            return self._take(life, queues, limit, wait)
        found: list[Taken] = []
        for queue in queues:
            if len(found) < limit and queue not in self._gates.shut:
                found += self._take(life, [queue], limit - len(found), 0.0)
        return found or (self._take(life, queues, limit, wait) if wait > 0 else [])

    def _take(
        self, life: ConsumerConnection, queues: Sequence[str], limit: int, wait: float
    ) -> list[Taken]:
        if life.getter is not None:
            return self._take_singly(life, life.getter, queues, limit, wait)
        found = self._run(Fetch(life.main, queues, limit, wait, self._shut))
        if FULL_BURST <= len(found) < limit and len(queues) == 1:
            found += drained(life.main, queues[0], limit - len(found), self._timeout, self._shut)
        return found

    def _take_singly(
        self,
        life: ConsumerConnection,
        getter: Getter,
        queues: Sequence[str],
        limit: int,
        wait: float,
    ) -> list[Taken]:
        """As `_take`, of quorum queues."""
        alone = len(queues) == 1
        found = self._run(GetClaim(getter, queues[0], limit, self._shut)) if alone else []
        if not found and wait > 0:
            found = self._run(Fetch(life.main, queues, 1, wait, self._shut, keep=True))
            if found and alone and limit > 1:
                found += self._run(GetClaim(getter, queues[0], limit - 1, self._shut))
        return found

    def _run(self, claim: Fetch) -> list[Taken]:
        self.claim = claim
        if self.woken:
            claim.end()
        try:
            return claim.run(self._timeout)
        finally:
            self.claim = None

    def _shut(self) -> frozenset[str]:
        return self._gates.shut

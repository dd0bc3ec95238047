"""A consumer of RabbitMQ queues: it claims, disposes and holds. The protocol stands in docs/explanation/amqp-protocol.md.

It has a connection of its own. When that, or the channel on it, is gone, all that was held belongs to others from that moment:
the server has put it back. What was delivered in an older life is never acknowledged in a newer one.

RabbitMQ counts no deaths; it says that a message was delivered before, and no more. So whoever gets one that came back looks
whether a consumer of this host ran it that lives no more (connections/session_files.py): that is a strike.

Limits: what died on another host is not seen, and is no strike; what came back is counted exactly when it runs again, see
amqp_holding.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec

from machinery_py.brokers.base import Consumer, Delivery, Disposal, Fate, WorkerInfo
from machinery_py.brokers.rabbitmq.control import Report, listen
from machinery_py.brokers.rabbitmq.gets import Getter
from machinery_py.brokers.rabbitmq.holding import HeldDelivery, Holding
from machinery_py.brokers.rabbitmq.messages import FENCE, STRIKES, Taken
from machinery_py.brokers.rabbitmq.pauses import Gates
from machinery_py.brokers.rabbitmq.publisher import Sending
from machinery_py.brokers.rabbitmq.receiving import ConsumerConnection, Taking
from machinery_py.brokers.rabbitmq.returns import Returns
from machinery_py.brokers.rabbitmq.topology import Topology, carry_out
from machinery_py.connections.rabbitmq.client import AmqpDriver, translated
from machinery_py.connections.rabbitmq.io_thread import (
    AmqpConnection,
    AmqpConnectionLost,
    Channel,
    ChannelLost,
    settle,
)
from machinery_py.connections.session_files import host_file, host_folder, ran_by_the_dead
from machinery_py.errors import BrokerUnavailable, MachineryError
from machinery_py.texts import get_logger

logger = get_logger(__name__)

KIND = "amqp"  # of the files that say what consumers run
MARKED = 512  # bytes of a message that it is known by; the UUID is in front

_receipts = itertools.count(1)


class AMQPConsumer(Consumer):
    """A connection, and what was delivered on it."""

    def __init__(
        self,
        driver: AmqpDriver,
        sending: Sending,
        topology: Topology,
        queues: Sequence[str],
        *,
        worker: str,
        consumer_timeout: float,
    ) -> None:
        self._driver = driver
        self._sending = sending
        self._topology = topology
        self._returns = Returns(driver, topology)
        self._queues = tuple(dict.fromkeys(topology.queue_of(queue) for queue in queues))
        self._lock = threading.Lock()  # guards what is held, and which life it is of
        self._opening = threading.Lock()
        self._held: dict[str, HeldDelivery] = {}
        self._life: ConsumerConnection | None = None
        self._birth: object = None
        self._gates = Gates()
        self._taking = Taking(self._gates, driver.timeout)
        self._vhost = driver.vhost.encode()
        self._file = host_file(KIND)
        self._given_up = self._closed = False
        self._hold_for = consumer_timeout / 2
        now = driver.clock.now()
        self.info = WorkerInfo(
            session=secrets.token_hex(12),
            name=worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            queues=self._queues,
            started_at=now,
            beat_at=now,
        )
        self._open()

    # Connection

    def _open(self) -> ConsumerConnection:
        """The life that is on, or a new one.

        Raises:
            BrokerUnavailable, StoreUnusable: there is none.
        """
        with self._opening:
            life = self._life
            if life is not None and life.is_open:
                return life
            if life is not None:
                self._lose(self._birth)
                life.link.close()
            birth = object()
            lost = functools.partial(self._lose, birth)
            link = self._driver.connect("consume", on_lost=lost)
            try:
                with translated(self._driver.place, f"consuming {', '.join(self._queues)}"):
                    life = self._begin(link, lost)
            except MachineryError:
                link.close()
                raise
            with self._lock:
                self._birth, self._life = birth, life
            return life

    def _begin(self, link: AmqpConnection, lost: Callable[[], object]) -> ConsumerConnection:
        timeout = self._driver.timeout
        setup = link.channel(timeout)
        steps = [*self._topology.exchange(), *self._topology.common()]
        for queue in self._queues:
            steps += self._topology.queue(queue)
        carry_out(setup, iter(steps), timeout)
        listen(
            setup,
            self._report,
            self._heard,
            self._driver.open_publisher,
            self._topology.workers,
            timeout,
        )
        self._look_for_marks(link)
        main = link.channel(timeout)
        main.watch(functools.partial(self._on_channel_lost, lost))
        main.ask(functools.partial(self._watch_queues, main), timeout)
        holding = Holding(
            link,
            self._sending,
            self._driver,
            self._topology,
            f"{self.info.session}.{secrets.token_hex(2)}",
        )
        if not self._topology.is_quorum:
            return ConsumerConnection(link, main, holding, None)
        gets = link.channel(timeout)
        gets.watch(functools.partial(self._on_gets_lost, main))
        return ConsumerConnection(link, main, holding, Getter(gets))

    def _heard(self, body: bytes, answer: Callable[[], object]) -> None:
        self._gates.hear(body, self._taking.claim, answer)

    def _look_for_marks(self, link: AmqpConnection) -> None:
        """Ask which queues are paused; what nobody can say while the server takes no messages stays as it was."""
        publisher, turn = self._driver.publisher, self._gates.turn
        if not publisher.link.wait_unblocked(0.0):
            return
        try:
            marked = self._sending.paused(self._queues)
        except BrokerUnavailable:
            if not publisher.link.wait_unblocked(0.0):
                return
            raise

        def learn(future: Future[Any]) -> None:
            self._gates.learn(marked, turn, self._taking.claim)
            settle(future, None)

        link.ask(learn, self._driver.timeout)

    def _watch_queues(self, main: Channel, future: Future[Any]) -> None:
        main.raw.add_on_cancel_callback(functools.partial(self._on_queue_gone, main))
        settle(future, None)

    def _on_channel_lost(self, lost: Callable[[], object], error: Exception) -> None:
        if isinstance(error, ChannelLost):
            logger.error(
                "RabbitMQ at %s closed the channel of a consumer: %s; what it held will run again",
                self._driver.place,
                error,
            )
        lost()

    def _on_gets_lost(self, main: Channel, error: Exception) -> None:
        """One life, one end."""
        if isinstance(error, ChannelLost):
            logger.warning(
                "RabbitMQ at %s closed the channel of a consumer: %s", self._driver.place, error
            )
        if main.raw.is_open:
            main.raw.close()

    def _on_queue_gone(self, main: Channel, _: object) -> None:
        """The server ended a subscription: a queue was deleted, or moved to another node. A new life declares it again."""
        logger.warning(
            "RabbitMQ at %s ended the subscription to a queue of %s; declaring it again",
            self._driver.place,
            ", ".join(self._queues),
        )
        if main.raw.is_open:
            main.raw.close()

    def _lose(self, birth: object) -> None:
        """Forget deliveries that are not ours any more."""
        with self._lock:
            if birth is not None and birth is self._birth:
                self._birth = None
                self._given_up = True
                self._held.clear()
                # What it ran is somebody else's now, who shall see that in the file of one who lives no more.
                self._file.abandon()
                self._file = host_file(KIND)

    def _report(self) -> Report:
        holding: dict[str, int] = {}
        for held in list(self._held.values()):
            holding[held.delivery.queue] = holding.get(held.delivery.queue, 0) + 1
        claim = self._taking.claim
        for one in claim.found if claim is not None else ():
            holding[one.queue] = holding.get(one.queue, 0) + 1
        return Report(msgspec.structs.replace(self.info, holding=sum(holding.values())), holding)

    # Claiming

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        if self._closed:
            return []
        life = self._open()
        queues = tuple(dict.fromkeys(map(self._topology.queue_of, order))) or self._queues
        found: list[Taken] = []
        left, until = timeout, time.monotonic() + timeout
        with translated(self._driver.place, f"receiving from {', '.join(queues)}"):
            while True:
                turn = self._gates.turn
                found = self._taking.take(life, queues, limit, left)
                left = until - time.monotonic()
                if found or left <= 0 or self._taking.woken or turn == self._gates.turn:
                    break  # else a queue was paused or resumed, and that ended the wait
        self._taking.woken = False
        return self._hold(life, found, limit)

    def _hold(self, life: ConsumerConnection, found: Sequence[Taken], limit: int) -> list[Delivery]:
        now = self._driver.clock.monotonic()
        deliveries: list[Delivery] = []
        blamed = (
            ran_by_the_dead(host_folder(KIND)) if any(one.redelivered for one in found) else set()
        )
        with self._lock:
            if self._life is not life or self._birth is None:
                return []  # they are back already
            for one in found[:limit]:
                delivery = self._delivery(one, blamed)
                channel = (
                    life.getter.channel if life.getter is not None and one.gotten else life.main
                )
                self._held[delivery.receipt] = HeldDelivery(
                    delivery, one, channel, one.tag, now, self._birth, subscription=one.subscription
                )
                deliveries.append(delivery)
        surplus = [
            (one.tag, False) for one in found[limit:]
        ]  # two queues got their message in one moment
        if surplus:
            self._settle(life.main, surplus)
        return deliveries

    def _mark_of(self, body: bytes) -> int:
        """Return the number that notes a message in its consumer's file."""
        return int.from_bytes(
            hashlib.blake2b(self._vhost + body[:MARKED], digest_size=8).digest(), "little"
        )

    def _delivery(self, one: Taken, blamed: Collection[int]) -> Delivery:
        fence, strikes = one.number(FENCE) + 1, one.number(STRIKES)
        if one.redelivered:
            fence = fence + 1
            if not strikes and self._mark_of(one.body) in blamed:
                strikes = 1  # a further one would be in its header
        return Delivery(
            body=one.body,
            queue=one.queue,
            receipt=f"{self.info.session}:{next(_receipts)}",
            fence=fence,
            strikes=strikes,
            parks=self._returns.parks(one),
            priority=one.priority,
            sent_at=one.sent_at,
        )

    # Disposing

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        with self._lock:
            ours = [self._held.pop(disposal.delivery.receipt, None) for disposal in disposals]
        pairs = [
            (held, disposal)
            for held, disposal in zip(ours, disposals, strict=True)
            if held is not None
        ]
        returned = [
            self._returns.addressed(held.delivery, held.one, disposal)
            for held, disposal in pairs
            if _is_published(held, disposal)
        ]
        if returned:
            try:
                self._sending.send(returned)
            except MachineryError:
                with self._lock:
                    self._held |= {
                        held.delivery.receipt: held
                        for held, _ in pairs
                        if held.birth is self._birth
                    }
                raise
        self._unsubscribe([held for held, _ in pairs])
        # Last, on purpose: a crash above this line brings the message back, a crash below it must not.
        lost: set[str] = set()
        for channel in {id(held.channel): held.channel for held, _ in pairs}.values():
            here = [(held, disposal) for held, disposal in pairs if held.channel is channel]
            tags = [
                (held.tag, disposal.fate is not Fate.BACK or held.moved) for held, disposal in here
            ]
            if not self._settle(channel, tags):
                lost |= {held.delivery.receipt for held, _ in here}
        return [held is not None and held.delivery.receipt not in lost for held in ours]

    def _unsubscribe(self, held: Sequence[HeldDelivery]) -> None:
        """End what brought these: when they are settled it would bring others."""
        over = [one for one in held if one.subscription]
        if not over:
            return
        left = len(over)

        def ended(future: Future[Any]) -> None:
            nonlocal left
            left -= 1
            if not left:
                settle(future, None)

        def work(future: Future[Any]) -> None:
            for one in over:
                one.subscription, tag = "", one.subscription
                one.channel.cancel(tag, lambda: ended(future))

        try:
            over[0].channel.ask(work, self._driver.timeout)
        except (AmqpConnectionLost, ChannelLost):
            pass  # the same will be said of settling them

    def _settle(self, channel: Channel, tags: Sequence[tuple[int, bool]]) -> bool:
        """Acknowledge (True) or give back (False), and wait until the server has seen it. False: the channel is gone."""

        def work(future: Future[Any]) -> None:
            channel.dispose(tags)
            # An acknowledgement has no answer; the server reads a channel in order, and this has one.
            channel.raw.basic_qos(prefetch_count=0, callback=lambda _: settle(future, None))

        try:
            channel.ask(work, self._driver.timeout)
        except (AmqpConnectionLost, ChannelLost) as error:
            logger.warning(
                "RabbitMQ at %s may not have heard that %d messages are settled: %s",
                self._driver.place,
                len(tags),
                error,
            )
            return False
        return True

    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        return [delivery.receipt in self._held for delivery in deliveries]

    def is_lost(self, delivery: Delivery) -> bool:
        return delivery.receipt not in self._held

    # Living

    def run_begins(self, delivery: Delivery) -> None:
        held = self._held.get(delivery.receipt)
        if held is None:
            return
        self._file.begins(self._mark_of(delivery.body))
        held.begun = True
        if delivery.strikes or held.one.redelivered:
            try:
                self._move([held])
            except MachineryError as error:
                logger.warning("a suspect task runs uncounted: %s", error)

    def run_ends(self, delivery: Delivery) -> None:
        self._file.ends(self._mark_of(delivery.body))

    def _move(self, held: Sequence[HeldDelivery]) -> None:
        """Hold these in the holding queue from now on."""
        life = self._life
        if life is None or not held:
            return
        channel, tags = life.holding.copy(held)
        self._unsubscribe(held)
        now = self._driver.clock.monotonic()
        over: dict[int, tuple[Channel, list[tuple[int, bool]]]] = {}
        with self._lock:
            for one, tag in zip(held, tags, strict=True):
                if one.delivery.receipt in self._held and one.birth is self._birth:
                    old, old_tag = one.channel, one.tag
                    one.channel, one.tag, one.since, one.moved = channel, tag, now, True
                else:
                    old, old_tag = channel, tag  # it was settled in between: the copy is not needed
                over.setdefault(id(old), (old, []))[1].append((old_tag, True))
        for old, gone in over.values():
            self._settle(old, gone)

    def beat(self) -> bool:
        if self._closed:
            return True
        self._file.touch()
        life = self._open()
        with translated(self._driver.place, "asking which queues are paused"):
            self._look_for_marks(
                life.link
            )  # and keeps the connection open that answers to questions go through
        self.info = msgspec.structs.replace(self.info, beat_at=self._driver.clock.now())
        if self._given_up:
            self._given_up = False
            return False
        now = self._driver.clock.monotonic()
        self._move(
            [held for held in list(self._held.values()) if now - held.since > self._hold_for]
        )
        return True

    def wake(self) -> None:
        self._taking.woken = True
        claim, life = self._taking.claim, self._life
        if claim is not None and life is not None:
            life.link.tell(claim.end)

    def close(self) -> None:
        if self._closed or self.info.pid != os.getpid():
            return
        self._closed = True
        self.wake()
        with self._lock:
            moved = [held.delivery for held in self._held.values() if held.moved]
        try:
            self.dispose([Disposal(delivery=delivery, fate=Fate.BACK) for delivery in moved])
        except MachineryError as error:
            logger.warning("%d tasks go back with a strike: %s", len(moved), error)
        with self._lock:
            self._birth = None
            self._held.clear()
            life, self._life = self._life, None
        if life is not None:
            if life.main.is_open:
                life.main.close()
            life.link.close()
        self._file.end()


def _is_published(held: HeldDelivery, disposal: Disposal) -> bool:
    """Whether the message is sent somewhere, and not just acknowledged or given back."""
    return disposal.fate in (Fate.DEAD, Fate.LATER) or (disposal.fate is Fate.BACK and held.moved)

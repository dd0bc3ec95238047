"""Consumer of RabbitMQ queues: fetches, disposes and holds (docs/explanation/amqp-protocol.md).

It has a connection of its own. When that, or the channel on it, is gone, all that was held belongs
to others from that moment: the server has put it back. A delivery is acknowledged on the channel
that it came on, or not at all.

RabbitMQ counts no deaths; it says only that a message was delivered before. So the consumer that
gets a redelivered message looks whether a dead consumer of this host ran it
(connections/session_files.py): that is a strike.

Limits: a death on another host is not seen, and is no strike; what came back is counted exactly
when it runs again, see holding.py.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import threading
from collections.abc import Collection, Sequence

import msgspec

from machinery_py.brokers.base import WAITING, Consumer, Delivery, Disposal, Fate, WorkerInfo
from machinery_py.brokers.entries import new_worker
from machinery_py.brokers.rabbitmq.control import Report, listen
from machinery_py.brokers.rabbitmq.fetch import Getter
from machinery_py.brokers.rabbitmq.holding import ConsumerConnection, HeldDelivery, HoldingQueues
from machinery_py.brokers.rabbitmq.messages import (
    COPY,
    COUNT,
    ETA,
    PARKS,
    SENT,
    STRIKES,
    Publication,
    ReceivedMessage,
)
from machinery_py.brokers.rabbitmq.publisher import MessagePublisher
from machinery_py.brokers.rabbitmq.receiving import MessageReceiver
from machinery_py.brokers.rabbitmq.topology import Topology, declare
from machinery_py.connections.rabbitmq.client import AmqpDriver, translated
from machinery_py.connections.rabbitmq.io_thread import (
    AmqpConnection,
    AmqpConnectionLost,
    Channel,
    ChannelLost,
)
from machinery_py.connections.session_files import ALL, Run, host_file, host_folder, ran_by_the_dead
from machinery_py.errors import BrokerUnavailable, MachineryError
from machinery_py.receipts import Receipt
from machinery_py.texts import get_logger

logger = get_logger(__name__)

KIND = "amqp"  # of the files that say what consumers run
MARKED = 512  # bytes of a message that it is known by; the UUID is in front

_receipts = itertools.count(1)


class AMQPReceipt(msgspec.Struct, Receipt, frozen=True, gc=False):
    """`number`: each process counts its deliveries."""

    session: str
    number: int

    def __str__(self) -> str:
        return f"{self.session}:{self.number}"


class AMQPConsumer(Consumer):
    """A consumer with a connection of its own, and the deliveries that came on it."""

    def __init__(
        self,
        driver: AmqpDriver,
        publisher: MessagePublisher,
        topology: Topology,
        queues: Sequence[str],
        *,
        worker: str,
        consumer_timeout: float,
    ) -> None:
        self._driver = driver
        self._publisher = publisher
        self._topology = topology
        self._queues = tuple(dict.fromkeys(topology.queue_of(queue) for queue in queues))
        self._lock = threading.Lock()  # guards what is held, and on which connection
        self._opening = threading.Lock()
        self._held: dict[Receipt, HeldDelivery] = {}
        self._connection: ConsumerConnection | None = None
        self._receiver = MessageReceiver(driver.timeout)
        self._vhost = driver.vhost.encode()
        self._file = host_file(KIND)
        self._given_up = self._closed = False
        self._hold_for = consumer_timeout / 2
        self.info: WorkerInfo = new_worker(worker, self._queues, driver.clock.now())
        try:
            self._open()
        except BaseException:
            self._file.end()
            raise

    # Connection

    def _open(self) -> ConsumerConnection:
        """Return the connection that is open, or a new one.

        Raises:
            BrokerUnavailable, StoreUnusable: there is none.
        """
        with self._opening:
            current = self._connection
            if current is not None:
                if current.is_open:
                    return current
                self._lose(current)
                current.link.close()
            new = ConsumerConnection()
            new.link = self._driver.connect("consume", on_lost=lambda: self._lose(new))
            try:
                with translated(self._driver.place, f"consuming {', '.join(self._queues)}"):
                    self._begin(new)
            except MachineryError:
                new.link.close()
                raise
            with self._lock:
                self._connection = new
            return new

    def _begin(self, new: ConsumerConnection) -> None:
        link, topology, timeout = new.link, self._topology, self._driver.timeout
        setup = link.channel(timeout)
        steps = [step for queue in self._queues for step in topology.queue(queue)]
        declare(setup, [*topology.steps("common", ""), *steps], timeout)
        hear, publisher = self._receiver.hear, self._driver.open_publisher
        listen(setup, self._report, hear, publisher, topology.workers, timeout)
        self._ask_paused(link, self._queues)
        new.main = link.channel(timeout)

        def on_lost(error: Exception) -> None:
            if isinstance(error, ChannelLost):
                logger.error(
                    "RabbitMQ at %s closed the channel of a consumer: %s;"
                    " what it held will run again",
                    self._driver.place,
                    error,
                )
            self._lose(new)

        def on_gets_lost(error: Exception) -> None:
            on_lost(error)
            new.close_main()

        def on_queue_gone(_: object) -> None:
            """A queue was deleted, or moved to another node. A new connection declares it again."""
            logger.warning(
                "RabbitMQ at %s ended the subscription to a queue of %s; declaring it again",
                self._driver.place,
                ", ".join(self._queues),
            )
            new.close_main()

        new.main.watch(on_lost)
        link.tell(lambda: new.main.raw.add_on_cancel_callback(on_queue_gone))
        name = f"{self.info.session}.{secrets.token_hex(2)}"
        new.holding = HoldingQueues(link, self._publisher, self._driver, topology, name)
        if topology.is_quorum:
            gets = link.channel(timeout)
            gets.watch(on_gets_lost)
            new.getter = Getter(gets)

    def _ask_paused(self, link: AmqpConnection, queues: Sequence[str]) -> None:
        """Ask which queues are paused; without an answer while the server takes no messages."""
        publisher, version = self._driver.publisher, self._receiver.version
        if not publisher.link.wait_unblocked(0.0):
            return
        try:
            marked = self._publisher.paused(queues)
        except BrokerUnavailable:
            if not publisher.link.wait_unblocked(0.0):
                return
            raise
        link.tell(lambda: self._receiver.learn(marked, version))

    def _lose(self, connection: ConsumerConnection) -> None:
        """Forget the deliveries of a connection that is lost."""
        with self._lock:
            if connection is self._connection and not connection.lost:
                connection.lost = self._given_up = True
                self._held.clear()
                # What it ran is another consumer's now, which must find a dead one's file.
                self._file.abandon()
                self._file = host_file(KIND)

    def _report(self) -> Report:
        holding: dict[str, int] = {}
        fetch = self._receiver.fetch
        queues = [held.delivery.queue for held in list(self._held.values())]
        queues += [one.queue for one in (fetch.found if fetch is not None else ())]
        for queue in queues:
            holding[queue] = holding.get(queue, 0) + 1
        return Report(msgspec.structs.replace(self.info, holding=len(queues)), holding)

    # Claiming

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        if self._closed:
            return []
        connection = self._open()
        served = self._queues
        named = dict.fromkeys(map(self._topology.queue_of, order))
        queues = tuple(queue for queue in named if queue in served) or served
        with translated(self._driver.place, f"receiving from {', '.join(queues)}"):
            found = self._receiver.receive(connection, queues, limit, timeout)
        return self._hold(connection, found, limit)

    def serve(self, queues: Sequence[str]) -> None:
        queues = tuple(dict.fromkeys(map(self._topology.queue_of, queues)))
        self._publisher.declare(queues)
        # Known before the next fetch begins, which is in the same thread.
        self._ask_paused(self._open().link, queues)
        self._queues = queues
        self.info = msgspec.structs.replace(self.info, queues=queues)
        self.wake()

    def _hold(
        self, connection: ConsumerConnection, found: Sequence[ReceivedMessage], limit: int
    ) -> list[Delivery]:
        now = self._driver.clock.monotonic()
        deliveries: list[Delivery] = []
        is_suspect = any(one.redelivered for one in found)
        blamed = ran_by_the_dead(host_folder(KIND)) if is_suspect else set[Run]()
        with self._lock:
            if self._connection is not connection or connection.lost:
                return []  # they are back already
            for one in found[:limit]:
                delivery = self._delivery(one, blamed)
                channel = connection.main
                if one.gotten and connection.getter is not None:
                    channel = connection.getter.channel
                self._held[delivery.receipt] = HeldDelivery(
                    delivery, one, channel, one.tag, now, connection
                )
                deliveries.append(delivery)
        if len(found) > limit:  # two queues got their message in one moment
            self._settle(connection.main, [(one.tag, False) for one in found[limit:]])
        return deliveries

    def _run_of(self, body: bytes) -> Run:
        """Return what notes a message in its consumer's file."""
        digest = hashlib.blake2b(self._vhost + body[:MARKED], digest_size=8).digest()
        return int.from_bytes(digest, "little"), ALL

    def _delivery(self, one: ReceivedMessage, blamed: Collection[Run]) -> Delivery:
        strikes = one.number(STRIKES)
        if one.redelivered and not strikes and self._run_of(one.body) in blamed:
            strikes = 1  # a further one would be in its header
        return Delivery(
            body=one.body,
            queue=one.queue,
            receipt=AMQPReceipt(self.info.session, next(_receipts)),
            count=one.number(COUNT) + 1 + one.redelivered,
            strikes=strikes,
            parks=one.number(PARKS),
            priority=one.priority,
            sent_at=one.moment(SENT),
        )

    # Disposing

    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        with self._lock:
            ours = [self._held.pop(disposal.delivery.receipt, None) for disposal in disposals]
        pairs = [(held, one) for held, one in zip(ours, disposals, strict=True) if held is not None]
        returned = [
            self._returned(held, disposal)
            for held, disposal in pairs
            if disposal.fate in (Fate.DEAD, Fate.LATER)
            or (disposal.fate is Fate.BACK and held.moved)
        ]
        if returned:
            try:
                self._publisher.send(returned)
            except MachineryError:
                with self._lock:
                    for held, _ in pairs:
                        if held.connection is self._connection and not held.connection.lost:
                            self._held[held.delivery.receipt] = held
                raise
        self._unsubscribe([held for held, _ in pairs])
        # Last, on purpose: a crash above brings the message back, a crash below must not.
        lost: set[Receipt] = set()
        for channel in {id(held.channel): held.channel for held, _ in pairs}.values():
            here = [(held, one) for held, one in pairs if held.channel is channel]
            tags = [(held.tag, one.fate is not Fate.BACK or held.moved) for held, one in here]
            if not self._settle(channel, tags):
                lost |= {held.delivery.receipt for held, _ in here}
        return [held is not None and held.delivery.receipt not in lost for held in ours]

    def _returned(self, held: HeldDelivery, disposal: Disposal) -> Publication:
        """Return the message for its queue, the delay levels or the dead letters."""
        delivery, message = held.delivery, held.message
        headers = message.own_headers() | {COUNT: delivery.count, STRIKES: delivery.strikes}
        headers.pop(COPY, None)
        headers.pop(ETA, None)
        if disposal.fate is Fate.DEAD:
            uuid, name = disposal.uuid or message.uuid, disposal.name or message.name
            return self._publisher.to_dead_letters(
                msgspec.structs.replace(message, uuid=uuid, name=name),
                delivery.queue,
                headers,
                reason=disposal.reason,
                error=disposal.error,
                letter=str(delivery.receipt),  # so a repeat after a lost reply is one letter
            )
        eta = None
        if disposal.fate is Fate.LATER:
            headers[PARKS] = delivery.parks + (disposal.reason != WAITING)
            eta = disposal.eta
        return self._publisher.to_queue(message, delivery.queue, headers, eta=eta)

    def _unsubscribe(self, held: Sequence[HeldDelivery]) -> None:
        """End the subscriptions of these deliveries, which bring others when these are settled."""
        for one in held:
            if tag := one.message.subscription:
                one.message.subscription = ""
                try:
                    one.channel.unsubscribe(tag, self._driver.timeout)
                except (AmqpConnectionLost, ChannelLost):
                    pass  # settling it fails in the same way

    def _settle(self, channel: Channel, tags: Sequence[tuple[int, bool]]) -> bool:
        """Acknowledge (True) or give back (False); return False if the channel is gone."""
        try:
            channel.settle(tags, self._driver.timeout)
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
        self._file.begins(self._run_of(delivery.body))
        held.begun = True
        if delivery.strikes or held.message.redelivered:
            try:
                self._move([held])
            except MachineryError as error:
                logger.warning("a suspect task runs uncounted: %s", error)

    def run_ends(self, delivery: Delivery) -> None:
        self._file.ends(self._run_of(delivery.body))

    def _move(self, held: Sequence[HeldDelivery]) -> None:
        """Move deliveries into the holding queues."""
        connection = self._connection
        if connection is None or not held:
            return
        channel, tags = connection.holding.copy(held)
        self._unsubscribe(held)
        now = self._driver.clock.monotonic()
        over: dict[int, tuple[Channel, list[tuple[int, bool]]]] = {}
        with self._lock:
            for one, tag in zip(held, tags, strict=True):
                old, old_tag = channel, tag  # if it was settled in between, the copy goes
                if one.delivery.receipt in self._held:
                    old, old_tag = one.channel, one.tag
                    one.channel, one.tag, one.since, one.moved = channel, tag, now, True
                over.setdefault(id(old), (old, []))[1].append((old_tag, True))
        for old, gone in over.values():
            self._settle(old, gone)

    def beat(self) -> bool:
        if self._closed:
            return True
        self._file.touch()
        # This also keeps the connection open through which questions are answered.
        self._ask_paused(self._open().link, self._queues)
        self.info = msgspec.structs.replace(self.info, beat_at=self._driver.clock.now())
        if self._given_up:
            self._given_up = False
            return False
        before = self._driver.clock.monotonic() - self._hold_for
        self._move([held for held in list(self._held.values()) if held.since < before])
        return True

    def wake(self) -> None:
        self._receiver.woken = True
        fetch, connection = self._receiver.fetch, self._connection
        if fetch is not None and connection is not None:
            connection.link.tell(fetch.end)

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
            self._held.clear()
            connection, self._connection = self._connection, None
        if connection is not None:
            if connection.is_open:
                connection.main.close()
            connection.link.close()
        self._file.end()

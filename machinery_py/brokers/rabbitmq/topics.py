"""Topics in RabbitMQ: a direct exchange, and an exclusive queue for each subscription.

A record is not kept, persisted or confirmed: it is pushed to the processes that subscribe. Each
bears the name of its sender and its number among the sender's records of the topic: a gap is what
was dropped.

Limits: what was sent before a subscription is not to be had.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pika

from machinery_py.brokers.topics import (
    TOPIC_AGE,
    TOPIC_LENGTH,
    BufferedSubscription,
    check_records,
)
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.rabbitmq.client import AmqpDriver, translated
from machinery_py.connections.rabbitmq.io_thread import (
    AmqpConnection,
    AmqpConnectionLost,
    Channel,
    resolve,
)
from machinery_py.connections.rabbitmq.publisher import Publisher
from machinery_py.connections.rabbitmq.queues import TOPICS
from machinery_py.errors import BrokerUnavailable, PublishUnknown

SENDER, NUMBER = "by", "n"  # headers of a record
MOST = 1000  # topics whose numbers a sender remembers, and senders whose numbers a reader does
SENDING = "sending to a topic"


class TopicSender:
    """A channel without confirms on the connection that publishes. For any thread."""

    def __init__(self, driver: AmqpDriver) -> None:
        self._driver = driver
        self._lock = ForkLock()
        self._publisher: Publisher | None = None
        self._channel: Channel | None = None
        self._name = ""
        self._numbers: dict[str, int] = {}

    def send(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        check_records(topic, records)
        if not records:
            return
        driver = self._driver
        with self._lock, translated(driver.place, SENDING):
            channel = self._open(driver.publisher)
            life = str(int(min(ttl, TOPIC_AGE) * 1000))
            last = self._numbers.pop(topic, 0)
            self._numbers[topic] = last + len(records)
            if len(self._numbers) > MOST:
                del self._numbers[next(iter(self._numbers))]

            def publish(future: Future[Any]) -> None:
                for number, body in enumerate(records, last + 1):
                    headers = {SENDER: self._name, NUMBER: number}
                    properties = pika.BasicProperties(headers=headers, expiration=life)
                    channel.raw.basic_publish(TOPICS, topic, bytes(body), properties)
                # Publishing has no answer; the server reads a channel in order, and this has one.
                channel.raw.basic_qos(prefetch_count=0, callback=lambda _: resolve(future, None))

            try:
                channel.ask(publish, driver.timeout)
            except AmqpConnectionLost as error:
                raise PublishUnknown(f"RabbitMQ at {driver.place}: {SENDING}: {error}") from error

    def _open(self, publisher: Publisher) -> Channel:
        """Return the channel on this connection; its numbers begin anew with it."""
        if publisher.link.blocked:
            raise BrokerUnavailable(
                f"RabbitMQ at {self._driver.place}: {SENDING}: it takes no messages: "
                f"{publisher.link.blocked}"
            )
        if self._channel is None or not self._channel.is_open or publisher is not self._publisher:
            self._channel = _channel(publisher.link, self._driver.timeout)
            self._publisher, self._name = publisher, secrets.token_hex(6)
            self._numbers.clear()
        return self._channel


class AMQPSubscription(BufferedSubscription):
    """A queue on a connection of its own; both are made anew when they are lost."""

    def __init__(self, driver: AmqpDriver, topic: str) -> None:
        super().__init__(driver.clock)
        self._driver = driver
        self._topic = topic
        self._last: dict[str, int] = {}  # number by sender; changed in the I/O thread alone
        self._opening = threading.Lock()
        self._link = self._open()

    def _open(self) -> AmqpConnection:
        driver = self._driver
        link = driver.connect("subscribe", on_lost=self.wake)
        try:
            with translated(driver.place, "subscribing to a topic"):
                channel = _channel(link, driver.timeout)
                own = {"exclusive": True, "auto_delete": True}
                ring = {"x-max-length": TOPIC_LENGTH}
                frame = channel.rpc(
                    "queue_declare", queue="", arguments=ring, timeout=driver.timeout, **own
                )
                queue = frame.method.queue
                channel.rpc(
                    "queue_bind",
                    queue=queue,
                    exchange=TOPICS,
                    routing_key=self._topic,
                    timeout=driver.timeout,
                )
                for on_end in (channel.watch, channel.raw.add_on_cancel_callback):
                    on_end(lambda _: link.tell(link.abort))  # the queue was deleted
                channel.rpc(
                    "basic_consume",
                    queue=queue,
                    on_message_callback=self._take,
                    auto_ack=True,
                    timeout=driver.timeout,
                )
        except BaseException:
            link.close()
            raise
        return link

    def _take(self, _: object, __: object, properties: Any, body: bytes) -> None:
        """Take in a record, in the I/O thread."""
        headers = properties.headers or {}
        sender, number = headers.get(SENDER), headers.get(NUMBER)
        missed = 0
        if isinstance(sender, str) and isinstance(number, int):
            missed = max(0, number - self._last.pop(sender, number - 1) - 1)
            self._last[sender] = number
            if len(self._last) > MOST:
                del self._last[next(iter(self._last))]
        life = str(getattr(properties, "expiration", None))
        left = int(life) / 1000 if life.isdecimal() else TOPIC_AGE
        until = self._clock.monotonic() + min(left, TOPIC_AGE)
        self.add([(bytes(body), until)], missed=missed)

    def read(self, timeout: float) -> list[bytes]:
        with self._opening:
            if not self._closed and not self._link.is_open:
                self._link.close()
                self._link = self._open()
        return super().read(timeout)

    def close(self) -> None:
        super().close()
        with self._opening:
            self._link.close()


def _channel(link: AmqpConnection, timeout: float) -> Channel:
    """Open a channel, and declare the exchange of all topics."""
    channel = link.channel(timeout)
    channel.rpc(
        "exchange_declare", exchange=TOPICS, exchange_type="direct", durable=True, timeout=timeout
    )
    return channel

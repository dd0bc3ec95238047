"""Topics in RabbitMQ: a direct exchange, and an exclusive queue for each subscription.

A record is not kept, persisted or confirmed: it is pushed to the processes that subscribe.

Limits: what was sent before a subscription is not to be had. What RabbitMQ itself drops, since the
connection was lost or the process did not read, is not counted as missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import pika

from machinery_py.brokers.rabbitmq.topology import Step, declare
from machinery_py.brokers.topics import TOPIC_AGE, TOPIC_LENGTH, PushedSubscription
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.rabbitmq.client import AmqpDriver, translated
from machinery_py.connections.rabbitmq.io_thread import (
    AmqpConnection,
    AmqpConnectionLost,
    Channel,
    resolve,
)
from machinery_py.connections.rabbitmq.queues import TOPICS
from machinery_py.errors import BrokerUnavailable, PublishUnknown

SENDING = "sending to a topic"
EXCHANGE: Step = (
    "exchange_declare",
    {"exchange": TOPICS, "exchange_type": "direct", "durable": True},
)


class TopicSender:
    """A channel without confirms on the connection that publishes. For any thread."""

    def __init__(self, driver: AmqpDriver) -> None:
        self._driver = driver
        self._lock = ForkLock()
        self._channel: Channel | None = None

    def append_records(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        driver, properties = self._driver, pika.BasicProperties(expiration=str(int(ttl * 1000)))
        with translated(driver.place, SENDING):
            channel = self._open()

            def publish(future: Future[Any]) -> None:
                for body in records:
                    channel.raw.basic_publish(TOPICS, topic, body, properties)
                # Publishing has no answer; the server reads a channel in order, and this has one.
                channel.raw.basic_qos(prefetch_count=0, callback=lambda _: resolve(future, None))

            try:
                channel.ask(publish, driver.timeout)
            except AmqpConnectionLost as error:
                raise PublishUnknown(f"RabbitMQ at {driver.place}: {SENDING}: {error}") from error

    def _open(self) -> Channel:
        driver, link = self._driver, self._driver.publisher.link
        if link.blocked:
            raise BrokerUnavailable(
                f"RabbitMQ at {driver.place}: {SENDING}: it takes no messages: {link.blocked}"
            )
        with self._lock:
            if self._channel is None or not self._channel.is_open or self._channel.link is not link:
                self._channel = link.channel(driver.timeout)
                declare(self._channel, [EXCHANGE], driver.timeout)
            return self._channel


class AMQPSubscription(PushedSubscription):
    """A queue on a connection of its own; both are made anew when they are lost."""

    def __init__(self, driver: AmqpDriver, topic: str) -> None:
        super().__init__(driver.clock)
        self._driver = driver
        self._topic = topic
        self._opening = ForkLock()
        self._link = self._open()

    def _open(self) -> AmqpConnection:
        driver = self._driver
        link = driver.connect("subscribe", on_lost=self.wake)
        own = {"exclusive": True, "auto_delete": True, "arguments": {"x-max-length": TOPIC_LENGTH}}
        # "": the queue that this channel has declared last, whose name is the server's.
        steps: list[Step] = [
            EXCHANGE,
            ("queue_declare", {"queue": "", **own}),
            ("queue_bind", {"queue": "", "exchange": TOPICS, "routing_key": self._topic}),
        ]
        try:
            with translated(driver.place, "subscribing to a topic"):
                channel = link.channel(driver.timeout)
                declare(channel, steps, driver.timeout)
                for on_end in (channel.watch, channel.raw.add_on_cancel_callback):
                    on_end(lambda _: link.tell(link.abort))  # the queue was deleted
                take = {"queue": "", "on_message_callback": self._take, "auto_ack": True}
                channel.rpc("basic_consume", timeout=driver.timeout, **take)
        except BaseException:
            link.close()
            raise
        return link

    def _take(self, _: object, __: object, properties: Any, body: bytes) -> None:
        """Take in a record, in the I/O thread."""
        life = str(getattr(properties, "expiration", None))
        left = int(life) / 1000 if life.isdecimal() else TOPIC_AGE
        self.add([(bytes(body), self._clock.monotonic() + min(left, TOPIC_AGE))])

    def read(self, timeout: float) -> list[bytes]:
        with self._opening:
            if not self.is_closed and not self._link.is_open:
                self._link.close()
                self._link = self._open()
        return super().read(timeout)

    def close(self) -> None:
        super().close()
        with self._opening:
            self._link.close()

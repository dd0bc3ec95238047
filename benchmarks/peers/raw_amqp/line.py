"""A connection to RabbitMQ with a channel, on pika's own loop, which runs while a call waits.

The states are those of the baseline on Redis (`raw`); the messages are in the queue `raw`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pika
from pika.adapters.select_connection import SelectConnection

from benchmarks.peers.driving import AMQP

QUEUE = "raw"


class Line:
    """`channel` is pika's, in confirm mode; the queue is declared."""

    def __init__(self, url: str = AMQP) -> None:
        self.channel: Any = None
        self._next = self._confirmed = 0
        self._unordered: set[int] = set()
        self._connection: Any = SelectConnection(
            pika.URLParameters(url),
            on_open_callback=self._on_open,
            on_open_error_callback=self._on_end,
            on_close_callback=self._on_end,
        )
        self.run()

    def run(self) -> None:
        """Let the loop go, until `stop`."""
        self._connection.ioloop.start()

    def stop(self) -> None:
        self._connection.ioloop.stop()

    def soon(self, work: Any) -> None:
        """Do it when what has been read is worked off."""
        self._connection.ioloop.add_callback(work)

    def publish(self, messages: Sequence[tuple[str, bytes]]) -> None:
        """Send (id, body) of each; returns when all are confirmed."""
        for id, body in messages:
            properties = pika.BasicProperties(
                content_type="application/json", delivery_mode=2, message_id=id
            )
            self.channel.basic_publish("", QUEUE, body, properties, mandatory=True)
        self._next += len(messages)
        if self._confirmed < self._next:
            self.run()

    def _on_open(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._on_channel)

    def _on_channel(self, channel: Any) -> None:
        self.channel = channel
        channel.confirm_delivery(
            self._on_confirm,
            callback=lambda _: channel.queue_declare(
                QUEUE, durable=True, callback=lambda _: self.stop()
            ),
        )
        channel.add_on_return_callback(self._on_end)

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        if method.NAME != "Basic.Ack":
            self._on_end(method)
        if method.multiple:
            self._confirmed = max(self._confirmed, method.delivery_tag)
        else:
            self._unordered.add(method.delivery_tag)
        while self._confirmed + 1 in self._unordered:
            self._confirmed += 1
            self._unordered.discard(self._confirmed)
        if self._confirmed >= self._next:
            self._unordered.clear()
            self.stop()

    def _on_end(self, *why: object) -> None:
        raise SystemExit(f"RabbitMQ: {why}")

"""Presence of consumers: each is counted by its subscription to an empty queue, and answers questions there.

A question goes to all by a fanout exchange; each answers to the asker's own reply queue, by the publishing connection:
a connection that has published is not read from while the server is short of memory, and consuming must go on then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import pika

from machinery_py.brokers.base import WorkerInfo
from machinery_py.connections.rabbitmq.io_thread import Channel, settle
from machinery_py.connections.rabbitmq.publisher import Publisher
from machinery_py.connections.rabbitmq.queues import CONTROL

PATIENCE = 1.0  # seconds for the answers; a worker that does not give one is frozen, or cut off
REPLIES = "amq.rabbitmq.reply-to"


class Report(msgspec.Struct, frozen=True):
    """Answer of a consumer: itself, and how much it holds of each queue."""

    info: WorkerInfo
    holding: dict[str, int]


_pack = msgspec.json.Encoder().encode
_unpack = msgspec.json.Decoder(Report).decode


def listen(
    channel: Channel,
    report: Callable[[], Report],
    heard: Callable[[bytes, Callable[[], object]], object],
    publisher: Callable[[], Publisher | None],
    workers: str,
    timeout: float,
) -> None:
    """Be counted and answer, from now on, until the channel ends.

    It is counted by its subscription to the queue `workers`. `heard` is called with what was said to all, in the link's thread;
    it calls the second when the answer may go out.

    Raises:
        LinkLost, ChannelLost: it could not be begun.
    """
    raw = channel.raw

    def asked(_: object, method: object, properties: Any, body: bytes) -> None:
        def answer() -> None:
            through = publisher()
            if through is not None and properties.reply_to:
                through.tell(properties.reply_to, _pack(report()), properties.correlation_id or "")

        heard(body, answer)

    def begin(future: Future[Any]) -> None:
        def named(frame: Any) -> None:
            queue = frame.method.queue
            raw.queue_bind(queue, CONTROL, callback=_nothing)
            raw.basic_consume(queue, asked, auto_ack=True, callback=_nothing)
            raw.basic_consume(
                workers, _nothing, auto_ack=True, callback=lambda _: settle(future, None)
            )

        raw.queue_declare("", exclusive=True, auto_delete=True, callback=named)

    channel.ask(begin, timeout)


def ask(
    channel: Channel,
    workers: str,
    timeout: float,
    question: bytes = b"",
    patience: float = PATIENCE,
) -> Sequence[Report]:
    """Say something to the consumers that live; their reports, when all have answered or there is no more patience."""
    raw = channel.raw
    reports: dict[str, Report] = {}

    def begin(future: Future[Any]) -> None:
        def answered(_: object, __: object, ___: object, body: bytes) -> None:
            try:
                report = _unpack(body)
            except msgspec.DecodeError:
                return  # of a later version
            reports[report.info.session] = report
            if not future.done():
                count()

        def count() -> None:
            raw.queue_declare(workers, passive=True, callback=counted)

        def counted(frame: Any) -> None:
            # Counted anew after each answer: who came after the question may have answered before others.
            if len(reports) >= frame.method.consumer_count:
                settle(future, None)

        def listening(_: object) -> None:
            raw.basic_publish(CONTROL, "", question, pika.BasicProperties(reply_to=REPLIES))
            count()

        raw.connection.ioloop.call_later(patience, lambda: settle(future, None))
        raw.basic_consume(REPLIES, answered, auto_ack=True, callback=listening)

    channel.ask(begin, timeout + patience)
    return list(reports.values())


def _nothing(*_: object) -> None:
    pass

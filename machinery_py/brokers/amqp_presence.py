"""Who is there: each consumer is counted by its subscription to an empty queue, and answers what it is asked.

A question goes to all by a fanout exchange; each answers to the asker's own reply queue, by the publishing connection:
a connection that has published is not read from while the server is short of memory, and consuming must go on then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import pika

from machinery_py._drivers.amqp_link import Channel, settle
from machinery_py._drivers.amqp_publisher import Publisher
from machinery_py.brokers.amqp_topology import CONTROL, WORKERS
from machinery_py.brokers.base import WorkerInfo

PATIENCE = 1.0  # seconds for the answers; a worker that does not give one is frozen, or cut off
REPLIES = "amq.rabbitmq.reply-to"


class Report(msgspec.Struct, frozen=True):
    """What a consumer says of itself, and how much it holds of each queue."""

    info: WorkerInfo
    holding: dict[str, int]


_pack = msgspec.json.Encoder().encode
_unpack = msgspec.json.Decoder(Report).decode


def listen(
    channel: Channel, report: Callable[[], Report], publisher: Callable[[], Publisher | None], timeout: float
) -> None:
    """Be counted and answer, from now on, until the channel ends.

    Raises:
        LinkLost, ChannelLost: it could not be begun.
    """
    raw = channel.raw

    def asked(_: object, method: object, properties: Any, body: bytes) -> None:
        through = publisher()
        if through is not None and properties.reply_to:
            through.tell(properties.reply_to, _pack(report()), properties.correlation_id or "")

    def begin(future: Future[Any]) -> None:
        def named(frame: Any) -> None:
            queue = frame.method.queue
            raw.queue_bind(queue, CONTROL, callback=_nothing)
            raw.basic_consume(queue, asked, auto_ack=True, callback=_nothing)
            raw.basic_consume(WORKERS, _nothing, auto_ack=True, callback=lambda _: settle(future, None))

        raw.queue_declare("", exclusive=True, auto_delete=True, callback=named)

    channel.ask(begin, timeout)


def ask(channel: Channel, timeout: float) -> Sequence[Report]:
    """The reports of the consumers that live."""
    raw = channel.raw
    reports: dict[str, Report] = {}
    state = {"expected": 0}

    def begin(future: Future[Any]) -> None:
        def answered(_: object, __: object, ___: object, body: bytes) -> None:
            try:
                report = _unpack(body)
            except msgspec.DecodeError:
                return  # of a later version
            reports[report.info.session] = report
            if len(reports) >= state["expected"]:
                settle(future, None)

        def counted(frame: Any) -> None:
            state["expected"] = frame.method.consumer_count
            if not state["expected"]:
                settle(future, None)
                return
            raw.connection.ioloop.call_later(PATIENCE, lambda: settle(future, None))
            raw.basic_publish(CONTROL, "", b"", pika.BasicProperties(reply_to=REPLIES))

        raw.basic_consume(REPLIES, answered, auto_ack=True, callback=_nothing)
        raw.queue_declare(WORKERS, passive=True, callback=counted)

    channel.ask(begin, timeout + PATIENCE)
    return list(reports.values())


def _nothing(*_: object) -> None:
    pass

"""Questions and orders to all consumers that live: who they are, and which queues are paused.

Each consumer is counted by its subscription to an empty queue. A question goes to all by a fanout
exchange; each answers to the asker's own reply queue, by the publishing connection: a connection
that has published is not read from while the server is short of memory, and consuming must go on.

A paused queue has a durable mark on the server, a binding of the exchange `machinery.paused`:

    pause    1  the mark is set            2  all consumers are told, end their fetch, and answer
    resume   1  the mark is taken away     2  all consumers are told

A consumer asks for the marks when its connection is made, after it has begun to listen, and at
each beat: so when a pauser dies between 1 and 2 it is obeyed a beat later. From 2 on a consumer
begins no fetch there, since fetches begin in the thread that hears the order. `pause` returns
when every consumer that is counted has answered.

Limits: a consumer that is frozen does not answer within PATIENCE; if it is thawed before its
heartbeats are missed, it runs what the server has handed to it by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final

import msgspec
import pika

from machinery_py.brokers.base import WorkerInfo
from machinery_py.brokers.rabbitmq.topology import Topology, declare
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.connections.rabbitmq.io_thread import Channel, resolve
from machinery_py.connections.rabbitmq.publisher import Publisher
from machinery_py.connections.rabbitmq.queues import CONTROL
from machinery_py.texts import get_logger
from machinery_py.values.malformed import MALFORMED

logger = get_logger(__name__)

ANSWER_WITHIN = 1.0  # seconds; a worker that does not answer is frozen, or cut off
PATIENCE = 3.0  # seconds for the answers to an order; longer than a beat
REPLIES = "amq.rabbitmq.reply-to"


class Report(msgspec.Struct, frozen=True):
    """Answer of a consumer: itself, and how much it holds of each queue."""

    info: WorkerInfo
    holding: dict[str, int]


class PauseOrder(msgspec.Struct, frozen=True):
    """Order to all consumers of a queue. `shut`: fetch no more from it; else it is open again."""

    queue: str
    shut: bool


_pack = msgspec.json.Encoder().encode
_unpack = msgspec.json.Decoder(Report).decode
decode_order: Final = msgspec.json.Decoder(PauseOrder).decode


def listen(
    channel: Channel,
    report: Callable[[], Report],
    hear: Callable[[bytes, Callable[[], object]], object],
    publisher: Callable[[], Publisher | None],
    workers: str,
    timeout: float,
) -> None:
    """Be counted and answer, from now on, until the channel ends.

    Args:
        hear: called in the I/O thread with each message to all; calls its second argument when the
            answer may go out.
        workers: the queue whose subscribers are counted.

    Raises:
        AmqpConnectionLost, ChannelLost: it could not be begun.
    """
    raw = channel.raw

    def asked(_: object, method: object, properties: Any, body: bytes) -> None:
        def answer() -> None:
            through = publisher()
            if through is not None and properties.reply_to:
                through.tell(properties.reply_to, _pack(report()), properties.correlation_id or "")

        hear(body, answer)

    def begin(future: Future[Any]) -> None:
        def named(frame: Any) -> None:
            queue = frame.method.queue
            raw.queue_bind(queue, CONTROL, callback=_ignore)
            raw.basic_consume(queue, asked, auto_ack=True, callback=_ignore)
            raw.basic_consume(
                workers, _ignore, auto_ack=True, callback=lambda _: resolve(future, None)
            )

        raw.queue_declare("", exclusive=True, auto_delete=True, callback=named)

    channel.ask(begin, timeout)


def ask(
    channel: Channel,
    workers: str,
    timeout: float,
    question: bytes = b"",
    patience: float = ANSWER_WITHIN,
) -> Sequence[Report]:
    """Send a message to all consumers; return the reports that come within `patience`."""
    raw = channel.raw
    reports: dict[str, Report] = {}

    def begin(future: Future[Any]) -> None:
        def answered(_: object, __: object, ___: object, body: bytes) -> None:
            try:
                report = _unpack(body)
            except MALFORMED:
                return  # of a later version
            reports[report.info.session] = report
            if not future.done():
                count()

        def count() -> None:
            raw.queue_declare(workers, passive=True, callback=counted)

        def counted(frame: Any) -> None:
            # Count again after each answer: a consumer newer than the question may answer first.
            if len(reports) >= frame.method.consumer_count:
                resolve(future, None)

        def listening(_: object) -> None:
            raw.basic_publish(CONTROL, "", question, pika.BasicProperties(reply_to=REPLIES))
            count()

        raw.connection.ioloop.call_later(patience, lambda: resolve(future, None))
        raw.basic_consume(REPLIES, answered, auto_ack=True, callback=listening)

    channel.ask(begin, timeout + patience)
    return list(reports.values())


def order_pause(driver: AmqpDriver, topology: Topology, queue: str, *, shut: bool) -> None:
    """Set the mark of a queue or take it away, and tell all consumers.

    Raises:
        BrokerUnavailable, StoreUnusable: the mark may be there or not; doing it again is safe.
    """
    with driver.visit(f"{'pausing' if shut else 'resuming'} {queue!r}") as channel:
        declare(channel, [*topology.common(), topology.pause(queue, shut=shut)], driver.timeout)
        order = _pack(PauseOrder(queue, shut))
        reports = ask(channel, topology.workers, driver.timeout, order, PATIENCE)
        counted = channel.rpc(
            "queue_declare", queue=topology.workers, passive=True, timeout=driver.timeout
        ).method.consumer_count
    if counted > len(reports):
        logger.warning(
            "queue %r is %s; %d of %d consumers have not said that they heard it",
            queue,
            "paused" if shut else "open again",
            counted - len(reports),
            counted,
        )


def _ignore(*_: object) -> None:
    pass

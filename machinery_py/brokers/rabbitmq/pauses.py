"""Paused queues on RabbitMQ: a durable mark on the server, and a word to all consumers that live.

    pause    1  the mark is set          2  all consumers are told, end the claim that is under way, and answer
    resume   1  the mark is taken away   2  all consumers are told

The mark is a binding of the exchange `machinery.paused`. A consumer asks for the marks when its connection is made, after it
has begun to listen, and at each beat: so a pauser that dies between 1 and 2 is obeyed a beat later. From 2 on a consumer begins
no claim there, for claims begin in the thread that hears. `pause` returns when every consumer that is counted has answered.

Limits: a consumer that is frozen does not answer within PATIENCE; what the server has handed to it by then it will run if it is
thawed before its heartbeats are missed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from machinery_py.brokers.rabbitmq.control import ask
from machinery_py.brokers.rabbitmq.fetch import Fetch
from machinery_py.brokers.rabbitmq.topology import Topology, carry_out
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.texts import get_logger

logger = get_logger(__name__)

PATIENCE = 3.0  # seconds for the answers of consumers; longer than a beat


class Word(msgspec.Struct, frozen=True):
    """Order to all consumers of a queue."""

    queue: str
    shut: bool


_pack = msgspec.json.Encoder().encode
_unpack = msgspec.json.Decoder(Word).decode


def spread(driver: AmqpDriver, topology: Topology, queue: str, *, shut: bool) -> None:
    """Set the mark of a queue or take it away, and tell everybody.

    Raises:
        BrokerUnavailable, StoreUnusable: the mark may be there or not; doing it again is safe.
    """
    with driver.visit(f"{'pausing' if shut else 'resuming'} {queue!r}") as channel:
        carry_out(
            channel, iter([*topology.common(), *topology.pause(queue, shut=shut)]), driver.timeout
        )
        reports = ask(channel, topology.workers, driver.timeout, _pack(Word(queue, shut)), PATIENCE)
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


class Gates:
    """Paused queues, as one consumer knows them. Changed in its link's thread alone, where its claims begin."""

    def __init__(self) -> None:
        self.shut: frozenset[str] = frozenset()
        self.turn = 0  # how often something was changed

    def hear(self, body: bytes, claim: Fetch | None, answer: Callable[[], object]) -> None:
        """Something was said to all; answer when no claim contradicts it any more."""
        try:
            word = _unpack(body)
        except msgspec.DecodeError:
            answer()  # only a question
            return
        self._change(self.shut | {word.queue} if word.shut else self.shut - {word.queue})
        if claim is None:
            answer()
        else:
            claim.stop(answer)

    def learn(self, marked: Collection[str], turn: int, claim: Fetch | None) -> None:
        """Note marked queues, unless an order has come since `turn`, which is newer."""
        if turn == self.turn and self.shut != frozenset(marked):
            self._change(frozenset(marked))
            if claim is not None:
                claim.stop(lambda: None)

    def _change(self, shut: frozenset[str]) -> None:
        self.shut = shut
        self.turn += 1

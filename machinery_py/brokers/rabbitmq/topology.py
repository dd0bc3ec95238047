"""Exchanges, queues and bindings on RabbitMQ: Go Machinery's where Go has them, ours where Go loses messages.

    <exchange>                   Go's, of the configured type
    <queue>                      durable, with `queue_declare_args`; bound by its name, the default queue also by `binding_key`
    machinery.delay.<n>          exchange and queue of level n: what lies here waits TICK · 2ⁿ; then on to level n-1
    machinery.delay.due          exchange: from the levels to the queues, by a digest of the queue's name
    machinery.dead.<queue>       dead letters
    machinery.queues             one message for each queue that was ever used, with its name
    machinery.workers            the consumers that live subscribe to it; it is always empty
    machinery.control            exchange: questions to all consumers
    machinery.paused             exchange: what is sent to it with a paused queue's key finds a queue, else it comes back

A delayed message carries its delay in ticks as a binary number in its routing key: level n holds it if bit n is set, and
passes it on if not. There are as many queues as bits, whatever the delays; nothing waits behind another message, since all
in a level wait equally long; and no queue expires.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from machinery_py.config.sections import AMQPConfig
from machinery_py.connections.rabbitmq.io_thread import Channel, settle
from machinery_py.connections.rabbitmq.queues import CONTROL, DUE, PAUSED, PAUSED_SINK
from machinery_py.errors import PublishRefused, for_good

LEVELS = 33  # the longest delay is 2³³ - 1 ticks: 13 years
TICK = 0.05  # seconds; a delayed message comes so late at most, and never early
LONGEST_NAME = 255  # bytes
OFTEN = 1_000_000_000  # deliveries of one message in a quorum queue of ours; -1, for no limit, is new in RabbitMQ 4


#: One call of a method of pika's channel: its name and its arguments.
Step = tuple[str, dict[str, Any]]


class Topology:
    """Declarations for each queue. Pure, but for `carry_out`."""

    def __init__(self, config: AMQPConfig, default_queue: str) -> None:
        self.config = config
        self.default_queue = default_queue
        self.is_quorum = config.queue_declare_args.get("x-queue-type") == "quorum"
        self.limits_length = bool(
            {"x-max-length", "x-max-length-bytes"} & config.queue_declare_args.keys()
        )
        self.rejects = config.queue_declare_args.get("x-overflow") == "reject-publish"
        # Quorum queues as well, or all of a cluster would stand still when the node is gone that has these.
        self.registry = self._named("queues")
        self.workers = self._named("workers")

    def ttl(self, level: int) -> int:
        """Milliseconds that a message lies in a level."""
        return int(TICK * 1000) << level

    # Names

    def queue_of(self, name: str) -> str:
        """The queue that a route leads to: Go writes the binding key where the default queue is meant."""
        return (
            self.default_queue
            if name in ("", self.config.binding_key) and self.routes_by_name
            else name or self.default_queue
        )

    @property
    def routes_by_name(self) -> bool:
        """Whether a message reaches the queue that it is addressed to, because each is bound by its name."""
        return self.config.exchange_type == "direct"

    def dead_queue(self, queue: str) -> str:
        name = f"machinery.dead.{queue}"
        return name if len(name.encode()) <= LONGEST_NAME else f"machinery.dead.{digest(queue)}"

    def level_name(self, level: int) -> str:
        return f"{self._named('delay')}.{level}"

    def _named(self, what: str) -> str:
        """The name of a queue of ours, which is another one where queues are quorum queues."""
        return f"machinery.{what}.quorum" if self.is_quorum else f"machinery.{what}"

    def delay_route(self, queue: str, delay: float) -> tuple[str, str]:
        """(exchange, routing key) for a message that is to come to the queue after so many seconds."""
        ticks = max(1, min(-int(-delay // TICK), (1 << LEVELS) - 1))
        bits = format(ticks, f"0{LEVELS}b")
        return self.level_name(ticks.bit_length() - 1), f"{'.'.join(bits)}.{digest(queue)}"

    def described(self, queues: Sequence[str]) -> list[str]:
        """Describe for people what these queues have when all is declared."""
        found = [f"exchange {self.config.exchange} ({self.config.exchange_type})"]
        arguments = ", ".join(
            f"{key}={value}" for key, value in sorted(self.config.queue_declare_args.items())
        )
        for queue in queues:
            keys = f"{queue}, {self.config.binding_key}" if queue == self.default_queue else queue
            found.append(
                f"queue {queue} bound by {keys}" + (f" ({arguments})" if arguments else "")
            )
            found.append(f"queue {self.dead_queue(queue)}")
        found.append(
            f"exchanges and queues {self.level_name(0)} to {self.level_name(LEVELS - 1)}, {DUE}"
        )
        found.append(f"{self.registry}, {self.workers}, {CONTROL}, {PAUSED}")
        return found

    # Declarations

    def exchange(self) -> Iterator[Step]:
        yield (
            "exchange_declare",
            {
                "exchange": self.config.exchange,
                "exchange_type": self.config.exchange_type,
                "durable": True,
            },
        )

    def queue(self, queue: str) -> Iterator[Step]:
        """Return the declarations that a worker or a sender needs for a queue."""
        if len(queue.encode(errors="replace")) > LONGEST_NAME:
            raise for_good(
                PublishRefused(
                    f"queue {queue[:40]!r}…: its name is longer than {LONGEST_NAME} bytes"
                )
            )
        if "\r" in queue or "\n" in queue:
            # RabbitMQ leaves them out of the names of queues, and not out of routing keys: nothing would ever come there.
            raise for_good(
                PublishRefused(
                    f"queue {queue[:40]!r}: a line break is in its name (give it another)"
                )
            )
        exchange, arguments = self.config.exchange, dict(self.config.queue_binding_args)
        yield (
            "queue_declare",
            {"queue": queue, "durable": True, "arguments": dict(self.config.queue_declare_args)},
        )
        keys = [queue, self.config.binding_key] if queue == self.default_queue else [queue]
        for key in dict.fromkeys(keys):
            yield (
                "queue_bind",
                {"queue": queue, "exchange": exchange, "routing_key": key, "arguments": arguments},
            )

    def due(self, queue: str) -> Iterator[Step]:
        """The way of delayed messages to a queue."""
        yield "queue_bind", {"queue": queue, "exchange": DUE, "routing_key": f"#.{digest(queue)}"}

    def dead(self, queue: str) -> Iterator[Step]:
        yield (
            "queue_declare",
            {"queue": self.dead_queue(queue), "durable": True, "arguments": self._ours()},
        )

    def common(self) -> Iterator[Step]:
        """Return the declarations that all queues share."""
        yield "queue_declare", {"queue": self.registry, "durable": True, "arguments": self._ours()}
        yield "queue_declare", {"queue": self.workers, "durable": True, "arguments": self._ours()}
        yield "exchange_declare", {"exchange": CONTROL, "exchange_type": "fanout", "durable": True}
        sink = self._named("paused")
        yield "exchange_declare", {"exchange": PAUSED, "exchange_type": "direct", "durable": True}
        yield (
            "exchange_declare",
            {"exchange": PAUSED_SINK, "exchange_type": "fanout", "durable": True},
        )
        yield (
            "queue_declare",
            {"queue": sink, "durable": True, "arguments": {"x-max-length": 1, **self._ours()}},
        )
        yield "queue_bind", {"queue": sink, "exchange": PAUSED_SINK}

    def pause(self, queue: str, *, shut: bool) -> Iterator[Step]:
        """The mark of a paused queue, set or taken away: a binding, which every node of a cluster knows."""
        method = "exchange_bind" if shut else "exchange_unbind"
        yield method, {"destination": PAUSED_SINK, "source": PAUSED, "routing_key": digest(queue)}

    def levels(self) -> Iterator[Step]:
        """The levels, from below, and the sign that all are there."""
        yield "exchange_declare", {"exchange": DUE, "exchange_type": "topic", "durable": True}
        for level in range(LEVELS):
            name, below = self.level_name(level), self.level_name(level - 1) if level else DUE
            skipped = "*." * (LEVELS - 1 - level)
            arguments = self._handing_on(self.ttl(level), below)
            yield "exchange_declare", {"exchange": name, "exchange_type": "topic", "durable": True}
            yield "queue_declare", {"queue": name, "durable": True, "arguments": arguments}
            yield (
                "exchange_bind",
                {"destination": below, "source": name, "routing_key": f"{skipped}0.#"},
            )
            yield "queue_bind", {"queue": name, "exchange": name, "routing_key": f"{skipped}1.#"}
        yield (
            "exchange_declare",
            {"exchange": self.levels_ready, "exchange_type": "fanout", "durable": True},
        )

    @property
    def levels_ready(self) -> str:
        """An exchange that is declared when all the levels are there."""
        return self.level_name(LEVELS)

    def held(self, queue: str, *, stay: int, gone: int) -> dict[str, Any]:
        """The arguments of a queue that gives to `queue` what nobody holds for `stay` ms, and goes after `gone` ms of disuse."""
        return self._handing_on(stay, "") | {"x-expires": gone, "x-dead-letter-routing-key": queue}

    def _handing_on(self, after: int, exchange: str) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "x-message-ttl": after,
            "x-dead-letter-exchange": exchange,
            **self._ours(),
        }
        if self.is_quorum:
            # Only so does a quorum queue keep a message until the next queue has it.
            arguments |= {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
        return arguments

    def _ours(self) -> dict[str, Any]:
        # RabbitMQ 4 drops, unless it is told otherwise, what was looked at and put back 20 times.
        return {"x-queue-type": "quorum", "x-delivery-limit": OFTEN} if self.is_quorum else {}


def digest(queue: str) -> str:
    """A word of a routing key that stands for a queue, whatever is in its name."""
    return hashlib.blake2s(queue.encode(errors="surrogatepass"), digest_size=10).hexdigest()


def carry_out(channel: Channel, steps: Iterator[Step], timeout: float) -> None:
    """Declare it all, one step after the other, in one go.

    Raises:
        LinkLost, ChannelLost: some of it may be declared; declaring again is safe.
    """
    remaining = list(steps)

    def begin(future: Future[Any]) -> None:
        for index, (method, arguments) in enumerate(remaining):
            last = index == len(remaining) - 1
            done: Callable[[object], object] = (
                (lambda _: settle(future, None)) if last else _nothing
            )
            getattr(channel.raw, method)(callback=done, **arguments)

    if remaining:
        channel.ask(begin, timeout)


def _nothing(_: object) -> None:
    pass

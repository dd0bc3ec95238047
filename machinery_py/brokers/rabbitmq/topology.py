"""Declarations on RabbitMQ: Go Machinery's where Go has them, ours where Go loses messages.

The exchanges and queues are listed in connections/rabbitmq/queues.py.

A delayed message carries its delay in ticks as a binary number in its routing key: level n holds
it for TICK · 2ⁿ if bit n is set, and passes it on to level n-1 if not. There are as many queues
as bits, whatever the delays; nothing waits behind another message, since all in a level wait
equally long; and no queue expires.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from machinery_py.config.sections import AMQPConfig
from machinery_py.connections.rabbitmq.io_thread import Channel, resolve
from machinery_py.connections.rabbitmq.queues import CONTROL, DUE, PAUSED, PAUSED_SINK
from machinery_py.errors import PublishRefused, for_good
from machinery_py.texts import quoted

LEVELS = 33  # the longest delay is 2³³ - 1 ticks: 13 years
TICK = 0.05  # seconds; a delayed message comes so late at most, and never early
LONGEST_NAME = 255  # bytes
OFTEN = 1_000_000_000  # deliveries of a message in a quorum queue; -1, no limit, needs RabbitMQ 4

#: One call of a method of pika's channel: its name and its arguments.
Step = tuple[str, dict[str, Any]]


class Topology:
    """Names and declarations for the queues of one configuration. Asks no server."""

    def __init__(self, config: AMQPConfig, default_queue: str) -> None:
        self.config = config
        self.default_queue = default_queue
        self.is_quorum: bool = config.queue_declare_args.get("x-queue-type") == "quorum"
        self.limits_length: bool = bool(
            {"x-max-length", "x-max-length-bytes"} & config.queue_declare_args.keys()
        )
        self.rejects: bool = config.queue_declare_args.get("x-overflow") == "reject-publish"
        # Quorum queues as well, or all of a cluster would stand still when the node is gone that
        # has these.
        self.registry: str = self._named("queues")
        self.workers: str = self._named("workers")

    def ttl(self, level: int) -> int:
        """Milliseconds that a message lies in a level."""
        return int(TICK * 1000) << level

    # Names

    def queue_of(self, name: str) -> str:
        """Return the queue of a route: Go writes the binding key for the default queue."""
        if name == self.config.binding_key and self.routes_by_name:
            return self.default_queue
        return name or self.default_queue

    @property
    def routes_by_name(self) -> bool:
        """Whether a message reaches the queue whose name is its routing key."""
        return self.config.exchange_type == "direct"

    def dead_queue(self, queue: str) -> str:
        name = f"machinery.dead.{queue}"
        return name if len(name.encode()) <= LONGEST_NAME else f"machinery.dead.{digest(queue)}"

    def level_name(self, level: int) -> str:
        return f"{self._named('delay')}.{level}"

    def _named(self, what: str) -> str:
        """Return the name of a queue of ours: another one where queues are quorum queues."""
        return f"machinery.{what}.quorum" if self.is_quorum else f"machinery.{what}"

    def delay_route(self, queue: str, delay: float) -> tuple[str, str]:
        """Return exchange and routing key for a delay of so many seconds."""
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

    def steps(self, kind: str, queue: str) -> list[Step]:
        """Return the declarations of one kind: common, levels; or queue, due, dead of a queue."""
        match kind:
            case "common":
                return [self.exchange(), *self.common()]
            case "queue":
                return self.queue(queue)
            case "due":  # the way of delayed messages to a queue
                key = f"#.{digest(queue)}"
                return [("queue_bind", {"queue": queue, "exchange": DUE, "routing_key": key})]
            case "dead":
                return [_queue(self.dead_queue(queue), self._ours())]
            case _:
                return self.levels()

    def exchange(self) -> Step:
        return _exchange(self.config.exchange, self.config.exchange_type)

    def queue(self, queue: str) -> list[Step]:
        """Return the declarations that a worker or a sender needs for a queue."""
        problem = ""
        if len(queue.encode(errors="replace")) > LONGEST_NAME:
            problem = f"its name is longer than {LONGEST_NAME} bytes"
        elif "\r" in queue or "\n" in queue:
            # RabbitMQ drops them from names of queues, and not from routing keys: no message
            # would arrive.
            problem = "a line break is in its name (give it another)"
        if problem:
            raise for_good(PublishRefused(f"queue {quoted(queue)}: {problem}"))
        keys = [queue, self.config.binding_key] if queue == self.default_queue else [queue]
        address = {"queue": queue, "exchange": self.config.exchange}
        arguments = dict(self.config.queue_binding_args)
        return [
            _queue(queue, dict(self.config.queue_declare_args)),
            *(
                ("queue_bind", {**address, "routing_key": key, "arguments": arguments})
                for key in dict.fromkeys(keys)
            ),
        ]

    def common(self) -> list[Step]:
        """Return the declarations of ours that all queues share."""
        sink = self._named("paused")
        return [
            _queue(self.registry, self._ours()),
            _queue(self.workers, self._ours()),
            _exchange(CONTROL, "fanout"),
            _exchange(PAUSED, "direct"),
            _exchange(PAUSED_SINK, "fanout"),
            _queue(sink, {"x-max-length": 1, **self._ours()}),
            ("queue_bind", {"queue": sink, "exchange": PAUSED_SINK}),
        ]

    def pause(self, queue: str, *, shut: bool) -> Step:
        """Set or take away the mark of a paused queue: a binding, known to all nodes."""
        method = "exchange_bind" if shut else "exchange_unbind"
        return method, {"destination": PAUSED_SINK, "source": PAUSED, "routing_key": digest(queue)}

    def levels(self) -> list[Step]:
        """Return the declarations of all levels, the lowest first; `levels_ready` comes last."""
        steps = [_exchange(DUE, "topic")]
        for level in range(LEVELS):
            name, below = self.level_name(level), self.level_name(level - 1) if level else DUE
            skipped = "*." * (LEVELS - 1 - level)
            steps += [
                _exchange(name, "topic"),
                _queue(name, self._handing_on(self.ttl(level), below)),
                (
                    "exchange_bind",
                    {"destination": below, "source": name, "routing_key": f"{skipped}0.#"},
                ),
                ("queue_bind", {"queue": name, "exchange": name, "routing_key": f"{skipped}1.#"}),
            ]
        return [*steps, _exchange(self.levels_ready, "fanout")]

    @property
    def levels_ready(self) -> str:
        """An exchange that is declared when all the levels are there."""
        return self.level_name(LEVELS)

    def held(self, queue: str, *, stay: int, gone: int) -> dict[str, Any]:
        """Return the arguments of a queue that hands on to `queue` what is not held for `stay` ms.

        It is removed after `gone` ms of disuse.
        """
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
    """Return a word of a routing key for a queue, whatever is in its name."""
    return hashlib.blake2s(queue.encode(errors="surrogatepass"), digest_size=10).hexdigest()


def _exchange(name: str, kind: str) -> Step:
    return "exchange_declare", {"exchange": name, "exchange_type": kind, "durable": True}


def _queue(name: str, arguments: Mapping[str, Any]) -> Step:
    return "queue_declare", {"queue": name, "durable": True, "arguments": arguments}


def declare(channel: Channel, steps: Sequence[Step], timeout: float) -> None:
    """Carry out the steps in one go, in their order.

    Raises:
        AmqpConnectionLost, ChannelLost: some of it may be declared; declaring again is safe.
    """

    def begin(future: Future[Any]) -> None:
        for method, arguments in steps[:-1]:
            getattr(channel.raw, method)(callback=_ignore, **arguments)
        method, arguments = steps[-1]
        getattr(channel.raw, method)(callback=lambda _: resolve(future, None), **arguments)

    if steps:
        channel.ask(begin, timeout)


def _ignore(_: object) -> None:
    pass

"""Publishing of the AMQP broker: topology first, then all messages at once, each with its confirm; and what is known of a try.

crash or loss                          what there is
before anything is written             nothing: refused
written, no confirm                    unknown. A repeat with the same token in this process publishes what was not
                                       confirmed; what was stored all the same is there twice, under one UUID
returned (no queue takes it)           nothing; the topology is declared again, and it is published once more
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from machinery_py.brokers.rabbitmq.messages import LATE
from machinery_py.brokers.rabbitmq.topology import Topology, carry_out, digest
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.rabbitmq.client import AmqpDriver, explained, largest_of, passes
from machinery_py.connections.rabbitmq.confirms import End
from machinery_py.connections.rabbitmq.frames import AddressedMessage
from machinery_py.connections.rabbitmq.io_thread import AmqpConnectionLost, ChannelLost
from machinery_py.connections.rabbitmq.publisher import Publisher
from machinery_py.connections.rabbitmq.queues import PAUSED
from machinery_py.errors import BrokerUnavailable, PublishRefused, PublishUnknown, for_good

SMALLER = "send an id and load the data in the task, or raise max_message_size in rabbitmq.conf"
SIZE_KNOWN = 60.0  # seconds that a max_message_size is believed; somebody may raise it
TOKEN_LIFE = 600.0  # seconds; longer than anybody repeats a submission


class Addressed(msgspec.Struct, frozen=True, gc=False):
    """A parcel, and what must be there for it: the queue (or ""), the way of delayed messages to it, its dead letters' queue."""

    parcel: AddressedMessage
    queue: str = ""
    delayed: bool = False
    dead: bool = False


class Attempt:
    """Progress of a submission that may be repeated."""

    def __init__(self, count: int, born: float) -> None:
        self.lock = threading.Lock()
        self.left = list(range(count))  # not confirmed
        self.stored = False  # some of it was, or may have been
        self.born = born


class Attempts:
    """The submissions of this process, by token. They are forgotten after TOKEN_LIFE."""

    def __init__(self) -> None:
        self._known: dict[str, Attempt] = {}
        self._lock = ForkLock()

    def of(self, token: str, count: int, now: float) -> Attempt:
        if not token:
            return Attempt(count, now)
        with self._lock:
            while (
                self._known
                and self._known[oldest := next(iter(self._known))].born <= now - TOKEN_LIFE
            ):
                del self._known[oldest]
            return self._known.setdefault(token, Attempt(count, now))


class Sending:
    """Publishes on the driver's publisher. May be used from any thread."""

    def __init__(self, driver: AmqpDriver, topology: Topology) -> None:
        self._driver = driver
        self._topology = topology
        self._lock = ForkLock(reentrant=True)
        self._declared_on: Publisher | None = None
        self._ready: set[tuple[str, str]] = set()
        self._registered: set[tuple[str, str]] = set()
        self._largest, self._known_until = (
            sys.maxsize,
            0.0,
        )  # bytes of a body; the server tells when it refuses one

    def send(self, addressed: Sequence[Addressed], attempt: Attempt | None = None) -> None:
        """Store it all; of an attempt that was made before, what is left.

        Raises:
            PublishRefused: nothing was stored, or what is not among its `left`.
            PublishUnknown: some of it may have been.
        """
        attempt = attempt or Attempt(len(addressed), 0.0)
        self._round(addressed, attempt)
        if attempt.left:
            # Returned: a queue or a binding was deleted behind our back.
            self.forget()
            self._round(addressed, attempt, last=True)

    def _round(
        self, addressed: Sequence[Addressed], attempt: Attempt, *, last: bool = False
    ) -> None:
        publisher = self._open()
        todo = attempt.left
        wanted = [addressed[index] for index in todo]
        self._check_sizes(wanted, attempt)
        with self._refusing():
            news = self.prepare(publisher, wanted)
        # What is new is told to the registry with the same stroke.
        batch = publisher.publish([*(one.parcel for one in wanted), *map(self._note, news)])
        ends = batch.ends[: len(todo)]
        self._learn_size(batch.failure, wanted, attempt)
        self._registered.update(
            news if all(end is End.CONFIRMED for end in batch.ends[len(todo) :]) else ()
        )
        attempt.left = [
            index for index, end in zip(todo, ends, strict=True) if end is not End.CONFIRMED
        ]
        attempt.stored |= any(end in (End.CONFIRMED, End.UNKNOWN) for end in ends)
        if End.REFUSED in ends and (self._topology.is_quorum or not self._topology.limits_length):
            self._driver.renew_publisher(publisher)
        self._judge(ends, [one.parcel.key for one in wanted], attempt, batch.failure, last=last)

    def _learn_size(
        self, failure: Exception | None, wanted: Sequence[Addressed], attempt: Attempt
    ) -> None:
        """Raise if one of these was too large: the server has ended the channel, for other threads' messages as well.

        Of several, those before it may be stored, and those behind it are not.
        """
        largest = largest_of(failure)
        if largest is not None:
            self._largest, self._known_until = largest, self._driver.clock.monotonic() + SIZE_KNOWN
            attempt.stored |= len(wanted) > 1
            self._check_sizes(wanted, attempt)

    def _check_sizes(self, wanted: Sequence[Addressed], attempt: Attempt) -> None:
        """Refuse what the server is known to refuse, and would end the channel for."""
        size = max((len(one.parcel.body) for one in wanted), default=0)
        if size > self._largest and self._driver.clock.monotonic() < self._known_until:
            key = next(
                one.queue or one.parcel.key for one in wanted if len(one.parcel.body) == size
            )
            text = (
                f"RabbitMQ at {self._driver.place}: a message for {key!r} has {size:,} bytes, "
                f"more than its max_message_size = {self._largest:,} ({SMALLER})"
            )
            raise for_good(PublishUnknown(text) if attempt.stored else PublishRefused(text))

    def _judge(
        self,
        ends: Sequence[End],
        keys: Sequence[str],
        attempt: Attempt,
        failure: Exception | None,
        *,
        last: bool,
    ) -> None:
        place, total = self._driver.place, len(ends)
        if End.UNKNOWN in ends:
            self.forget()
            why = str(failure) if failure else f"no confirm within {self._driver.timeout:g} s"
            raise PublishUnknown(
                f"RabbitMQ at {place}: {ends.count(End.UNKNOWN)} of {total} messages may or may not have been stored: {why}"
            ) from failure
        if End.REFUSED in ends:
            text = f"RabbitMQ at {place} took no message for {keys[ends.index(End.REFUSED)]!r}: its queue "
            text += (
                "is full (x-max-length)"
                if self._topology.limits_length
                else "has no leader just now, or is full by a policy"
            )
            refusal = (
                PublishRefused(text) if self._topology.limits_length else BrokerUnavailable(text)
            )
            raise self._but(attempt, refusal)
        if last and attempt.left:
            key = keys[ends.index(End.RETURNED)]
            text = (
                f"RabbitMQ at {place}: exchange {self._topology.config.exchange!r} "
                f"({self._topology.config.exchange_type}) leads to no queue for the routing key {key!r}"
            )
            raise for_good(self._but(attempt, PublishRefused(text)))

    @staticmethod
    def _but(attempt: Attempt, refusal: PublishRefused) -> PublishRefused | PublishUnknown:
        """The error for a part of what was to be sent: the rest is stored."""
        error = PublishUnknown(str(refusal)) if attempt.stored else refusal
        error.left = frozenset(attempt.left)
        return error

    def _open(self) -> Publisher:
        publisher = self._driver.publisher
        if publisher.link.blocked and not publisher.link.wait_unblocked(self._driver.timeout):
            raise BrokerUnavailable(
                f"RabbitMQ at {self._driver.place} takes no messages at present: {publisher.link.blocked}"
            )
        return publisher

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn errors inside into refusals: nothing was published yet."""
        try:
            yield
        except ChannelLost as error:
            if passes(error):
                raise BrokerUnavailable(
                    f"RabbitMQ at {self._driver.place}: {explained(error)}"
                ) from error
            raise PublishRefused(f"RabbitMQ at {self._driver.place}: {explained(error)}") from error
        except AmqpConnectionLost as error:
            raise BrokerUnavailable(f"RabbitMQ at {self._driver.place}: {error}") from error

    # Topology

    def forget(self) -> None:
        """Declare everything again before the next message."""
        with self._lock:
            self._ready.clear()

    def prepare(
        self, publisher: Publisher, addressed: Iterable[Addressed]
    ) -> list[tuple[str, str]]:
        """Declare what the parcels need and is not known to be there; what of it the registry has to be told.

        Raises:
            AmqpConnectionLost, ChannelLost: as Channel.rpc. A refused declaration ends the publishing channel.
        """
        wanted: dict[tuple[str, str], None] = {("common", ""): None}
        for one in addressed:
            if one.queue and (
                self._topology.routes_by_name
                or one.queue == self._topology.default_queue
                or one.dead
            ):
                wanted[("queue", one.queue)] = None
            if one.delayed:
                wanted |= {("levels", ""): None, ("due", one.queue): None}
            if one.dead:
                wanted[("dead", one.queue)] = None
        with self._lock:
            if self._declared_on is not publisher:
                self._ready.clear()
                self._declared_on = publisher
            missing = [what for what in wanted if what not in self._ready]
            if missing:
                self._declare(publisher, missing)
                self._ready.update(missing)
        return [
            what for what in wanted if what[0] in ("queue", "due") and what not in self._registered
        ]

    def _note(self, what: tuple[str, str]) -> AddressedMessage:
        kind, name = what
        return AddressedMessage(
            "", self._topology.registry, name.encode(), {LATE: True} if kind == "due" else {}
        )

    def _declare(self, publisher: Publisher, missing: Sequence[tuple[str, str]]) -> None:
        """On a channel of its own: what the server refuses must not end the one with messages on their way."""
        channel = publisher.link.channel(self._driver.timeout)
        for kind, name in missing:
            match kind:
                case "common":
                    steps = [*self._topology.exchange(), *self._topology.common()]
                case "queue":
                    steps = list(self._topology.queue(name))
                case "due":
                    steps = list(self._topology.due(name))
                case "dead":
                    steps = list(self._topology.dead(name))
                case _:
                    steps = [] if self._has_levels(publisher) else list(self._topology.levels())
            try:
                carry_out(channel, iter(steps), self._driver.timeout)
            except ChannelLost as error:
                if kind not in ("queue", "due", "dead") or passes(error):
                    raise  # it is in the way of every message
                what = "dead letters of queue" if kind == "dead" else "queue"
                text = f"RabbitMQ at {self._driver.place}: {what} {name!r} cannot be used: {explained(error)}"
                raise for_good(PublishRefused(text)) from error
        channel.close()

    def _has_levels(self, publisher: Publisher) -> bool:
        """A hundred declarations can be saved."""
        channel = publisher.link.channel(self._driver.timeout)
        try:
            channel.rpc(
                "exchange_declare",
                exchange=self._topology.levels_ready,
                passive=True,
                timeout=self._driver.timeout,
            )
        except ChannelLost:
            return False
        channel.close()
        return True

    def note(self, queues: Iterable[str]) -> None:
        """Tell the registry of these, if this process has not yet.

        Raises:
            PublishRefused, PublishUnknown, BrokerUnavailable: a later message to the queue tells it.
        """
        new = [what for queue in queues if (what := ("queue", queue)) not in self._registered]
        if new:
            self.send([Addressed(self._note(what)) for what in new])
            self._registered.update(new)

    def paused(self, queues: Sequence[str]) -> frozenset[str]:
        """Return the queues that bear the mark of paused ones.

        Raises:
            BrokerUnavailable: it is not known.
        """
        publisher = self._open()
        with self._refusing():
            self.prepare(publisher, [])
        batch = publisher.publish(
            [AddressedMessage(PAUSED, digest(queue), b"", {}) for queue in queues]
        )
        if End.UNKNOWN in batch.ends:
            self.forget()
            raise BrokerUnavailable(
                f"RabbitMQ at {self._driver.place}: it cannot be told which queues are paused: "
                f"{batch.failure or 'no answer'}"
            )
        return frozenset(
            queue for queue, end in zip(queues, batch.ends, strict=True) if end is not End.RETURNED
        )

    def declare(self, queues: Sequence[str]) -> None:
        """Make everything that messages to these queues will need, now.

        Raises:
            PublishRefused, BrokerUnavailable: some of it may be there; doing it again is safe.
        """
        self.forget()
        wanted = [
            Addressed(AddressedMessage("", "", b"", {}), queue, delayed=True, dead=True)
            for queue in queues
        ]
        with self._refusing():
            self.prepare(self._open(), wanted)
        self.note(queues)

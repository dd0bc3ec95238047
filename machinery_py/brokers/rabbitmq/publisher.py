"""Publishing to RabbitMQ: declarations first, then all messages at once, each with its confirm.

crash or loss                   what there is
before anything is written      nothing: refused
written, no confirm             unknown. A repeat with the same token in this process publishes
                                what was not confirmed; if that was stored all the same, it is
                                there twice, under one UUID
returned (no queue takes it)    nothing; all is declared again, and it is published once more
"""

from __future__ import annotations

import datetime as dt
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from machinery_py.bounds import TOKEN_LIFE
from machinery_py.brokers.base import Message
from machinery_py.brokers.rabbitmq.messages import (
    DIED,
    ERROR,
    ETA,
    LATE,
    LETTER,
    QUEUE,
    REASON,
    Publication,
    ReceivedMessage,
    addressed,
)
from machinery_py.brokers.rabbitmq.topology import Topology, declare, digest
from machinery_py.clock import micros
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.rabbitmq.client import (
    NOT_FOUND,
    AmqpDriver,
    explained,
    largest_of,
    passes,
)
from machinery_py.connections.rabbitmq.frames import AddressedMessage
from machinery_py.connections.rabbitmq.io_thread import AmqpConnectionLost, ChannelLost
from machinery_py.connections.rabbitmq.publisher import Batch, Confirmation, Publisher
from machinery_py.connections.rabbitmq.queues import PAUSED
from machinery_py.errors import BrokerUnavailable, PublishRefused, PublishUnknown, for_good
from machinery_py.texts import MAX_ERROR, cut, printable

SMALLER = "send an id and load the data in the task, or raise max_message_size in rabbitmq.conf"
SIZE_KNOWN = 60.0  # seconds that a max_message_size is believed; somebody may raise it


class PublishAttempt:
    """Progress of a submission that may be repeated."""

    def __init__(self, count: int, born: float) -> None:
        self.lock: Final = threading.Lock()
        self.left: list[int] = list(range(count))  # not confirmed
        self.stored = False  # some of it was, or may have been
        self.born = born


class Sending(NamedTuple):
    """Messages on their way.

    Attributes:
        news: what the registry is told of in the same batch, behind them.
    """

    publisher: Publisher
    publications: Sequence[Publication]
    attempt: PublishAttempt
    news: Sequence[tuple[str, str]]
    batch: Batch

    def end(self) -> None:
        """Take no more notice of them."""
        self.publisher.end(self.batch)


class PublishAttempts:
    """The submissions of this process, by token. They are forgotten after TOKEN_LIFE."""

    def __init__(self) -> None:
        self._known: dict[str, PublishAttempt] = {}
        self._lock = ForkLock()

    def of(self, token: str, count: int, now: float) -> PublishAttempt:
        if not token:
            return PublishAttempt(count, now)
        with self._lock:
            known = self._known
            while known and known[oldest := next(iter(known))].born <= now - TOKEN_LIFE:
                del known[oldest]
            return known.setdefault(token, PublishAttempt(count, now))

    def stored(self, token: str) -> bool:
        """Return whether a submission may have been stored, in part at least."""
        attempt = self._known.get(token)
        return attempt is not None and attempt.stored


class MessagePublisher:
    """Declares and publishes on the driver's publishing connection. May be used from any thread."""

    def __init__(self, driver: AmqpDriver, topology: Topology) -> None:
        self._driver = driver
        self._topology = topology
        self._lock = ForkLock(reentrant=True)
        self._declared_on: Publisher | None = None
        self._declared: set[tuple[str, str]] = set()
        self._registered: set[tuple[str, str]] = set()
        self._largest = sys.maxsize  # bytes of a body; the server tells when it refuses one
        self._largest_until = 0.0

    def send(self, wanted: Sequence[Publication], attempt: PublishAttempt | None = None) -> None:
        """Store all messages; of an attempt that was made before, those that are left.

        Raises:
            PublishRefused: nothing was stored, or only messages that are not among its `left`.
            PublishUnknown: some of it may have been.
        """
        self.wait(self.begin(wanted, attempt or PublishAttempt(len(wanted), 0.0)))

    def begin(self, publications: Sequence[Publication], attempt: PublishAttempt) -> Sending:
        """Send the messages of an attempt that are left on their way; the caller must `end` that.

        Raises:
            PublishRefused, PublishUnknown: as `send`; nothing is on its way.
        """
        publisher = self._open()
        wanted = [publications[index] for index in attempt.left]
        self._check_sizes(wanted, attempt)
        with self._refusing():
            news = self._declare(publisher, [need for one in wanted for need in one.needs])
        # The registry is told of new queues in the same batch.
        batch = publisher.begin([*(one.message for one in wanted), *map(self._note, news)])
        return Sending(publisher, publications, attempt, news, batch)

    def wait(self, sending: Sending) -> None:
        """Return when all is stored. Raises as `send`."""
        self._finish(sending)
        if sending.attempt.left:
            # Returned: a queue or a binding was deleted behind our back.
            self._forget()
            self._finish(self.begin(sending.publications, sending.attempt), last=True)

    def _finish(self, sending: Sending, *, last: bool = False) -> None:
        publisher, publications, attempt, news, batch = sending
        try:
            publisher.wait(batch)
        finally:
            sending.end()
        todo = attempt.left
        wanted = [publications[index] for index in todo]
        ends, noted = batch.ends[: len(todo)], batch.ends[len(todo) :]
        largest = largest_of(batch.failure)
        if largest is not None:
            # The server has ended the channel, for other threads' messages as well. Of several
            # messages those before the one that was too large may be stored, and those behind it
            # are not.
            now = self._driver.clock.monotonic()
            self._largest, self._largest_until = largest, now + SIZE_KNOWN
            attempt.stored |= len(wanted) > 1
            self._check_sizes(wanted, attempt)
        if all(end is Confirmation.CONFIRMED for end in noted):
            self._registered.update(news)
        attempt.left = [
            index
            for index, end in zip(todo, ends, strict=True)
            if end is not Confirmation.CONFIRMED
        ]
        attempt.stored |= any(end in (Confirmation.CONFIRMED, Confirmation.UNKNOWN) for end in ends)
        if Confirmation.REFUSED in ends and (
            self._topology.is_quorum or not self._topology.limits_length
        ):
            self._driver.renew_publisher(publisher)
        keys = [one.message.key for one in wanted]
        self._raise_for(ends, keys, attempt, batch.failure, last=last)

    def _check_sizes(self, wanted: Sequence[Publication], attempt: PublishAttempt) -> None:
        """Refuse a message that is known to be too large: the server would end the channel."""
        size = max((len(one.message.body) for one in wanted), default=0)
        if size > self._largest and self._driver.clock.monotonic() < self._largest_until:
            [one, *_] = [one for one in wanted if len(one.message.body) == size]
            queue = one.needs[-1][1] if one.needs else one.message.key
            text = (
                f"{self._place}: a message for {queue!r} has {size:,} bytes, "
                f"more than its max_message_size = {self._largest:,} ({SMALLER})"
            )
            raise for_good(PublishUnknown(text) if attempt.stored else PublishRefused(text))

    @property
    def _place(self) -> str:
        return f"RabbitMQ at {self._driver.place}"

    def _raise_for(
        self,
        ends: Sequence[Confirmation],
        keys: Sequence[str],
        attempt: PublishAttempt,
        failure: Exception | None,
        *,
        last: bool,
    ) -> None:
        if Confirmation.UNKNOWN in ends:
            self._forget()
            why = str(failure) if failure else f"no confirm within {self._driver.timeout:g} s"
            raise PublishUnknown(
                f"{self._place}: {ends.count(Confirmation.UNKNOWN)} of {len(ends)} messages may or"
                f" may not have been stored: {why}"
            ) from failure
        if Confirmation.REFUSED in ends:
            is_limited = self._topology.limits_length
            full = "is full (x-max-length)"
            why = full if is_limited else "has no leader just now, or is full by a policy"
            key = keys[ends.index(Confirmation.REFUSED)]
            text = f"{self._place} took no message for {key!r}: its queue {why}"
            raise _partly(attempt, PublishRefused(text) if is_limited else BrokerUnavailable(text))
        if last and attempt.left:
            config, key = self._topology.config, keys[ends.index(Confirmation.RETURNED)]
            text = (
                f"{self._place}: exchange {config.exchange!r} ({config.exchange_type}) "
                f"leads to no queue for the routing key {key!r}"
            )
            raise for_good(_partly(attempt, PublishRefused(text)))

    def _open(self) -> Publisher:
        publisher = self._driver.publisher
        if publisher.link.blocked and not publisher.link.wait_unblocked(self._driver.timeout):
            raise BrokerUnavailable(
                f"{self._place} takes no messages at present: {publisher.link.blocked}"
            )
        return publisher

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn errors inside into refusals: nothing was published yet."""
        try:
            yield
        except ChannelLost as error:
            kind = BrokerUnavailable if passes(error) else PublishRefused
            raise kind(f"{self._place}: {explained(error)}") from error
        except AmqpConnectionLost as error:
            raise BrokerUnavailable(f"{self._place}: {error}") from error

    # Publications

    def to_queue(
        self,
        message: Message | ReceivedMessage,
        queue: str,
        headers: dict[str, Any],
        *,
        eta: dt.datetime | None = None,
        exchange: str = "",
    ) -> Publication:
        """Return a message for a queue by this exchange; through the delay levels until `eta`."""
        key, delay = queue, 0.0
        if eta is not None:
            delay = max(0.0, (micros(eta) - micros(self._driver.clock.now())) / 1e6)
        if eta is not None and delay:
            headers |= {QUEUE: queue, ETA: micros(eta)}
            exchange, key = self._topology.delay_route(queue, delay)
        topology, needs = self._topology, list[tuple[str, str]]()
        if topology.routes_by_name or queue == topology.default_queue:
            needs.append(("queue", queue))
        if delay:
            needs += (("levels", ""), ("due", queue))
        return Publication(addressed(exchange, key, message, headers), needs)

    def to_dead_letters(
        self,
        message: Message | ReceivedMessage,
        queue: str,
        headers: dict[str, Any],
        *,
        reason: str,
        error: str,
        letter: str,
    ) -> Publication:
        """Return a dead letter of a queue, whose id is `letter`: a repeat is one letter."""
        headers |= {
            QUEUE: queue,
            REASON: printable(cut(reason, MAX_ERROR)),  # all headers must fit into one frame
            ERROR: printable(cut(error, MAX_ERROR)),
            DIED: micros(self._driver.clock.now()),
            LETTER: letter,
        }
        key, needs = self._topology.dead_queue(queue), (("queue", queue), ("dead", queue))
        return Publication(addressed("", key, message, headers), needs)

    # Declarations

    def _forget(self) -> None:
        """Declare everything again before the next message."""
        with self._lock:
            self._declared.clear()

    def _declare(
        self, publisher: Publisher, needs: Iterable[tuple[str, str]]
    ) -> list[tuple[str, str]]:
        """Declare what is not known to be there; return what the registry must be told.

        Raises:
            AmqpConnectionLost, ChannelLost: as Channel.rpc. A refused declaration ends the channel.
        """
        wanted = dict.fromkeys([("common", ""), *needs])
        with self._lock:
            if self._declared_on is not publisher:
                self._declared.clear()
                self._declared_on = publisher
            missing = [what for what in wanted if what not in self._declared]
            if missing:
                self._declare_all(publisher, missing)
                self._declared.update(missing)
        return [
            what for what in wanted if what[0] in ("queue", "due") and what not in self._registered
        ]

    def _declare_all(self, publisher: Publisher, missing: Sequence[tuple[str, str]]) -> None:
        """Use a channel of its own: a refused step must not end the one that publishes."""
        channel = publisher.link.channel(self._driver.timeout)
        for kind, name in missing:
            if kind == "levels" and self._has_levels(publisher):
                continue  # saves a hundred declarations
            try:
                declare(channel, self._topology.steps(kind, name), self._driver.timeout)
            except ChannelLost as error:
                if not name or passes(error):
                    raise  # it is in the way of every message
                what = "dead letters of queue" if kind == "dead" else "queue"
                text = f"{self._place}: {what} {name!r} cannot be used: {explained(error)}"
                raise for_good(PublishRefused(text)) from error
        channel.close()

    def _has_levels(self, publisher: Publisher) -> bool:
        timeout = self._driver.timeout
        channel = publisher.link.channel(timeout)
        ready = self._topology.levels_ready
        try:
            channel.rpc("exchange_declare", exchange=ready, passive=True, timeout=timeout)
        except ChannelLost:
            return False
        channel.close()
        return True

    def declare(self, queues: Sequence[str]) -> None:
        """Make everything that messages to these queues will need, now.

        Raises:
            PublishRefused, BrokerUnavailable: some of it may be there; doing it again is safe.
        """
        self._forget()
        kinds = ("queue", "due", "dead")
        needs = [(kind, queue) for queue in queues for kind in kinds]
        with self._refusing():
            self._declare(self._open(), [("levels", ""), *needs])
        self.register(queues)

    # Registry and marks

    def _note(self, what: tuple[str, str]) -> AddressedMessage:
        kind, name = what
        headers = {LATE: True} if kind == "due" else {}
        return AddressedMessage("", self._topology.registry, name.encode(), headers)

    def register(self, queues: Iterable[str]) -> None:
        """Tell the registry of these queues, if this process has not yet.

        Raises:
            PublishRefused, PublishUnknown, BrokerUnavailable: a later message to the queue tells
            it.
        """
        new = [what for queue in queues if (what := ("queue", queue)) not in self._registered]
        if new:
            self.send([Publication(self._note(what)) for what in new])
            self._registered.update(new)

    def waiting(self, queue: str) -> int:
        """Return how many messages wait in a queue; 0 if there is no such queue.

        Raises:
            BrokerUnavailable: it is not known.
        """
        timeout = self._driver.timeout
        with self._refusing():
            channel = self._open().link.channel(timeout)
            try:
                frame = channel.rpc("queue_declare", queue=queue, passive=True, timeout=timeout)
            except ChannelLost as error:
                if error.code == NOT_FOUND:
                    return 0
                raise
            channel.close()
        return int(frame.method.message_count)

    def paused(self, queues: Sequence[str]) -> frozenset[str]:
        """Return the queues that bear the mark of paused ones.

        Raises:
            BrokerUnavailable: it is not known.
        """
        publisher = self._open()
        with self._refusing():
            self._declare(publisher, [])
        probes = [AddressedMessage(PAUSED, digest(queue), b"", {}) for queue in queues]
        batch = publisher.publish(probes)
        if Confirmation.UNKNOWN in batch.ends:
            self._forget()
            raise BrokerUnavailable(
                f"{self._place}: it cannot be told which queues are paused: "
                f"{batch.failure or 'no answer'}"
            )
        return frozenset(
            queue
            for queue, end in zip(queues, batch.ends, strict=True)
            if end is not Confirmation.RETURNED
        )


def _partly(attempt: PublishAttempt, refusal: PublishRefused) -> PublishRefused | PublishUnknown:
    """Return the error for the messages that are left; it is unknown if others are stored."""
    error = PublishUnknown(str(refusal)) if attempt.stored else refusal
    error.left = frozenset(attempt.left)
    return error

"""The contract of a broker: messages are put, claimed by consumers, and disposed of once.

At every moment a message is in exactly one place: waiting, delayed, held by one consumer, or among
the dead letters. A claim moves it into the consumer's hold. It comes back by itself when the
consumer's process dies.
"""

from __future__ import annotations

import datetime as dt
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from enum import Enum
from typing import Any

import msgspec

from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.brokers.topics import TOPIC_AGE, Subscription, checked_records
from machinery_py.connections.durability import Concern
from machinery_py.errors import DecodeError, Unsupported
from machinery_py.fences import NO_FENCE, Fence, local_fence
from machinery_py.receipts import Receipt
from machinery_py.tasks.signature import Signature
from machinery_py.wire.signatures import decode_signature

UNLIMITED = 2**31 - 1


class BrokerFeatures(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Abilities of a broker. The rest is refused with Unsupported, in words."""

    name: str
    durable: bool = True  # messages survive the end of every process
    shared: bool = True  # other processes can consume from it
    embedded: bool = False  # it needs no server
    priorities: bool = True
    peeking: bool = True  # waiting and delayed messages can be listed without taking them
    pausing: bool = True  # a queue can be paused
    # A token is known to all processes; else to the one that used it, unless a reply was lost.
    deduplicates: bool = True
    whole_batches: bool = True  # nobody sees a part of what one call has put
    exact_limits: bool = False  # `put_within` looks and puts in one step
    fair: bool = False  # tenants take turns in a queue
    keeps_turns: bool = True  # what waited as WAITING goes first, but for half of each claim
    counts_returns: bool = True  # else `Delivery.count` counts the first return alone
    message_groups: bool = False  # Go's BrokerMessageGroupId: strict order within a group
    tells_age: bool = True  # QueueStats.oldest_at is known
    beats: bool = False  # a consumer lives as long as it beats; another process can do so, too
    topics: bool = False  # `broadcast` and `subscribe`
    keeps_topics: bool = False  # a subscription can begin with what was sent before
    forgets_queues: bool = False  # `forget_queue`


class Message(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Bytes on their way to a queue. The app alone knows what they mean.

    Attributes:
        uuid, name: of the task, for listings; empty when the bytes are no signature.
        eta: not handed out before; None or past is at once.
        priority: 0 to 255, the higher first, within one queue.
        parks: how often a worker that did not know the task has put it back.
        races: how often it was put back as RACED.
        tenant: whose turn it takes in a fair queue; None: it waits in the queue's own order.
    """

    uuid: str
    name: str
    queue: str
    body: bytes
    eta: dt.datetime | None = None
    priority: int = 0
    parks: int = 0
    races: int = 0
    tenant: str | None = None


class Delivery(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One handing-over of a message to a consumer.

    Attributes:
        count: how often the message was delivered, with this time; see
            BrokerFeatures.counts_returns.
        fence: greater than that of any delivery before. Given by the broker in the step that makes
            the message this consumer's; one that cannot leaves it to the clock of this machine.
        epoch: the fence that a result backend in another store has given, and which it checks. 0:
            there is none.
        strikes: how many consumers died (or lost their lease) while they ran it; fewer, if nobody
            could see what one of them ran.
        order: its place among the deliveries of the queue, where the fence does not say it: of what
            was moved to a sleeping consumer before others were claimed. 0: its fence says it.
        sent_at: when it was put on the queue, to 0.25 s. None: the broker does not know, of a
            later delivery, of another program's message, or since `Consumer.is_timed` is off.
    """

    body: bytes
    queue: str
    receipt: Receipt
    count: int = 1
    fence: Fence = msgspec.field(default_factory=local_fence)
    epoch: Fence = NO_FENCE
    strikes: int = 0
    parks: int = 0
    races: int = 0
    priority: int = 0
    order: int = 0
    sent_at: dt.datetime | None = None

    @property
    def redelivered(self) -> bool:
        return self.count > 1


def mark_of(delivery: Delivery) -> str:
    """Return a delivery's name in a backend, which tells our own repeat from others' work."""
    return f"{delivery.receipt!s}/{delivery.count}"


# Reason of a Fate.LATER that does not count as parked: the worker knows the task, and it must wait
# its turn.
WAITING = "waiting"
# The same, and races + 1: its transaction was rolled back. Of stores that have transactions.
RACED = "raced"


class Fate(Enum):
    """Fate of a held message."""

    DONE = "done"  # it is gone
    BACK = "back"  # it goes back to where it was in its queue; nobody is blamed
    LATER = "later"  # it waits until the disposal's eta; parks + 1, unless it is WAITING or RACED
    DEAD = "dead"  # it goes to the dead letters


class DeliveryEnd(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of a delivery. `uuid`, `name`, `reason` and `error` are kept with a dead letter."""

    fate: Fate = Fate.DONE
    eta: dt.datetime | None = None
    reason: str = ""
    error: str = ""
    uuid: str = ""
    name: str = ""


class Disposal(DeliveryEnd, frozen=True, kw_only=True, gc=False):
    """The end of this delivery."""

    delivery: Delivery


def size_of_message(message: Message) -> int:
    """Return about how many bytes a message takes."""
    return len(message.body)


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message that nobody could deal with, with its original bytes."""

    id: str
    uuid: str
    name: str
    queue: str
    body: bytes
    reason: str
    error: str = ""
    strikes: int = 0
    died_at: dt.datetime


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A consumer that has registered with the broker.

    Attributes:
        stalled: its process lives, and has not beaten by itself for a lease: a task holds the
            interpreter. False where that cannot be seen.
    """

    session: str
    name: str
    host: str
    pid: int
    queues: Sequence[str]
    started_at: dt.datetime
    beat_at: dt.datetime
    holding: int = 0
    stalled: bool = False


class QueueStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The message counts of a queue.

    Attributes:
        running: messages that consumers hold, prefetched ones, too.
        oldest_at: when its oldest waiting message was put there.
        paused: nothing is claimed from it.
    """

    queue: str
    waiting: int = 0
    running: int = 0
    delayed: int = 0
    dead: int = 0
    oldest_at: dt.datetime | None = None
    paused: bool = False


class Consumer(ABC):
    """One worker's hold on some queues.

    `receive` belongs to one thread; the rest may be called from any.

    Attributes:
        session: the name under which the broker knows it; a `beat` that is False gives it another.
            "" if it has none.
        is_timed: whether deliveries need their `sent_at`: some brokers look for it only then. May
            be set at any time, for the claims to come.
        none_revoked: the last claim saw that this store knows of no revoked task; False says
            nothing.
    """

    session: str = ""
    is_timed: bool = True
    none_revoked: bool = False

    @abstractmethod
    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        """Claim up to `limit` waiting messages: first those of the first queue, oldest first.

        Returns at once with what there is. Only if there is nothing, it waits up to `timeout`
        seconds (or until `wake`). `order` has all of the consumer's queues in the order of this
        claim, and others are left out; empty: as they were given to `consume` or `serve`. A paused
        queue is treated as an empty one, and `resume` wakes a call that waits.
        """

    def serve(self, queues: Sequence[str]) -> None:
        """Claim from these queues, from the next claim on, in place of those so far.

        A waiting `receive` is woken. Listings of workers show these queues. What is held of another
        queue stays held, and ends as before. May be called from any thread, and done twice.

        Raises:
            BrokerUnavailable, StoreUnusable: call again; some of it may be done.
            NameRefused, PublishRefused: there can be no such queue; nothing has changed.
            Unsupported: this consumer keeps its queues.
        """
        raise Unsupported(f"{type(self).__name__} cannot serve {', '.join(queues)} as well")

    @abstractmethod
    def dispose(self, disposals: Sequence[Disposal]) -> list[bool]:
        """End these deliveries, all in one step.

        Returns, for each, whether it was still ours. False: the lease was lost (or the delivery was
        disposed of before), and nothing was done with it.
        """

    @abstractmethod
    def holds(self, deliveries: Sequence[Delivery]) -> list[bool]:
        """Whether each delivery is still ours."""

    def run_begins(self, delivery: Delivery) -> None:  # noqa: B027 - not every broker can make use of it
        """The task is called now: if this consumer dies before `run_ends`, it gets a strike.

        A round trip is made only for a redelivery, and only where a consumer may die unseen.
        """

    def run_ends(self, delivery: Delivery) -> None:  # noqa: B027
        """The call has come back."""

    def is_lost(self, delivery: Delivery) -> bool:
        """Return whether the delivery is known here, without a round trip, to be lost.

        A lost delivery is not ours any more, and must not be begun.
        """
        del delivery
        return False

    @abstractmethod
    def beat(self) -> bool:
        """Say that this consumer lives.

        False: it had been given up. Others own what it held, and it has started again as a new one.
        """

    @abstractmethod
    def wake(self) -> None:
        """Let a waiting `receive` return."""

    @abstractmethod
    def close(self) -> None:
        """Give back at once what is still held, to the head of its queue. May be called twice."""


class Broker(ABC):
    """Holds messages until a worker has dealt with them. Any thread may call any method."""

    features: BrokerFeatures

    def is_entered(self) -> bool:
        """Return whether this thread holds the store's lock, so that it must not call it again."""
        return False

    @abstractmethod
    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        """Store all the messages or none.

        Does nothing and returns False if the token was used within 10 minutes; "" is no token.

        Raises:
            PublishRefused: nothing was stored.
            PublishUnknown: they may have been; putting them again with the same token is safe.
        """

    def put_within(
        self, messages: Sequence[Message], limits: Sequence[QueueLimit], *, token: str
    ) -> bool:
        """Put as `put` does, if there is room in each of these queues.

        Senders that look at the same time may pass a limit together, each by what it puts, unless
        `BrokerFeatures.exact_limits`.

        Raises:
            QueueFull: nothing was stored.
            Unsupported: this broker cannot count.
        """
        self.check_limits(limits, token=token)
        return self.put(messages, token=token)

    def check_limits(self, limits: Sequence[QueueLimit], *, token: str = "") -> None:
        """Raise QueueFull if there is no room in one of these queues, unless it is a repeat."""
        for one in limits:
            waiting = self.waiting(one.queue)
            if waiting + one.adds > one.limit and not self.was_put(token):
                raise one.passed(waiting)

    def was_put(self, token: str) -> bool:
        """Return whether a put with this token may have stored something, as far as known."""
        return False

    def waiting(self, queue: str) -> int:
        """Return how many messages wait in a queue, 0 if there is none; or raise Unsupported."""
        raise Unsupported(
            f"{type(self).__name__} cannot count what waits in {queue!r} "
            "(take it out of the setting queue_limits)"
        )

    @abstractmethod
    def consume(self, queues: Sequence[str], *, worker: str) -> Consumer:
        """Register a consumer. Nothing is claimed yet."""

    def beat_for(self, session: str, queues: Sequence[str], *, stalled: bool) -> bool:
        """Beat for a consumer of another process, which lives and cannot beat by itself.

        May be repeated, and beside the consumer's own beats. It never starts a session.

        Args:
            queues: those of the consumer, or those that it had first.
            stalled: what listings of workers say of it until its own next beat.

        Returns:
            False: it was given up or is closed, or consumers of this broker live otherwise
            (`BrokerFeatures.beats`).
        """
        del session, queues, stalled
        return False

    def declare(self, queues: Sequence[str]) -> Sequence[str]:
        """Make on the server all that these queues will ever need, and say in words what that is.

        Called when an application is deployed.

        Most stores need nothing. Doing it again changes nothing.
        """
        del queues
        return ()

    @abstractmethod
    def tend(self) -> float:
        """Do house-keeping: queue delayed messages that are due, take back those of dead consumers.

        Any number of processes may do it. Returns the seconds until it wants to be called again.
        """

    def pending(self, queue: str, limit: int) -> list[Message]:
        """The first waiting messages of a queue, without taking them.

        Raises:
            Unsupported: this broker's messages cannot be read (`BrokerFeatures.peeking`).
        """
        raise self._unreadable("waiting")

    def delayed(self, limit: int) -> list[Message]:
        """The first delayed messages of all queues, the next due first. Raises as `pending`."""
        raise self._unreadable("delayed")

    def _unreadable(self, which: str) -> Unsupported:
        return Unsupported(
            f"{type(self).__name__} cannot list {which} tasks: its store does not let them be read"
        )

    @abstractmethod
    def stats(self) -> list[QueueStats]:
        """One line for each queue that has ever held something or has a consumer."""

    @abstractmethod
    def workers(self) -> list[WorkerInfo]:
        """The consumers that live."""

    @abstractmethod
    def purge(self, queue: str) -> int:
        """Delete the waiting and delayed messages of a queue; how many they were."""

    def purge_each(
        self, queue: str, before: Callable[[Sequence[Message]], object]
    ) -> Iterator[Sequence[Message]]:
        """Delete the messages of a queue as `purge` does, in steps; yield those that are gone.

        What was put after the begin may stay. A message that a consumer claims meanwhile is not
        yielded; messages of a broker that cannot list them are not seen by `before`.

        Args:
            before: called with the messages of each step before they are deleted; if it raises,
                they stay.
        """
        found: list[Message] = []
        with suppress(Unsupported):
            found += self.pending(queue, UNLIMITED)
            found += (one for one in self.delayed(UNLIMITED) if one.queue == queue)
        before(found)
        self.purge(queue)
        yield found

    def forget_queue(self, queue: str) -> bool:
        """Delete what is kept of a queue that is not used any more: its name and its counters.

        No message is lost, whoever sends one meanwhile: it makes the queue anew. May be done twice.

        Returns:
            False: something waits, is delayed, is held, is dead or paused there, or a consumer
            serves it. Nothing was changed.

        Raises:
            Unsupported: this broker cannot (`BrokerFeatures.forgets_queues`).
        """
        raise Unsupported(
            f"{type(self).__name__} cannot forget {queue!r}: its store does not let a queue be "
            "deleted without the risk of losing a message; see the page on queues"
        )

    def pause(self, queue: str) -> None:
        """Let no consumer claim from this queue, from the return of this call until `resume`.

        The pause is kept with the messages and survives the end of every process. Held messages are
        not touched. Senders, delayed messages and messages that are given back go on filling the
        queue. It need not exist yet. May be done twice.

        Raises:
            Unsupported: this broker cannot.
        """
        raise Unsupported(
            f"{type(self).__name__} cannot pause {queue!r}: queues of this store are always open"
        )

    def resume(self, queue: str) -> None:
        """Let the queue be claimed from again, and wake the consumers that wait for it.

        May be done twice.

        Raises:
            Unsupported: this broker cannot.
        """
        raise Unsupported(
            f"{type(self).__name__} cannot resume {queue!r}: queues of this store are always open"
        )

    def paused(self) -> frozenset[str]:
        """The queues that are paused."""
        stats = self.stats() if self.features.pausing else ()
        return frozenset(one.queue for one in stats if one.paused)

    @abstractmethod
    def dead_letters(self, *, limit: int, queue: str = "") -> list[DeadLetter]:
        """The newest dead letters."""

    @abstractmethod
    def take_dead(self, ids: Sequence[str]) -> list[DeadLetter]:
        """Remove dead letters, and return those that were there.

        After a lost reply they may be there or not: put what they held elsewhere first.
        """

    def bury(self, message: Message, *, queue: str, reason: str, error: str) -> None:
        """Keep a message that was never stored as a dead letter of `queue`, which may be another's.

        Done again, it may be there twice.

        Raises:
            PublishRefused, Unsupported: it is not kept.
        """
        raise Unsupported(f"{type(self).__name__} keeps no dead letters of its own accord")

    def broadcast(self, topic: str, records: Sequence[bytes], *, ttl: float) -> None:
        """Send records of up to MAX_RECORD bytes to all that subscribe to the topic.

        One round trip, which waits for no reader. Without a subscription nobody gets them.

        Args:
            ttl: seconds, by the store's clock, after which they are not handed out any more.

        Raises:
            PublishRefused, StoreUnusable: nobody gets them; one is too large, or it is away.
            PublishUnknown: they may have been sent.
            Unsupported: this broker has no topics.
        """
        if checked := checked_records(topic, records):
            self.append_records(topic, checked, min(ttl, TOPIC_AGE))

    def append_records(self, topic: str, records: Sequence[bytes], ttl: float) -> None:
        """Do what `broadcast` promises, with records and a ttl that are within their limits."""
        del records, ttl
        raise self._without_topics(topic)

    def subscribe(self, topic: str, *, since: float = 0.0) -> Subscription:
        """Open a subscription, which gets all records that are sent after this call.

        Args:
            since: begin with the records that are up to so many seconds old, where the store keeps
                them (`BrokerFeatures.keeps_topics`).

        Raises:
            BrokerUnavailable: there is no subscription.
            Unsupported: this broker has no topics.
        """
        del since
        raise self._without_topics(topic)

    def _without_topics(self, topic: str) -> Unsupported:
        return Unsupported(f"{type(self).__name__} has no topics; {topic!r} cannot be used")

    def concerns(self) -> list[Concern]:
        """How its server could lose what it has stored; nothing if all is well."""
        return []

    def close(self) -> None:  # noqa: B027 - most own nothing
        """Give everything back to the operating system. May be called twice."""

    # Go Machinery's names, written once for every broker.

    def get_pending_tasks(
        self, queue: str = "machinery_tasks", limit: int = 10_000
    ) -> list[Signature[Any]]:
        """The tasks waiting in a queue, the next one first, without bytes that are no signature."""
        return _signatures(self.pending(queue, limit))

    def get_delayed_tasks(self, limit: int = 10_000) -> list[Signature[Any]]:
        """The delayed tasks of all queues, next due first, without bytes that are no signature."""
        return _signatures(self.delayed(limit))


def _signatures(messages: Sequence[Message]) -> list[Signature[Any]]:
    found: list[Signature[Any]] = []
    for message in messages:
        try:
            found.append(decode_signature(message.body))
        except DecodeError:
            continue
    return found

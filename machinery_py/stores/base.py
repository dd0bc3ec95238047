"""The contract that keeps tasks from being lost or doubled: submit, receive, settle.

A settlement is all that must become true when a delivery is over. Its invariants, on every store:

- An accepted message is waiting, delayed, held, dead or done; never in two of these, never in none.
- Of all deliveries of a message at most one settlement is SETTLED. A worker that lost its lease
  writes nothing.
- State, callbacks, group arrival and the end of the delivery become true together (one store), or
  each of them becomes true in the end (two stores, see outbox.py).
- A rider is the change of a record that must become true with a submission, settlement or firing.
  If its record holds something else, that one is refused alone: nothing of it is written, its
  delivery stays held, and the others of the batch go on (docs/explanation/riders.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from machinery_py.backends.base import Backend, Change, Keeping, ReadyGroup, Rider, Verdict
from machinery_py.brokers.base import (
    Broker,
    Consumer,
    Delivery,
    DeliveryEnd,
    Disposal,
    Fate,
    Message,
    mark_of,
)
from machinery_py.brokers.queue_limits import QueueLimit
from machinery_py.errors import (
    BackendUnavailable,
    MachineryError,
    PublishRefused,
    PublishUnknown,
    StoreUnusable,
    Unsupported,
)
from machinery_py.rows.contract import OwnTransaction
from machinery_py.tasks.states import Arrival, GroupMeta, TaskState, size_of_state
from machinery_py.texts import get_logger
from machinery_py.threads import INSIDE

logger = get_logger(__name__)


class Submission(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Messages to be published, with the states and groups that go with them, all or none.

    Attributes:
        token: stays the same when a submission is repeated after a lost reply; it is done once.
            With riders, which do that themselves: a `tick_key` or `sending_key`, under which two
            stores keep the messages until they are published; empty if there are none.
        states: normally PENDING for each message.
        replay: the states replace finished ones.
        limits: of queues that these messages come to; done only if there is room in each.
        riders: changes of records.
    """

    token: str
    messages: Sequence[Message]
    states: Sequence[TaskState] = ()
    groups: Sequence[GroupMeta] = ()
    replay: bool = False
    limits: Sequence[QueueLimit] = ()
    riders: Sequence[Rider] = ()

    def put(self, broker: Broker) -> bool:
        """Put the messages, as Broker.put; raises QueueFull as well."""
        if self.limits:
            return broker.put_within(self.messages, self.limits, token=self.token)
        return broker.put(self.messages, token=self.token)


class Settlement(DeliveryEnd, frozen=True, kw_only=True, gc=False):
    """The end of a delivery and all that follows from it.

    Attributes:
        uuid, name: of the task; empty when the bytes were no signature.
        states: the task's own first, then others (PENDING of a callback, FAILURE of a chord).
        send: callbacks, or the retry itself.
        groups: that the messages in `send` belong to; created if they are not there.
        eta, reason, error: for Fate.LATER and Fate.DEAD.
        riders: changes of records. They need the task's own state, by which a repeat is known.
    """

    delivery: Delivery
    states: Sequence[TaskState] = ()
    send: Sequence[Message] = ()
    groups: Sequence[GroupMeta] = ()
    arrivals: Sequence[Arrival] = ()
    riders: Sequence[Rider] = ()


def carried_along(settlement: Settlement) -> int:
    """Return the bytes of what follows a settlement: its messages, arrivals and records."""
    size = sum(len(message.body) for message in settlement.send)
    size += sum(len(rider.body or b"") for rider in settlement.riders)
    return size + sum(len(arrival.callback) for arrival in settlement.arrivals)


class Mark(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """RECEIVED, STARTED or progress of a delivery that is not over. Dropped if it is not ours."""

    delivery: Delivery
    state: TaskState


class Firing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The settling of a group, or the end of a task that no worker holds.

    A group's callback is sent, or failed, once.

    Attributes:
        task_uuid: of the task, whose state is the first; then there is no group.
        riders: changes of records.
    """

    group_uuid: str = ""
    task_uuid: str = ""
    states: Sequence[TaskState] = ()
    send: Sequence[Message] = ()
    groups: Sequence[GroupMeta] = ()
    arrivals: Sequence[Arrival] = ()
    riders: Sequence[Rider] = ()


def change_in(submission: Submission, outbox: Sequence[bytes] = ()) -> Change:
    """Return the change of a submission in the backend."""
    return Change(
        key=submission.token if submission.riders else f"submit {submission.token}",
        outbox=outbox,
        riders=submission.riders,
        states=submission.states,
        groups=submission.groups,
        force=submission.replay,
    )


def change_of(firing: Firing, outbox: Sequence[bytes] = ()) -> Change:
    """Return the change of a firing in the backend."""
    return Change(
        key=firing.task_uuid or firing.group_uuid,
        fires=firing.group_uuid,
        riders=firing.riders,
        states=firing.states,
        groups=firing.groups,
        arrivals=firing.arrivals,
        outbox=outbox,
    )


def change_by(settlement: Settlement, outbox: Sequence[bytes] = ()) -> Change:
    """Return the change of a settlement in the backend."""
    return Change(
        key=settlement.uuid,
        mark=mark_of(settlement.delivery),
        epoch=settlement.delivery.epoch,
        riders=settlement.riders,
        states=settlement.states,
        groups=settlement.groups,
        arrivals=settlement.arrivals,
        outbox=outbox,
    )


def disposal_of(settlement: Settlement) -> Disposal:
    """Return what becomes of the message of a settlement in the broker."""
    return Disposal(
        delivery=settlement.delivery,
        fate=settlement.fate,
        eta=settlement.eta,
        reason=settlement.reason,
        error=settlement.error,
        uuid=settlement.uuid,
        name=settlement.name,
    )


class Refusal(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Replacement of a message that its store refuses for good.

    Attributes:
        states: FAILURE of its task first, with the message in it; then PENDING of what is sent.
        queue: where the program keeps what has no other place.
    """

    states: Sequence[TaskState]
    send: Sequence[Message] = ()
    groups: Sequence[GroupMeta] = ()
    arrivals: Sequence[Arrival] = ()
    queue: str = ""


Sending = TypeVar("Sending", Settlement, Firing)


def in_place_of(sending: Sending, refusals: Sequence[Refusal]) -> Sending:
    """Return the settlement or firing when all that it sends is refused for good.

    The rest stands, and the tasks of the refused messages have failed.
    """
    failed = {message.uuid for message in sending.send}  # of a retry the task itself
    own: list[TaskState] = [state for state in sending.states if state.task_uuid not in failed]
    return msgspec.structs.replace(
        sending,
        states=(*own, *(state for one in refusals for state in one.states)),
        send=[message for one in refusals for message in one.send],
        groups=[group for one in refusals for group in one.groups],
        arrivals=(*sending.arrivals, *(arrival for one in refusals for arrival in one.arrivals)),
    )


REASON_REFUSED = "refused"  # of the dead letter of such a message
REASON_FAILED = "failed"  # of the dead letter of a task that ran, and failed for good
REASON_REJECTED = "rejected"  # of the dead letter of a task that ran, and raised Reject

#: A store's trouble, which passes unless it is permanent.
AWAY = (BackendUnavailable, PublishRefused, PublishUnknown, StoreUnusable)


class Session(ABC):
    """Hold of a worker on a store. `receive` belongs to one thread; any thread may call the rest.

    Attributes:
        consumer: of the broker; it is woken, and told which deliveries run.
        none_revoked: the last `receive` saw that no task at all is revoked.
    """

    none_revoked = False

    def __init__(self, consumer: Consumer) -> None:
        self.consumer = consumer
        self._unreturned: list[Delivery] = []  # claimed, and neither handed out nor given back yet

    @abstractmethod
    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        """As Consumer.receive, but finish deliveries that were settled before, and omit them."""

    def prepare(self, settlement: Settlement) -> int:
        """Do what can be done before the settlement's turn comes; raises nothing.

        Called in the thread that ended the call. Returns about how many bytes it carries.
        """
        size = len(settlement.delivery.body)
        for state in settlement.states:
            size += size_of_state(state)
        if settlement.send or settlement.arrivals or settlement.riders:
            size += carried_along(settlement)
        return size

    @abstractmethod
    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        """Make it all true, in as few round trips as the store allows; return a verdict for each.

        May be repeated with the same settlements after any error: the settled ones are ALREADY. One
        that is CONFLICT is still held.

        Raises:
            BrokerUnavailable, BackendUnavailable, StoreUnusable: some of it may have become true.
        """

    def keep(self, delivery: Delivery, keeping: Keeping) -> Verdict:
        """Keep checkpoints of a task that runs, if its delivery is still ours: in one step.

        Returns SETTLED; FENCED: the delivery is not ours, and nothing was written; or CONFLICT:
        there is one of these names, perhaps by our own repeat, and the same.

        Raises:
            BrokerUnavailable, BackendUnavailable, StoreUnusable: they may be kept.
            Unsupported: the backend keeps none.
        """
        raise Unsupported(f"{type(self).__name__} keeps no checkpoints")

    def _write_marks(self, marks: Sequence[Mark], backend: Backend) -> None:
        """Write the states of those deliveries that are still ours."""
        ours = self.consumer.holds([mark.delivery for mark in marks])
        backend.apply(
            [
                Change(key=mark.state.task_uuid, states=(mark.state,))
                for mark, mine in zip(marks, ours, strict=True)
                if mine
            ]
        )

    def _give_back(self, deliveries: Sequence[Delivery] = ()) -> None:
        """Give back deliveries that were claimed but not handed out, or nobody would settle them.

        If that fails, the next call, at the beginning of the next `receive`, does it.
        """
        self._unreturned += deliveries
        if self._unreturned:
            back = [Disposal(delivery=one, fate=Fate.BACK) for one in self._unreturned]
            self.consumer.dispose(back)
            self._unreturned = []

    def beat(self) -> bool:
        """Beat, as Consumer.beat."""
        return self.consumer.beat()

    def close(self) -> None:
        """Close the consumer, as Consumer.close."""
        self.consumer.close()


class StoreTransaction(ABC):
    """A transaction of a store, in which user code writes. Belongs to one thread.

    Attributes:
        own: with the connection for that code.
        store: as `Store.within` of it.
    """

    own: OwnTransaction
    store: Store

    @abstractmethod
    def settle(self, session: Session, settlement: Settlement) -> Verdict:
        """Settle as the last step before `own.commit`; unless SETTLED the caller rolls back."""

    @abstractmethod
    def keep(self, session: Session, delivery: Delivery, keeping: Keeping) -> Verdict:
        """Keep checkpoints as the last step before `own.commit`, with verdicts as `Session.keep`.

        Unless SETTLED the caller rolls back. A CONFLICT may be followed by another `keep`.
        """

    @abstractmethod
    def is_held(self, session: Session, delivery: Delivery) -> bool:
        """Return whether the session has the delivery, when the transaction has come to an end."""


class Store(ABC):
    """A broker and a backend, changed together. All methods may be called from any thread."""

    broker: Broker
    backend: Backend
    # The app's, which knows what follows a failed task.
    refusal: Callable[[Message, Exception], Refusal] | None = None

    def is_entered(self) -> bool:
        """Return whether this thread is in a call of the store already, which waits for it to end.

        So it is for finalisers and signal handlers.
        """
        return INSIDE.depth > 0 or self.broker.is_entered() or self.backend.is_entered()

    def give_up(self, message: Message, error: Exception, *home: str) -> None:
        """Keep a message that was refused for good as a dead letter.

        It goes to the dead letters of `home`, the queue it was sent from, if that is given and can
        be used, else to those of another queue.

        Raises:
            BrokerUnavailable, PublishUnknown: nobody knows whether it is kept.
        """
        logger.error(
            "task %s (%s) cannot be sent to %r, and has failed: %s",
            message.uuid,
            message.name,
            message.queue,
            error,
            extra={"task_uuid": message.uuid},
        )
        bare = msgspec.structs.replace(message, body=b"")  # it may be too large for any queue
        only = (
            f"{error}; too large for a dead letter, only its state keeps it "
            f"(machinery retry {message.uuid})"
        )
        for letter, text in ((message, str(error)), (bare, only)):
            for queue in dict.fromkeys((*home, message.queue)):
                try:
                    self.broker.bury(letter, queue=queue, reason=REASON_REFUSED, error=text)
                except MachineryError as refusal:
                    if isinstance(refusal, AWAY) and not refusal.permanent:
                        raise
                    logger.debug("no dead letter of %s on %r: %s", message.uuid, queue, refusal)
                else:
                    return
        logger.error(
            "there is no dead letter of task %s: only its state keeps it, until that expires",
            message.uuid,
            extra={"task_uuid": message.uuid},
        )

    @abstractmethod
    def submit(self, submission: Submission) -> bool:
        """Publish, with all that goes with it.

        False: a rider met another record, and nothing is true. A repeat after a lost reply may be
        False though the first try was carried out: then the record is the caller's.

        Raises:
            PublishRefused: nothing is true. QueueFull: there is no room for it. With riders in two
                stores it says that a message was refused for good, and its task has failed.
            PublishUnknown: it may be; submitting again with the same token is safe.
            BackendUnavailable: the same, with riders in two stores.
            Unsupported: the backend does not keep the record of a rider.
        """

    @abstractmethod
    def open_session(self, queues: Sequence[str], *, worker: str) -> Session:
        """Return a session that claims from these queues; its caller closes it.

        `worker` is the session's name in states.

        Raises:
            BrokerUnavailable: no server could be reached.
            StoreUnusable: it refuses this user, or a queue is declared in another way.
        """

    @abstractmethod
    def fire(self, firing: Firing) -> bool:
        """Settle a group, or end a task that no worker holds.

        Returns True to one caller; for all others, and if a rider refuses it, nothing is written.
        """

    def within(self, connection: object) -> Store:
        """Return a store that submits in a transaction which its caller has begun.

        Its `submit` is called once, not repeated: after an error the transaction is over. A limit
        of a queue is looked at before. Of the backend it knows claims and states.

        Args:
            connection: as the store of rows takes it, see `Rows.on`.

        Raises:
            Unsupported: broker and backend are not in one database that has transactions, or the
                connection is none to it.
        """
        del connection
        raise self._has_no_transactions()

    def open_transaction(self) -> StoreTransaction:
        """Return a transaction for a task that this store has delivered.

        Raises:
            Unsupported: as `within`.
        """
        raise self._has_no_transactions()

    def _has_no_transactions(self) -> Unsupported:
        names = self.broker.features.name, self.backend.features.name
        return Unsupported(
            "tasks cannot be sent or settled in your transaction: the broker is {!r}, the result "
            "backend {!r} (both must be one postgresql:// URL; else by an outbox: "
            "docs/how-to/outbox.md)".format(*names)
        )

    def publish_left(self, key: str) -> None:  # noqa: B027 - most stores keep no messages of their own
        """Publish what a submission with riders and this token left when it was cut off.

        Raises:
            PublishRefused, BackendUnavailable: it is still left.
        """

    def ready_groups(self, limit: int = 100) -> list[ReadyGroup]:
        """Groups that wait for `fire`: normally only those that completed just now."""
        return self.backend.ready_groups(limit)

    @abstractmethod
    def tend(self) -> float:
        """House-keeping of both; the seconds after which it wants to be called again."""

    def attach(self, drain: Callable[[], object]) -> None:  # noqa: B027 - most stores leave running to workers
        """Take a function that runs what is waiting. Only the eager store calls it, in `submit`."""

    def close(self) -> None:
        """Close broker and backend. May be called twice."""
        self.broker.close()
        self.backend.close()

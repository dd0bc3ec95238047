"""The contract of rows with messages: what a broker and a backend need besides records.

A message has an id, bytes that its broker understands, and a count of how often it was claimed. It
is in one place at each moment:

    push ──► late ──due──► waiting ──claim──► held ──take──► gone, or pushed again
               └──take─────── take ───► gone, or pushed again

Whoever claims has a hold. A receipt names hold, message and count, and so it is receipt, lease and
fence in one: a step takes a message only by the receipt of its last claim. A message that no hold
has is taken by `waiting_at`.

Crash points, and who goes on:

- Before a step: nothing of it is true. After it: all of it is, whether the reply came or not.
- A claim whose reply is lost: its hold says so with the next claim, and gets the same messages; or
  they go back with the end of the hold.
- A process that dies with a hold: any other process finds it among `dead_holds`, and condemns it.
  Its messages go back to their places, and those that ran get a strike.
- A process that dies between a step that makes a set whole and the one that answers it: the row
  that the set made is listed until a step deletes it.

Invariants, on every store, besides those of Rows:

- Of all steps with a receipt one is carried out; each later one is Gone, its own repeat, too.
- A hold that was ended claims nothing, and none of its receipts takes anything, though its messages
  may not be back yet.
- Nothing is claimed from a queue once the step has returned that closed it.
- A message that goes back has the place that it had, before all that was pushed after it. Places
  do not say in which order pushes became visible.
- A set makes its row once, however often its members come, and however many at the same time:
  steps that join one set wait for each other.

Counts of what happened are no part of a step: a row that each settlement writes would let them wait
for each other.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType

import msgspec

from machinery_py.bounds import STEP_BYTES
from machinery_py.clock import Clock
from machinery_py.fences import Fence
from machinery_py.receipts import Receipt
from machinery_py.rows.contract import (
    PAGE,
    SURE,
    Key,
    Rows,
    RowStep,
    StepResult,
    Version,
    Write,
    check_keys,
    check_writes,
)

#: A queue is closed, and nothing is claimed from it, while there is the row (CLOSED, its name).
CLOSED = "closed"
#: A task is revoked while there is the row (REVOKED, its UUID).
REVOKED = "revoked"
EVER = 2**62  # µs


NONE: Mapping[Key, Write] = MappingProxyType({})


def queue_topic(queue: str) -> str:
    """Return the topic that is told when messages come to a queue."""
    return f"queue {queue}"


class ClaimReceipt(msgspec.Struct, Receipt, frozen=True, gc=False):
    """The name of one claim of a message.

    Attributes:
        count: how often it has been claimed.
        claim: number of the hold's claim, where a crash of the server may undo one: the next one
            has the same count.
    """

    hold: str
    id: int
    count: int
    claim: int = 0

    def __str__(self) -> str:
        return f"{self.id}.{self.count}.{self.claim}.{self.hold}"


def waiting_at(id: int) -> ClaimReceipt:
    """Return the receipt by which a message is taken that waits, or is late."""
    return ClaimReceipt("", id, 0)


class Place(Enum):
    """Where in its queue a pushed message goes, among those of its priority.

    LAST    behind all; of a tenant its next turn
    SAME    back to the place that it had
    WAITED  before all that have not waited; the first due first
    """

    LAST = 1
    SAME = 2
    WAITED = 3


class Push(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message that comes to a queue.

    Attributes:
        id: of a message that the step takes; None: it is a new one, and the store gives the id,
            which is greater than all that were given before.
        body: None: as it was.
        priority: the higher first.
        tenant: whose turn it takes in its queue; None: it takes none.
        due: µs since 1970 by the clock on the wall; it is late until then.
        place: of one that the step takes; SAME: only `queue` and `body` of the others count.
    """

    queue: str
    id: int | None = None
    body: bytes | None = None
    priority: int = 0
    tenant: str | None = None
    due: int = 0
    place: Place = Place.LAST


class Room(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Condition of a step: behind it no more than `limit` messages wait in the queue.

    Exact only where steps are carried out one after the other; elsewhere it may be late by the
    pushes of one moment. A late message that is due counts when the store has looked for such.

    Attributes:
        adds: how many of the step's messages come to the queue at once.
    """

    queue: str
    limit: int
    adds: int


class Join(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Addition of a member to a set; does nothing if it is there, or if the row `ready` is.

    Attributes:
        set: the row that the set is; it is made with the first member, and goes as a row.
        whole: with so many members the row `ready` is written.
        beside: rows that are written if the member is added.
    """

    set: Key
    member: str
    whole: int
    ready: Key
    write: Write
    beside: Mapping[Key, Write] = {}


class MessageStep(msgspec.Struct, kw_only=True, gc=False):
    """A step of rows and messages. Whoever writes it may add to it until it is carried out.

    It writes `create`, then `write`, then `joins`, in their order: the last that names a row wins.
    The row of a set is in `joins` alone.

    Attributes:
        once, expect, create, write, durable: as in RowStep.
        takes: receipts that must be the last of their messages; these leave their hold or queue,
            and are gone unless `pushes` names them.
        held: receipts that must be the last of their messages, and stay so until the step is true.
        room: conditions on queues.
        pushes: messages that come to queues.
        joins: additions to sets.
        tell: topics whose listeners wake; a queue's is told by itself.
    """

    once: Key | None = None
    expect: dict[Key, Version] = {}
    create: Mapping[Key, Write] = NONE
    write: dict[Key, Write | None] = {}
    takes: tuple[ClaimReceipt, ...] = ()
    held: tuple[ClaimReceipt, ...] = ()
    room: tuple[Room, ...] = ()
    pushes: tuple[Push, ...] = ()
    joins: tuple[Join, ...] = ()
    tell: tuple[str, ...] = ()
    durable: bool = True

    def size(self) -> int:
        """Return how many bytes of bodies it carries."""
        size = sum(len(push.body) for push in self.pushes if push.body is not None)
        for write in (*self.create.values(), *self.write.values()):
            if write is not None:
                size += len(write.body)
        for join in self.joins:
            size += len(join.write.body) + sum(len(write.body) for write in join.beside.values())
        return size


def checked(step: RowStep | MessageStep) -> MessageStep:
    """Return it as a step of messages, or raise NameRefused: an id or a name in it is too long."""
    if type(step) is RowStep:  # isinstance has to ask the metaclass of structs
        step = MessageStep(
            once=step.once,
            expect=dict(step.expect),
            create=step.create,
            write=dict(step.write),
            durable=step.durable,
        )
    for key in step.expect:
        if len(key.id) > SURE:
            check_keys((key,))
    if step.create:
        check_writes(step.create)
    for key, write in step.write.items():
        if len(key.id) > SURE or (write and write.facts and len(write.facts.name) > SURE):
            check_writes({key: write})
    for join in step.joins:
        check_keys((join.set, join.ready, Key("member", join.member)))
    return step


class StoredMessage(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message as it was at one moment.

    Attributes:
        put_at: when it was pushed first; µs since 1970, by the clock on the wall.
        place: in the order of its queue, or of all that are late; means something to the store.
    """

    id: int
    queue: str
    body: bytes
    put_at: int
    place: object = None


class Claimed(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A message that a hold has got. `strikes`: how many holds ended while it ran in them."""

    receipt: ClaimReceipt
    queue: str
    body: bytes
    fence: Fence
    strikes: int
    put_at: int


class Claims(msgspec.Struct, frozen=True, gc=False):
    """Result of a claim.

    Attributes:
        next_due: of the next late message; None: there is none.
        none_revoked: the step that claimed saw no row of REVOKED; False says nothing.
    """

    found: list[Claimed]
    next_due: int | None
    none_revoked: bool = False


class QueueCount(msgspec.Struct, kw_only=True, gc=False):
    """How many messages of a queue are where. `oldest_at`: `put_at` of the oldest that waits."""

    waiting: int = 0
    late: int = 0
    held: int = 0
    oldest_at: int | None = None


class HoldReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A hold as listings show it. `stalled`: it lives, and has not beaten for its lease."""

    id: str
    body: bytes
    beat_at: int
    holding: int
    stalled: bool


class Hold(ABC):
    """The messages that one consumer has claimed. Any thread may call any method; `claim`: one
    at a time.
    """

    id: str

    @abstractmethod
    def claim(
        self,
        queues: Sequence[str],
        items: int,
        *,
        size: int = STEP_BYTES,
        number: int = 0,
        lost: int | None = None,
    ) -> Claims:
        """Claim up to so many messages, in one round trip; none if the hold was ended.

        First those of the first queue. In a queue: the greater priority first, then those that have
        waited, then the turns of tenants, then the order of their pushes. While others wait, those
        that have waited get half of it. Late ones that are due are moved to their queues before, a
        step of them. It is never durable: what a power cut undoes is claimed again, and the receipt
        is Gone. Looking at empty queues writes nothing.

        Args:
            size: end before the bodies exceed so many bytes; one message at least.
            number: of this claim, rising.
            lost: first all that was claimed under this number and later ones: their replies did not
                come. They have the receipts that they had, and may be more than `items`. A claim
                with a smaller number than this one's that is carried out later gives nothing.
        """

    @abstractmethod
    def has(self, receipts: Sequence[ClaimReceipt]) -> list[bool]:
        """Return whether each is the last receipt of a message, and held here."""

    @abstractmethod
    def begin_run(self, receipt: ClaimReceipt) -> None:
        """Note that the message runs: it gets a strike if the hold is condemned."""

    @abstractmethod
    def end_run(self, receipt: ClaimReceipt) -> None:
        """Note that it runs no more."""

    @abstractmethod
    def write(self, body: bytes) -> None:
        """Change what listings show of the hold."""

    @abstractmethod
    def beat(self) -> bool:
        """Let the hold live on for another lease; return False if it was ended."""

    @abstractmethod
    def end(self) -> None:
        """End the hold: its messages go back without a strike. May be called twice."""


class TopicListener(ABC):
    """Wakes a thread when a topic is told. One thread waits; any may call the rest.

    It may wake early, and what was told before `watch` returned may be missed: look once after it.
    Each who tells may have to look for those that watch: watch while you wait.
    """

    @abstractmethod
    def watch(self, topics: Iterable[str]) -> None:
        """Listen to these as well."""

    @abstractmethod
    def unwatch(self, topics: Iterable[str]) -> None:
        """Listen to these no more."""

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Return once a topic may have been told since the last `wait`, or after a `wake`."""

    @abstractmethod
    def wake(self) -> None:
        """Let a waiting `wait` return, or the next one."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. May be called twice."""


class MessageQueues(ABC):
    """The messages of all queues, as listings and house-keeping see them."""

    @abstractmethod
    def messages(
        self,
        queue: str | None,
        *,
        since: int = 0,
        after: StoredMessage | None = None,
        items: int = PAGE,
        size: int = STEP_BYTES,
    ) -> list[StoredMessage]:
        """Return messages that wait in a queue, the next one first; None: all that are late.

        Args:
            since: only those pushed first at this moment or later.
            after: begin behind this one of an earlier page, which may be gone by now.
            items, size: as in `list`.
        """

    @abstractmethod
    def newest_id(self) -> int:
        """Return an id: those of messages that are yet to be pushed are greater."""

    @abstractmethod
    def count_messages(self) -> dict[str, QueueCount]:
        """Return the counts of each queue that has a message."""

    @abstractmethod
    def count_waiting(self, queue: str) -> int:
        """Return how many messages wait in the queue."""

    @abstractmethod
    def promote(self) -> int | None:
        """Move late messages that are due to their queues, for those who sleep instead of claiming;
        return when the next one is due.
        """


class HoldKeeper(ABC):
    """The holds of all processes."""

    @abstractmethod
    def open_hold(self, body: bytes, *, lease: float) -> Hold:
        """Return a new hold, which lives while its process does, and beats."""

    @abstractmethod
    def holds(self) -> list[HoldReport]:
        """Return the holds that live."""

    @abstractmethod
    def dead_holds(self) -> list[str]:
        """Return the holds whose process is dead, or has missed its beats, as Suspects says.

        And those that were ended, while messages are in them.
        """

    @abstractmethod
    def condemn(self, hold: str, items: int) -> int | None:
        """End a hold that is dead, and give back up to so many of its messages; return how many.

        Those that ran get a strike. Less than `items`: none is left but what a step has at this
        moment, which a later call gives back. None: it has beaten meanwhile,
        and lives; that is decided by the step that would end it, not before.
        """

    def reap(self) -> int:
        """Condemn the holds that are dead; return how many."""
        reaped = 0
        for hold in self.dead_holds():
            while (back := self.condemn(hold, PAGE)) == PAGE:
                pass
            reaped += back is not None
        return reaped


class MessageRows(Rows, MessageQueues, HoldKeeper):
    """A store of rows and messages. Any thread may call any method; errors as in Rows.

    Attributes:
        clock: what moments of messages are compared with.
    """

    clock: Clock

    @abstractmethod
    def is_entered(self) -> bool:
        """Return whether this thread holds the store's lock, so that it must not call it again."""

    def together(self) -> contextlib.AbstractContextManager[object]:
        """Return a context whose reads and commits may be one transaction, where that is cheaper.

        It promises nothing: steps expect what they have read. Ended by an error, nothing of it may
        have become true.
        """
        return contextlib.nullcontext()

    @abstractmethod
    def commit(self, steps: Sequence[RowStep | MessageStep]) -> list[StepResult]:
        """As Rows; a step is first compared in this order: once, expect, takes and held, room."""

    @abstractmethod
    def fences(self, number: int) -> Fence:
        """Return the first of so many numbers of the store's sequence, one behind the other.

        They are greater than all fences that were given before the call. Calls at the same moment
        may get the same numbers: they are fences of different things. Some may never be used.
        """

    @abstractmethod
    def ids(self, kind: str, *, prefix: str = "", items: int = PAGE) -> list[str]:
        """Return the first ids of the kind that begin like this, in rising order."""

    @abstractmethod
    def count(self, kind: str, *, since: int = 0, step: int = EVER) -> dict[tuple[str, int], int]:
        """Return how many listed rows of a kind bear each `Facts.name`, by steps of `Facts.at`.

        Args:
            since: only rows of this moment or later.
            step: µs; a key has the moment at which its step begins.
        """

    @abstractmethod
    def listen(self) -> TopicListener:
        """Return a new listener, which its caller closes."""

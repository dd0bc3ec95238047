"""Mailboxes: signals that a task has got, and the wait in which it is suspended. Pure.

A mailbox is one record of a task's UUID in the result backend. Who changes it says what was there
before, so of two changes at a time one is made anew.

    RUNNING ── wait_for, no signal ──► SUSPENDED ── signal, or timer ──► WAITING ──► RUNNING

A suspended task has no message: its settlement takes the delivery and writes the wait, with the
message of the next run in it, in one step. Whoever ends the wait publishes that message in the same
step. A timer is a late message of its own, which does no more than that; a wait without a timeout
has none. So a task has a delivery,
a wait or a message, one of them. docs/explanation/durable-functions.md has the crash points.

The result of another task is a signal whose name no user can give. The settlement that suspends the
task sends that one, with callbacks that bring what became of it.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from machinery_py.bounds import CHECKPOINT_LIFE, MOST_SIGNALS, SIGNALS_BYTES
from machinery_py.clock import LONGEST, moment_of
from machinery_py.errors import DecodeError, NameRefused, SignalRefused
from machinery_py.names import check_uuid
from machinery_py.tasks.checkpoints import Checkpoint, last_generation, newest_generation
from machinery_py.tasks.signature import Arg, RunNumber, Signature, new_uuid
from machinery_py.tasks.states import RETRY, SUSPENDED, TaskState
from machinery_py.values.malformed import MALFORMED

WAIT = "wait for "  # before the name of a signal: of the steps that wait
TIMER = "machinery.timer"  # name of the message that ends a wait when its time is up
TIMERS = "timer_"  # their UUIDs begin so
DEADLINE = "deadline "  # before the name of a signal: of the steps that keep when a wait ends
CHILD = "result of "  # before the name of a task: of the steps that wait for its result
RESULT = "machinery.result"  # names of the callbacks that bring a result, or that there is none
FAILED = "machinery.failed"
UNREAD = b""  # in place of a result for which nobody waited just then: the state has it
SILENT = frozenset((TIMER, RESULT, FAILED))  # no states are kept of these


class Sent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A signal.

    Attributes:
        number: of its name, from 1.
        results: its value, as a state has results.
        failed: error and error type of a task that has none.
    """

    name: str
    number: int
    results: bytes
    key: str
    failed: tuple[str, str] | None = None


class OpenWait(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The wait of a suspended task.

    Attributes:
        id: the UUID of its timer.
        name: of the signal.
        body: the message of the run that goes on, `run` its number.
        until: µs since 1970; 0: it has no end, and no timer.
        tenant: of the message, in a fair queue.
        child: the task whose result is waited for; "": none.
    """

    id: str
    name: str
    body: bytes
    run: RunNumber
    until: int
    tenant: str | None = None
    child: str = ""


class Mailbox(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """Content of the record.

    Attributes:
        sent: signals that may be unread.
        counts: of each name, how many ever came.
        keys: of all these, the last ones: a repeat is dropped.
        wait: None: the task is not suspended in a wait.
        generation: of the task that numbers the signals.
    """

    sent: tuple[Sent, ...] = ()
    counts: dict[str, int] = {}
    keys: tuple[str, ...] = ()
    wait: OpenWait | None = None
    generation: int = 0


NONE: Mapping[str, int] = {}

encode: Final = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Mailbox).decode


def decode(body: bytes | None, read: Mapping[str, int] = NONE) -> Mailbox:
    """Return what a record holds; an empty mailbox if there is none.

    Args:
        read: how many signals the task has read: where there is no record, the next ones are
            numbered behind these.

    Raises:
        DecodeError: it is no mailbox.
    """
    if body is None:
        return Mailbox(counts=dict(read))
    try:
        return _decode(body)
    except MALFORMED as error:
        raise DecodeError(f"no mailbox: {error}") from None


def record_of(uuid: str) -> str:
    """Return the name of a task's record."""
    return f"signals {uuid}"


class Wanted(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A signal that a run wants.

    Attributes:
        read: how many it has got of each name.
        until: µs since 1970; 0: no end.
        waits: the task is to wait for it; else only one that is there is wanted.
        child: UUID of the task whose result it is; "": of none.
        workflow: that ends with this task, as `pack_step` has it.
    """

    name: str
    read: dict[str, int]
    until: int
    waits: bool
    child: str = ""
    workflow: bytes = b""

    @property
    def number(self) -> int:
        """Number of the signal among those of its name."""
        return self.read.get(self.name, 0) + 1


class Received(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Answer to a Wanted: the signal; or there is none.

    Attributes:
        results: its value, as a state has results.
        waits: the run is to end, and the task waits.
        failed: as of Sent.
    """

    results: bytes | None = None
    waits: bool = False
    failed: tuple[str, str] | None = None


def delivered(
    box: Mailbox, name: str, results: bytes, key: str, failed: tuple[str, str] | None = None
) -> tuple[Mailbox, OpenWait | None]:
    """Return the mailbox with one more signal, and the wait that this ends.

    Raises:
        SignalRefused: there is no room for it. For one that ends a wait there always is.
    """
    wait = box.wait if box.wait is not None and box.wait.name == name else None
    size = len(results) + sum(len(one.results) for one in box.sent)
    is_full = len(box.sent) >= MOST_SIGNALS or size > SIGNALS_BYTES
    if len(results) > SIGNALS_BYTES or (is_full and wait is None):
        raise SignalRefused(
            f"the task has {len(box.sent):,} unread signals, and with this one they would have "
            f"{size:,} bytes (at most {MOST_SIGNALS:,}, and {SIGNALS_BYTES:,} bytes)"
        )
    number = box.counts.get(name, 0) + 1
    return (
        Mailbox(
            sent=(*box.sent, Sent(name, number, results, key, failed)),
            counts={**box.counts, name: number},
            keys=(*box.keys, key)[-MOST_SIGNALS:],
            wait=None if wait is not None else box.wait,
            generation=box.generation,
        ),
        wait,
    )


def signal_in(box: Mailbox, wanted: Wanted) -> Received | None:
    """Return the signal; None: it has not come."""
    for one in box.sent:
        if one.name == wanted.name and one.number == wanted.number:
            return Received(one.results, failed=one.failed)
    return None


def read_in(rows: Mapping[str, Checkpoint], generation: int) -> dict[str, int]:
    """Return how many signals of each name are among the checkpoints of this generation."""
    read: dict[str, int] = {}
    for step, row in rows.items():
        if step.startswith(WAIT) and not row.failed:
            name = step.partition("#")[0].removeprefix(WAIT)
            read[name] = read.get(name, 0) + 1
        elif step.startswith(CHILD):  # one that came too late is not wanted any more
            read[result_signal(generation, step)] = 1
    return read


def result_signal(generation: int, step: str) -> str:
    """Return the name of the signal that is the result of the task that this step waits for."""
    return f"#{generation} {step}"  # which no user can give: see `check_signal`


def of_next_generation(box: Mailbox, read: Mapping[str, int], generation: int) -> Mailbox:
    """Return the mailbox for a generation that begins: what is unread is numbered anew."""
    counts: dict[str, int] = {}
    unread: list[Sent] = []
    for one in box.sent:
        if one.number > read.get(one.name, 0) and not one.name.startswith("#"):
            counts[one.name] = number = counts.get(one.name, 0) + 1
            unread.append(Sent(one.name, number, one.results, one.key))
    return msgspec.structs.replace(box, sent=tuple(unread), counts=counts, generation=generation)


def unread_in(box: Mailbox, rows: Mapping[str, bytes]) -> Mailbox:
    """Return the mailbox without the signals that the task has read, by all its checkpoints."""
    if box.generation > last_generation(rows):
        return box  # it has read none yet
    return _without(box, read_among(rows))


def read_among(rows: Mapping[str, bytes]) -> dict[str, int]:
    """Return how many signals of each name the task has read, by all its checkpoints."""
    return read_in(newest_generation(rows), last_generation(rows))


def _without(box: Mailbox, read: Mapping[str, int]) -> Mailbox:
    unread = tuple(one for one in box.sent if one.number > read.get(one.name, 0))
    return msgspec.structs.replace(box, sent=unread)


def waiting(
    box: Mailbox,
    wanted: Wanted,
    *,
    body: bytes,
    run: RunNumber,
    tenant: str | None = None,
) -> Mailbox:
    """Return the mailbox of a task that waits, without the signals that it has read."""
    wait = OpenWait(
        id=new_uuid(TIMERS),
        name=wanted.name,
        body=body,
        run=run,
        until=wanted.until,
        tenant=tenant,
        child=wanted.child,
    )
    return msgspec.structs.replace(_without(box, wanted.read), wait=wait)


def without_wait(box: Mailbox) -> Mailbox:
    """Return the mailbox of a task that is not suspended."""
    return msgspec.structs.replace(box, wait=None)


def stands(wait: OpenWait, state: TaskState | None) -> bool:
    """Return whether the task is suspended in this wait, by its state; None: that has expired.

    Else it was ended (revoked) meanwhile, and perhaps sent again.
    """
    if state is None:
        return True
    is_suspended = state.state is RETRY and state.error_type == SUSPENDED
    return is_suspended and state.run == wait.run - 1


def life_of(box: Mailbox, now: dt.datetime) -> float:
    """Return the seconds that the record is to be there: longer than its wait."""
    if box.wait is None:
        return CHECKPOINT_LIFE
    if not box.wait.until:
        return LONGEST
    return CHECKPOINT_LIFE + max(0.0, box.wait.until / 1e6 - now.timestamp())


# The timer


def timer_of(uuid: str, wait: OpenWait, queue: str) -> Signature[Any]:
    """Return the message that ends the wait of a task when its time is up."""
    return Signature(
        name=TIMER,
        uuid=wait.id,
        args=[Arg(type="string", value=uuid)],
        eta=moment_of(wait.until),
        routing_key=queue,
    )


def timed_by(timer: Signature[Any]) -> str:
    """Return the UUID of the task that a timer is of; "": it is none of ours."""
    value = timer.args[0].value if timer.args else ""
    is_ours = isinstance(value, str) and timer.uuid.startswith(TIMERS)
    return value if is_ours and _is_uuid(value) else ""


def _is_uuid(text: str) -> bool:
    """Return whether a task may have this UUID; a stranger's message may name anything."""
    try:
        check_uuid(text)
    except NameRefused:
        return False
    return True


def waits_for(name: str, until: dt.datetime | None) -> str:
    """Return what is shown of a task that waits."""
    end = "" if until is None else f" until {until:%Y-%m-%d %H:%M:%S} UTC"
    what = f"the {name.partition(' ')[2]}" if name.startswith("#") else f"signal {name!r}"
    return f"waits for {what}{end}"


# The result of another task


def brings_result(uuid: str, signal: str, queue: str) -> tuple[Signature[Any], Signature[Any]]:
    """Return the callbacks that tell a task what became of another one: its success, its failure.

    They are plain callbacks on the wire, so a worker of Go may run that one.
    """
    args = [Arg(type="string", value=uuid), Arg(type="string", value=signal)]
    failure: Signature[Any] = Signature(name=FAILED, args=args, routing_key=queue)
    # Its own error callback, if the broker refuses the result.
    return failure.replace(name=RESULT, on_error=(failure,)), failure


def brought_to(message: Signature[Any]) -> tuple[str, str]:
    """Return the task that such a callback tells, and the signal; ("", ""): it is none of ours."""
    first = 1 if message.name == FAILED else 0  # behind the error text
    values = [one.value for one in message.args[first : first + 2]]
    if len(values) == 2 and all(isinstance(value, str) for value in values):
        uuid, signal = values
        if signal.startswith("#") and _is_uuid(uuid):
            return uuid, signal
    return "", ""

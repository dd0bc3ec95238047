"""The six states of a task, which may follow which, and the records that hold them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from machinery_py.bounds import size_of
from machinery_py.errors import nearest
from machinery_py.tasks.signature import FIRST_ATTEMPT, FIRST_RUN, Arg, AttemptNumber, RunNumber
from machinery_py.values.malformed import MALFORMED

ZERO_TIME = dt.datetime(1, 1, 1, tzinfo=dt.timezone.utc)  # Go's time that was never set


class State(StrEnum):
    """State of a task. SUCCESS and FAILURE are final."""

    PENDING = "PENDING"
    RECEIVED = "RECEIVED"
    STARTED = "STARTED"
    RETRY = "RETRY"
    SUCCESS = "SUCCESS"
    FAILURE = "FAILURE"

    @property
    def is_finished(self) -> bool:
        return self is State.SUCCESS or self is State.FAILURE


#: The states by their bare names, for what each task passes: an attribute of an enum is slow in
#: Python 3.11.
PENDING, RECEIVED, STARTED, RETRY, SUCCESS, FAILURE = State
FINISHED = (SUCCESS, FAILURE)
SUSPENDED = "Suspended"  # error type of a run after which the task sleeps, or waits

_ALSO = {
    "WAITING": PENDING,
    "QUEUED": PENDING,
    "SENT": PENDING,
    "CLAIMED": RECEIVED,
    "RUNNING": STARTED,
    "ACTIVE": STARTED,
    "RETRYING": RETRY,
    "RETRIED": RETRY,
    "SUCCEEDED": SUCCESS,
    "SUCCESSFUL": SUCCESS,
    "DONE": SUCCESS,
    "OK": SUCCESS,
    "FAILED": FAILURE,
    "FAIL": FAILURE,
    "ERROR": FAILURE,
}


def state_named(word: str) -> State:
    """Return the state for a word typed by a person: in any case, or a common synonym.

    Raises:
        ValueError: with the words that there are.
    """
    text = word.strip().upper()
    if text in _ALSO:
        return _ALSO[text]
    if text not in set(State):
        known = ", ".join(State).lower()
        close = nearest(text, [*map(str, State), *_ALSO])
        raise ValueError(f"no state {word!r} (expected {known}{close.lower()})")
    return State(text)


#: Legal changes within one run. A fast task goes from PENDING to SUCCESS in one write. None: the
#: state is unknown, because it has expired, or a Go program published the task without one.
LEGAL: dict[State | None, frozenset[State]] = {
    None: frozenset(State),
    PENDING: frozenset({RECEIVED, STARTED, RETRY, SUCCESS, FAILURE}),
    RECEIVED: frozenset({STARTED, RETRY, SUCCESS, FAILURE}),
    STARTED: frozenset({RETRY, SUCCESS, FAILURE}),
    RETRY: frozenset({SUCCESS, FAILURE}),
    SUCCESS: frozenset(),
    FAILURE: frozenset(),
}

#: Legal changes between runs: the next run follows RETRY, and a replay of a dead letter or of a
#: failed task starts anew.
_NEXT_RUN: dict[State, frozenset[State]] = {
    **dict.fromkeys(
        (PENDING, RECEIVED, STARTED, RETRY), frozenset({RECEIVED, STARTED, RETRY, SUCCESS, FAILURE})
    ),
    **dict.fromkeys((SUCCESS, FAILURE), frozenset[State]()),
}


_read_notes = msgspec.json.Decoder(dict[str, Any]).decode


class TaskState(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """State of one task and what is known of it. Go sees the first seven fields; the rest is ours.

    The stores take our fields from here through EXTRA (`wire/states.py`). Add a new field at
    the end, with a default.

    Attributes:
        results: empty unless SUCCESS; several for a task that returns a tuple.
        error: the error text; for RETRY that of the try that just failed.
        created_at: when it was sent (kept by every later state; Go resets it on a retry).
        ttl: 0 except where Go uses DynamoDB.
        run: how many runs ended before the one this state belongs to.
        attempt: which try, 1 for the first.
        progress: (done, total) as the task last reported it.
        worker: the worker that wrote the state.
        message: of a task that failed, or succeeded after a retry, the signature of its last try,
            to look at and to send again; of a waiting task, what its failure would take along
            (`outcomes.failing`).
        notes_json: `notes` as they are kept.
        keep_for: seconds that a finished state is kept; None: as long as the store keeps others.
        root, parent: as of the signature; empty for a task that was sent alone.
    """

    task_uuid: str
    task_name: str = ""
    state: State = State.PENDING
    results: Sequence[Arg] = ()
    error: str = ""
    created_at: dt.datetime = ZERO_TIME
    ttl: int = 0

    run: RunNumber = FIRST_RUN
    attempt: AttemptNumber = FIRST_ATTEMPT
    queue: str = ""
    error_type: str = ""
    traceback: str = ""
    progress: tuple[float, float] | None = None
    started_at: dt.datetime | None = None
    finished_at: dt.datetime | None = None
    eta: dt.datetime | None = None
    worker: str = ""
    message: bytes = b""
    notes_json: str = ""
    keep_for: float | None = None
    root: str = ""
    parent: str = ""

    @property
    def is_finished(self) -> bool:
        return self.state is SUCCESS or self.state is FAILURE

    def life(self, expire_in: float) -> float:
        """Return the seconds that it is kept once finished; others are kept for `expire_in`."""
        return expire_in if self.keep_for is None else self.keep_for

    @property
    def notes(self) -> dict[str, Any]:
        """Facts that the task noted in the run, or the delivery, that wrote this state."""
        try:
            return _read_notes(self.notes_json) if self.notes_json else {}
        except MALFORMED:  # no worker of ours has written them
            return {}


def size_of_state(state: TaskState) -> int:
    """Return about how many bytes a state takes, without encoding it."""
    size = len(state.error) + len(state.traceback) + len(state.message) + len(state.notes_json)
    for result in state.results:
        size += size_of(result.value)
    return size


class GroupMeta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A group, with the fields of Go's backends, and one of ours.

    Attributes:
        plan: of a workflow's record (tasks/plans.py); its members are the tasks that keep it.
    """

    group_uuid: str
    task_uuids: Sequence[str] = ()
    chord_triggered: bool = False
    lock: bool = False
    created_at: dt.datetime = ZERO_TIME
    ttl: int = 0
    plan: str = ""


def advance(current: TaskState | None, change: TaskState) -> TaskState | None:
    """Return the state after `change`, or None when the change must be dropped.

    A change is dropped when the task is finished, when the change belongs to an earlier run, or
    when it would go back within a run: a redelivered task stays STARTED. A later run may only
    follow RETRY or a state that a crash left behind. Name, creation time and queue stay as first
    written.
    """
    if current is None:
        return change
    if change.run < current.run:
        return None
    table = LEGAL if change.run == current.run else _NEXT_RUN
    # The same state again: a second delivery after a crash, or progress.
    same = change.run == current.run and change.state is current.state and not current.is_finished
    if change.state not in table[current.state] and not same:
        return None
    return msgspec.structs.replace(
        change,
        task_name=change.task_name or current.task_name,
        created_at=current.created_at if current.created_at != ZERO_TIME else change.created_at,
        queue=change.queue or current.queue,
        started_at=change.started_at or (current.started_at if change.run == current.run else None),
        progress=change.progress or (current.progress if change.run == current.run else None),
        worker=change.worker or current.worker,
        root=change.root or current.root,
        parent=change.parent or current.parent,
    )


class Arrival(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The end of one member of a group. A member that arrives twice counts once.

    Attributes:
        total: how many members the group has, as its messages say.
        ok: False when it failed for good; then the chord's callback will never be called.
        callback: the chord's callback as a message body; it is sent only with the results added.
    """

    group_uuid: str
    task_uuid: str
    total: int
    ok: bool
    callback: bytes

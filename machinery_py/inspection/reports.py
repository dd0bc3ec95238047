"""The records that `server.inspect` returns."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence

import msgspec

from machinery_py.clock import moment_of
from machinery_py.errors import DecodeError
from machinery_py.tasks.attempts import Attempt
from machinery_py.tasks.checkpoints import last_generation, of_generation
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.tasks.states import GroupMeta, TaskState
from machinery_py.wire.states import decode_results


class QueueReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one queue.

    Attributes:
        running: messages that workers have: of tasks that run, and those that they have prefetched.
            `server.control.workers().stats()` has the number that run.
        failed: tasks that failed and whose states are still kept.
        oldest: seconds that its oldest waiting message has waited.
        per_minute: tasks that ended in the last minute.
        paused: whether workers take nothing from it.
    """

    queue: str
    waiting: int
    running: int
    delayed: int
    dead: int
    failed: int
    oldest: float
    per_minute: int
    paused: bool = False


class TaskPage(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks that a search has found.

    Attributes:
        cursor: where the next page begins; "": nothing more follows.
        looked: how many states were looked at for it.
    """

    tasks: Sequence[TaskState]
    cursor: str
    looked: int


class ChildTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is sent when another has ended.

    Attributes:
        when: "success", "error", or "chord": all members of the group have succeeded.
        uuid: "" if it gets one when it is sent.
    """

    when: str
    name: str
    uuid: str


def children_of(signature: Signature[object]) -> list[ChildTask]:
    """Return what the task sends when it has ended."""
    chord = signature.chord_callback
    children = {
        "success": signature.on_success,
        "error": signature.on_error,
        "chord": () if chord is None else (chord,),
    }
    return [
        ChildTask(when=when, name=one.name, uuid=one.uuid)
        for when, some in children.items()
        for one in some
    ]


class KeptStep(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a task.

    Attributes:
        name: of its step; the second one of a name ends in "#2".
        at: when it was kept, by the clock of the worker; `run`: of the task, 0 for the first.
        results: what the step returned.
        error, error_type: what it raised, if the task went on all the same.
    """

    name: str
    at: dt.datetime
    run: int
    results: Sequence[Arg] = ()
    error: str = ""
    error_type: str = ""


def steps_of(rows: Mapping[str, bytes]) -> list[KeptStep]:
    """Return the checkpoints of a task as they are shown, the first kept first."""
    try:
        kept = of_generation(rows, last_generation(rows))
        return [
            KeptStep(
                name=name,
                at=moment_of(one.at),
                run=one.run,
                results=decode_results(one.results) if one.results else (),
                error=one.error,
                error_type=one.error_type,
            )
            for name, one in kept.items()
        ]
    except DecodeError:
        return []  # a run of the task says what is wrong


class TaskReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a task, and what its message says, if that is known.

    A message is known while it waits in a queue, of tasks that failed or were tried again, and with
    the setting `keep_calls`.

    Attributes:
        args: its arguments, also of a task whose worker was asked; None: they are not known.
        attempts: tries that another followed, the first and the last 19 of them.
        children: what it sends when it has ended; of a chain the next step.
        group: the group that it is a member of.
        members: states of the first 1,000 members of that, in its order; some may have expired.
        steps: its checkpoints.
        waits_for: the signal that it waits for; "": it waits for none.
    """

    state: TaskState
    signature: Signature[object] | None = None
    args: Sequence[Arg] | None = None
    attempts: Sequence[Attempt] = ()
    children: Sequence[ChildTask] = ()
    group: GroupMeta | None = None
    members: Sequence[TaskState] = ()
    steps: Sequence[KeptStep] = ()
    waits_for: str = ""


class ErrorGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Failures of one task with one type of error.

    Attributes:
        first, last: when the earliest and the latest of them failed.
        uuid, error, queue: of the latest.
    """

    name: str
    error_type: str
    count: int
    first: dt.datetime
    last: dt.datetime
    uuid: str
    error: str
    queue: str


class ErrorSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Failures by task and error type, the most frequent first.

    Attributes:
        looked: how many failures were counted.
        complete: False: time was up, and older ones were not counted.
    """

    groups: Sequence[ErrorGroup]
    looked: int
    complete: bool

"""Records that the dashboard's JSON API gives, besides those of `server.inspect` and `control`.

All that tasks and senders said stands in them as text: JSON of a value, masked and cut. So no
number changes in a browser, and no value breaks an answer.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence

import msgspec

from machinery_py.brokers.base import WorkerInfo
from machinery_py.control.answers import ActiveTask, WorkerQueue, WorkerStats
from machinery_py.inspection import ChildTask, QueueReport


class Problem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error. `count`: messages of a queue that holds more than was confirmed."""

    error: str
    count: int | None = None


class WorkerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers there are; stalled ones are among those alive."""

    alive: int = 0
    stalled: int = 0


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the whole.

    Attributes:
        at: when the stores were last asked with success; None: not yet.
        broker, backend: URLs without secrets.
        trouble: why a store cannot be asked now; the rest is as last known.
    """

    at: dt.datetime | None
    version: str
    broker: str
    backend: str
    read_only: bool = False
    user: str = ""
    queues: Sequence[QueueReport] = ()
    workers: WorkerCounts = WorkerCounts()
    trouble: str = ""


class TaskFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions that a task meets; an empty one is none.

    Attributes:
        state: one of these.
        text: in arguments of kept messages, errors, error types or results, in any case.
        since, until: last changed then: seconds ago, or an ISO time with its zone.
    """

    state: Sequence[str] = ()
    name: str = ""
    queue: str = ""
    worker: str = ""
    text: str = ""
    since: str = ""
    until: str = ""


class TaskRow(msgspec.Struct, frozen=True, kw_only=True):
    """A task in a list.

    Attributes:
        args: the start of its arguments; empty: they are not known, or there are none.
        error, result: the start of it.
    """

    uuid: str
    name: str
    args: str = ""
    state: str
    queue: str
    attempt: int
    worker: str
    error: str
    error_type: str
    result: str
    progress: tuple[float, float] | None
    created_at: dt.datetime | None
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    eta: dt.datetime | None


class Tasks(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks, the last changed first.

    Attributes:
        cursor: of the next page; empty: there is none.
        looked: how many tasks were looked at.
    """

    tasks: Sequence[TaskRow]
    cursor: str
    looked: int


class ShownValue(msgspec.Struct, frozen=True, kw_only=True):
    """An argument or result."""

    name: str
    type: str
    value: str


class ShownMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message of a task. `retry_count`: tries left; None: until it works."""

    args: Sequence[ShownValue]
    headers: Mapping[str, str]
    priority: int
    retry_count: int | None
    eta: dt.datetime | None
    group_uuid: str


class ShownAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """A try that another one followed."""

    number: int
    started_at: dt.datetime | None
    ended_at: dt.datetime
    worker: str
    error_type: str
    error: str


class ShownCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of a task. `error`: what its step raised, if the task went on all the same."""

    name: str
    at: dt.datetime
    run: int
    results: Sequence[ShownValue]
    error_type: str
    error: str


class ShownGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group, with its first 1,000 members."""

    uuid: str
    members: Sequence[TaskRow]


class TaskDetail(TaskRow, frozen=True, kw_only=True):
    """All that is known of a task.

    Attributes:
        arguments: also of a task that runs, whose worker was asked; None: they are not known.
        message: None: it is not kept.
        attempts: the tries before the last.
        python: the call as Python; empty without a message.
        root, parent: UUIDs; empty for a task that was sent alone.
        waits_for: the signal that it waits for; empty: none.
    """

    traceback: str
    results: Sequence[ShownValue]
    notes: Mapping[str, str]
    arguments: Sequence[ShownValue] | None
    message: ShownMessage | None
    attempts: Sequence[ShownAttempt]
    steps: Sequence[ShownCheckpoint]
    children: Sequence[ChildTask]
    group: ShownGroup | None
    python: str
    root: str
    parent: str
    waits_for: str


class WorkflowRow(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow. `done`, `failed`, `total`: numbers of tasks."""

    uuid: str
    name: str
    state: str
    cancelled: bool
    created_at: dt.datetime
    done: int
    failed: int
    total: int


class ShownStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a workflow.

    Attributes:
        uuid: of its task or group.
        counts: tasks in each state; the others of `total` were not sent.
        tasks: the first 20, those that failed first.
    """

    uuid: str
    name: str
    is_group: bool
    total: int
    counts: Mapping[str, int]
    error: str
    error_type: str
    attempt: int
    started_at: dt.datetime | None
    finished_at: dt.datetime | None
    parents: Sequence[str]
    children: Sequence[str]
    tasks: Sequence[TaskRow]


class WorkflowDetail(WorkflowRow, frozen=True, kw_only=True):
    """A workflow and its steps."""

    steps: Sequence[ShownStep]


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """A change that was made, or one step of it.

    Attributes:
        skipped: those that it did not apply to.
        cursor: of the next step; empty: there is none.
        looked: how many tasks were looked at.
    """

    done: int = 1
    skipped: int = 0
    cursor: str = ""
    looked: int = 0


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks that one step has found; `cursor`: of the next one."""

    count: int
    cursor: str
    looked: int


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter."""

    id: str
    uuid: str
    name: str
    queue: str
    reason: str
    error: str
    strikes: int
    died_at: dt.datetime
    body: str


class ShownWorker(WorkerInfo, frozen=True, kw_only=True, gc=False):
    """A worker that is alive. `age`: seconds since its last beat."""

    age: float


class WorkerDetail(msgspec.Struct, frozen=True, kw_only=True):
    """The answers of a worker that was asked; `trouble`: why there are none."""

    stats: WorkerStats | None = None
    active: Sequence[ActiveTask] = ()
    queues: Sequence[WorkerQueue] = ()
    trouble: str = ""

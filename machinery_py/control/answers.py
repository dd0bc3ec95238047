"""Answers of workers to orders: the records that `server.control` hands out."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from machinery_py.tasks.signature import Arg

T = TypeVar("T")


class Answers(dict[str, T]):
    """Answers by the worker's name; by `name@host:pid` where several have the same name.

    Attributes:
        missing: workers that are known by a fresh beat, or were named, and did not answer in time.
        errors: why a worker could not carry out the order, by its name.
    """

    def __init__(
        self,
        answers: Mapping[str, T],
        *,
        missing: Sequence[str] = (),
        errors: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(answers)
        self.missing: tuple[str, ...] = tuple(missing)
        self.errors: dict[str, str] = dict(errors or {})


class Revoked(Answers[dict[str, str]]):
    """Answers to `Control.revoke`: "killed", "asked" or "left", by the UUID of a running task.

    Attributes:
        uuids: of the tasks that are revoked now.
    """

    def __init__(
        self,
        answers: Mapping[str, dict[str, str]],
        *,
        uuids: Sequence[str],
        missing: Sequence[str] = (),
        errors: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(answers, missing=missing, errors=errors)
        self.uuids: tuple[str, ...] = tuple(uuids)


class Pong(msgspec.Struct, frozen=True, kw_only=True):
    """A sign of life.

    Attributes:
        clock: the logical clock of the worker's process.
        seconds: from the order to the answer.
    """

    clock: int
    seconds: float


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a worker and its process.

    Attributes:
        uptime: seconds since the worker was started.
        active: tasks that run; the `oldest` of them for so many seconds.
        held: tasks that are claimed and not settled, with those that run.
        processed: tasks that have ended since then, `failed` of them in FAILURE.
        connected: whether the last claim reached the store.
        memory: bytes of the process; 0 if the platform does not tell.
        load: of the host over 1, 5 and 15 minutes.
        threads: of the process.
        events: whether it sends its events.
    """

    host: str
    pid: int
    version: str
    python: str
    platform: str
    started_at: dt.datetime
    uptime: float
    concurrency: int
    pool: str
    active: int
    oldest: float
    held: int
    processed: int
    failed: int
    connected: bool
    memory: int
    load: tuple[float, float, float] | None
    threads: int
    events: bool


class HeldTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that a worker has claimed and not begun."""

    uuid: str
    name: str
    queue: str
    attempt: int


class ActiveTask(HeldTask, frozen=True, kw_only=True):
    """A task that runs.

    Attributes:
        started_at: by the clock of the worker; None: it is just beginning.
        seconds: since then.
        place: the name of its thread, "event loop" or "process <pid>".
        cancelled: it was asked to stop.
        args: its arguments. None: its message has more than 2,048 bytes, those of the tasks before
            it have 32,768, or its worker is stalled.
    """

    started_at: dt.datetime | None
    seconds: float
    place: str
    cancelled: bool = False
    args: Sequence[Arg] | None = None


class WorkerQueue(msgspec.Struct, frozen=True, kw_only=True):
    """A queue of a worker; `weight` is 0 in strict order."""

    name: str
    weight: float = 0.0


class ThreadStack(msgspec.Struct, frozen=True, kw_only=True):
    """The stack of a thread, as it is now.

    Attributes:
        task: UUID of the task that it runs; "" if it runs none.
        stack: as in a traceback, the innermost call last.
    """

    thread: str
    task: str = ""
    stack: str

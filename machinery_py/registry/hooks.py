"""Handlers that an app registers: around its tasks, after them, and around its processes.

Which is called where and when, and what an exception in it does: docs/how-to/hooks.md.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from machinery_py.tasks.context import Context
from machinery_py.tasks.signature import Signature
from machinery_py.tasks.states import State

Around = Callable[[Signature[Any]], Iterator[None]]
AroundSend = Callable[[Sequence[Signature[Any]]], Iterator[Mapping[str, str] | None]]
# The same two with `contextmanager` around them.
Surrounding = Callable[[Signature[Any]], AbstractContextManager[None]]
SurroundingSend = Callable[
    [Sequence[Signature[Any]]], AbstractContextManager[Mapping[str, str] | None]
]
TaskHandler = Callable[[Context], object]
SuccessHandler = Callable[[Context, Any], object]
ErrorHandler = Callable[[Context, BaseException], object]
Lifespan = Callable[
    [], Iterator[Mapping[str, Any] | None] | AsyncIterator[Mapping[str, Any] | None]
]

# Runs it on an event loop of another thread, and waits for what it returns.
RunCoroutine = Callable[[Coroutine[Any, Any, Any]], Any]

A = TypeVar("A", bound=Around)
D = TypeVar("D", bound=AroundSend)
T = TypeVar("T", bound=TaskHandler)
S = TypeVar("S", bound=SuccessHandler)
E = TypeVar("E", bound=ErrorHandler)
L = TypeVar("L", bound=Lifespan)


class NothingSent(Exception):
    """Raised in a handler of `around_send`: another process has sent this tick of a schedule."""


class WorkerPart(Protocol):
    """A part of an app in the process of a worker. Both may be coroutine functions."""

    def start(self, worker: Any, /) -> object:
        """Begin, and return; the worker does not start if this fails."""

    def stop(self, worker: Any, /) -> object:
        """End what `start` began; not called after a `start` that failed."""


P = TypeVar("P", bound=WorkerPart)


@dataclass(frozen=True, slots=True)
class AddedPart:
    """A part that an app adds to its workers, or a program to one.

    Attributes:
        after: names of parts that are started before it, and stopped after it.
        make: called at each start of a worker.
    """

    name: str
    after: Sequence[str]
    make: Callable[[], WorkerPart]


def added_part(make: Callable[[], WorkerPart], name: str, after: str | Sequence[str]) -> AddedPart:
    """Return a part, after one or several others."""
    return AddedPart(name, (after,) if isinstance(after, str) else tuple(after), make)


class Hooks:
    """Handlers of one Server, each kind in the order of registration. All may be coroutines.

    Whatever a handler raises is logged, and changes nothing; only `around_task` is part of the run,
    and `around_send` of the sending.
    """

    def __init__(self) -> None:
        self.around: list[Surrounding] = []
        self.sends: list[SurroundingSend] = []
        self.before: list[TaskHandler] = []
        self.after: list[TaskHandler] = []
        self.lifespans: list[Lifespan] = []
        self.parts: list[AddedPart] = []
        self.on_end: dict[State, list[Callable[[Context, Any], object]]] = {}
        # For tasks that run in the caller's thread: a framework may work for the coroutine there.
        self.awaiting: Callable[[RunCoroutine], RunCoroutine] = lambda run: run

    def around_task(self, function: A) -> A:
        """Run each task, in the worker, between the halves of this generator function."""
        self.around.append(contextmanager(function))
        return function

    def around_send(self, function: D) -> D:
        """Send between the halves of this generator function, in the sender's thread.

        It is called with the signatures of one sending: a task, the members of a group, what a tick
        of a schedule sends. It may yield a mapping: headers for each of them, in place of their
        own. Callbacks and retries, which workers send, do not pass it.
        """
        self.sends.append(contextmanager(function))
        return function

    def before_task(self, handler: T) -> T:
        """Call it before each run, in the task's thread."""
        self.before.append(handler)
        return handler

    def after_task(self, handler: T) -> T:
        """Call it after each run, in the task's thread, before it is known how the task ends."""
        self.after.append(handler)
        return handler

    def on_success(self, handler: S) -> S:
        """Call it with the result when SUCCESS is stored."""
        self.on_end.setdefault(State.SUCCESS, []).append(handler)
        return handler

    def on_retry(self, handler: E) -> E:
        """Call it with the error when RETRY is stored: the task will run again."""
        self.on_end.setdefault(State.RETRY, []).append(handler)
        return handler

    def on_failure(self, handler: E) -> E:
        """Call it with the error when FAILURE is stored, whatever the reason."""
        self.on_end.setdefault(State.FAILURE, []).append(handler)
        return handler

    def lifespan(self, function: L) -> L:
        """Run each process that runs tasks between the halves of this generator function.

        It may be an async one, which runs on the loop of coroutine tasks. It may yield a mapping,
        which is then in `Context.state`. If it fails before it yields, the process does not start.
        """
        self.lifespans.append(function)
        return function

    def worker_part(
        self, *, name: str = "", after: str | Sequence[str] = "broker"
    ) -> Callable[[type[P]], type[P]]:
        """Start and stop an instance of the class with each worker, between its own parts.

        It is started before tasks are claimed and stopped when they have ended, unless it comes
        after "consumer". `machinery worker APP --parts` shows the order.

        Args:
            name: by default that of the class.
            after: the part or parts that it needs; none: the lifespans.
        """

        def decorate(part: type[P]) -> type[P]:
            self.parts.append(added_part(part, name or part.__name__, after))
            return part

        return decorate

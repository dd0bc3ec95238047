"""Declaring schedules in code, as part of a Server. Nothing is stored or started here: workers do that."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, overload

from machinery_py.registry.task import AsyncTask, Task
from machinery_py.schedules.api import PeriodicOptions, definition_of
from machinery_py.schedules.scheduler import Declared
from machinery_py.tasks.context import Context
from machinery_py.tasks.signature import Signature, Step
from machinery_py.tasks.workflow import chain, chord, group

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=Task[..., Any])


class Anything:
    """For type checkers: a first parameter that takes even this is untyped, Any or object, and would pass for a Context."""


class TaskDecorator(Protocol):
    """Result of `server.task(…)` with options. Keeps the function's parameters and result for type checkers."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Anything, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[..., R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Anything, P], R], /) -> Task[..., R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class PeriodicDecorator(Protocol):
    """Result of `server.periodic(…)`: takes a task, or a function that becomes one."""

    @overload
    def __call__(self, task: T, /) -> T: ...
    @overload
    def __call__(
        self, function: Callable[[Context], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[[], R]: ...
    @overload
    def __call__(self, function: Callable[[Context], R], /) -> Task[[], R]: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class Declaring(ABC):
    """The part of a Server that schedules are declared with."""

    declared: Declared

    @abstractmethod
    def task(self, function: Any = None, /) -> Any: ...

    def periodic(
        self, spec: str, *, name: str = "", **options: Unpack[PeriodicOptions]
    ) -> PeriodicDecorator:
        """Run a task by a schedule: `@server.periodic("0 6 * * MON-FRI", tz="Europe/Berlin")` above `@server.task` or a function.

        Args:
            spec: five cron fields, six with the seconds first, `@daily`, `@every 30s`; see docs/how-to/periodic.md.
            name: of the schedule; by default the task's.
            options: see PeriodicOptions.

        Raises:
            ScheduleError: the spec cannot be read or can never be due, or the name is taken.
            ArgumentError: the task cannot be called without arguments.
        """

        def decorate(function: Any) -> Any:
            task = function if isinstance(function, Task) else self.task(function)
            self._declare(spec, name or task.name, task.signature(), options)
            return task

        return decorate

    def register_periodic_task(
        self, spec: str, name: str, signature: Signature[Any], **options: Unpack[PeriodicOptions]
    ) -> None:
        """Declare a schedule that sends one task. Registering starts nothing: workers send it. (Go: RegisterPeriodicTask.)

        Raises:
            ScheduleError, ArgumentError: as `periodic`.
        """
        self._declare(spec, name, signature, options)

    def register_periodic_chain(
        self, spec: str, name: str, *signatures: Step[Any], **options: Unpack[PeriodicOptions]
    ) -> None:
        """As `register_periodic_task`, for a chain."""
        self._declare(spec, name, chain(*signatures), options)

    def register_periodic_group(
        self,
        spec: str,
        name: str,
        send_concurrency: int,
        *signatures: Step[Any],
        **options: Unpack[PeriodicOptions],
    ) -> None:
        """As `register_periodic_task`, for a group; `send_concurrency` is Go's and is not needed here."""
        del send_concurrency
        self._declare(spec, name, group(*signatures), options)

    def register_periodic_chord(
        self,
        spec: str,
        name: str,
        send_concurrency: int,
        callback: Signature[Any],
        *signatures: Step[Any],
        **options: Unpack[PeriodicOptions],
    ) -> None:
        """As `register_periodic_task`, for a chord; `send_concurrency` is Go's and is not needed here."""
        del send_concurrency
        self._declare(spec, name, chord(group(*signatures), callback), options)

    def _declare(self, spec: str, name: str, step: Step[Any], options: PeriodicOptions) -> None:
        self.declared.add(name, definition_of(spec, step, options))

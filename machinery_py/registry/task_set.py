"""The decorator `task` of a Server, and sets of tasks without a Server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, cast, overload

from machinery_py.errors import MachineryError
from machinery_py.registry.calls import Call
from machinery_py.registry.options import TASK_OPTIONS, BatchOptions, TaskOptions, check
from machinery_py.registry.registry import Registry, new_task
from machinery_py.registry.task import (
    Anything,
    AsyncTask,
    BatchDecorator,
    Task,
    TaskDecorator,
    TaskSender,
)
from machinery_py.tasks.context import Context
from machinery_py.tasks.signature import Arg

P = ParamSpec("P")
R = TypeVar("R")

Register = Callable[[str, Callable[..., Any], TaskOptions], Task[..., Any]]


class TaskRegistrar(ABC):
    """Base of Server and TaskSet: the decorator that makes tasks of functions."""

    @overload
    def task(
        self, function: Callable[Concatenate[Anything, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[..., R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Anything, P], R], /) -> Task[..., R]: ...
    @overload
    def task(
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(self, name: str | None = None, /, **options: Unpack[TaskOptions]) -> TaskDecorator: ...
    @overload
    def task(
        self, name: str | None = None, /, **options: Unpack[BatchOptions]
    ) -> BatchDecorator: ...
    def task(self, function: Any = None, /, **options: Any) -> Any:
        """Register a function as a task; it can still be called as before.

        Its name is the function's, unless one is given: `@server.task("billing.charge")`.

        Args:
            options: see TaskOptions, and BatchOptions for a task whose calls are run together.

        Raises:
            TaskAlreadyRegistered: the name belongs to another function.
            TypeError: it is a method, a class or a generator.
            TypeError, ValueError: an option is unknown, or its value makes no sense.
        """
        name = function if isinstance(function, str) else ""
        if function is not None and not isinstance(function, str):
            return self._register(name, function, cast(TaskOptions, options))
        return lambda decorated: self._register(name, decorated, cast(TaskOptions, options))

    @abstractmethod
    def _register(
        self, name: str, function: Callable[..., Any], options: TaskOptions
    ) -> Task[..., Any]:
        """Make a task and add it; an empty name is the function's."""


class TaskSet(TaskRegistrar):
    """Tasks without a Server, as of a package: `server.include(task_set)` registers them.

    They can be called at once, and sent when a Server has included them: through the last one that
    did. A signature or `options(…)` belongs to the Server that had included them when it was made.

    Args:
        defaults: options of its tasks that these do not have themselves, see TaskOptions.

    Raises:
        TypeError, ValueError: an option is unknown, or its value makes no sense.
    """

    def __init__(self, **defaults: Unpack[TaskOptions]) -> None:
        check("TaskSet", defaults, TASK_OPTIONS)
        self._defaults = defaults
        self._registry = Registry()
        self._tasks: list[tuple[Task[..., Any], str, TaskOptions]] = []
        self._includers: list[Callable[[Task[..., Any], str, TaskOptions], None]] = []

    def included(self, register: Register, prefix: str, defaults: TaskOptions) -> None:
        """Register its tasks, and later ones, for a Server; see `Server.include`."""
        check("include", defaults, TASK_OPTIONS)

        def include(task: Task[..., Any], name: str, own: TaskOptions) -> None:
            options: TaskOptions = {**self._defaults, **defaults, **own}
            # The user's module has this object: it becomes one of the Server's tasks.
            task.__dict__.update(register(prefix + name, task.function, options).__dict__)

        for one in self._tasks:
            include(*one)
        self._includers.append(include)

    def _register(
        self, name: str, function: Callable[..., Any], options: TaskOptions
    ) -> Task[..., Any]:
        nobody = cast(TaskSender, None)  # unused: the call below has no arguments to send
        task = new_task(name, function, {**self._defaults, **options}, nobody)
        self._registry.add(task)
        task.call = _Unsendable(task.name, task.function, in_batches=task.call.in_batches)
        declared = task, task.name, options
        self._tasks.append(declared)
        for include in self._includers:
            include(*declared)
        return task


class _Unsendable(Call):
    """Call of a task that belongs to no Server yet."""

    def arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool = False
    ) -> tuple[Arg, ...]:
        raise MachineryError(
            f"task {self.name!r} cannot be sent: its TaskSet was in no Server when this was made "
            "(server.include(task_set) first)"
        )

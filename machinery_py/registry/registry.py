"""The tasks of a Server, by their names."""

from __future__ import annotations

import datetime as dt
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from machinery_py.connections.forks import ForkLock
from machinery_py.errors import TaskAlreadyRegistered, TaskNotRegistered
from machinery_py.registry.calls import needs_check
from machinery_py.registry.options import TaskOptions
from machinery_py.registry.task import AsyncTask, BatchTask, Task, TaskSender
from machinery_py.tasks.linking import link_callbacks
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.tasks.states import GroupMeta

_ERROR_TEXT = Arg(type="string", value="")  # what an error callback gets in front of its arguments


class Registry:
    """The tasks of one Server. May be used from any thread."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task[..., Any]] = {}
        #: Return the task of that name, or None.
        self.find: Callable[[str], Task[..., Any] | None] = self._tasks.get
        self._lock = ForkLock()

    def register(
        self, name: str, function: Callable[..., Any], options: TaskOptions, sender: TaskSender
    ) -> Task[..., Any]:
        """Make a task of a function and add it.

        Raises:
            TypeError, ValueError, NameRefused: as `new_task`.
            TaskAlreadyRegistered: as `add`.
        """
        task = new_task(name, function, options, sender)
        self.add(task)
        return task

    def add(self, task: Task[..., Any]) -> None:
        """Add a task.

        Raises:
            TaskAlreadyRegistered: its name belongs to a different function. The same function
                replaces it, as when its module is imported twice.
        """
        with self._lock:
            old = self._tasks.get(task.name)
            if old is not None and not _is_same(old.function, task.function, set()):
                module = task.__module__.rpartition(".")[2].strip("_")
                raise TaskAlreadyRegistered(
                    task.name, where=_place(old.function), suggestion=f"{module}.{task.name}"
                )
            self._tasks[task.name] = task

    def get(self, name: str) -> Task[..., Any]:
        """Return the task.

        Raises:
            TaskNotRegistered: with the names that there are.
        """
        task = self._tasks.get(name)
        if task is None:
            raise TaskNotRegistered(name, self._tasks)
        return task

    def linked(
        self, signature: Signature[Any], now: dt.datetime
    ) -> tuple[Signature[Any], Sequence[GroupMeta]]:
        """Check a single call, and link its callbacks; return it with their groups.

        Raises:
            ArgumentError: as `check`.
        """
        signature, groups = link_callbacks(signature, now=now)
        self.check((signature,))
        return signature, groups

    def check(self, signatures: Sequence[Signature[Any]]) -> None:
        """Check calls and their callbacks against the parameters of the tasks known here.

        Raises:
            ArgumentError: the worker would refuse one.
        """
        todo: list[tuple[Signature[Any], Sequence[Arg], bool]] = [
            (one, one.args, False) for one in signatures if needs_check(one)
        ]
        seen: set[int] = set()  # the members of a group share their callback
        while todo:
            signature, args, room = todo.pop()
            task = self._tasks.get(signature.name)
            if task is not None:
                task.call.check(args, room=room)
            callback = signature.chord_callback
            if callback is not None and id(callback) not in seen:
                seen.add(id(callback))
                todo.append(
                    (callback, callback.args, not (callback.immutable or callback.is_fixed))
                )
            if type(signature.on_success) is tuple and signature.on_success:
                todo.extend(
                    (one, one.args, not (signature.immutable or one.is_fixed))
                    for one in signature.on_success
                )
            if type(signature.on_error) is tuple and signature.on_error:
                todo.extend(
                    (one, one.args if one.is_fixed else (_ERROR_TEXT, *one.args), False)
                    for one in signature.on_error
                )

    def parameters(self, name: str) -> Sequence[str]:
        """Return the names of a task's positional parameters; empty if it is not known here."""
        task = self._tasks.get(name)
        return task.call.places if task is not None else ()

    def names(self) -> list[str]:
        return sorted(self._tasks)

    def __iter__(self) -> Iterator[Task[..., Any]]:
        return iter(list(self._tasks.values()))


def new_task(
    name: str, function: Callable[..., Any], options: TaskOptions, sender: TaskSender
) -> Task[..., Any]:
    """Make a task of a function.

    Args:
        name: of the task; by default the function's.

    Raises:
        TypeError: it is no function, a method without its object, a class, a generator, or has no
            name.
        TypeError, ValueError, NameRefused: as Task.
    """
    if isinstance(function, Task):
        function = function.function
    if problem := _function_problem(function):
        raise TypeError(f"{function!r} cannot be a task: {problem}")
    name = name or getattr(function, "__name__", "")
    if not name or name == "<lambda>":
        raise TypeError(
            f"{function!r} has no name of its own: server.register_task(name, function)"
        )
    kind: type[Task[..., Any]] = AsyncTask if inspect.iscoroutinefunction(function) else Task
    if options.get("batch"):
        kind = BatchTask
    return kind(name, function, options, sender)


def _function_problem(function: Any) -> str:
    """Return why this cannot be a task; "" if it can."""
    if isinstance(function, classmethod) or _is_method(function):
        return (
            "it is a method, and its object cannot be sent (make a function of it, or register "
            "the method of an object: server.register_task(name, object.method))"
        )
    if not callable(function):
        return "Task must be a func type"
    if isinstance(function, type) and function.__module__ != "builtins":
        return "there are no task classes (take a function, or an object that can be called)"
    called = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004
    if any(map(inspect.isgeneratorfunction, (function, called))) or any(
        map(inspect.isasyncgenfunction, (function, called))
    ):
        return "it is a generator, which cannot be a result (return a list)"
    if not inspect.iscoroutinefunction(function) and inspect.iscoroutinefunction(called):
        return "its __call__ is a coroutine function (register that: object.__call__)"
    return ""


def _is_method(function: Any) -> bool:
    """Return whether a function stands in a class, and takes an object of that first."""
    if not inspect.isfunction(function):
        return False
    outer = function.__qualname__.rpartition(".")[0]
    if not outer or outer.endswith("<locals>"):
        return False
    return next(iter(inspect.signature(function).parameters), "") in ("self", "cls")


def _is_same(old: Any, new: Any, seen: set[tuple[int, int]]) -> bool:
    """Return whether two values are the same function, or belong to it in the same way.

    A module that is loaded again compiles the same lines again: the same function. A factory that
    runs twice makes two, unless it runs with the same values. `seen` ends recursion.
    """
    if old is new or (id(old), id(new)) in seen or old is _UNKNOWN or new is _UNKNOWN:
        return True
    seen.add((id(old), id(new)))
    if isinstance(old, Task) and isinstance(new, Task):
        return old.name == new.name
    codes = [getattr(function, "__code__", None) for function in (old, new)]
    if None in codes or _place(old) != _place(new):
        return type(old) is type(new) and (
            old == new if isinstance(old, _PLAIN) else repr(old) == repr(new) and callable(old)
        )
    if codes[0] is not codes[1]:
        return True
    return all(_is_same(*pair, seen) for pair in zip(_around(old), _around(new), strict=True))


_PLAIN = (str, bytes, int, float, bool, type(None), tuple, frozenset)


def _around(function: Any) -> list[Any]:
    """Return what a function has besides its code: object, defaults, closure."""
    cells = [_content(cell) for cell in function.__closure__ or ()]
    named = function.__kwdefaults__ or {}
    return [
        getattr(function, "__self__", None),
        *(function.__defaults__ or ()),
        *named.values(),
        *cells,
    ]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the function itself, say, while its decorator is at work
        return _UNKNOWN


_UNKNOWN = object()


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    path = os.path.relpath(code.co_filename)
    return f"{code.co_filename if path.startswith('..') else path}:{code.co_firstlineno}"

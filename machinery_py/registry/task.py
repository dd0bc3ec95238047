"""A registered function: how it is called here, and how a call of it is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    TypeVarTuple,
    Unpack,
    cast,
    overload,
)
from uuid import NAMESPACE_OID, uuid5

import msgspec

from machinery_py.call_threads import in_thread
from machinery_py.config.config import Config
from machinery_py.errors import NameRefused
from machinery_py.limits.base import Rule
from machinery_py.limits.settings import RATE, rules_of
from machinery_py.names import check_lock, check_queue, check_task, check_uuid
from machinery_py.registry import unique_keys
from machinery_py.registry.calls import Call
from machinery_py.registry.chunks import chunk_of
from machinery_py.registry.options import (
    SendOptions,
    TaskOptions,
    TaskSettings,
    check_call,
    check_keys,
    counted_retries,
    headers_of_call,
)
from machinery_py.results.async_results import AsyncResult
from machinery_py.tasks.context import Context
from machinery_py.tasks.mailboxes import SILENT
from machinery_py.tasks.signature import HEADER_UNIQUE, Arg, Signature, Step, new_uuid
from machinery_py.tasks.workflow import Group
from machinery_py.wire.signatures import encode_signature

INTERRUPTIBLE = True  # calls user code and takes no lock, see worker/running/executors.py

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", contravariant=True)
Out = TypeVar("Out", covariant=True)
Ts = TypeVarTuple("Ts")
Row = TypeVar("Row")
T = TypeVar("T", bound="Task[..., Any]")


class TaskSender(Protocol):
    """The part of a Server that a task needs."""

    @property
    def config(self) -> Config: ...
    def result(self, uuid: str) -> Any: ...
    def send(self, step: Step[Any]) -> Any: ...
    def send_once(self, signature: Signature[Any]) -> Any: ...
    def send_async(self, step: Step[Any]) -> Coroutine[Any, Any, Any]: ...


class _TakesOne(Protocol[A, Out]):
    """A task of one argument, or one whose others have defaults."""

    def signature(self, item: A, /) -> Signature[Out]: ...


class _Takes(Protocol[*Ts, Out]):
    """A task of these arguments."""

    def signature(self, *args: *Ts) -> Signature[Out]: ...


class Task(Generic[P, R]):
    """A registered function. It can still be called as before; `send` lets a worker call it."""

    def __init__(
        self, name: str, function: Callable[..., Any], options: TaskOptions, sender: TaskSender
    ) -> None:
        """Return a task with these options.

        Raises:
            NameRefused: no task, or no queue, may be called so.
            TypeError, ValueError: an option is unknown, or its value makes no sense.
        """
        check_task(name)
        if name in SILENT:
            raise NameRefused(f"task {name!r} is the library's own (choose another name)", name)
        self.name = name
        self.function = function
        self.settings: TaskSettings = TaskSettings.of(name, options)
        if self.settings.queue:
            check_queue(self.settings.queue)
        self.call: Call = Call(
            name,
            function,
            in_batches=bool(self.settings.batch),
            secrets=self.settings.send_secrets,
        )
        check_keys(name, self.settings, self.call.names)
        if self.settings.transaction and self.call.is_async:
            raise ValueError(
                f"{name}: transaction=True and a coroutine function (expected a function: one "
                "thread runs and commits it)"
            )
        self.own_rules: tuple[Rule, ...] = rules_of(self.settings.limits)
        self.limit_also(())
        self._sender = sender
        self._options: SendOptions = {}
        self.__doc__ = function.__doc__
        self.__name__: str = getattr(function, "__name__", name)
        self.__module__ = getattr(function, "__module__", __name__)
        self.__wrapped__ = function

    def limit_also(self, rules: Iterable[Rule]) -> None:
        """Let it run by these rules, too, besides its own; those of the same names are its own."""
        own = {rule.name for rule in self.own_rules}
        self.rules: tuple[Rule, ...] = (
            *self.own_rules,
            *(rule for rule in rules if rule.name not in own),
        )
        # Most tasks need not ask anybody before they run.
        self.is_guarded: bool = bool(
            self.rules or self.settings.exclusive or self.settings.ack == "early"
        )

    def rules_of(self, args: Sequence[Arg]) -> list[Rule]:
        """Return its rules, each with the key of a call.

        Raises:
            ArgumentError: a key cannot be made of these arguments.
        """
        return [self._keyed(rule, args) for rule in self.rules]

    def _keyed(self, rule: Rule, args: Sequence[Arg]) -> Rule:
        option = "rate_key" if rule.name == RATE else "running_key"
        how = getattr(self.settings, option)
        if not how:
            return rule
        key = unique_keys.key_text(self.name, self.call, args, how, option)
        return msgspec.structs.replace(rule, key=key)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function here and now; a Context parameter is not given by the caller."""
        if self.call.takes_context:
            # As in a unit test: there is nobody to report to.
            context = Context(
                Signature(name=self.name), queue="", delivery=1, worker="", report=None
            )
            return cast(R, self.function(context, *args, **kwargs))
        return cast(R, self.function(*args, **kwargs))

    def send(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Publish a call of this task.

        Raises:
            ArgumentError: the arguments do not fit, or one cannot be sent.
            PublishRefused, PublishUnknown: as Server.send_task.
        """
        signature = self._signature(args, kwargs, now=True)  # it knows if there is no sender yet
        return cast("AsyncResult[R]", self._sender.send(signature))

    async def send_async(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """`send` for coroutines."""
        signature = self._signature(args, kwargs, now=True)
        return cast("AsyncResult[R]", await self._sender.send_async(signature))

    def send_once(self, key: str, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """`send`, and nothing if the same call was sent with this key before.

        It is known by its UUID, which is made of key and call. One that has a UUID of its own, or
        is unique, is sent as ever.
        """
        signature = self.signature(*args, **kwargs)
        if signature.uuid or is_unique(self, signature):
            return self.send(*args, **kwargs)
        call = sha256(encode_signature(signature)).hexdigest()
        signature = signature.replace(uuid=f"task_{uuid5(NAMESPACE_OID, f'{key} {call}')}")
        return cast("AsyncResult[R]", self._sender.send_once(signature))

    async def send_once_async(self, key: str, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """`send_once` for coroutines."""
        return await in_thread(functools.partial(self.send_once, key, *args, **kwargs))

    def result(self, uuid: str) -> AsyncResult[R]:
        """Return the result of a call that any process has sent."""
        return cast("AsyncResult[R]", self._sender.result(uuid))

    def signature(self, *args: P.args, **kwargs: P.kwargs) -> Signature[R]:
        """Return the call as an object: to be sent, chained, put into a group."""
        return self._signature(args, kwargs)

    def partial(self, *args: Any, **kwargs: Any) -> Signature[R]:
        """Return a call to which a chain or chord adds results; so the count is not checked."""
        return self._signature(args, kwargs, partial=True)

    def map(self: _TakesOne[A, R], items: Iterable[A]) -> Group[list[R]]:
        """Return a group with a call for each item. Raises as `signature`.

        Without an item it is over at once: its result is [].
        """
        task = cast("Task[..., R]", self)
        return Group([task.signature(item) for item in items], sender=task._sender)

    def starmap(self: _Takes[*Ts, R], calls: Iterable[tuple[*Ts]]) -> Group[list[R]]:
        """Return a group with a call for each tuple of arguments. Else as `map`."""
        task = cast("Task[..., R]", self)
        return Group([task.signature(*args) for args in calls], sender=task._sender)

    def chunks(
        self: _Takes[*Ts, R], calls: Iterable[tuple[*Ts]], size: int
    ) -> Group[list[list[R]]]:
        """Return a group in which each task makes `size` calls, one after the other.

        Each is one task with one state, and its result is the list of the calls' results: when a
        call fails, all of its chunk are made again, or fail. Ours alone: a Go worker fails it.

        Raises:
            ArgumentError: as `signature`; or the tuples are not of one length.
            ValueError: the size is not positive, or the task takes batches.
        """
        task = cast("Task[..., R]", self)
        if size < 1 or task.settings.batch:
            found = "a task with batch=…" if task.settings.batch else f"size={size}"
            raise ValueError(f"{task.name}: no chunks of {found} (expected a size of 1 or more)")
        made = [task.signature(*args) for args in calls]
        chunks = [chunk_of(made[at : at + size]) for at in range(0, len(made), size)]
        return Group(chunks, sender=task._sender)

    def options(self, **options: Unpack[SendOptions]) -> Self:
        """Return the task with options for its calls, besides those that it was given before.

        Raises:
            TypeError, ValueError: an option is unknown, or its value makes no sense.
            NameRefused: no queue, no lock, or no task's UUID, may be called so.
        """
        delay, eta = options.get("delay"), options.get("eta")
        if delay is not None and eta is not None:
            raise ValueError(f"{self.name}: delay={delay!r} and eta={eta!r} (expected one of them)")
        merged: SendOptions = {**self._options, **options}
        check_call(self.name, merged, self.settings)
        if lock := options.get("exclusive_key"):
            check_lock(lock)
        if queue := options.get("queue"):
            check_queue(queue)
        if uuid := options.get("uuid"):
            check_uuid(uuid)
        task = object.__new__(type(self))
        task.__dict__.update(self.__dict__, _options=merged)
        return task

    def _signature(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        partial: bool = False,
        now: bool = False,
    ) -> Signature[R]:
        """Return a call. `now`: it is sent at once: it has a UUID and a queue."""
        settings, options = self.settings, self._options
        arguments = self.call.arguments(args, kwargs, partial=partial)
        if not options:
            return Signature(
                name=self.name,
                args=arguments,
                uuid=new_uuid() if now else "",
                routing_key=settings.queue or (self._sender.config.default_queue if now else ""),
                priority=settings.priority,
                retry_count=settings.retries,
                sender=self._sender,
            )
        headers = headers_of_call(options)
        if (unique := options.get("unique")) is not None:
            headers[HEADER_UNIQUE] = self._unique_key(arguments, unique) if unique else ""
        return Signature(
            name=self.name,
            args=arguments,
            uuid=options.get("uuid", ""),
            eta=options.get("eta") if options.get("delay") is None else None,
            headers=headers,
            routing_key=options.get("queue", settings.queue),
            priority=options.get("priority", settings.priority),
            retry_count=counted_retries(options.get("retries", settings.retries)),
            sender=self._sender,
        )

    def _unique_key(self, arguments: Sequence[Arg], unique: bool | str) -> str:
        owner = unique_keys.owner(self._sender.config)
        return unique_keys.unique_key(self.name, self.call, arguments, unique, owner=owner)

    def __repr__(self) -> str:
        return f"<Task {self.name!r}>"


class AsyncTask(Task[P, R]):
    """A task whose function is a coroutine function; workers run it on their event loop."""


class BatchTask(Task[[Row], R], Generic[Row, R]):
    """A task that is sent one row at a time, and whose function is called with many."""

    def __call__(self, rows: Sequence[Row]) -> Any:  # type: ignore[override]  # not as it is sent
        """Call the function here and now."""
        return super().__call__(cast(Any, rows))


def is_unique(task: Task[..., Any] | None, signature: Signature[Any]) -> bool:
    """Return whether the store is to look at a call's key: as the call says, else its task."""
    by_task = task is not None and task.settings.unique is not False
    return bool(signature.headers.get(HEADER_UNIQUE, by_task))


# Decorators, for type checkers


class Anything:
    """Type of no value: a first parameter that takes it is untyped, and no Context."""


class TaskDecorator(Protocol):
    """Result of `server.task(…)` with options; it keeps the function's parameters and result."""

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


class BatchDecorator(Protocol):
    """Result of `server.task(batch=…)`: what takes a list is sent its items, one in each call."""

    @overload
    def __call__(
        self, function: Callable[[Context, list[Row]], Coroutine[Any, Any, list[R]]], /
    ) -> BatchTask[Row, R]: ...
    @overload
    def __call__(
        self, function: Callable[[Context, list[Row]], Coroutine[Any, Any, None]], /
    ) -> BatchTask[Row, None]: ...
    @overload
    def __call__(
        self, function: Callable[[Context, list[Row]], list[R]], /
    ) -> BatchTask[Row, R]: ...
    @overload
    def __call__(
        self, function: Callable[[Context, list[Row]], None], /
    ) -> BatchTask[Row, None]: ...
    @overload
    def __call__(
        self, function: Callable[[list[Row]], Coroutine[Any, Any, list[R]]], /
    ) -> BatchTask[Row, R]: ...
    @overload
    def __call__(
        self, function: Callable[[list[Row]], Coroutine[Any, Any, None]], /
    ) -> BatchTask[Row, None]: ...
    @overload
    def __call__(self, function: Callable[[list[Row]], list[R]], /) -> BatchTask[Row, R]: ...
    @overload
    def __call__(self, function: Callable[[list[Row]], None], /) -> BatchTask[Row, None]: ...


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

"""A registered function: how it is called here, and how a call of it is sent."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from machinery_py.config.config import Config
from machinery_py.names import check_queue, check_task, check_uuid
from machinery_py.registry import unique_keys
from machinery_py.registry.calls import Call
from machinery_py.registry.options import (
    OPTION_NAMES,
    SendOptions,
    TaskSettings,
    check_kill_after,
    check_numbers,
    check_word,
    check_zone,
    counted_retries,
    no_option,
)
from machinery_py.results.async_results import AsyncResult
from machinery_py.tasks.context import Context
from machinery_py.tasks.signature import (
    HEADER_DELAY,
    HEADER_EXPIRES,
    HEADER_EXPIRES_IN,
    HEADER_IGNORE_RESULT,
    HEADER_KILL_AFTER,
    HEADER_ON_DUPLICATE,
    HEADER_TIME_LIMIT,
    HEADER_UNIQUE,
    LONGEST,
    Arg,
    Signature,
    Step,
)

INTERRUPTIBLE = True  # calls user code and takes no lock, see worker/executors.py

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="Task[..., Any]")


class TaskSender(Protocol):
    """The part of a Server that a task needs."""

    @property
    def config(self) -> Config: ...
    def send(self, step: Step[Any]) -> Any: ...
    def send_async(self, step: Step[Any]) -> Coroutine[Any, Any, Any]: ...


class Task(Generic[P, R]):
    """A registered function. It can still be called as before; `send` lets a worker call it."""

    def __init__(
        self, name: str, function: Callable[..., Any], settings: TaskSettings, sender: TaskSender
    ) -> None:
        """Raises NameRefused: no task, or no queue, may be called so."""
        check_task(name)
        if settings.queue:
            check_queue(settings.queue)
        self.name = name
        self.function = function
        self.settings = settings
        self.call = Call(name, function)
        self._sender = sender
        self.__doc__ = function.__doc__
        self.__name__ = getattr(function, "__name__", name)
        self.__module__ = getattr(function, "__module__", __name__)
        self.__wrapped__ = function

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
        return cast("AsyncResult[R]", self._sender.send(self._signature(args, kwargs, {})))

    async def send_async(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """`send` for coroutines."""
        return cast(
            "AsyncResult[R]", await self._sender.send_async(self._signature(args, kwargs, {}))
        )

    def signature(self, *args: P.args, **kwargs: P.kwargs) -> Signature[R]:
        """Return the call as an object: to be sent, chained, put into a group."""
        return self._signature(args, kwargs, {})

    def partial(self, *args: Any, **kwargs: Any) -> Signature[R]:
        """Return a call to which a chain or chord adds results; so the count is not checked."""
        return self._signature(args, kwargs, {}, partial=True)

    def options(self, **options: Unpack[SendOptions]) -> Bound[P, R]:
        """Return the task with options for its calls.

        Raises:
            TypeError: there is no such option.
            NameRefused: no queue, or no task's UUID, may be called so.
        """
        for name in options:
            if name not in OPTION_NAMES:
                raise no_option(self.name, name, OPTION_NAMES)
        if queue := options.get("queue"):
            check_queue(queue)
        if uuid := options.get("uuid"):
            check_uuid(uuid)
        return Bound(self, options)

    def _signature(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: SendOptions,
        *,
        partial: bool = False,
    ) -> Signature[R]:
        settings = self.settings
        arguments = self.call.arguments(args, kwargs, partial=partial)
        if not options:
            return Signature(
                name=self.name,
                args=arguments,
                routing_key=settings.queue,
                priority=settings.priority,
                retry_count=settings.retries,
                sender=self._sender,
            )
        return self._with_options(arguments, options)

    def _with_options(self, arguments: Sequence[Arg], options: SendOptions) -> Signature[R]:
        settings = self.settings
        headers = dict(options.get("headers", {}))
        # Lengths travel as they are: it may be sent much later, by another process.
        if (delay := options.get("delay")) is not None:
            headers[HEADER_DELAY] = self._length("delay", delay)
        eta = options.get("eta") if delay is None else None
        check_zone(self.name, "eta", eta)
        expires = options.get("expires")
        if isinstance(expires, dt.datetime):
            check_zone(self.name, "expires", expires)
            headers[HEADER_EXPIRES] = repr(expires.timestamp())
        elif expires is not None:
            headers[HEADER_EXPIRES_IN] = self._length("expires", expires)
        if "on_duplicate" in options:
            check_word(self.name, "on_duplicate", options["on_duplicate"])
            headers[HEADER_ON_DUPLICATE] = options["on_duplicate"]
        if (unique := options.get("unique")) is not None:
            whose = unique_keys.owner(self._sender.config)
            headers[HEADER_UNIQUE] = (
                unique_keys.unique_key(self.name, self.call, arguments, unique, owner=whose)
                if unique
                else ""
            )
        retries = counted_retries(options.get("retries", settings.retries))
        priority = options.get("priority", settings.priority)
        limit = options.get("time_limit")
        check_numbers(self.name, retries=retries, priority=priority, time_limit=limit)
        if "time_limit" in options:
            headers[HEADER_TIME_LIMIT] = "" if limit is None else repr(float(limit))
        if "kill_after" in options:
            check_kill_after(self.name, options["kill_after"])
            headers[HEADER_KILL_AFTER] = repr(float(options["kill_after"]))
        if "ignore_result" in options:
            headers[HEADER_IGNORE_RESULT] = "yes" if options["ignore_result"] else "no"
        return Signature(
            name=self.name,
            args=arguments,
            uuid=options.get("uuid", ""),
            eta=eta,
            headers=headers,
            routing_key=options.get("queue", settings.queue),
            priority=priority,
            retry_count=retries,
            sender=self._sender,
        )

    def _length(self, option: str, value: float | dt.timedelta) -> str:
        seconds = value.total_seconds() if isinstance(value, dt.timedelta) else float(value)
        if not abs(seconds) <= LONGEST:
            raise ValueError(
                f"{self.name}: {option}={value!r} "
                "(expected seconds or a timedelta of at most 317 years)"
            )
        return repr(seconds)

    def __repr__(self) -> str:
        return f"<Task {self.name!r}>"


class AsyncTask(Task[P, R]):
    """A task whose function is a coroutine function; workers run it on their event loop."""


class Bound(Generic[P, R]):
    """A task with options: what `task.options(…)` returns."""

    __slots__ = ("_options", "_task")

    def __init__(self, task: Task[P, R], options: SendOptions) -> None:
        self._task = task
        self._options = options

    def send(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """As Task.send."""
        return cast("AsyncResult[R]", self._task._sender.send(self.signature(*args, **kwargs)))

    async def send_async(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """As Task.send_async."""
        signature = self.signature(*args, **kwargs)
        return cast("AsyncResult[R]", await self._task._sender.send_async(signature))

    def signature(self, *args: P.args, **kwargs: P.kwargs) -> Signature[R]:
        """As Task.signature."""
        return self._task._signature(args, kwargs, self._options)

    def partial(self, *args: Any, **kwargs: Any) -> Signature[R]:
        """As Task.partial."""
        return self._task._signature(args, kwargs, self._options, partial=True)


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

"""A registered function: the options it was given, how it is called here, and how a call of it is sent."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, cast

import msgspec

from machinery_py.config.config import Config
from machinery_py.errors import nearest
from machinery_py.names import check_queue, check_task, check_uuid
from machinery_py.registry import unique_keys
from machinery_py.registry.calls import Call
from machinery_py.results.async_results import AsyncResult
from machinery_py.tasks.backoff import LONGEST as LONGEST_RUN
from machinery_py.tasks.backoff import Backoff, check_backoff
from machinery_py.tasks.context import Context
from machinery_py.tasks.signature import (
    HEADER_DELAY,
    HEADER_EXPIRES,
    HEADER_EXPIRES_IN,
    HEADER_ON_DUPLICATE,
    HEADER_UNIQUE,
    LONGEST,
    Arg,
    Signature,
    Step,
)

INTERRUPTIBLE = True  # calls user code and takes no lock, see worker/executors.py

P = ParamSpec("P")
R = TypeVar("R")


class SendOptions(TypedDict, total=False):
    """How one call is sent.

    delay: seconds or a timedelta, from when it is sent: in a workflow, when its turn has come; in a schedule, at the tick. eta:
    aware. queue: its name. priority: 0 to 255, the higher first. expires: not started later than that many seconds (or timedelta)
    from when it is sent, or that moment. retries: tries after the first. headers: strings that travel with the task. uuid:
    instead of a random one. unique, on_duplicate: as for the task, with a text as the key.
    """

    delay: float | dt.timedelta
    eta: dt.datetime
    queue: str
    priority: int
    expires: float | dt.timedelta | dt.datetime
    retries: int
    headers: Mapping[str, str]
    uuid: str
    unique: bool | str
    on_duplicate: OnDuplicate


OnDuplicate = Literal["join", "reject", "replace"]
Key = str | Callable[..., str]


class SamenessOptions(TypedDict, total=False):
    """Options for calls that are the same (docs/how-to/unique.md).

    unique: one at a time is sent: True for calls with the same arguments, or the key: a text, or a function of the arguments
    that returns it. unique_for: seconds (or a timedelta) from sending for which the key is held at most. unique_until: the key
    is held until the task is "finish"ed (the default) or "start"ed. on_duplicate: "join" (the default), "reject" or "replace".

    exclusive: one at a time is run; another call waits ("wait") or ends at once ("skip"). exclusive_key: the name of the lock,
    or a function of the arguments that returns it; by default calls with the same arguments are the same. exclusive_timeout:
    seconds that a call waits at most.
    """

    unique: bool | Key
    unique_for: float | dt.timedelta
    unique_until: Literal["finish", "start"]
    on_duplicate: OnDuplicate
    exclusive: Literal["wait", "skip"]
    exclusive_key: Key
    exclusive_timeout: float


OPTION_NAMES = frozenset(SendOptions.__annotations__)


class TaskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a task, from where it was registered.

    Attributes:
        retries: tries after the first, for each call that does not say otherwise.
        backoff: how long to wait between them.
        retry_on: which exceptions are retried; None: all but NoRetry and wrong arguments.
        time_limit: seconds one run may take.
        ignore_result: no results are kept, only the state; they are passed on all the same.
        unique, exclusive and what belongs to them: see SamenessOptions.
    """

    queue: str = ""
    retries: int = 0
    backoff: Backoff = "fibonacci"
    retry_on: tuple[type[BaseException], ...] | None = None
    time_limit: float | None = None
    priority: int = 0
    ignore_result: bool = False
    unique: bool | Key = False
    unique_for: float | None = None
    unique_until: str = "finish"
    on_duplicate: str = "join"
    exclusive: str = ""
    exclusive_key: Key = ""
    exclusive_timeout: float | None = None

    def with_sameness(self, name: str, options: SamenessOptions) -> TaskSettings:
        """With these options.

        Raises:
            TypeError, ValueError: one is unknown, or has a value that is none of its.
        """
        for option in options:
            if option not in SAMENESS_NAMES:
                raise _no_option(name, option, TASK_OPTIONS)
        given: dict[str, Any] = {**options}
        for option in _WORDS.keys() & given.keys():
            _check_word(name, option, given[option])
        if (window := given.get("unique_for")) is not None:
            length = window if isinstance(window, dt.timedelta) else dt.timedelta(seconds=window)
            given["unique_for"] = length.total_seconds()
        for option in ("unique_for", "exclusive_timeout"):
            if given.get(option) is not None and given[option] <= 0:
                raise ValueError(
                    f"{name}: {option}={given[option]!r} (expected seconds, more than 0)"
                )
        return msgspec.structs.replace(self, **given)


SAMENESS_NAMES = frozenset(SamenessOptions.__annotations__)
_WORDS = {
    "unique_until": ("finish", "start"),
    "on_duplicate": ("join", "reject", "replace"),
    "exclusive": ("wait", "skip"),
}


# Words of other task queues. What stands in brackets is no option here.
_TRANSLATED = {
    "max_retries": "retries",
    "autoretry_for": "retry_on",
    "throws": "retry_on",
    "countdown": "delay",
    "queue_name": "queue",
    "routing_key": "queue",
    "task_id": "uuid",
    "job_id": "uuid",
    "soft_time_limit": "time_limit",
    "job_timeout": "time_limit",
    **dict.fromkeys(
        ("retry_backoff", "default_retry_delay", "retry_jitter", "min_backoff", "max_backoff"),
        "backoff",
    ),
    "acks_late": "(every task is acknowledged when it has ended)",
    "reject_on_worker_lost": "(every task comes back)",
    "bind": "(a first parameter of type Context, or current_task())",
    "name": '(@server.task("name"))',
    "actor_name": '(@server.task("name"))',
    "link": "(signature.then)",
    "link_error": "(signature.catch)",
    "on_success": "(signature.then)",
    "on_failure": "(signature.catch)",
    "result_ttl": "(the setting results_expire_in)",
    "args": "(the arguments of send)",
    "kwargs": "(the arguments of send)",
}


def _no_option(name: str, option: str, known: frozenset[str]) -> TypeError:
    """The error for an option that is not there, with the one that was meant."""
    meant = _TRANSLATED.get(option, "")
    if meant.startswith("("):
        hint = f"; here it is {meant[1:-1]}"
    else:
        others = TASK_OPTIONS if known is OPTION_NAMES else OPTION_NAMES
        where = "@server.task(…)" if known is OPTION_NAMES else "task.options(…)"
        wanted = meant or option
        if wanted in known:
            hint = f"; did you mean {wanted!r}?"
        elif wanted in others:
            hint = f"; {wanted!r} belongs to {where}"
        else:
            hint = nearest(option, known)
    return TypeError(f"{name}: no option {option!r} (known: {', '.join(sorted(known))}{hint})")


TASK_OPTIONS = frozenset(TaskSettings.__struct_fields__)


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
        """The call as an object: to be sent, chained, put into a group."""
        return self._signature(args, kwargs, {})

    def partial(self, *args: Any, **kwargs: Any) -> Signature[R]:
        """As `signature`, with room for the results that a chain or chord adds; so the count is not checked."""
        return self._signature(args, kwargs, {}, partial=True)

    def options(self, **options: Unpack[SendOptions]) -> Bound[P, R]:
        """The same task, to be sent in another way.

        Raises:
            TypeError: there is no such option.
            NameRefused: no queue, or no task's UUID, may be called so.
        """
        for name in options:
            if name not in OPTION_NAMES:
                raise _no_option(self.name, name, OPTION_NAMES)
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
        # Lengths travel as they are, and are counted when it is sent: that may be long after, by another process.
        if (delay := options.get("delay")) is not None:
            headers[HEADER_DELAY] = self._length("delay", delay)
        eta = options.get("eta") if delay is None else None
        _check_zone(self.name, "eta", eta)
        expires = options.get("expires")
        if isinstance(expires, dt.datetime):
            _check_zone(self.name, "expires", expires)
            headers[HEADER_EXPIRES] = repr(expires.timestamp())
        elif expires is not None:
            headers[HEADER_EXPIRES_IN] = self._length("expires", expires)
        if "on_duplicate" in options:
            _check_word(self.name, "on_duplicate", options["on_duplicate"])
            headers[HEADER_ON_DUPLICATE] = options["on_duplicate"]
        if (unique := options.get("unique")) is not None:
            whose = unique_keys.owner(self._sender.config)
            headers[HEADER_UNIQUE] = (
                unique_keys.unique_key(self.name, self.call, arguments, unique, owner=whose)
                if unique
                else ""
            )
        retries = options.get("retries", settings.retries)
        priority = options.get("priority", settings.priority)
        check_numbers(self.name, retries=retries, priority=priority)
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
                f"{self.name}: {option}={value!r} (expected seconds or a timedelta of at most 317 years)"
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


def _check_zone(name: str, option: str, moment: dt.datetime | None) -> None:
    if moment is not None and moment.tzinfo is None:
        raise ValueError(
            f"{name}: {option} {moment!r} has no time zone (use datetime.now(timezone.utc) + …)"
        )


def _check_word(name: str, option: str, word: object) -> None:
    if word not in _WORDS[option]:
        raise ValueError(
            f"{name}: {option}={word!r} (expected {' or '.join(map(repr, _WORDS[option]))})"
        )


def check_numbers(
    name: str, *, retries: int, priority: int, time_limit: float | None = None
) -> None:
    """Refuse what no worker could make sense of.

    Raises:
        ValueError: with the option, what was found and what is expected.
    """
    if not isinstance(retries, int) or retries < 0:
        raise ValueError(f"{name}: retries={retries!r} (expected a whole number, 0 or more)")
    if not isinstance(priority, int) or not 0 <= priority <= 255:
        raise ValueError(
            f"{name}: priority={priority!r} (expected a whole number, 0 to 255, the higher first)"
        )
    if time_limit is not None and not (
        isinstance(time_limit, (int, float)) and 0 < time_limit <= LONGEST_RUN
    ):
        raise ValueError(
            f"{name}: time_limit={time_limit!r} (expected seconds, more than 0, at most 100 years)"
        )


def check_settings(name: str, settings: TaskSettings) -> None:
    """Refuse what would fail in the worker only.

    Raises:
        ValueError: with the option, what was found and what is expected.
    """
    check_numbers(
        name,
        retries=settings.retries,
        priority=settings.priority,
        time_limit=settings.time_limit,
    )
    try:
        check_backoff(settings.backoff)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    for one in settings.retry_on or ():
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise ValueError(
                f"{name}: retry_on: found {one!r} "
                "(expected exception classes, as (ConnectionError, TimeoutError))"
            )

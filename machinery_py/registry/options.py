"""Options of tasks and of calls: which there are, and what each may be.

An option stands in a TypedDict, with its type and its text. A task's stands in TaskSettings, too,
with its default. Words are checked by that type, numbers by `_NUMBERS`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict, get_args, get_origin, get_type_hints

import msgspec

from machinery_py.clock import LONGEST as LONGEST_RUN
from machinery_py.clock import Seconds, seconds_of
from machinery_py.errors import NoRetry, TimeLimitExceeded, nearest
from machinery_py.limits.settings import LIMIT_OPTIONS, LimitOptions, check_limits
from machinery_py.tasks.backoff import Backoff, check_backoff
from machinery_py.tasks.signature import (
    HEADER_BLOCK,
    HEADER_DELAY,
    HEADER_EXCLUSIVE,
    HEADER_EXCLUSIVE_KEY,
    HEADER_EXCLUSIVE_TIMEOUT,
    HEADER_EXPIRES,
    HEADER_EXPIRES_IN,
    HEADER_IGNORE_RESULT,
    HEADER_KILL_AFTER,
    HEADER_ON_DUPLICATE,
    HEADER_RESULT_EXPIRES,
    HEADER_TIME_LIMIT,
    LONGEST,
    UNLIMITED,
    Signature,
)

Key = str | Callable[..., str]
Errors = type[BaseException] | Sequence[type[BaseException]]


class CallOptions(TypedDict, total=False):
    """Options of a task; one call of it can have others.

    queue: where it goes; by default the configured queue.
    priority: 0 to 255, the higher first.
    retries: tries after the first (Go's RetryCount); None: until it works.
    time_limit: seconds (or a timedelta) one run may take; None: as long as it takes.
    kill_after: seconds (or a timedelta) after the time limit until the process of a process
        task is killed; by default 5.
    ignore_result: keep no results, only the state; callbacks, the next step and a chord's callback
        get them all the same.
    result_expires: seconds (or a timedelta) for which its end is kept, its results with it; None,
        and by default: the setting results_expire_in.
    on_duplicate: "join" (the default), "reject" or "replace": what a call does whose key is held.
    exclusive: one at a time is run; another call waits ("wait") or ends at once ("skip").
    exclusive_timeout: seconds (or a timedelta) that a call waits at most; None, and by default: as
        long as it takes.
    """

    queue: str
    priority: int
    retries: int | None
    time_limit: Seconds | None
    kill_after: Seconds
    ignore_result: bool
    result_expires: Seconds | None
    on_duplicate: Literal["join", "reject", "replace"]
    exclusive: Literal["wait", "skip"]
    exclusive_timeout: Seconds | None


class SendOptions(CallOptions, total=False):
    """Options of one call. Those of CallOptions, and:

    delay: seconds or a timedelta from when it is sent: in a workflow after the step before it, in a
        schedule at the tick.
    eta: an aware moment; not run before.
    expires: not started after that many seconds (or a timedelta) from sending, or after a moment.
    headers: strings that travel with the task.
    uuid: used in place of a random one.
    unique: as in TaskOptions, with a text as the key.
    exclusive_key: as in TaskOptions, but no function.
    block: seconds (or a timedelta) that `send` waits for room in a queue of `queue_limits`.
    """

    delay: Seconds
    eta: dt.datetime
    expires: Seconds | dt.datetime
    headers: Mapping[str, str]
    uuid: str
    unique: bool | str
    exclusive_key: str
    block: Seconds


class TaskOptions(CallOptions, LimitOptions, total=False):
    """Options of a task: how its calls are sent, retried and run. Those of CallOptions, and:

    backoff: "fibonacci" (Go's: 1, 2, 3, 5 s …), "exponential", exponential(…), seconds for each
        try, or a function of the try.
    retry_on: only these exceptions are retried; by default all but NoRetry and wrong arguments.
    dont_retry_on: these are not retried, whatever `retry_on` says.
    pool: "thread", or "process": in a process of its own (docs/how-to/process-pool.md); by default
        what the worker says.
    ack: "late" (the default): a run that a lost worker cut off is repeated. "early": each run is
        begun at most once; cut off, it ends in FAILURE (WorkerLost).
    on_worker_lost: "retry" (the default) or "fail": a cut-off run ends in FAILURE (WorkerLost).
    on_failure: "ack" (the default) or "dead_letter": the message of a task that has failed for good
        is kept as a dead letter, too, which does not expire.
    transaction: its writes with `current_task().connection`, what it sends and its end are one
        transaction of PostgreSQL, which any exception rolls back (docs/how-to/transactions.md).
    send_secrets: whether pydantic's SecretStr and SecretBytes may be among its arguments and
        results, which travel and are stored in clear text. None, and by default: where its
        annotations have them. What is not allowed is refused by `send`.

    The others are for calls that are the same (docs/how-to/unique.md):

    unique: one at a time is sent. True: calls with the same arguments are the same; or the key, as
        `unique_key`.
    unique_key: calls with the same key are the same: the name of a parameter for its value, another
        text, or a function of the arguments that returns it.
    debounce: seconds (or a timedelta) after the last of several sends until it is run, once, with
        its arguments: each call that is the same replaces the one that waits.
    unique_for: seconds (or a timedelta) from sending for which the key is held at most.
    unique_until: the key is held until the task is "finish"ed (the default) or "start"ed.
    exclusive_key: the name of the lock of `exclusive`, given as `unique_key`; by default calls with
        the same arguments share one.

    The limits of LimitOptions hold for all workers together. They count
    apart for each key, which is given as `unique_key`:

    rate_key: of `rate`.
    running_key: of `max_running` and `min_interval`.
    """

    backoff: Backoff
    retry_on: Errors | None
    dont_retry_on: Errors
    pool: Literal["thread", "process"]
    ack: Literal["late", "early"]
    on_worker_lost: Literal["retry", "fail"]
    on_failure: Literal["ack", "dead_letter"]
    transaction: bool
    send_secrets: bool | None
    unique: bool | Key
    unique_key: Key
    unique_for: Seconds
    unique_until: Literal["finish", "start"]
    debounce: Seconds
    exclusive_key: Key
    rate_key: Key
    running_key: Key


class BatchOptions(TaskOptions):
    """Options of a task whose calls are run together (docs/how-to/batches.md); and TaskOptions.

    batch: calls of one run, at most; the function takes a list of what each call was sent with.
    batch_within: seconds (or a timedelta) that the first of them waits for the others in a worker;
        by default 1.
    """

    batch: int
    batch_within: NotRequired[Seconds]


class TaskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked options of a task; see TaskOptions."""

    queue: str = ""
    priority: int = 0
    retries: int = 0
    time_limit: float | None = None
    kill_after: float | None = None
    ignore_result: bool = False
    result_expires: float | None = None
    on_duplicate: str = "join"
    backoff: Backoff = "fibonacci"
    retry_on: tuple[type[BaseException], ...] | None = None
    dont_retry_on: tuple[type[BaseException], ...] = ()
    pool: str = ""
    ack: str = "late"
    on_worker_lost: str = "retry"
    on_failure: str = "ack"
    transaction: bool = False
    send_secrets: bool | None = None
    unique: bool | Key = False
    unique_key: Key = ""
    unique_for: float | None = None
    unique_until: str = "finish"
    debounce: float | None = None
    exclusive: str = ""
    exclusive_key: Key = ""
    exclusive_timeout: float | None = None
    rate: str = ""
    rate_key: Key = ""
    burst: int | str | None = None
    max_running: int | None = None
    running_key: Key = ""
    min_interval: float | None = None
    batch: int = 0
    batch_within: float = 1.0

    @classmethod
    def of(cls, name: str, options: TaskOptions) -> TaskSettings:
        """Return the settings that these options make.

        Args:
            name: of the task, for errors.

        Raises:
            TypeError, ValueError: an option is unknown, or its value makes no sense.
        """
        given: dict[str, Any] = {**options}
        check(name, given, TASK_OPTIONS)
        for option, value in given.items():
            if option in _LENGTHS and type(value) not in (int, float, type(None)):
                given[option] = seconds_of(option, value)  # of a timedelta, or a number of numpy's
            elif option in _ERRORS:
                given[option] = value and _tuple(value)
        if given.get("transaction") and not given.get("pool"):
            given["pool"] = "thread"  # a process has no connection of the worker's
        given["retries"] = counted_retries(given.get("retries", 0))
        settings = _with_key(name, cls(**given), options)
        _check_keys(name, settings)
        _check_exclusive(name, given, settings.exclusive)
        if "batch_within" in given and not settings.batch:
            raise ValueError(f"{name}: batch_within={settings.batch_within:g} (it needs batch=…)")
        if settings.transaction:
            _check_transaction(name, settings)
        kill_after = settings.kill_after
        if kill_after is not None and (settings.pool == "thread" or settings.time_limit is None):
            raise ValueError(
                f"{name}: kill_after={kill_after!r} "
                '(it needs a time_limit and pool="process": a thread cannot be killed)'
            )
        return settings

    @property
    def limits(self) -> Mapping[str, object]:
        """Options that `limits.settings.rules_of` reads."""
        return {option: getattr(self, option) for option in LIMIT_OPTIONS}

    def may_retry(self, error: BaseException) -> bool:
        """Return whether a counted try may follow this error, if one is left."""
        if isinstance(error, (NoRetry, *self.dont_retry_on)):
            return False
        return self.retry_on is None or isinstance(error, (*self.retry_on, TimeLimitExceeded))


def _check_transaction(name: str, settings: TaskSettings) -> None:
    """Refuse what ends before, or beside, the thread that commits."""
    for option, value in ("pool", "process"), ("ack", "early"):
        if getattr(settings, option) == value:
            raise ValueError(
                f"{name}: transaction=True and {option}={value!r} (one thread runs and commits it)"
            )
    if settings.batch:
        raise ValueError(
            f"{name}: transaction=True and batch={settings.batch} (each call has a transaction)"
        )


def _with_key(name: str, settings: TaskSettings, options: TaskOptions) -> TaskSettings:
    """Return them with the key that `unique` means, and with what `debounce` says of it."""
    changes: dict[str, Any] = {}
    if settings.unique_key:
        if not (settings.unique is True or (settings.debounce and "unique" not in options)):
            raise ValueError(
                f"{name}: unique_key={settings.unique_key!r} (it needs unique=True or debounce=…)"
            )
        changes["unique"] = settings.unique_key
    if settings.debounce:
        for option in ("unique_until", "unique_for", "on_duplicate"):
            if option in options:
                raise ValueError(
                    f"{name}: debounce={settings.debounce:g} and {option} (a debounced call is "
                    "unique until it starts, and a later one replaces it)"
                )
        changes = {"unique": settings.unique or True, **changes}
        changes.update(unique_until="start", on_duplicate="replace")
    return msgspec.structs.replace(settings, **changes) if changes else settings


TASK_OPTIONS = frozenset(TaskSettings.__struct_fields__)
OPTION_NAMES = frozenset(SendOptions.__annotations__)

# Headers of the options of one call. What they hold is JSON, but for words.
_FOR_WORKER = {
    "time_limit": HEADER_TIME_LIMIT,
    "kill_after": HEADER_KILL_AFTER,
    "ignore_result": HEADER_IGNORE_RESULT,
    "result_expires": HEADER_RESULT_EXPIRES,
    "exclusive": HEADER_EXCLUSIVE,
    "exclusive_key": HEADER_EXCLUSIVE_KEY,
    "exclusive_timeout": HEADER_EXCLUSIVE_TIMEOUT,
}
_TEXTS = "exclusive", "exclusive_key"
_OF_CALLS = frozenset(_FOR_WORKER.values())
_HEADERS = {
    **_FOR_WORKER,
    # Lengths travel as they are: it may be sent much later, by another process.
    "delay": HEADER_DELAY,
    "expires": HEADER_EXPIRES_IN,
    "on_duplicate": HEADER_ON_DUPLICATE,
    "block": HEADER_BLOCK,
}


def headers_of_call(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers of a call with these options, which were checked."""
    headers = dict(options.get("headers", {}))
    for option, value in options.items():
        if option not in _HEADERS or (value is None and option not in _FOR_WORKER):
            continue
        if isinstance(value, dt.datetime):
            headers[HEADER_EXPIRES] = repr(value.timestamp())
        elif isinstance(value, (bool, str, type(None))):
            headers[_HEADERS[option]] = value if isinstance(value, str) else json.dumps(value)
        else:
            headers[_HEADERS[option]] = repr(seconds_of(option, value, least=-LONGEST))
    return headers


def block_of(signature: Signature[Any]) -> float:
    """Return the seconds that the sender of a call waits for room in its queue."""
    text = signature.headers.get(HEADER_BLOCK)
    try:
        return float(text) if text else 0.0
    except (TypeError, ValueError):
        return 0.0


def settings_of_call(settings: TaskSettings, headers: Mapping[str, Any]) -> TaskSettings:
    """Return the settings of a call with these headers: the task's, but for the call's own.

    What no sender of ours has written counts as not given.
    """
    if _OF_CALLS.isdisjoint(headers):
        return settings
    changes: dict[str, Any] = {}
    for option, header in _FOR_WORKER.items():
        if header in headers:
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                value = headers[header]
                if option not in _TEXTS:
                    value = json.loads(value)
                check("", {option: value}, OPTION_NAMES)
                changes[option] = value
    return msgspec.structs.replace(settings, **changes) if changes else settings


def check_call(name: str, options: Mapping[str, Any], settings: TaskSettings) -> None:
    """Refuse options of a call as `check` does, and those that its task makes no sense of.

    Args:
        options: all that the call has.
        settings: of its task.

    Raises:
        TypeError, ValueError: one is.
    """
    check(name, options, OPTION_NAMES)
    key = options.get("exclusive_key", "")
    if not isinstance(key, str):
        raise ValueError(
            f"{name}: exclusive_key={key!r} (expected a text: a function belongs to the task)"
        )
    _check_exclusive(name, options, options.get("exclusive", settings.exclusive))


def _check_exclusive(name: str, options: Mapping[str, Any], exclusive: str) -> None:
    """Refuse options that a call which is not exclusive, or does not wait, would ignore."""
    for option, wanted in ("exclusive_key", "…"), ("exclusive_timeout", '"wait"'):
        value = options.get(option)
        if value and (not exclusive or (wanted != "…" and exclusive != "wait")):
            found = f" and exclusive={exclusive!r}" if exclusive else ""
            raise ValueError(f"{name}: {option}={value!r}{found} (it needs exclusive={wanted})")


def counted_retries(retries: int | None) -> int:
    """Return what travels as RetryCount."""
    return UNLIMITED if retries is None else retries


_ERRORS = "retry_on", "dont_retry_on"
_KEYS = "rate_key", "running_key"
_TEXT = "a text"
#: Options of other types: the type, and what is expected.
_TYPES: Mapping[str, tuple[Any, str]] = {
    "queue": (str, _TEXT),
    "uuid": (str, _TEXT),
    "headers": (Mapping, "a mapping of names to texts"),
    "ignore_result": (bool, "True or False"),
    "transaction": (bool, "True or False"),
}
# For one call None would read as "none", whatever its task says.
_NEVER_NONE = frozenset({"exclusive", "headers", "ignore_result", "queue"})
#: Options that are whole numbers: the least, the most, and what is expected.
_NUMBERS = {
    "priority": (0, 255, "a whole number, 0 to 255, the higher first"),
    "retries": (0, UNLIMITED, f"a whole number, 0 to {UNLIMITED}, or None"),
    "batch": (1, 1000, "a whole number, 1 to 1,000"),
}
_LIMIT = 1e-9, LONGEST_RUN, "seconds or a timedelta, more than 0, at most 100 years"
_WAIT = 0.0, LONGEST_RUN, "seconds or a timedelta, at most 100 years"
#: Options that are lengths of time: the same in seconds.
_LENGTHS = {
    "time_limit": _LIMIT,
    "kill_after": _WAIT,
    "result_expires": _LIMIT,
    "unique_for": _LIMIT,
    "debounce": _LIMIT,
    "batch_within": (1e-9, 600.0, "seconds or a timedelta, more than 0, at most 10 minutes"),
    "exclusive_timeout": _LIMIT,
    "block": _WAIT,
    "delay": (0.0, LONGEST, "seconds or a timedelta, 0 or more, at most 317 years"),
    "expires": (-LONGEST, LONGEST, "seconds or a timedelta, at most 317 years"),
}


def check(name: str, options: Mapping[str, Any], known: frozenset[str]) -> None:
    """Refuse options that are unknown, or that no worker could make sense of.

    Args:
        name: of the task, for errors.

    Raises:
        TypeError, ValueError: one is.
    """
    if known is TASK_OPTIONS:
        check_limits(name, options)
    never_none = {"priority"} if known is TASK_OPTIONS else {"priority", *_NEVER_NONE}
    for option, value in options.items():
        if option not in known:
            raise _no_option(name, option, known)
        if option == "backoff":
            try:
                check_backoff(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        elif (value is not None or option in never_none) and (text := _misfit(option, value)):
            raise ValueError(f"{name}: {option}={value!r} ({text})")


def _check_keys(name: str, settings: TaskSettings) -> None:
    """Refuse a key without a limit that counts by it."""
    if settings.rate_key and not settings.rate:
        raise ValueError(f"{name}: rate_key={settings.rate_key!r} (it needs a rate)")
    if settings.running_key and not (settings.max_running or settings.min_interval):
        raise ValueError(
            f"{name}: running_key={settings.running_key!r} (it needs max_running or min_interval)"
        )


def check_keys(name: str, settings: TaskSettings, parameters: Collection[str]) -> None:
    """Refuse a key of limits that names no parameter: all runs would be counted together."""
    for option in _KEYS:
        how = getattr(settings, option)
        if isinstance(how, str) and how and how not in parameters:
            known = ", ".join(sorted(parameters)) or "none"
            raise ValueError(
                f"{name}: {option}={how!r} is no parameter{nearest(how, parameters)} "
                f"(parameters: {known}; or a function of the arguments)"
            )


def _misfit(option: str, value: Any) -> str:
    """Return what is wrong with an option, or ""."""
    fits, expected = True, ""
    if isinstance(value, dt.datetime) or option == "eta":
        fits = isinstance(value, dt.datetime) and value.utcoffset() is not None
        expected = "a datetime with a time zone, as datetime.now(timezone.utc) + …"
    elif option in _NUMBERS:
        low, high, expected = _NUMBERS[option]
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        fits = is_whole and low <= value <= high
    elif option in _LENGTHS:
        least, most, expected = _LENGTHS[option]
        try:
            seconds_of(option, value, least=least, most=most)
        except (TypeError, ValueError):
            fits = False
    elif option in _TYPES:
        kind, expected = _TYPES[option]
        fits = isinstance(value, kind)
    elif option == "unique":
        fits = isinstance(value, (bool, str)) or callable(value)
        expected = "True, False, or a key"
    elif option in _ERRORS:
        fits = all(
            isinstance(one, type) and issubclass(one, BaseException) for one in _tuple(value)
        )
        expected = "exception classes, as (ConnectionError, TimeoutError)"
    elif option in _KEYS or option in ("exclusive_key", "unique_key"):
        fits = isinstance(value, str) or callable(value)
        text = "" if option in _KEYS else ", another text"
        expected = f"the name of a parameter{text}, or a function of the arguments"
    elif words := _words().get(option):
        fits, expected = value in words, " or ".join(map(repr, words))
    return "" if fits else f"expected {expected}"


@functools.cache
def _words() -> Mapping[str, tuple[str, ...]]:
    """Return the options that are words, and which."""
    hints = get_type_hints(TaskOptions)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def _tuple(classes: Any) -> tuple[Any, ...]:
    return tuple(classes) if isinstance(classes, (tuple, list)) else (classes,)


# Words of other task queues. What stands in brackets is no option here.
_TRANSLATED = {
    "max_retries": "retries",
    "autoretry_for": "retry_on",
    "throws": "dont_retry_on",
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
    "rate_limit": "rate",
    "acks_late": "ack",
    "reject_on_worker_lost": "on_worker_lost",
    "acks_on_failure_or_timeout": "on_failure",
    "bind": "(a first parameter of type Context, or current_task())",
    "name": '(@server.task("name"))',
    "actor_name": '(@server.task("name"))',
    "link": "(signature.then)",
    "link_error": "(signature.catch)",
    "on_success": "(signature.then)",
    "result_ttl": "result_expires",
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

"""Options of tasks and of calls: which there are, and what each may be."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from machinery_py.config.config import POOLS
from machinery_py.errors import nearest
from machinery_py.tasks.backoff import LONGEST as LONGEST_RUN
from machinery_py.tasks.backoff import Backoff, check_backoff
from machinery_py.tasks.signature import (
    HEADER_IGNORE_RESULT,
    HEADER_KILL_AFTER,
    HEADER_TIME_LIMIT,
    UNLIMITED,
)


class SendOptions(TypedDict, total=False):
    """Options of one call.

    delay: seconds or a timedelta from when it is sent: in a workflow after the step before it, in a
        schedule at the tick.
    eta: an aware moment; not run before.
    queue: name of the queue.
    priority: 0 to 255, the higher first.
    expires: not started after that many seconds (or a timedelta) from sending, or after a moment.
    retries: tries after the first; None: until it works.
    time_limit, kill_after, ignore_result: as in TaskOptions.
    headers: strings that travel with the task.
    uuid: used in place of a random one.
    unique, on_duplicate: as in TaskOptions, with a text as the key.
    """

    delay: float | dt.timedelta
    eta: dt.datetime
    queue: str
    priority: int
    expires: float | dt.timedelta | dt.datetime
    retries: int | None
    time_limit: float | None
    kill_after: float
    ignore_result: bool
    headers: Mapping[str, str]
    uuid: str
    unique: bool | str
    on_duplicate: OnDuplicate


OnDuplicate = Literal["join", "reject", "replace"]
Pool = Literal["thread", "process"]
Key = str | Callable[..., str]


class TaskOptions(TypedDict, total=False):
    """Options of a task: how its calls are sent, retried and run.

    queue: where its calls go; by default the configured queue.
    retries: tries after the first (Go's RetryCount); None: until it works.
    backoff: "fibonacci" (Go's: 1, 2, 3, 5 s …), "exponential", exponential(…), seconds for each
        try, or a function of the try.
    retry_on: only these exceptions are retried; by default all but NoRetry and wrong arguments.
    dont_retry_on: these are not retried, whatever `retry_on` says.
    time_limit: seconds one run may take.
    pool: "thread", or "process": in a process of its own (docs/how-to/process-pool.md); by default
        what the worker says.
    kill_after: seconds after the time limit until the process of a process task is killed; by
        default 5.
    priority: 0 to 255, the higher first.
    ignore_result: keep no results, only the state; callbacks, the next step and a chord's callback
        get them all the same.
    ack: "late" (the default): a run that a lost worker cut off is repeated. "early": each run is
        begun at most once; cut off, it ends in FAILURE (WorkerLost).
    on_worker_lost: "retry" (the default) or "fail": a cut-off run ends in FAILURE (WorkerLost).
    on_failure: "ack" (the default) or "dead_letter": the message of a task that has failed for good
        is kept as a dead letter, too, which does not expire.

    The others are for calls that are the same (docs/how-to/unique.md):

    unique: one at a time is sent. True: calls with the same arguments are the same; or the key: a
        text, or a function of the arguments that returns it.
    unique_for: seconds (or a timedelta) from sending for which the key is held at most.
    unique_until: the key is held until the task is "finish"ed (the default) or "start"ed.
    on_duplicate: "join" (the default), "reject" or "replace".
    exclusive: one at a time is run; another call waits ("wait") or ends at once ("skip").
    exclusive_key: the name of the lock, or a function of the arguments that returns it; by default
        calls with the same arguments share one.
    exclusive_timeout: seconds that a call waits at most.
    """

    queue: str
    retries: int | None
    backoff: Backoff
    retry_on: type[BaseException] | Sequence[type[BaseException]] | None
    dont_retry_on: type[BaseException] | Sequence[type[BaseException]]
    time_limit: float | None
    pool: Pool
    kill_after: float
    priority: int
    ignore_result: bool
    ack: Literal["late", "early"]
    on_worker_lost: Literal["retry", "fail"]
    on_failure: Literal["ack", "dead_letter"]
    unique: bool | Key
    unique_for: float | dt.timedelta
    unique_until: Literal["finish", "start"]
    on_duplicate: OnDuplicate
    exclusive: Literal["wait", "skip"]
    exclusive_key: Key
    exclusive_timeout: float


OPTION_NAMES = frozenset(SendOptions.__annotations__)


class TaskSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Checked options of a task; see TaskOptions."""

    queue: str = ""
    retries: int = 0
    backoff: Backoff = "fibonacci"
    retry_on: tuple[type[BaseException], ...] | None = None
    dont_retry_on: tuple[type[BaseException], ...] = ()
    time_limit: float | None = None
    pool: str = ""
    kill_after: float | None = None
    priority: int = 0
    ignore_result: bool = False
    ack: str = "late"
    on_worker_lost: str = "retry"
    on_failure: str = "ack"
    unique: bool | Key = False
    unique_for: float | None = None
    unique_until: str = "finish"
    on_duplicate: str = "join"
    exclusive: str = ""
    exclusive_key: Key = ""
    exclusive_timeout: float | None = None

    @classmethod
    def of(cls, name: str, options: TaskOptions) -> TaskSettings:
        """Return the settings that these options make.

        Args:
            name: of the task, for errors.

        Raises:
            TypeError, ValueError: an option is unknown, or its value makes no sense.
        """
        given: dict[str, Any] = {**options}
        for option in given:
            if option not in TASK_OPTIONS:
                raise no_option(name, option, TASK_OPTIONS)
        for option in _WORDS.keys() & given.keys():
            check_word(name, option, given[option])
        if (window := given.get("unique_for")) is not None:
            length = window if isinstance(window, dt.timedelta) else dt.timedelta(seconds=window)
            given["unique_for"] = length.total_seconds()
        for option in ("unique_for", "exclusive_timeout"):
            if given.get(option) is not None and given[option] <= 0:
                raise ValueError(
                    f"{name}: {option}={given[option]!r} (expected seconds, more than 0)"
                )
        for option in ("retry_on", "dont_retry_on"):
            classes = given.get(option)
            if classes is not None and not isinstance(classes, tuple):
                given[option] = tuple(classes) if isinstance(classes, list) else (classes,)
        if "retries" in given:
            given["retries"] = counted_retries(given["retries"])
        return cls(**given)


def settings_of_call(settings: TaskSettings, headers: Mapping[str, Any]) -> TaskSettings:
    """Return the settings of a call with these headers: the task's, but for the call's own.

    What no sender of ours has written counts as not given.
    """
    limit, ignore = headers.get(HEADER_TIME_LIMIT), headers.get(HEADER_IGNORE_RESULT)
    kill_after = headers.get(HEADER_KILL_AFTER)
    if limit is None and ignore is None and kill_after is None:
        return settings
    changes: dict[str, Any] = {"time_limit": None} if limit == "" else {}
    for option, text in (("time_limit", limit), ("kill_after", kill_after)):
        with contextlib.suppress(TypeError, ValueError):
            seconds = float(text)  # type: ignore[arg-type]  # TypeError
            if 0 <= seconds <= LONGEST_RUN and (seconds or option == "kill_after"):
                changes[option] = seconds
    if ignore in ("yes", "no"):
        changes["ignore_result"] = ignore == "yes"
    return msgspec.structs.replace(settings, **changes)


def counted_retries(retries: int | None) -> int:
    """Return what travels as RetryCount."""
    return UNLIMITED if retries is None else retries


_WORDS = {
    "pool": POOLS,
    "ack": ("late", "early"),
    "on_worker_lost": ("retry", "fail"),
    "on_failure": ("ack", "dead_letter"),
    "unique_until": ("finish", "start"),
    "on_duplicate": ("join", "reject", "replace"),
    "exclusive": ("wait", "skip"),
}


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
    "acks_late": "ack",
    "reject_on_worker_lost": "on_worker_lost",
    "acks_on_failure_or_timeout": "on_failure",
    "bind": "(a first parameter of type Context, or current_task())",
    "name": '(@server.task("name"))',
    "actor_name": '(@server.task("name"))',
    "link": "(signature.then)",
    "link_error": "(signature.catch)",
    "on_success": "(signature.then)",
    "result_ttl": "(the setting results_expire_in)",
    "args": "(the arguments of send)",
    "kwargs": "(the arguments of send)",
}


def no_option(name: str, option: str, known: frozenset[str]) -> TypeError:
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


def check_zone(name: str, option: str, moment: dt.datetime | None) -> None:
    if moment is not None and moment.tzinfo is None:
        raise ValueError(
            f"{name}: {option} {moment!r} has no time zone (use datetime.now(timezone.utc) + …)"
        )


def check_word(name: str, option: str, word: object) -> None:
    if word not in _WORDS[option]:
        raise ValueError(
            f"{name}: {option}={word!r} (expected {' or '.join(map(repr, _WORDS[option]))})"
        )


def check_numbers(
    name: str, *, retries: int, priority: int, time_limit: float | None = None
) -> None:
    """Raise ValueError for a number that no worker could make sense of."""
    if not isinstance(retries, int) or retries < 0:
        raise ValueError(
            f"{name}: retries={retries!r} (expected a whole number, 0 or more, or None)"
        )
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


def check_kill_after(name: str, kill_after: object) -> None:
    if not (isinstance(kill_after, (int, float)) and 0 <= kill_after <= LONGEST_RUN):
        raise ValueError(f"{name}: kill_after={kill_after!r} (expected seconds, at most 100 years)")


def check_settings(name: str, settings: TaskSettings) -> None:
    """Raise ValueError for a setting that would fail in the worker only."""
    check_numbers(
        name, retries=settings.retries, priority=settings.priority, time_limit=settings.time_limit
    )
    kill_after = settings.kill_after
    if kill_after is not None:
        check_kill_after(name, kill_after)
        if settings.pool == "thread" or settings.time_limit is None:
            raise ValueError(
                f"{name}: kill_after={kill_after!r} "
                '(it needs a time_limit and pool="process": a thread cannot be killed)'
            )
    try:
        check_backoff(settings.backoff)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    for option in ("retry_on", "dont_retry_on"):
        for one in getattr(settings, option) or ():
            if not (isinstance(one, type) and issubclass(one, BaseException)):
                raise ValueError(
                    f"{name}: {option}: found {one!r} "
                    "(expected exception classes, as (ConnectionError, TimeoutError))"
                )

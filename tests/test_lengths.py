"""Every public parameter that is a length of time takes seconds and a timedelta.

The parameters are found, not listed: in the public names, what the docs import, and what their
methods return. A new one that takes only a float fails here.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime as dt
import functools
import importlib
import inspect
import math
import pkgutil
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, get_overloads

import msgspec
import pytest

import machinery_py
from machinery_py import (
    AsyncResult,
    ChainResult,
    ChordResult,
    Config,
    ConfigError,
    Context,
    GroupResult,
    LimitNotAcquired,
    LockNotAcquired,
    ResultTimeout,
    Retry,
    RetryTaskLater,
    Server,
    Task,
    TaskSet,
    Worker,
    chain,
    chord,
    exponential,
    group,
)
from machinery_py.clock import ABOVE_ZERO, micros, moment_of, seconds_of, timeout_of
from machinery_py.config.config import OPTIONS, SECTIONS
from machinery_py.config.options import Option, Section
from machinery_py.control.client import ChosenWorkers, Control
from machinery_py.control.stream import Camera, EventStream, ServerEvents
from machinery_py.errors import ScheduleError
from machinery_py.inspection import Inspector
from machinery_py.limits.limiter import Limiter
from machinery_py.locks.named import NamedLock
from machinery_py.schedules.api import Schedules
from machinery_py.tasks.backoff import check_backoff, delay_for
from machinery_py.testing import Harness, ManualClock

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]

#: Contracts of stores: the library calls them, with floats. Fault injection wraps them.
CONTRACTS = (
    *("brokers", "backends", "stores", "connections", "locks.base", "limits.base"),
    *("rows", "locks.rows", "limits.rows"),
    *("clock", "fences", "app", "testing.conformance", "testing.flaky"),
)

#: Parameters of numbers that are no lengths of time, or that only the library gives.
NO_LENGTHS = {
    "AsyncWaiter.wait(timeout)": "inside of get_async",
    "Context.progress(done)": "a share of the work",
    "Context.progress(total)": "a share of the work",
    "Context.track(total)": "a share of the work",
    "LimitNotAcquired(waited)": "the library makes it",
    "LockNotAcquired(waited)": "the library makes it",
    "ResultExpired(kept_for)": "the library makes it",
    "TaskState.life(expire_in)": "inside of stores",
    "option(low)": "a bound of an option, in its unit",
}

NUMBER = re.compile(r"\b(float|int|timedelta|Seconds)\b")
LENGTH = re.compile(
    r"timeout|delay|expire|ttl|lease|every|pause|after|since|until|within|seconds|interval|period"
    r"|wait$|_for$|age$|patience|grace"
)


class Found(NamedTuple):
    """A public parameter."""

    owner: type | None
    name: str  # of the method or function; "": the constructor
    function: Callable[..., Any]
    parameter: str
    annotation: str
    option: bool = False  # of a TypedDict

    def __str__(self) -> str:
        place = [self.owner.__name__] if self.owner else []
        return f"{'.'.join(filter(None, [*place, self.name]))}({self.parameter})"

    @property
    def is_length(self) -> bool:
        kind = re.sub(r"Callable\[.*\]", "", self.annotation)
        if str(self) in NO_LENGTHS or not NUMBER.search(kind):
            return False
        return "float" in kind or "Seconds" in kind or bool(LENGTH.search(self.parameter))


def is_contract(module: str) -> bool:
    inner = module.removeprefix("machinery_py.")
    return any(inner == one or inner.startswith(f"{one}.") for one in CONTRACTS)


def imported() -> Iterator[Any]:
    """Yield the public names, and what the docs import from the package."""
    yield from (getattr(machinery_py, name) for name in machinery_py.__all__)
    pattern = r"from (machinery_py[\w.]*) import (\([^)]*\)|[^\n]*)"
    for page in PAGES:
        for module, names in re.findall(pattern, page.read_text()):
            if is_contract(module):
                continue
            for name in re.findall(r"\w+", re.sub(r" as \w+", "", names)):
                try:
                    yield getattr(importlib.import_module(module), name)
                except (ImportError, AttributeError):  # of an extra
                    continue
                except Exception as error:  # Django without settings
                    assert type(error).__module__.startswith("django"), error


def classes_by_name() -> dict[str, type]:
    """Return our classes that a return annotation may name."""
    found: dict[str, type] = {}
    for info in pkgutil.walk_packages(machinery_py.__path__, "machinery_py."):
        if is_contract(info.name) or ".contrib" in info.name or info.name.endswith("__main__"):
            continue
        module = importlib.import_module(info.name)
        for name, one in vars(module).items():
            if isinstance(one, type) and one.__module__ == info.name:
                found[name] = one
    return found


def public() -> tuple[set[type], set[type], set[Callable[..., Any]]]:
    """Return the classes that users make, those that they get, and the functions."""
    every = {one for one in imported() if getattr(one, "__module__", "").startswith("machinery_py")}
    made = {one for one in every if isinstance(one, type)}
    functions = {one for one in every if inspect.isfunction(one)}
    known, got = classes_by_name(), set(made)
    documented = set(re.findall(r"\w+", (ROOT / "docs/reference/api.md").read_text()))
    attributes = vars(Server("memory://lengths-types")).items()
    got |= {type(one) for name, one in attributes if name in documented}
    waiting = {one for one in got if one.__module__.startswith("machinery_py")}
    got = set()
    while waiting:
        one = waiting.pop()
        if one in got or is_contract(one.__module__):
            continue
        got.add(one)
        for _, method in methods_of(one):
            returned = str(inspect.signature(method).return_annotation)
            waiting |= {known[name] for name in re.findall(r"\w+", returned) if name in known}
    return made, got, functions


def methods_of(owner: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, _ in inspect.getmembers(owner):
        static = inspect.getattr_static(owner, name)
        static = static.fget if isinstance(static, property) else static
        function = getattr(static, "__func__", static)
        ours = getattr(function, "__module__", "") or ""
        if not name.startswith("_") and callable(function) and ours.startswith("machinery_py"):
            yield name, function


def parameters(owner: type | None, name: str, function: Callable[..., Any]) -> Iterator[Found]:
    every = (function, *get_overloads(inspect.unwrap(function)))
    for one in (one for each in every for one in inspect.signature(each).parameters.values()):
        text = one.annotation if isinstance(one.annotation, str) else repr(one.annotation)
        if unpacked := re.fullmatch(r"Unpack\[(\w+)\]", text):
            options = vars(inspect.getmodule(inspect.unwrap(function)))[unpacked[1]]
            for key, hint in options.__annotations__.items():
                shown = getattr(hint, "__forward_arg__", None) or repr(hint)
                yield Found(owner, name, function, key, shown, option=True)
        elif one.kind is not one.VAR_KEYWORD:
            yield Found(owner, name, function, one.name, text)


def is_protocol(owner: type | None) -> bool:
    return bool(getattr(owner, "_is_protocol", False))


@functools.cache
def lengths() -> list[Found]:
    made, got, functions = public()
    found: list[Found] = []
    for function in functions:
        found += parameters(None, function.__name__, function)
    for owner in got:
        for name, method in methods_of(owner):
            found += parameters(owner, name, method)
    for owner in made:
        # Records hold what travels, and that is numbers; for settings see below.
        if not issubclass(owner, (msgspec.Struct, Section)) and inspect.isfunction(owner.__init__):
            found += parameters(owner, "", owner.__init__)
    return sorted({str(one): one for one in found if one.is_length}.values(), key=str)


def test_each_length_takes_seconds_and_a_timedelta() -> None:
    wrong = [f"{one}: {one.annotation}" for one in lengths() if "Seconds" not in one.annotation]

    assert not wrong, "\n".join(wrong)
    assert len(lengths()) > 90


def test_exceptions_are_still_there() -> None:
    made, got, functions = public()
    every = {
        *(
            str(one)
            for function in functions
            for one in parameters(None, function.__name__, function)
        ),
        *(
            str(one)
            for owner in got
            for name, method in methods_of(owner)
            for one in parameters(owner, name, method)
        ),
        *(str(one) for owner in made for one in parameters(owner, "", owner)),
    }

    assert set(NO_LENGTHS) <= every


def nothing() -> None: ...


class Fleet:
    """A Server, an object of each class whose methods take lengths, and what calls need besides."""

    def __init__(self) -> None:
        server = Server("memory://lengths")
        task = server.task(nothing)
        call = task.signature()
        server.schedules.add("@daily", "nothing", call)
        self.makers: dict[type, Callable[[], Any]] = {
            AsyncResult: task.send,
            Camera: lambda: server.events.every(3600, lambda _: None),
            ChainResult: lambda: chain(call, call).send(),
            ChordResult: lambda: chord([call], task.partial()).send(),
            ChosenWorkers: server.control.workers,
            Context: lambda: Context(call, queue="q", delivery=1, worker="w", report=None),
            Control: lambda: server.control,
            EventStream: server.events.stream,
            GroupResult: lambda: group(call).send(),
            Harness: lambda: Harness(server),
            Inspector: lambda: server.inspect,
            Limiter: lambda: server.limiter("n", "5/s"),
            ManualClock: ManualClock,
            NamedLock: lambda: server.lock("n"),
            Schedules: lambda: server.schedules,
            Server: lambda: server,
            ServerEvents: lambda: server.events,
            Task: lambda: task,
            TaskSet: TaskSet,
            Worker: lambda: server.new_worker("n"),
        }
        self.needed: dict[str, Any] = {
            **dict.fromkeys(("callback", "signature", "signatures", "step"), call),
            **dict.fromkeys(("camera", "function", "predicate"), lambda *_: None),
            **dict.fromkeys(("message", "name", "task"), "nothing"),
            **dict.fromkeys(("count", "send_concurrency"), 1),
            "app": server.app,
            "rate": "5/s",
            "seconds": 60,
            "spec": "@daily",
            "task_set": TaskSet(),
        }
        self.close = server.close

    def call(self, one: Found, value: Any) -> None:
        """Call it with this length, and with what else it needs."""
        function: Any = one.function
        if one.owner is not None:
            function = getattr(self.makers[one.owner](), one.name) if one.name else one.owner
        given: dict[str, Any] = {one.parameter: value}
        places: list[Any] = []
        for each in inspect.signature(function).parameters.values():
            if each.kind is each.VAR_POSITIONAL and each.name in self.needed:
                places = [*[*given.values()][1:], self.needed[each.name]]
                given = {one.parameter: value}
            elif each.kind is each.POSITIONAL_OR_KEYWORD and (
                each.default is each.empty or each.name == "rate"
            ):
                given.setdefault(each.name, self.needed.get(each.name))
        found = function(*places, **given)
        if inspect.isawaitable(found):
            asyncio.run(awaited(found))
        elif one.option and callable(found) and not isinstance(found, Task):
            found(nothing)  # a decorator


async def awaited(found: Awaitable[Any]) -> None:
    await found


def test_what_is_no_length_is_refused_by_its_name() -> None:
    fleet, wrong = Fleet(), list[str]()

    for one in lengths():
        for value in ("5", True, math.nan):
            if is_protocol(one.owner):
                continue
            try:
                fleet.call(one, value)
            except (TypeError, ValueError) as error:
                text = str(error)
                if one.parameter not in text or "expected" not in text.lower():
                    wrong.append(f"{one}: {value!r}: {text}")
                    break  # NaN might never end
            else:
                wrong.append(f"{one}: {value!r} is accepted")
                break
    fleet.close()

    assert not wrong, "\n".join(wrong)


# Settings


LENGTHS_OF_CONFIG = [one for one in OPTIONS.values() if one.unit in ("s", "ms")]


def config(option: Option, value: Any) -> Any:
    section, dot, name = option.key.rpartition(".")
    made = Config(**{section: SECTIONS[section](**{name: value})} if dot else {name: value})
    return getattr(getattr(made, section) if dot else made, name)


@pytest.mark.parametrize("option", LENGTHS_OF_CONFIG, ids=lambda one: one.key)
def test_setting_takes_a_timedelta_as_its_number_of_units(option: Option) -> None:
    found = config(option, dt.timedelta(seconds=7))

    assert found == (7 if option.unit == "s" else 7000)
    assert type(found).__name__ == option.kind
    for wrong in (dt.timedelta(seconds=-1), dt.timedelta.max, "7", True):
        with pytest.raises(ConfigError, match=f"{option.key}: found .*expected"):
            config(option, wrong)


def test_each_setting_with_a_unit_of_time_is_declared_as_a_length() -> None:
    kinds = {
        f"{kind.PREFIX}{one.name}": one.type
        for kind in (Config, *SECTIONS.values())
        for one in dataclasses.fields(kind)
    }

    for option in LENGTHS_OF_CONFIG:
        assert kinds[option.key] in ("Length", "WholeLength"), option.key
    assert {one.key for one in OPTIONS.values() if one.kind == "float"} <= {
        one.key for one in LENGTHS_OF_CONFIG
    }


def test_setting_in_whole_seconds_refuses_a_part_of_one() -> None:
    with pytest.raises(
        ConfigError, match=r"results_expire_in: found 1.5 \(expected a whole number"
    ):
        Config(results_expire_in=dt.timedelta(seconds=1.5))


# What they do


def test_seconds_of_reads_numbers_and_timedeltas() -> None:
    for given, seconds in (
        (5, 5.0),
        (0.25, 0.25),
        (Fraction(1, 2), 0.5),
        (math.inf, math.inf),
        (10**400, math.inf),
        (dt.timedelta(minutes=1, microseconds=1), 60.000001),
    ):
        found = seconds_of("timeout", given)  # type: ignore[arg-type]  # Fraction is a number
        assert (found, type(found)) == (seconds, float)


@pytest.mark.parametrize("wrong", ["5", b"5", None, True, [5], dt.datetime(2030, 1, 1)], ids=repr)
def test_seconds_of_refuses_what_is_no_length(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^ttl: found .* \(expected seconds as a number, or a "):
        seconds_of("ttl", wrong)


def test_seconds_of_says_its_bounds() -> None:
    for wrong, bounds, text in (
        (dt.timedelta(-1), {}, "0 or more"),
        (math.nan, {"least": -math.inf}, r"timedelta\)"),
        (0, {"least": ABOVE_ZERO}, "more than 0"),
        (3601, {"most": 3600}, "0 or more, at most 3,600 s"),
    ):
        with pytest.raises(ValueError, match=f"^ttl: found .*expected seconds or .*{text}"):
            seconds_of("ttl", wrong, **bounds)


def test_negative_timeout_is_over() -> None:
    assert (timeout_of(-1), timeout_of(dt.timedelta(-1)), timeout_of(None)) == (0.0, 0.0, None)


LONG, SHORT, NONE = dt.timedelta(minutes=2), dt.timedelta(milliseconds=20), dt.timedelta()


def test_waiting_for_results_takes_a_timedelta() -> None:
    server = Server("memory://lengths-results")
    task = server.task(nothing)
    text = r"no result of .* after 0.0 s; last state"

    async def both(sent: Any, more: Any) -> None:
        await sent.get_async(LONG)
        assert [one async for one in more.as_completed(LONG)]

    for sent in (task.send(), group(task.signature()).send(), chain(task.signature()).send()):
        with pytest.raises(ResultTimeout, match=text):
            sent.get(timeout=SHORT)
        with pytest.raises(ResultTimeout, match=text):
            asyncio.run(awaited(sent.get_async(timeout=SHORT, propagate=False)))
    with pytest.raises(ResultTimeout, match=text):
        list(group(task.signature()).send().as_completed(SHORT))
    with server.new_worker("w", shutdown_timeout=LONG):
        more = group(task.signature()).send()
        task.send().get(timeout=LONG)
        assert list(more.as_completed(LONG))
        asyncio.run(both(task.send(), more))
    server.close()


def test_locks_and_limiters_take_a_timedelta() -> None:
    server = Server("memory://lengths-locks")
    held, wanted = server.lock("n"), server.lock("n", timeout=SHORT)
    slow = server.limiter("n", min_interval=dt.timedelta(hours=1), timeout=SHORT)

    with held:
        assert not wanted.acquire(timeout=SHORT)
        assert not asyncio.run(wanted.acquire_async(timeout=NONE))
        with pytest.raises(LockNotAcquired, match="0.02 s"), wanted:
            pass
    assert wanted.acquire(timeout=LONG)
    assert slow.acquire(timeout=LONG)
    with pytest.raises(LimitNotAcquired, match="0.02 s"), slow:
        pass
    server.close()


def test_orders_streams_and_timers_take_a_timedelta() -> None:
    server = Server("memory://lengths-control")
    called = threading.Event()
    worker = server.new_worker("w")
    worker.after(dt.timedelta(milliseconds=1), called.set)
    server.task(nothing)

    with worker, server.events.stream(since=LONG) as stream:
        assert called.wait(60)
        chosen = server.control.workers(timeout=LONG)
        assert list(server.control.ping(timeout=LONG)) == list(chosen.ping()) == ["w"]
        chosen.set_time_limit("nothing", LONG)
        assert list(chosen.change("set_time_limit", task="nothing", seconds=LONG)) == ["w"]
        assert stream.read(NONE) == []
        server.events.every(LONG, lambda _: None, since=LONG).stop(LONG)
    assert server.inspect.history(seconds=LONG, step=dt.timedelta(minutes=1)) == []
    assert not server.inspect.search(since=LONG, until=NONE, within=LONG).tasks
    server.close()


def test_schedules_take_a_timedelta() -> None:
    server = Server("memory://lengths-schedules")
    task = server.task(nothing)

    server.schedules.add("@daily", "n", task.signature(), catch_up="all", window=LONG)

    assert server.schedules.get("n").window == 120.0
    with pytest.raises(ScheduleError, match="window: found"):
        server.schedules.change("n", window=dt.timedelta(-1))
    server.close()


def test_pauses_of_retries_take_a_timedelta() -> None:
    pauses = [1, LONG]

    check_backoff(pauses)

    assert [delay_for(pauses, attempt, 0) for attempt in (1, 2, 3)] == [1.0, 120.0, 120.0]
    assert delay_for(lambda attempt: attempt * LONG, 2, 0) == 240.0
    assert exponential(base=LONG, cap=LONG, jitter=None)(5) == 120.0
    assert (Retry(delay=LONG).delay, RetryTaskLater("", LONG).delay) == (120.0, 120.0)


def test_clocks_of_tests_take_a_timedelta() -> None:
    clock, server = ManualClock(), Server("memory://")
    began = clock.now()

    clock.advance(LONG)
    clock.set_back(dt.timedelta(minutes=1))

    assert clock.now() - began == dt.timedelta(minutes=1)
    with Harness(server) as harness:
        at = harness.clock.now()
        harness.advance(LONG, hours=1)
        assert harness.clock.now() - at == dt.timedelta(hours=1, minutes=2)


class Drifting(dt.datetime):
    """As of a library whose moments subtract to a length of its own."""

    def __sub__(self, other: object) -> object:  # type: ignore[override]
        return f"from {other}"


def test_moment_of_another_library_is_a_moment() -> None:
    moment = Drifting(2026, 11, 28, 12, 30, 0, 7, tzinfo=dt.timezone.utc)
    assert moment_of(micros(moment)) == dt.datetime(
        2026, 11, 28, 12, 30, 0, 7, tzinfo=dt.timezone.utc
    )

"""Options in groups that commands share, and the parsers of their values."""

from __future__ import annotations

import argparse
import datetime as dt
import re
from collections.abc import Callable
from typing import Any

from machinery_py.errors import ConfigError
from machinery_py.queues import parse_queues

LONGEST = 36_500 * 86_400.0  # seconds; longer times overflow the clocks of some stores
POOLS = ("thread", "process")  # as in config.py, which takes long to import
MOST = 1_000_000_000  # of anything
SHORTEST_PAUSE = 0.1  # seconds
SHORTEST_STALL = 5.0  # seconds; as in config/options.py

_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_UNITS |= {"d": 86_400.0, "w": 604_800.0}
_BYTES = {"K": 2**10, "M": 2**20, "G": 2**30}
_SIZE = re.compile(r"(\d{1,9})([KMG])B?")
_SPAN = re.compile(r"(\d{1,6}),(\d{1,6})")
_LENGTH = re.compile(r"(\d+(?:\.\d+)?)(ms|s|min|m|h|d|w|)")


def seconds(text: str) -> float:
    """Read a length of time: `90`, `1.5s`, `10m`, `1h`, `2d`."""
    found = _LENGTH.fullmatch(text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no length of time (expected for instance 90, 500ms, 10m, 1h, 2d)"
        )
    length = float(found[1]) * _UNITS[found[2]]
    if length > LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r} is too long (expected at most 36500d)")
    return length


def _moment(text: str) -> dt.datetime:
    try:
        moment = dt.datetime.fromisoformat(text.strip())
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no moment with its zone (expected for instance 2030-01-31T06:00+01:00)"
        )
    return moment


def _stall_timeout(text: str) -> float:
    length = seconds(text)
    if length < SHORTEST_STALL:
        raise argparse.ArgumentTypeError(
            f"{text!r} is too short (expected at least {SHORTEST_STALL:g}s)"
        )
    return length


def _pause(text: str) -> float:
    length = seconds(text)
    if length < SHORTEST_PAUSE:
        raise argparse.ArgumentTypeError(f"{text!r} is too short (expected at least 100ms)")
    return length


def _whole(least: int, most: int = MOST) -> Callable[[str], int]:
    def read(text: str) -> int:
        # The digits are counted first: Python refuses to read thousands of them.
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
        if not is_number or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return read


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text.strip().upper())
    if found is None or (size := int(found[1]) * _BYTES[found[2]]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size (expected for instance 300M, 2G)")
    return size


def _span(text: str) -> tuple[int, int]:
    found = _SPAN.fullmatch(text.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no span (expected the least and the most tasks at a time, as 2,10)"
        )
    return int(found[1]), int(found[2])


def _queues(text: str) -> tuple[str, ...] | dict[str, float]:
    try:
        return parse_queues(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _state(text: str) -> str:
    from machinery_py.tasks.states import state_named  # only who names a state pays for it

    try:
        return state_named(text).value
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


#: Arguments of `ArgumentParser.add_argument`, those by position and those by name.
Option = tuple[tuple[str, ...], dict[str, Any]]
Options = tuple[Option, ...]


def _option(flags: str, help: str, **settings: Any) -> Option:
    """Describe an option with a value; its default is None."""
    return tuple(flags.split()), {"help": help, **settings}


def _switch(flags: str, help: str) -> Option:
    return _option(flags, help, action="store_true")


def _text(flags: str, help: str, metavar: str | None = None) -> Option:
    return _option(flags, help, default="", metavar=metavar)


def _time(flag: str, help: str, default: float | None = None) -> Option:
    return _option(flag, help, type=seconds, default=default, metavar="TIME")


def _count(flags: str, help: str, least: int, default: int | None = None) -> Option:
    return _option(flags, help, type=_whole(least), default=default, metavar="N")


def _choice(flag: str, help: str, *choices: str, default: str | None = None) -> Option:
    return _option(flag, help, choices=choices, default=default)


APP: Options = (
    _text("--app-dir", "folder to import the app from; default: the working directory", "DIR"),
)
JSON: Options = (_switch("--json", "print JSON instead of a table"),)
UNDECLARED: Options = (
    _switch("--undeclared", "instead of names: all that this application's code has dropped"),
)
MIGRATE: Options = (_switch("--sql", "print what would be run, and run nothing"),)
STACK: Options = (_switch("--stack", "of a task that runs, also what its thread does now"),)
YES: Options = (_switch("--yes -y", "do not ask"),)
SIGNAL: Options = (
    _option("--key", "a second signal with the same key is dropped", default="", metavar="KEY"),
)
FROM_START: Options = (
    _switch("--from-start", "make all steps again, with other keys; else go on behind those kept"),
)
ANSWERS = _time("--timeout", "longest wait for answers; default: 2 s", 2.0)
TERMINATE: Options = (
    _switch("--terminate", "end those that run: kill their task processes; ask others to stop"),
    _option(
        "--header",
        "instead of UUIDs: all tasks sent so far that have this header; repeated: all of them",
        action="append",
        default=[],
        metavar="NAME=VALUE",
    ),
    ANSWERS,
)
LIMIT: Options = (_count("--limit", "at most this many; default: 50", 1, 50),)
FILTER: Options = (
    _text("--name", "only tasks of this name"),
    _time("--since", "only tasks that changed in this time: 90 (seconds), 10m, 1h, 2d"),
    _text("--queue", "only tasks of this queue"),
)
SEARCH: Options = (
    _text("--worker", "only tasks that this worker had last"),
    _text("--text", "only tasks with this in an error, a result or a kept argument"),
)
_STATES = "pending, received, started, retry, success or failure"
STATE: Options = (_option("--state", _STATES, type=_state, metavar="STATE"),)
FAILURE: Options = (
    _option(
        "--state",
        "failure: there is nothing else to retry",
        type=_state,
        default="FAILURE",
        choices=("FAILURE",),
        metavar="STATE",
    ),
)
WAIT: Options = (
    _switch("--wait", "wait for the result and print it"),
    _time("--timeout", "longest wait: 90 (seconds), 10m; default: no limit"),
)
SEND: Options = (
    _option(
        "--kw",
        "an argument by name; may be repeated",
        action="append",
        default=[],
        metavar="NAME=JSON",
    ),
    _text("--queue", "instead of the task's own queue"),
    _option("--priority", "0 to 255, the higher first", type=_whole(0, 255), metavar="N"),
    _time("--delay", "run it after this time"),
    _option("--eta", "run it then: 2030-01-31T06:00+01:00", type=_moment, metavar="MOMENT"),
    _time("--expires", "do not start it later than this after sending"),
    _option(
        "--header",
        "a text that travels with the task; may be repeated",
        action="append",
        default=[],
        metavar="NAME=VALUE",
    ),
)
DEAD: Options = (_text("--queue", "only letters from this queue"),)
ALL: Options = (_switch("--all", "all dead letters, or with --queue all of that queue"),)
WORKER: Options = (
    _count(
        "-c --concurrency",
        "tasks at a time in each process, 0: two for each processor; default: the setting",
        0,
    ),
    _option(
        "--autoscale",
        "tasks at a time in each process, as there is work: 2,10; in place of --concurrency",
        type=_span,
        metavar="MIN,MAX",
    ),
    _count("-p --processes", "worker processes; default: 1", 1, 1),
    _choice("--pool", "where tasks run that do not say; default: the setting, thread", *POOLS),
    _count("--max-tasks-per-child", "renew a process after so many tasks", 1),
    _option(
        "--max-memory-per-child",
        "renew a process that has more than this in memory: 300M, 2G",
        type=_size,
        metavar="SIZE",
    ),
    _option(
        "-Q --queues",
        "queues: strictly in this order, or A:6,B:1 by weights; default: the setting",
        type=_queues,
        default=(),
        metavar="A,B",
    ),
    _text("-n --name", "name of the worker; default: host and process", "NAME"),
    _switch("-E --events", "send the events of its processes to all that watch"),
    _switch("--burst", "end when the queues are empty; paused queues do not count"),
    _switch("--reload", "start again when a .py file changes (for development)"),
    _switch("--no-scheduler", "send no tasks of schedules; other workers do"),
    _time(
        "--shutdown-timeout",
        "how long running tasks may go on at the end; default: the setting, 30 s",
    ),
    _option(
        "--stall-timeout",
        "kill a process that gives no sign of life for this long; default: the setting, 10 minutes",
        type=_stall_timeout,
        metavar="TIME",
    ),
    _choice("--log-level", "default: the setting, info", "debug", "info", "warning", "error"),
    _choice("--log-format", "default: text", "text", "json", default="text"),
    _switch("--no-log-tasks", "log final failures and lost task processes alone, not each task"),
    _switch("--no-banner", "print nothing but logs"),
    _switch("--parts", "print the parts of the worker in the order of their start, and end"),
    _text(
        "--heartbeat-file", "file for this worker's heartbeat, read by `machinery health`", "FILE"
    ),
    _option(
        "--health-port",
        "serve /live, /ready and /metrics over HTTP",
        type=_whole(0, 65_535),
        metavar="PORT",
    ),
    _option(
        "--health-host",
        "address for --health-port; default: 127.0.0.1",
        default="127.0.0.1",
        metavar="HOST",
    ),
    # From the supervisor to its processes: see processes.py.
    _text("--child", argparse.SUPPRESS),
)
EVENTS: Options = (
    _time("--since", "begin with the events of this time, where the broker keeps them: 30, 5m"),
    _count("--limit", "end after so many events", 1),
)
CONTROL: Options = (
    _option(
        "--worker",
        "only workers of this name; * is any text; may be repeated",
        action="append",
        default=[],
        metavar="NAME",
    ),
    ANSWERS,
)
TOP: Options = (
    _time("--since", "as for `machinery events`; default: 10 s", 10.0),
    _switch("--once", "print once and end"),
    _option(
        "--every",
        "time between two pictures; default: 2 s",
        type=_pause,
        default=2.0,
        metavar="TIME",
    ),
)
DASHBOARD: Options = (
    _option("--port", "default: 8765", type=_whole(0, 65_535), default=8765, metavar="PORT"),
    _option(
        "--host",
        "address to listen on; default: 127.0.0.1, this machine only",
        default="127.0.0.1",
        metavar="HOST",
    ),
    _text(
        "--auth",
        "who may see it; MACHINERY_DASHBOARD_AUTH does not show it to all users of the machine",
        "USER:PASSWORD",
    ),
    _switch("--insecure", "let everybody see and change everything"),
    _text("--user-header", "where the proxy in front says the user's name, for the log", "HEADER"),
    _switch("--read-only", "let nobody change anything"),
)
EXPORTER: Options = (
    _option(
        "--port", "of HTTP; default: 9465", type=_whole(0, 65_535), default=9465, metavar="PORT"
    ),
    _option("--host", "address for it; default: 127.0.0.1", default="127.0.0.1", metavar="HOST"),
    _switch("-E --events", "also count what workers and senders tell whose events are on"),
)
CHANGE: Options = (
    _option("--spec", "when it is due: '0 6 * * MON-FRI', @daily, '@every 30s'"),
    _option("--tz", "zone of its times, for instance Europe/Berlin", metavar="ZONE"),
    _choice("--catch-up", "policy for ticks that no worker was there for", "skip", "latest", "all"),
    _time("--window", "how far back `latest` and `all` go"),
    _choice("--overlap", "policy for a tick while the last run goes on", "allow", "skip", "queue"),
)
HEALTH: Options = (
    _time("--max-age", "oldest heartbeat that counts; default: 15 s", 15.0),
    _switch("--ready", "also require that the broker answered at the last beat"),
    _text("--heartbeat-file", "the file that was given to the worker", "FILE"),
)

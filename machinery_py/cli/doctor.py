"""`machinery doctor`: a line for each check, never a traceback. Also `machinery config`."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from machinery_py.backends.base import BackendFeatures
from machinery_py.backends.listings import COMPLETE
from machinery_py.cli import apps, logs
from machinery_py.cli.output import (
    NONE,
    clean,
    length,
    listing,
    many,
    shown_url,
    size,
    to_json,
    value_text,
)
from machinery_py.config.config import OPTIONS
from machinery_py.config.server_urls import parse_amqp_url
from machinery_py.config.urls import ROLES, StoreUrl, scheme_of
from machinery_py.errors import MachineryError
from machinery_py.inspection import typed
from machinery_py.tasks.signature import new_uuid
from machinery_py.version import __version__

if TYPE_CHECKING:
    from machinery_py.connections.durability import Concern
    from machinery_py.server import Server

SKEW = 5.0  # seconds that a worker's clock may be ahead
LOW_SPACE = 256 << 20  # bytes
SLOW = 1.0  # seconds of one question to a store
EARLIEST = 2024  # a clock that shows an earlier year was never set


class Grade(StrEnum):
    """The grade of a finding. Only WRONG makes the exit code 1."""

    OK = "ok"
    NOTE = "note"
    WRONG = "WRONG"


OK, NOTE, WRONG = Grade.OK, Grade.NOTE, Grade.WRONG

#: The name of the check, its grade and a text.
Finding = tuple[str, Grade, str]


def doctor(args: argparse.Namespace) -> int:
    """Run `machinery doctor`: 0 all is well, 1 something is wrong, 2 there is no such app."""
    logs.configure_short()
    stores = logging.getLogger("machinery_py.connections")
    level = stores.level
    stores.setLevel(logging.ERROR)  # what a store warns of is a line of the report
    try:
        return _report(args)
    finally:
        stores.setLevel(level)  # main() may have been called by a program that goes on


def _report(args: argparse.Namespace) -> int:
    findings = list(_versions())
    wrong = 1
    try:
        server = apps.load(args.app, args.app_dir, command="doctor")
    except MachineryError as error:
        findings.append(("app", WRONG, str(error)))
        wrong = 2  # as from any other command
    else:
        names = server.get_registered_task_names()
        text = f"{args.app}: {many(len(names), 'task')}"
        findings.append(
            ("app", OK, text) if names else ("app", NOTE, f"{text}; is their module imported?")
        )
        checks = (
            _settings,
            _file,
            _tasks,
            _broker,
            _backend,
            _clock,
            _workers,
            _queues,
            _schedules,
            _dead,
        )
        for check in checks:
            findings += _guarded(check, server)
    if args.json:
        print(
            to_json([{"check": name, "mark": mark, "text": text} for name, mark, text in findings])
        )
    else:
        for name, mark, text in findings:
            print(f"{mark:<6} {name:<9} {clean(text)}")
    return wrong if any(mark is WRONG for _, mark, _ in findings) else 0


Check = Callable[["Server"], Iterable[tuple[Grade, str]]]


def _guarded(check: Check, server: Server) -> Iterator[Finding]:
    name = check.__name__.strip("_")
    try:
        yield from [(name, mark, text) for mark, text in check(server)]
    except MachineryError as error:
        yield name, WRONG, str(error)
    except Exception as error:  # whatever is wrong here is what is to be shown
        yield name, WRONG, f"cannot be checked: {type(error).__name__}: {error}"


def _unless(wrong: bool) -> Grade:
    return WRONG if wrong else OK


def _versions() -> Iterator[Finding]:
    python, machine = platform.python_version(), platform.machine()
    yield (
        "versions",
        OK,
        f"machinery_py {__version__}, Python {python}, SQLite {sqlite3.sqlite_version}, "
        f"{sys.platform} {machine}",
    )
    found = [f"{name} {one or 'missing'}" for name, one in apps.library_versions().items()]
    yield "packages", OK, ", ".join(found)


def _settings(server: Server) -> Iterator[tuple[Grade, str]]:
    config = server.config
    stores = ("broker", config.broker), ("results", config.backend_url), ("lock", config.lock_url)
    for key, (name, url) in zip(ROLES, stores, strict=True):
        shown = shown_url(url, config.multiple_broker_separator) or "none"
        yield OK, f"{name} {shown} (from {config.sources.get(key, 'default')})"
    if os.environ.get("MACHINERY_URL") and config.sources.get("broker") == "argument":
        yield NOTE, "MACHINERY_URL is set, but the Server is given its broker in the code"


def _file(server: Server) -> Iterator[tuple[Grade, str]]:
    """Check the files of the SQLite stores from outside."""
    for url in sorted({server.config.broker, server.config.backend_url}):
        if scheme_of(url) == "sqlite":
            parsed = StoreUrl.parse(url)
            yield from _sqlite_file(os.path.abspath(parsed.path), parsed.synchronous)


def _tasks(server: Server) -> Iterator[tuple[Grade, str]]:
    """Find tasks that may outlast a connection which lives in their process: RabbitMQ's."""
    urls = [url for url in server.config.broker_urls if scheme_of(url) in ("amqp", "amqps")]
    silence = 2 * min((parse_amqp_url(url).heartbeat for url in urls), default=0)
    names = [
        task.name
        for task in server.app.registry
        if (task.settings.pool or server.config.pool) == "thread"
        and (task.settings.time_limit or 0.0) > silence > 0
    ]
    if names:
        yield (
            NOTE,
            f"{', '.join(sorted(names))}: the time limit is longer than {silence} s, two "
            "heartbeats of RabbitMQ; a thread that holds the interpreter for so long loses the "
            'connection, and the task runs again (set pool="process" if it computes)',
        )


def _sqlite_file(path: str, synchronous: str) -> Iterator[tuple[Grade, str]]:
    from machinery_py.connections.sqlite.open import network_kind
    from machinery_py.connections.sqlite.schema import VERSION

    folder = os.path.dirname(path)
    if kind := network_kind(path):
        yield WRONG, f"{path} is on a network file system ({kind}), where locks do not hold"
    is_writable = os.access(folder, os.W_OK)
    if not os.path.exists(path):
        trouble = "" if is_writable else f", and {folder} cannot be written"
        yield _unless(not is_writable), f"{path} is not there yet{trouble}"
        return
    is_writable = is_writable and os.access(path, os.W_OK)
    quoted = path.replace("?", "%3f").replace("#", "%23")
    with closing(sqlite3.connect(f"file:{quoted}?mode=ro", uri=True, timeout=SLOW)) as connection:
        try:
            schema, journal = (
                connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("user_version", "journal_mode")
            )
        except sqlite3.Error as error:
            yield WRONG, f"{path}: {error}"
            return
    yield (
        _unless(not is_writable),
        f"{path}: {size(os.path.getsize(path))}, schema {schema} (known {VERSION}), "
        f"journal {journal}, synchronous {synchronous}"
        + ("" if is_writable else ", cannot be written"),
    )
    free = shutil.disk_usage(folder).free
    yield _unless(free < LOW_SPACE), f"{size(free)} free on its disk"


def _broker(server: Server) -> Iterator[tuple[Grade, str]]:
    yield _answers(server.broker.stats)
    # A batch of nothing: all that is written is its token, which is forgotten after a while.
    server.broker.put([], token=new_uuid(""))
    yield OK, "can be written"
    yield from _concerns(server.broker.concerns())
    if server.broker.features.embedded:
        yield NOTE, "embedded: for one machine (set MACHINERY_URL for a server)"


def _backend(server: Server) -> Iterator[tuple[Grade, str]]:
    features = server.backend.features
    if not features.keeps:
        yield NOTE, "keeps no results"
        return
    yield _answers(lambda: server.backend.get_states([new_uuid()]))
    if server.config.backend_url != server.config.broker:
        yield from _concerns(server.backend.concerns())
    # Of a task that was never sent: a write that changes nothing.
    server.backend.purge_state(new_uuid())
    yield OK, "can be written"
    if features.forgets:
        yield (
            NOTE,
            "forgets results when it restarts or is full; so can a chord be lost",
        )
    elif not features.durable and not features.embedded:
        yield NOTE, "forgets states when it restarts"
    if not features.keeps_unfinished:
        kept = length(server.config.results_expire_in)
        yield (
            NOTE,
            f"keeps a state for {kept} (results_expire_in), also of a task that waits or runs",
        )
    yield from _lacks(features)


def _lacks(features: BackendFeatures) -> Iterator[tuple[Grade, str]]:
    parts = {
        "keys of unique tasks": features.claims,
        "schedules": features.schedules,
        "revocations": features.revocations,
        "lists of tasks": features.listing,
    }
    if missing := [name for name, is_kept in parts.items() if not is_kept]:
        yield NOTE, f"keeps no {', '.join(missing)} ({COMPLETE})"


def _concerns(concerns: Iterable[Concern]) -> Iterator[tuple[Grade, str]]:
    for concern in concerns:
        yield WRONG if concern.is_certain else NOTE, concern.text


def _answers(ask: Callable[[], object]) -> tuple[Grade, str]:
    ask()  # the first one opens the connection
    start = time.perf_counter()
    ask()
    seconds = time.perf_counter() - start
    return _unless(seconds >= SLOW), f"answers in {length(seconds)}"


def _clock(server: Server) -> Iterator[tuple[Grade, str]]:
    now = server.now()
    shown = now.isoformat(sep=" ", timespec="seconds")
    yield _unless(now.year < EARLIEST), f"{shown}, here {time.strftime('%H:%M %Z')}"
    for worker in server.broker.workers():
        ahead = (worker.beat_at - now).total_seconds()
        if ahead > SKEW:
            yield WRONG, f"the clock of {worker.host} is {length(ahead)} ahead of this one"


def _workers(server: Server) -> Iterator[tuple[Grade, str]]:
    if workers := server.inspect.workers():
        yield OK, f"{many(len(workers), 'worker')}: {', '.join(one.name for one in workers)}"
    else:
        yield NOTE, "no worker lives"


def _queues(server: Server) -> Iterator[tuple[Grade, str]]:
    served = {queue for worker in server.inspect.workers() for queue in worker.queues}
    now = server.now()
    for stats in server.broker.stats():
        queue = stats.queue
        if not stats.waiting:
            if stats.paused:
                yield NOTE, f"{queue!r} is paused, and empty"
            continue
        text = f"{queue!r}: {many(stats.waiting, 'task')} waiting"
        if stats.oldest_at is not None:
            text += f", the oldest for {length((now - stats.oldest_at).total_seconds())}"
        if stats.paused:
            yield NOTE, f"{text}; it is paused ({typed(server.app, 'resume', queue)})"
        elif queue in served:
            yield OK, text
        else:
            advice = f"start one: {typed(server.app, 'worker', f'-Q {queue}')}"
            yield WRONG, f"{text}; no worker on this queue ({advice})"


def _schedules(server: Server) -> Iterator[tuple[Grade, str]]:
    if not server.backend.features.schedules:
        return
    if names := server.schedules.undeclared():
        yield (
            NOTE,
            f"this code does not declare, and its workers do not send: {', '.join(names)} "
            "(machinery periodic remove APP --undeclared, if no other code does)",
        )


def _dead(server: Server) -> Iterator[tuple[Grade, str]]:
    if dead := sum(stats.dead for stats in server.broker.stats()):
        yield NOTE, f"{many(dead, 'dead letter')} (see: {typed(server.app, 'dead')})"
    else:
        yield OK, "0 dead letters"


# machinery config


def config(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery config`."""
    values, sources = server.config.redacted(), server.config.sources
    columns: dict[str, Callable[[str], str]] = {
        "SETTING": str,
        "VALUE": lambda key: f"{_setting(values[key])} {OPTIONS[key].unit}".rstrip(),
        "FROM": lambda key: sources[key],
    }

    def record(key: str) -> dict[str, Any]:
        value = values[key]
        return {
            "key": key,
            "value": dict(value) if isinstance(value, Mapping) else value,
            "unit": OPTIONS[key].unit,
            "source": sources[key],
        }

    return listing(args, list(values), columns, record=record)


def _setting(value: object) -> str:
    if value in ("", {}):
        return NONE
    return value if isinstance(value, str) else value_text(value)

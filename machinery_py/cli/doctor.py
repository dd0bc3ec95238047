"""`machinery doctor`: is everything as it should be? One line for each thing that was looked at; never a traceback."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from machinery_py.cli import apps, logs
from machinery_py.cli.banner import shown_url
from machinery_py.cli.tables import clean, length, many, size, to_json
from machinery_py.config.urls import StoreUrl, scheme_of
from machinery_py.errors import MachineryError
from machinery_py.tasks.signature import new_uuid
from machinery_py.version import __version__

if TYPE_CHECKING:
    from machinery_py.server import Server

SKEW = 5.0  # seconds that a worker's clock may be ahead
LOW_SPACE = 256 << 20  # bytes
SLOW = 1.0  # seconds of one question to a store
EARLIEST = 2024  # a clock that shows an earlier year was never set
PACKAGES = ("msgspec", "redis", "pymongo", "pika", "croniter")


class Grade(StrEnum):
    """How a thing is. Only WRONG makes the exit code 1."""

    OK = "ok"
    NOTE = "note"
    WRONG = "WRONG"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    mark: Grade
    text: str


def doctor(args: argparse.Namespace) -> int:
    """`machinery doctor`: 0 all is well, 1 something is wrong, 2 there is no such app."""
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
        findings.append(Finding("app", Grade.WRONG, str(error)))
        wrong = 2  # as from any other command
    else:
        names = server.get_registered_task_names()
        findings.append(
            Finding(
                "app",
                Grade.OK if names else Grade.NOTE,
                f"{args.app}: {many(len(names), 'task')}"
                + ("" if names else "; is their module imported?"),
            )
        )
        for check in (_settings, _file, _broker, _backend, _clock, _queues, _dead):
            findings += _guarded(check, server)
    if args.json:
        print(to_json([asdict(one) for one in findings]))
    else:
        for one in findings:
            print(f"{one.mark:<6} {one.check:<9} {clean(one.text)}")
    return wrong if any(one.mark is Grade.WRONG for one in findings) else 0


def _guarded(check: Callable[[Server], Iterator[Finding]], server: Server) -> list[Finding]:
    name = check.__name__.strip("_")
    try:
        return list(check(server))
    except MachineryError as error:
        return [Finding(name, Grade.WRONG, str(error))]
    except Exception as error:  # whatever is wrong here is what is to be shown
        return [Finding(name, Grade.WRONG, f"cannot be checked: {type(error).__name__}: {error}")]


def _versions() -> Iterator[Finding]:
    yield Finding(
        "versions",
        Grade.OK,
        f"machinery_py {__version__}, Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}, {sys.platform} {platform.machine()}",
    )
    found = [f"{name} {apps.installed_version(name) or 'missing'}" for name in PACKAGES]
    yield Finding("packages", Grade.OK, ", ".join(found))


def _settings(server: Server) -> Iterator[Finding]:
    config = server.config
    for name, url in (
        ("broker", config.broker),
        ("results", config.backend_url),
        ("lock", config.lock_url),
    ):
        shown = shown_url(url, config.multiple_broker_separator) or "none"
        yield Finding(
            "settings",
            Grade.OK,
            f"{name} {shown} (from {config.sources.get(_KEYS[name], 'default')})",
        )
    if os.environ.get("MACHINERY_URL") and config.sources.get("broker") == "argument":
        yield Finding(
            "settings",
            Grade.NOTE,
            "MACHINERY_URL is set, but the Server is given its broker in the code",
        )


_KEYS = {"broker": "broker", "results": "result_backend", "lock": "lock"}


def _file(server: Server) -> Iterator[Finding]:
    """The file of the SQLite stores, looked at from outside."""
    for url in sorted(
        {
            url
            for url in (server.config.broker, server.config.backend_url)
            if scheme_of(url) == "sqlite"
        }
    ):
        parsed = StoreUrl.parse(url)
        yield from _sqlite_file(os.path.abspath(parsed.path), parsed.synchronous)


def _sqlite_file(path: str, synchronous: str) -> Iterator[Finding]:
    from machinery_py.connections.sqlite.open import network_kind
    from machinery_py.connections.sqlite.schema import VERSION

    folder = os.path.dirname(path)
    kind = network_kind(path)
    if kind:
        yield Finding(
            "file",
            Grade.WRONG,
            f"{path} is on a network file system ({kind}), where locks do not hold",
        )
    if not os.path.exists(path):
        writable = os.access(folder, os.W_OK)
        yield Finding(
            "file",
            Grade.OK if writable else Grade.WRONG,
            f"{path} is not there yet" + ("" if writable else f", and {folder} cannot be written"),
        )
        return
    rights = os.access(path, os.W_OK) and os.access(folder, os.W_OK)
    connection = sqlite3.connect(
        f"file:{path.replace('?', '%3f').replace('#', '%23')}?mode=ro", uri=True, timeout=SLOW
    )
    try:
        schema, journal = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("user_version", "journal_mode")
        )
    except sqlite3.Error as error:
        yield Finding("file", Grade.WRONG, f"{path}: {error}")
        return
    finally:
        connection.close()
    yield Finding(
        "file",
        Grade.OK if rights else Grade.WRONG,
        f"{path}: {size(os.path.getsize(path))}, schema {schema} "
        f"(known {VERSION}), journal {journal}, synchronous {synchronous}"
        + ("" if rights else ", cannot be written"),
    )
    free = shutil.disk_usage(folder).free
    yield Finding(
        "file", Grade.OK if free >= LOW_SPACE else Grade.WRONG, f"{size(free)} free on its disk"
    )


def _broker(server: Server) -> Iterator[Finding]:
    seconds = _timed(server.broker.stats)
    yield _speed("broker", "answers", seconds)
    # A batch of nothing: all that is written is its token, which is forgotten after a while.
    server.broker.put([], token=new_uuid(""))
    yield Finding("broker", Grade.OK, "can be written")
    for concern in server.broker.concerns():
        yield Finding("broker", Grade.WRONG if concern.is_certain else Grade.NOTE, concern.text)
    if server.broker.features.embedded:
        yield Finding(
            "broker", Grade.NOTE, "embedded: for one machine (set MACHINERY_URL for a server)"
        )


def _backend(server: Server) -> Iterator[Finding]:
    features = server.backend.features
    if not features.keeps:
        yield Finding("backend", Grade.NOTE, "keeps no results")
        return
    yield _speed("backend", "answers", _timed(lambda: server.backend.get_states([new_uuid()])))
    if server.config.backend_url != server.config.broker:
        for concern in server.backend.concerns():
            yield Finding(
                "backend", Grade.WRONG if concern.is_certain else Grade.NOTE, concern.text
            )
    server.backend.purge_state(
        new_uuid()
    )  # of a task that was never sent: a write that changes nothing
    yield Finding("backend", Grade.OK, "can be written")
    if features.forgets:
        yield Finding(
            "backend",
            Grade.NOTE,
            "forgets results, schedules and keys of unique tasks when it restarts or is full; "
            "so can a chord be lost",
        )
    elif not features.durable and not features.embedded:
        yield Finding(
            "backend",
            Grade.NOTE,
            "forgets states when it restarts; the key of a unique task without a state is free",
        )
    if not features.keeps_unfinished:
        kept = length(server.config.results_expire_in)
        yield Finding(
            "backend",
            Grade.NOTE,
            f"keeps a state for {kept} (results_expire_in), also of a task that waits or runs",
        )


def _timed(ask: Callable[[], object]) -> float:
    ask()  # the first one opens the connection
    start = time.perf_counter()
    ask()
    return time.perf_counter() - start


def _speed(check: str, text: str, seconds: float) -> Finding:
    return Finding(
        check, Grade.OK if seconds < SLOW else Grade.WRONG, f"{text} in {length(seconds)}"
    )


def _clock(server: Server) -> Iterator[Finding]:
    now = server.now()
    year = now.year
    yield Finding(
        "clock",
        Grade.OK if year >= EARLIEST else Grade.WRONG,
        f"{now.isoformat(sep=' ', timespec='seconds')}, here {time.strftime('%H:%M %Z')}",
    )
    for worker in server.broker.workers():
        ahead = (worker.beat_at - now).total_seconds()
        if ahead > SKEW:
            yield Finding(
                "clock",
                Grade.WRONG,
                f"the clock of {worker.host} is {length(ahead)} ahead of this one",
            )


def _queues(server: Server) -> Iterator[Finding]:
    workers = server.inspect.workers()
    served = {queue for worker in workers for queue in worker.queues}
    text = (
        f"{many(len(workers), 'worker')}: {', '.join(worker.name for worker in workers)}"
        if workers
        else "no worker lives"
    )
    yield Finding("workers", Grade.OK if workers else Grade.NOTE, text)
    now = server.now()
    for stats in server.broker.stats():
        if not stats.waiting:
            if stats.paused:
                yield Finding("queues", Grade.NOTE, f"{stats.queue!r} is paused, and empty")
            continue
        text = f"{stats.queue!r}: {many(stats.waiting, 'task')} waiting"
        if stats.oldest_at is not None:
            text += f", the oldest for {length((now - stats.oldest_at).total_seconds())}"
        if stats.paused:
            yield Finding(
                "queues", Grade.NOTE, f"{text}; it is paused (machinery resume APP {stats.queue})"
            )
        elif stats.queue in served:
            yield Finding("queues", Grade.OK, text)
        else:
            yield Finding(
                "queues",
                Grade.WRONG,
                f"{text}; no worker on this queue (start one: machinery worker APP "
                f"-Q {stats.queue})",
            )


def _dead(server: Server) -> Iterator[Finding]:
    dead = sum(stats.dead for stats in server.broker.stats())
    yield Finding(
        "dead",
        Grade.NOTE if dead else Grade.OK,
        f"{many(dead, 'dead letter')}" + (" (see: machinery dead list)" if dead else ""),
    )

"""Commands that watch a fleet: events, top."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict as fields_of

from machinery_py.cli.output import (
    NONE,
    ago,
    answer,
    clean,
    length,
    many,
    short_uuid,
    shorten,
    table,
    to_json,
)
from machinery_py.control.fleet import FleetState, Tally
from machinery_py.errors import ArgumentError, MachineryError, nearest
from machinery_py.events import Event, kinds_of

if TYPE_CHECKING:
    from machinery_py.brokers.base import QueueStats, WorkerInfo
    from machinery_py.server import Server

SHOWN = 10  # tasks, runs and failures
HOME, REST_OF_LINE, REST = "\x1b[H", "\x1b[K", "\x1b[J"
_ENVELOPE = ("kind", "at", "host", "pid", "worker", "clock", "uuid", "name", "attempt", "traceback")


def events(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery events`: until Ctrl+C, or --limit."""
    known = {kind.__name__: kind for kind in kinds_of(Event)}
    for name in args.rest:
        if name not in known:
            raise ArgumentError(f"no event is called {name!r}{nearest(name, known)}")
    kinds = [known[name] for name in args.rest]
    with server.events.stream(*kinds, since=args.since or 0.0) as stream:
        for event in islice(stream, args.limit):
            print(to_json(event.as_json(), indent=None) if args.json else line(event), flush=True)
    return 0


def line(event: Event) -> str:
    """Return an event as a line of text."""
    record = event.as_json()
    words = [f"{event.at.astimezone():%H:%M:%S}.{event.at.microsecond // 1000:03}"]
    words += [f"{event.kind:17}", event.worker]
    words += [record.get("name", ""), short_uuid(record.get("uuid", ""))]
    for key, value in record.items():
        has_not_run = key == "runtime" and not value
        if key not in _ENVELOPE and value not in ("", None) and not has_not_run:
            is_length = key in ("runtime", "wait", "delay", "seconds", "interval")
            words.append(f"{key}={length(value) if is_length else shorten(str(value))}")
    return " ".join(clean(word) for word in words if word)


def top(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery top`: redraw until `q` or Ctrl+C; once with --once, --json or no terminal."""
    if args.once or args.json or not sys.stdout.isatty():
        return _once(server, args)

    def draw(state: FleetState) -> None:
        trouble = ""
        try:
            found = server.broker.stats(), server.broker.workers()
        except MachineryError as error:
            found, trouble = ([], []), str(error)
        shown = picture(state, *found, now=server.now(), trouble=trouble)
        sys.stdout.write(_fitted(shown))
        sys.stdout.flush()

    draw(FleetState())
    with _keys() as is_quit, ExitStack() as stack:
        stack.callback(server.events.every(args.every, draw, since=args.since).stop)
        while not is_quit(0.5):
            pass
    return 0


def _once(server: Server, args: argparse.Namespace) -> int:
    state, begun = FleetState(), time.monotonic()
    with closing(server.events.stream(since=args.since)) as stream:
        while (left := begun + args.every - time.monotonic()) > 0:
            state.apply(stream.read(left))
    state.since = begun - stream.since
    found = server.broker.stats(), server.broker.workers()
    record = as_record(state, *found) if args.json else None
    return answer(args, record, picture(state, *found, now=server.now()))


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Give a function that waits so many seconds, and returns whether `q` was pressed."""
    if os.name != "posix" or not sys.stdin.isatty():
        yield threading.Event().wait
        return
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard)
    try:
        yield (
            lambda wait: (
                bool(select.select([keyboard], [], [], wait)[0]) and os.read(keyboard, 1) in b"qQ"
            )
        )
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def as_record(
    state: FleetState, queues: list[QueueStats], workers: list[WorkerInfo]
) -> dict[str, Any]:
    """Return what is shown as one JSON object."""

    def tally(one: Tally) -> dict[str, Any]:
        found = {**asdict(one), "mean": one.mean, "rate": state.rate(one)}
        del found["ends"]
        return found

    alive = state.alive()
    return {
        "queues": [fields_of(one) for one in queues],
        "workers": [fields_of(one) for one in workers],
        "seen": [asdict(one) | {"alive": one in alive} for one in state.workers.values()],
        "tasks": {name: tally(one) for name, one in state.tasks.items()},
        "queue_rates": {name: state.rate(one) for name, one in state.queues.items()},
        "running": [one.as_json() for one in state.running.values()],
        "slowest": [one.as_json() for one in state.slowest],
        "failures": [one.as_json() for one in state.failures],
    }


def picture(
    state: FleetState,
    queues: list[QueueStats],
    workers: list[WorkerInfo],
    *,
    now: dt.datetime,
    trouble: str = "",
) -> str:
    """Return what is shown as tables."""
    rate = sum(state.rate(tally) for tally in state.tasks.values())
    held = sum(one.running for one in queues)
    head = (
        f"machinery top · {now:%H:%M:%S} UTC · {many(len(workers), 'worker')}, "
        f"{many(held, 'task')} held, {rate:,.1f} runs/s"
    )
    parts = [head]
    if trouble:
        parts.append(f"the broker cannot be asked: {clean(trouble)}")
    if not state.workers and not state.tasks:
        parts.append(
            "no events so far: rates and tasks are those of workers with -E (or events=True)"
        )
    rows = [
        [
            f"{one.queue} (paused)" if one.paused else one.queue,
            *(f"{number:,}" for number in (one.waiting, one.running, one.delayed, one.dead)),
            f"{state.rate(state.queues[one.queue]) if one.queue in state.queues else 0:.1f}",
        ]
        for one in queues
    ]
    heads = ["QUEUE", "WAITING", "HELD", "DELAYED", "DEAD", "RUNS/S"]
    parts.append(table(heads, rows, range(1, 6)))
    parts.append(_workers(state, workers, now))
    parts += [text for text in (_tasks(state), _runs(state), _failures(state)) if text]
    return "\n\n".join(parts)


def _workers(state: FleetState, workers: list[WorkerInfo], now: dt.datetime) -> str:
    ticks = time.monotonic()
    names = {one.name for one in workers}
    rows = []
    for one in workers:
        seen = state.workers.get(one.name)
        load = f"{seen.load[0]:.2f}" if seen and seen.load else NONE
        numbers = (f"{seen.active:,}", f"{seen.processed:,}") if seen else (NONE, NONE)
        word = "stalled" if one.stalled else "alive"
        rows.append([one.name, one.host, str(one.pid), word, *numbers, load, ago(one.beat_at, now)])
    alive = {each.name for each in state.alive()}  # the broker may not have told of them
    for silent in state.workers.values():
        if silent.name not in names and silent.is_online:
            word = "alive" if silent.name in alive else "lost"
            beat = f"{length(ticks - silent.seen_at)} ago"
            rows.append([silent.name, silent.host, str(silent.pid), word, NONE, NONE, NONE, beat])
    heads = ["WORKER", "HOST", "PID", "STATE", "RUNS", "DONE", "LOAD", "BEAT"]
    return table(heads, rows, (2, 4, 5, 6, 7))


def _tasks(state: FleetState) -> str:
    busiest = sorted(state.tasks.items(), key=lambda item: -state.rate(item[1]))[:SHOWN]
    rows = [
        [
            name,
            f"{state.rate(one):.1f}",
            *(f"{number:,}" for number in (one.succeeded, one.failed, one.retried)),
            length(one.mean) if one.succeeded else NONE,
            length(one.longest) if one.succeeded else NONE,
        ]
        for name, one in busiest
    ]
    heads = ["TASK", "RUNS/S", "OK", "FAILED", "RETRIED", "MEAN", "LONGEST"]
    return table(heads, rows, range(1, 7)) if rows else ""


def _runs(state: FleetState) -> str:
    oldest = sorted(state.running.values(), key=lambda one: one.stamp)[:SHOWN]
    rows = [[one.name, short_uuid(one.uuid), one.worker, f"{one.at:%H:%M:%S}"] for one in oldest]
    return table(["RUNNING", "UUID", "WORKER", "SINCE"], rows) if rows else ""


def _failures(state: FleetState) -> str:
    rows = [
        [one.name, short_uuid(one.uuid), one.worker, f"{one.at:%H:%M:%S}", one.error]
        for one in reversed(state.failures)
    ]
    return table(["FAILURE", "UUID", "WORKER", "AT", "ERROR"], rows) if rows else ""


def _fitted(text: str) -> str:
    """Return the text for the whole terminal, written over the picture before."""
    width, height = shutil.get_terminal_size()
    lines = [one[:width] for one in text.split("\n")[: height - 1]]
    return HOME + "".join(f"{one}{REST_OF_LINE}\n" for one in lines) + REST

"""Commands that watch a fleet: events, top."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from machinery_py.cli.output import (
    NONE,
    ago,
    clean,
    length,
    many,
    short_uuid,
    shorten,
    table,
    to_json,
)
from machinery_py.control.fleet import FleetState
from machinery_py.control.records import FleetEvent, kinds_of
from machinery_py.errors import ArgumentError, MachineryError, nearest
from machinery_py.events import Event

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
    left = args.limit
    kinds = [known[name] for name in args.rest]
    with server.events.stream(*kinds, since=args.since or 0.0) as stream:
        for event in stream:
            print(to_json(event.as_json(), indent=None) if args.json else line(event), flush=True)
            left = left and left - 1
            if left == 0:
                return 0
    return 0


def line(event: FleetEvent[Any]) -> str:
    """Return an event as a line of text."""
    record = event.as_json()
    words = [f"{event.at.astimezone():%H:%M:%S}.{event.at.microsecond // 1000:03}"]
    words += [f"{event.kind:17}", event.worker]
    words += [record.get("name", ""), short_uuid(record.get("uuid", ""))]
    for key, value in record.items():
        if key not in _ENVELOPE and value not in ("", None):
            is_length = key in ("runtime", "wait", "delay", "seconds", "interval")
            words.append(f"{key}={length(value) if is_length else shorten(str(value))}")
    return " ".join(clean(word) for word in words if word)


def top(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery top`: redraw until `q` or Ctrl+C; once with --once, --json or no terminal."""
    is_once = args.once or args.json or not sys.stdout.isatty()
    view = View(server, args, in_place=not is_once)
    if not is_once:
        view.draw(FleetState())
    with (
        _keys(are_read=os.name == "posix" and not is_once) as is_quit,
        server.events.every(args.every, view.draw, since=args.since),
    ):
        if is_once:
            view.drawn.wait()
            return view.code
        while not is_quit(0.5):
            pass
    return 0


@contextmanager
def _keys(*, are_read: bool) -> Iterator[Callable[[float], bool]]:
    """Give a function that waits so many seconds, and returns whether `q` was pressed."""
    if not are_read or not sys.stdin.isatty():
        never = threading.Event()
        yield never.wait
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


class View:
    """Picture of `machinery top`: the queues and workers of the store, and the stream so far.

    Attributes:
        drawn: set when the first picture was shown.
        code: exit code; 3 when the store could not be asked.
    """

    def __init__(self, server: Server, args: argparse.Namespace, *, in_place: bool) -> None:
        self._server = server
        self._args = args
        self._in_place = in_place
        self.drawn = threading.Event()
        self.code = 0

    def draw(self, state: FleetState) -> None:
        """Ask the store, and show all."""
        if self.drawn.is_set() and not self._in_place:
            return
        try:
            queues, workers = self._server.broker.stats(), self._server.broker.workers()
        except MachineryError as error:
            queues, workers, trouble, self.code = [], [], str(error), 3
        else:
            trouble, self.code = "", 0
        if self._args.json:
            print(to_json(self.record(state, queues, workers)))
        else:
            text = self.text(state, queues, workers, trouble)
            sys.stdout.write(_fitted(text) if self._in_place else f"{text}\n")
        sys.stdout.flush()
        self.drawn.set()

    def record(
        self, state: FleetState, queues: list[QueueStats], workers: list[WorkerInfo]
    ) -> dict[str, Any]:
        """Return what is shown as one JSON object."""
        from dataclasses import asdict

        from msgspec.structs import asdict as fields_of

        def tallies(of: dict[str, Any]) -> dict[str, Any]:
            return {
                name: {
                    key: value for key, value in asdict(tally).items() if not key.startswith("_")
                }
                | {"mean": tally.mean, "rate": state.rate(tally)}
                for name, tally in of.items()
            }

        return {
            "queues": [fields_of(one) for one in queues],
            "workers": [fields_of(one) for one in workers],
            "seen": [asdict(one) | {"alive": one in state.alive()} for one in _seen(state)],
            "tasks": tallies(state.tasks),
            "queue_rates": {name: state.rate(tally) for name, tally in state.queues.items()},
            "running": [one.as_json() for one in state.running.values()],
            "slowest": [one.as_json() for one in state.slowest],
            "failures": [one.as_json() for one in state.failures],
        }

    def text(
        self,
        state: FleetState,
        queues: list[QueueStats],
        workers: list[WorkerInfo],
        trouble: str,
    ) -> str:
        """Return what is shown as tables."""
        now = self._server.now()
        rate = sum(state.rate(tally) for tally in state.tasks.values())
        running = sum(one.running for one in queues)
        head = (
            f"machinery top · {now:%H:%M:%S} UTC · {many(len(workers), 'worker')}, "
            f"{many(running, 'running task')}, {rate:,.1f} runs/s"
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
        heads = ["QUEUE", "WAITING", "RUNNING", "DELAYED", "DEAD", "RUNS/S"]
        parts.append(table(heads, rows, range(1, 6)))
        parts.append(self._workers(state, workers))
        parts += [text for text in (_tasks(state), _runs(state), _failures(state)) if text]
        return "\n\n".join(parts)

    def _workers(self, state: FleetState, workers: list[WorkerInfo]) -> str:
        now, ticks = self._server.now(), time.monotonic()
        names = {one.name for one in workers}
        rows = []
        for one in workers:
            seen = state.workers.get(one.name)
            load = f"{seen.load[0]:.2f}" if seen and seen.load else NONE
            numbers = (f"{seen.active:,}", f"{seen.processed:,}") if seen else (NONE, NONE)
            word = "stalled" if one.stalled else "alive"
            rows.append(
                [one.name, one.host, str(one.pid), word, *numbers, load, ago(one.beat_at, now)]
            )
        for gone in _seen(state):
            if gone.name not in names and gone.is_online:
                beat = f"{length(ticks - gone.seen_at)} ago"
                rows.append([gone.name, gone.host, str(gone.pid), "lost", NONE, NONE, NONE, beat])
        heads = ["WORKER", "HOST", "PID", "STATE", "RUNS", "DONE", "LOAD", "BEAT"]
        return table(heads, rows, (2, 4, 5, 6, 7))


def _seen(state: FleetState) -> list[Any]:
    return [one for _, one in sorted(state.workers.items())]


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

"""Commands on queues and their workers: queues, forget, workers, purge, declare, pause, resume."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from machinery_py.cli.output import (
    NONE,
    ago,
    answer,
    confirm,
    length,
    listing,
    many,
    note,
    size,
)
from machinery_py.errors import ArgumentError, MachineryError, nearest

if TYPE_CHECKING:
    from machinery_py.brokers.base import WorkerInfo
    from machinery_py.control.answers import WorkerStats
    from machinery_py.inspection import QueueReport
    from machinery_py.server import Server

TOLD_EVERY = 5.0  # seconds between two lines about a purge that takes long


def queues(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery queues`."""
    columns: dict[str, Callable[[QueueReport], str]] = {
        "QUEUE": lambda one: f"{one.queue} (paused)" if one.paused else one.queue,
        "WAITING": lambda one: f"{one.waiting:,}",
        "HELD": lambda one: f"{one.running:,}",
        "DELAYED": lambda one: f"{one.delayed:,}",
        "FAILED": lambda one: f"{one.failed:,}",
        "OLDEST": lambda one: length(one.oldest) if one.oldest else NONE,
        "PER MIN": lambda one: f"{one.per_minute:,}",
    }
    return listing(args, server.inspect.queues(), columns, right=list(columns)[1:])


def forget(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery forget`. The exit code is 1 if a queue is in use."""
    names = list(dict.fromkeys(args.rest))
    forgotten = [name for name in names if server.inspect.forget_queue(name)]
    for name in names:
        if name not in forgotten:
            note(
                f"queue {name!r} is in use, and was left as it is: messages wait, are delayed, "
                "held or dead there, it is paused, or a worker serves it"
            )
    text = f"forgot {', '.join(map(repr, forgotten)) or 'nothing'}"
    return answer(args, {"forgotten": forgotten}, text) or int(forgotten != names)


def workers(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery workers`."""
    found = server.inspect.workers()
    now = server.now()
    stats: Mapping[str, WorkerStats] = {}
    if found and server.broker.features.topics:
        chosen = server.control.workers(timeout=args.timeout)
        try:
            stats = chosen.stats()
        except MachineryError as error:
            note(f"the workers cannot be asked: {error}")

    def facts(one: WorkerInfo) -> WorkerStats | None:
        return stats.get(one.name) or stats.get(f"{one.name}@{one.host}:{one.pid}")

    def told(show: Callable[[WorkerStats], str]) -> Callable[[WorkerInfo], str]:
        return lambda one: show(known) if (known := facts(one)) is not None else NONE

    columns: dict[str, Callable[[WorkerInfo], str]] = {
        "WORKER": lambda one: one.name,
        "HOST": lambda one: one.host,
        "PID": lambda one: str(one.pid),
        "QUEUES": lambda one: ",".join(one.queues),
        "HOLDS": lambda one: f"{one.holding:,}",
        "UP": lambda one: ago(one.started_at, now),
        "BEAT": lambda one: ago(one.beat_at, now) + (" (stalled)" if one.stalled else ""),
        "RUNS": told(lambda one: f"{one.active:,}/{one.concurrency:,} {one.pool}"),
        "OLDEST": told(lambda one: length(one.oldest) if one.active else NONE),
        "DONE": told(lambda one: f"{one.processed:,}"),
        "FAILED": told(lambda one: f"{one.failed:,}"),
        "MEMORY": told(lambda one: size(one.memory)),
        "LOAD": told(lambda one: f"{one.load[0]:.1f}" if one.load else NONE),
        "VERSION": told(lambda one: one.version),
    }

    def record(one: WorkerInfo) -> object:
        return msgspec.structs.asdict(one) | {"stats": msgspec.to_builtins(facts(one))}

    right = [head for head in columns if head not in ("WORKER", "HOST", "QUEUES", "RUNS")]
    return listing(args, found, columns, right=right, record=record)


def purge(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery purge`."""
    queue = args.rest[0]
    found = {stats.queue: stats.waiting + stats.delayed for stats in server.broker.stats()}
    count = found.get(queue, 0)
    if count > 1:
        confirm(args, f"delete {many(count, 'task')} that wait in {queue!r}?")
    deleted = server.inspect.purge(queue, progress=_told_of(count))
    text = f"deleted {many(deleted, 'task')} from {queue!r}"
    return answer(args, {"queue": queue, "deleted": deleted}, text)


def _told_of(all: int) -> Callable[[int], None]:
    """Return what tells on stderr, each TOLD_EVERY seconds, how far a purge is."""
    told_at = time.monotonic()

    def tell(count: int) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= TOLD_EVERY:
            told_at = time.monotonic()
            note(f"{count:,} of {max(all, count):,} deleted")

    return tell


def declare(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery declare`."""
    made = list(server.broker.declare(args.rest or [server.config.default_queue]))
    text = "\n".join(made) or "nothing to declare: this store makes its queues by itself"
    return answer(args, {"declared": made}, text)


def pause(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery pause`. A queue may be paused before it exists: before a deployment, say."""
    if "" in args.rest:
        raise ArgumentError("pause: the name of a queue is empty")
    found = {stats.queue: stats for stats in server.broker.stats()}
    names = list(dict.fromkeys(args.rest))
    paused: list[str] = []
    for name in names:
        server.inspect.pause(name)
        paused.append(repr(name))
        if name in found:
            paused[-1] += f" ({many(found[name].waiting, 'task')} waiting)"
        else:
            hint = nearest(name, found)
            note(f"there was no queue {name!r} so far{hint}; it is paused for when there is")
    return answer(args, {"paused": names}, f"paused {', '.join(paused)}")


def resume(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery resume`."""
    paused = server.broker.paused()
    names = list(dict.fromkeys(args.rest))
    for name in names:
        # Also a queue that seems not to be paused: somebody may pause it at this moment.
        server.inspect.resume(name)
        if name not in paused:
            known = ", ".join(map(repr, sorted(paused))) or "none"
            note(f"queue {name!r} was not paused (paused are: {known})")
    return answer(args, {"resumed": names}, f"resumed {', '.join(map(repr, names))}")

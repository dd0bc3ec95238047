"""Commands on schedules: periodic, and periodic pause, resume, run, change, remove."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from machinery_py.cli.output import NONE, answer, confirm, listing, many, moment
from machinery_py.errors import ArgumentError

if TYPE_CHECKING:
    import datetime as dt

    from machinery_py.schedules.api import ScheduleReport
    from machinery_py.server import Server


def periodic(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery periodic`."""
    found = server.schedules.list(dropped=True)
    now = server.now()
    columns: dict[str, Callable[[ScheduleReport], str]] = {
        "NAME": lambda one: one.name,
        "SPEC": lambda one: one.spec,
        "ZONE": lambda one: one.tz,
        "SENDS": lambda one: ", ".join(one.tasks),
        "STATE": _state,
        "LAST RUN": lambda one: moment(one.last_run, now),
        "NEXT RUNS": lambda one: _times(one.next_runs),
    }
    return listing(args, found, columns)


def _state(report: ScheduleReport) -> str:
    if report.paused:
        return "paused"
    if not report.stored:
        return "no worker yet"
    if report.dropped:
        return "nobody sends it"
    return f"{report.waiting} waiting" if report.waiting else "on"


def _times(moments: Sequence[dt.datetime]) -> str:
    """Return local times; each names year and day only where they change."""
    words: list[str] = []
    before = None
    for local in (one.astimezone() for one in moments):
        day = "%Y-%m-%d "
        if before is not None and before.year == local.year:
            day = "" if before.date() == local.date() else "%m-%d "
        words.append(local.strftime(day + ("%H:%M:%S" if local.second else "%H:%M")))
        before = local
    return ", ".join(words) or NONE


def periodic_pause(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery periodic pause`."""
    return _each(server, args, server.schedules.pause, "pause", "paused")


def periodic_resume(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery periodic resume`."""
    return _each(server, args, server.schedules.resume, "resume", "resumed")


def periodic_run(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery periodic run`."""
    return _each(server, args, server.schedules.run_now, "run", "sent")


def periodic_remove(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery periodic remove`."""
    if args.undeclared:
        if args.rest:
            raise ArgumentError("periodic remove: say names or --undeclared (found both)")
        args.rest = server.schedules.undeclared()
        if not args.rest:
            return answer(args, [], "the code declares all that it ever declared")
    elif not args.rest:
        raise ArgumentError("periodic remove: say the names of schedules, or --undeclared")
    return _each(server, args, server.schedules.remove, "remove", "removed")


def _each(
    server: Server,
    args: argparse.Namespace,
    act: Callable[[str], object],
    verb: str,
    done: str,
) -> int:
    names: Sequence[str] = args.rest
    for name in names:
        server.schedules.get(name)  # none is changed if one of the names is wrong
    if verb == "remove" or len(names) > 1:
        confirm(args, f"{verb} {many(len(names), 'schedule')}: {', '.join(names)}?")
    for name in names:
        act(name)
    records: Sequence[Any] = names
    if args.json and verb != "remove":  # it is done: what is not shown is not read
        records = [msgspec.structs.asdict(server.schedules.get(name)) for name in names]
    return answer(args, records, f"{done}: {', '.join(names)}")


def periodic_change(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery periodic change`."""
    (name,) = args.rest
    options: Any = {
        option: value
        for option in ("spec", "tz", "catch_up", "window", "overlap")
        if (value := getattr(args, option)) is not None
    }
    if not options:
        raise ArgumentError(
            "nothing to change (say --spec, --tz, --catch-up, --window or --overlap)"
        )
    server.schedules.change(name, **options)
    report = server.schedules.get(name)
    text = f"changed: {name}; next: {_times(report.next_runs)}"
    return answer(args, msgspec.structs.asdict(report), text)

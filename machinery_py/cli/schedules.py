"""Commands on schedules: periodic, and periodic pause, resume, run, change, remove."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from machinery_py.cli.act import confirm
from machinery_py.cli.look import open_app
from machinery_py.cli.tables import NONE, many, moment, table, to_json
from machinery_py.errors import ArgumentError

if TYPE_CHECKING:
    import datetime as dt

    from machinery_py.schedules.api import PeriodicOptions, ScheduleReport, Schedules


def periodic(args: argparse.Namespace) -> int:
    """`machinery periodic`."""
    server = open_app(args, "periodic")
    found = server.schedules.list()
    if args.json:
        print(to_json([msgspec.structs.asdict(one) for one in found]))
        return 0
    now = server.now()
    rows = [
        (
            one.name,
            one.spec,
            one.tz,
            ", ".join(one.tasks),
            _state(one),
            moment(one.last_run, now),
            _times(one.next_runs),
        )
        for one in found
    ]
    print(table(("NAME", "SPEC", "ZONE", "SENDS", "STATE", "LAST RUN", "NEXT RUNS"), rows))
    return 0


def _state(report: ScheduleReport) -> str:
    if report.paused:
        return "paused"
    if not report.stored:
        return "no worker yet"
    return f"{report.waiting} waiting" if report.waiting else "on"


def _times(moments: Sequence[dt.datetime]) -> str:
    """In local time; year and day are said once."""
    words: list[str] = []
    before = None
    for local in (one.astimezone() for one in moments):
        time = "%H:%M:%S" if local.second else "%H:%M"
        day = (
            "%Y-%m-%d "
            if before is None or before.year != local.year
            else "%m-%d "
            if before.date() != local.date()
            else ""
        )
        words.append(local.strftime(day + time))
        before = local
    return ", ".join(words) or NONE


def pause(args: argparse.Namespace) -> int:
    """`machinery periodic pause`."""
    return _each(args, "pause", "paused")


def resume(args: argparse.Namespace) -> int:
    """`machinery periodic resume`."""
    return _each(args, "resume", "resumed")


def run(args: argparse.Namespace) -> int:
    """`machinery periodic run`."""
    return _each(args, "run_now", "sent")


def remove(args: argparse.Namespace) -> int:
    """`machinery periodic remove`."""
    return _each(args, "remove", "removed", question=True)


def _each(args: argparse.Namespace, method: str, done: str, *, question: bool = False) -> int:
    schedules: Schedules = open_app(args, "periodic").schedules
    names: Sequence[str] = args.rest
    for name in names:
        schedules.get(name)  # none is changed if one of the names is wrong
    if question or len(names) > 1:
        confirm(
            args, f"{method.partition('_')[0]} {many(len(names), 'schedule')}: {', '.join(names)}?"
        )
    for name in names:
        getattr(schedules, method)(name)
    print(
        to_json(
            [msgspec.structs.asdict(schedules.get(name)) for name in names]
            if method != "remove"
            else names
        )
        if args.json
        else f"{done}: {', '.join(names)}"
    )
    return 0


def change(args: argparse.Namespace) -> int:
    """`machinery periodic change`."""
    schedules: Schedules = open_app(args, "periodic").schedules
    (name,) = args.rest
    options: PeriodicOptions = {}
    if args.tz is not None:
        options["tz"] = args.tz
    if args.catch_up is not None:
        options["catch_up"] = args.catch_up
    if args.window is not None:
        options["window"] = args.window
    if args.overlap is not None:
        options["overlap"] = args.overlap
    if args.spec is None and not options:
        raise ArgumentError(
            "nothing to change (say --spec, --tz, --catch-up, --window or --overlap)"
        )
    schedules.change(name, spec=args.spec, **options)
    report = schedules.get(name)
    record: dict[str, Any] = msgspec.structs.asdict(report)
    print(to_json(record) if args.json else f"changed: {name}; next: {_times(report.next_runs)}")
    return 0

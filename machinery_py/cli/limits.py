"""Commands on limits: limits, limits set, limits reset."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from machinery_py.cli.options import seconds
from machinery_py.cli.output import NONE, answer, length, listing
from machinery_py.errors import ArgumentError
from machinery_py.limits.base import Rule
from machinery_py.limits.settings import LimitOptions, options_of

if TYPE_CHECKING:
    from machinery_py.inspection import LimitReport
    from machinery_py.server import Server


class LimitRow(msgspec.Struct, frozen=True, kw_only=True):
    """A limit under one key; without numbers, if nobody has asked for it."""

    name: str
    limit: str
    key: str = ""
    running: str = NONE
    waiting: str = NONE
    wait: str = NONE


def limits(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery limits`."""
    found = server.inspect.limits()
    if args.json:
        return answer(args, msgspec.to_builtins(found), "")
    columns: dict[str, Callable[[LimitRow], str]] = {
        "NAME": lambda one: one.name,
        "LIMIT": lambda one: one.limit,
        "KEY": lambda one: one.key or NONE,
        "RUNNING": lambda one: one.running,
        "WAITING": lambda one: one.waiting,
        "NEXT TURN": lambda one: one.wait,
    }
    rows = [row for report in found for row in _rows(report)]
    return listing(args, rows, columns, right=list(columns)[3:])


def _rows(report: LimitReport) -> Iterator[LimitRow]:
    for option, value in {**report.options, **report.changed}.items():
        note = " (changed)" if option in report.changed else ""
        yield LimitRow(name=report.name, limit=_text({option: value}) + note)
    for one in report.usage:
        rule = Rule(name=one.name, limit=one.limit, interval=one.interval)
        yield LimitRow(
            name=report.name,
            limit=_text(options_of([rule])) or one.name,
            key=one.key,
            running=f"{one.running:,}" if not one.interval else NONE,
            waiting=f"{one.waiting:,}",
            wait=f"in {length(one.wait)}" if one.wait else "now",
        )


def _text(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{option}={length(value) if option == 'min_interval' else value}"
        for option, value in options.items()
    )


def limits_set(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery limits set`."""
    name, *words = args.rest
    options = _options(words)
    server.control.limit(name, **options)
    record = {"name": name, "changed": {**options}}
    return answer(args, record, f"{name}: {_text(options)}, from now on")


def limits_reset(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery limits reset`."""
    for name in args.rest:
        server.control.reset_limit(name)
    text = f"the limits of the code count again for {', '.join(args.rest)}"
    return answer(args, {"reset": args.rest}, text)


def _options(words: Sequence[str]) -> LimitOptions:
    """Read `rate=5/s burst=10`."""
    options: dict[str, Any] = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals:
            raise ArgumentError(f"limit {word!r}: found no '=' (expected for instance rate=5/s)")
        if option == "min_interval":
            try:
                options[option] = seconds(value)
            except argparse.ArgumentTypeError as error:
                raise ArgumentError(str(error)) from None
        else:
            options[option] = int(value) if value.isdecimal() else value
    return cast("LimitOptions", options)

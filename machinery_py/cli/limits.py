"""Commands on limits: limits, limits set, limits reset."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from machinery_py.cli.options import seconds
from machinery_py.cli.output import NONE, answer, length, listing
from machinery_py.errors import ArgumentError
from machinery_py.inspection import LimitRow, limit_rows
from machinery_py.limits.settings import LimitOptions

if TYPE_CHECKING:
    from machinery_py.server import Server


def limits(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery limits`."""
    found = server.inspect.limits()
    if args.json:
        return answer(args, msgspec.to_builtins(found), "")
    columns: dict[str, Callable[[LimitRow], str]] = {
        "NAME": lambda one: one.name,
        "LIMIT": lambda one: one.limit + (" (changed)" if one.changed else ""),
        "KEY": lambda one: one.key or NONE,
        "RUNNING": lambda one: NONE if one.running is None else f"{one.running:,}",
        "WAITING": lambda one: f"{one.waiting:,}" if one.in_use else NONE,
        "NEXT TURN": lambda one: (
            (f"in {length(one.wait)}" if one.wait else "now") if one.in_use else NONE
        ),
    }
    return listing(args, limit_rows(found), columns, right=list(columns)[3:])


def limits_set(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery limits set`."""
    name, *words = args.rest
    options = _options(words)
    server.control.limit(name, **options)
    record = {"name": name, "changed": {**options}}
    return answer(args, record, f"{name}: {', '.join(words)}, from now on")


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

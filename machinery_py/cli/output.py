"""Output of the commands: tables, JSON, questions, lengths of time, sizes.

Nothing that a task said reaches the terminal unescaped.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from machinery_py.config.urls import redact, split_urls
from machinery_py.connections.streams import announce
from machinery_py.errors import MachineryError
from machinery_py.texts import get_logger
from machinery_py.texts import length as length

logger = get_logger(__name__)

T = TypeVar("T")

ALL = 100_000  # the most items that one command lists or acts on
READY = "Ready. Ctrl+C stops when the running tasks are done."  # of a worker
NONE = "-"  # a cell with nothing in it
WIDEST = 60  # characters of a cell; what is longer ends in …

# Control characters, line separators, what turns the writing direction, and halves of characters.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def clean(text: str) -> str:
    """Return the text on one line, with everything escaped that a terminal would obey."""
    if text.isprintable():
        return text  # most are, and this takes a fifth of the time
    return _UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def clean_lines(text: str) -> list[str]:
    """Return the lines of a text, each cleaned."""
    return [clean(line) for line in text.splitlines()]


def shorten(text: str) -> str:
    """Return the text as a table's cell."""
    text = clean(text)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def short_uuid(uuid: str) -> str:
    """Return the start of a UUID that is enough to find it again by."""
    head, underscore, rest = clean(uuid).rpartition("_")
    return f"{head}{underscore}{rest[:8]}…" if len(rest) > 8 else clean(uuid)


# Answers


def answer(args: argparse.Namespace, record: Any, text: str) -> int:
    """Print what was done or found: the record as JSON if --json was given, else the text."""
    print(to_json(record) if args.json else text)
    return 0


def listing(
    args: argparse.Namespace,
    items: Sequence[T],
    columns: Mapping[str, Callable[[T], str]],
    *,
    right: Collection[str] = (),
    record: Callable[[Any], Any] | None = None,
) -> int:
    """Print a table with a row for each item, or JSON with a record for each.

    Args:
        columns: head → the cell of an item.
        right: heads of the columns that are aligned to the right.
        record: item → what JSON shows of it; by default the fields of a Struct.
    """
    from msgspec.structs import asdict  # a supervisor prints no list, and is to be small

    rows = [] if args.json else [[cell(item) for cell in columns.values()] for item in items]
    to_right = [at for at, head in enumerate(columns) if head in right]
    as_record: Callable[[Any], Any] = record or asdict
    return answer(args, list(map(as_record, items)), table(list(columns), rows, to_right))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> str:
    """Return rows under their heads, aligned; the columns in `right` to the right."""
    lines = [list(heads), *([shorten(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def fields(rows: Iterable[tuple[str, str]]) -> str:
    """Return names and values, one a line, without those that have no value."""
    shown = [(name, value) for name, value in rows if value not in ("", NONE)]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join(f"{name.ljust(width)}  {clean(value)}".rstrip() for name, value in shown)


# Questions and notes


def say(args: argparse.Namespace, text: str) -> None:
    """Print the text at once, if somebody reads it.

    With JSON logs it is a record, so that programs find nothing else.
    """
    if args.log_format == "json":
        logger.info("%s", "; ".join(" ".join(line.split()) for line in text.splitlines()))
    else:
        announce(text)


class Refused(MachineryError):
    """A question was not answered with yes."""


def confirm(args: argparse.Namespace, question: str) -> None:
    """Ask, unless --yes was given.

    Raises:
        Refused: the answer was no, or there is nobody to ask.
    """
    if args.yes:
        return
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise Refused(f"{question} (nobody to ask here: say --yes)")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("nothing was done")


def note(text: str) -> None:
    """Tell something on stderr that is no error."""
    sys.stderr.write(f"machinery: {clean(text)}\n")


# Values


def shown_url(url: str, separator: str) -> str:
    """Return one or several URLs without their secrets."""
    return clean(separator.join(map(redact, split_urls(url, separator))))


def many(number: int, one: str, several: str = "") -> str:
    """Return `1 task`, `1,240 tasks`."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def size(number: float) -> str:
    """Return a number of bytes as people say it."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TB"


def moment(value: dt.datetime | None, now: dt.datetime) -> str:
    """Return a moment in local time, and how long ago it was or when it will be."""
    if value is None or value.year <= 1:
        return NONE
    away = (now - value).total_seconds()
    local = value.astimezone().isoformat(sep=" ", timespec="milliseconds")
    return f"{local}  ({length(away)} ago)" if away >= 0 else f"{local}  (in {length(-away)})"


def ago(value: dt.datetime | None, now: dt.datetime) -> str:
    """Return how long ago it was, for a cell."""
    return NONE if value is None or value.year <= 1 else length((now - value).total_seconds())


def at_home(path: str) -> str:
    """Return the path with the home folder as ~."""
    home = os.path.expanduser("~")
    if home not in ("", "/", "~") and (path == home or path.startswith(home + os.sep)):
        return "~" + path[len(home) :]
    return path


def value_text(value: Any) -> str:
    """Return a value on one line, as JSON if it has a JSON form; a moment, a Decimal, … as text."""
    if isinstance(value, dict) and value.keys() == {"$", "v"} and isinstance(value["v"], str):
        value = value["v"]
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return clean(text)


def to_json(value: Any, *, indent: int | None = 2) -> str:
    """Return JSON in ASCII, so that it means the same on every terminal and in every file."""
    return json.dumps(_finite(value), default=_plain, indent=indent)


def _finite(value: Any) -> Any:
    """Return the value without nan and infinities, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_finite(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return str(value)

"""How things are shown: tables, JSON, lengths of time, sizes. Nothing that a task said reaches the terminal unescaped."""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NONE = "-"  # a cell with nothing in it
WIDEST = 60  # characters of a cell; what is longer ends in …

# Control characters, line separators, what turns the writing direction, and halves of characters.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def clean(text: str) -> str:
    """The text on one line, with everything escaped that a terminal would obey."""
    return _UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def clean_lines(text: str) -> list[str]:
    """The lines of a text, each cleaned."""
    return [clean(line) for line in text.splitlines()]


def shorten(text: str, width: int = WIDEST) -> str:
    text = clean(text)
    return text if len(text) <= width else text[: width - 1] + "…"


def short_uuid(uuid: str) -> str:
    """The start of a UUID that is enough to find it again by."""
    head, underscore, rest = clean(uuid).rpartition("_")
    return f"{head}{underscore}{rest[:8]}…" if len(rest) > 8 else clean(uuid)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> str:
    """Rows under their heads, aligned; the columns in `right` to the right."""
    lines = [list(heads), *([shorten(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    to_right = frozenset(right)
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in to_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def fields(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values, one a line."""
    rows = list(pairs)
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name.ljust(width)}  {clean(value)}".rstrip() for name, value in rows)


def count(number: int) -> str:
    return f"{number:,}"


def many(number: int, one: str, several: str = "") -> str:
    """`1 task`, `1,240 tasks`."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def length(seconds: float) -> str:
    """A length of time as people say it: `4 ms`, `0.4 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if not math.isfinite(seconds):
        return NONE
    seconds = max(0.0, seconds)
    if seconds < 0.1:
        return f"{max(1, round(seconds * 1000))} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller, part in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit}" + (f" {rest} {part}" if rest else "")
    return f"{whole} s"


def size(number: float) -> str:
    """Bytes as people say them."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if number < 1024:
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TB"


def moment(value: dt.datetime | None, now: dt.datetime) -> str:
    """A moment in local time, and how long ago it was or when it will be."""
    if value is None or value.year <= 1:
        return NONE
    away = (now - value).total_seconds()
    local = value.astimezone().isoformat(sep=" ", timespec="milliseconds")
    return f"{local}  ({length(away)} ago)" if away >= 0 else f"{local}  (in {length(-away)})"


def ago(value: dt.datetime | None, now: dt.datetime) -> str:
    """How long ago, for a cell."""
    return NONE if value is None or value.year <= 1 else length((now - value).total_seconds())


def at_home(path: str) -> str:
    """The path with the home folder as ~."""
    home = os.path.expanduser("~")
    if home not in ("", "/", "~") and (path == home or path.startswith(home + os.sep)):
        return "~" + path[len(home) :]
    return path


def value_text(value: Any) -> str:
    """A value on one line, as JSON if it has a JSON form."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    return clean(text)


def to_json(value: Any) -> str:
    """JSON in ASCII, so that it means the same on every terminal and in every file."""
    return json.dumps(_finite(value), default=_plain, indent=2)


def _finite(value: Any) -> Any:
    """The same without nan and infinities, which JSON does not have."""
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

"""Fields of a cron spec, written out as plain numbers: Go's grammar (robfig/cron) and extensions.

    minute hour day-of-month month day-of-week, or second minute hour …

    Go's     *  ?  lists  ranges  steps  names;  0 to 6: SUN to SAT;  `5/15`: from 5 on, by 15
    ours     six fields;  L, 15W (day of month);  MON#2, L5 (day of week);  H, H/15, H(0-29)

Written out, a spec means the same to every version of the library that searches the calendar.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Field:
    """Numbers that a place of a spec may hold. `hashed_high`: the greatest that `H` stands for."""

    name: str
    low: int
    high: int
    names: tuple[str, ...] = ()  # of low, low + 1, …
    hashed_high: int = -1


_MONTHS = ("JAN", "FEB", "MAR", "APR", "MAY", "JUN", "JUL", "AUG", "SEP", "OCT", "NOV", "DEC")
_DAYS = ("SUN", "MON", "TUE", "WED", "THU", "FRI", "SAT")

FIELDS = (
    Field("second", 0, 59),
    Field("minute", 0, 59),
    Field("hour", 0, 23),
    Field("day of month", 1, 31, hashed_high=28),  # a day that every month has
    Field("month", 1, 12, _MONTHS),
    Field("day of week", 0, 6, _DAYS),
)

DESCRIPTORS = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}

_NUMBER = re.compile(r"[0-9]{1,9}")
_HASHED = re.compile(r"H(?:\((\d{1,2})-(\d{1,2})\))?(?:/(\d{1,9}))?", re.IGNORECASE)
_SPECIAL_DAY = re.compile(r"(L|\d{1,2}W|W\d{1,2})", re.IGNORECASE)
_SPECIAL_WEEKDAY = re.compile(r"(?:(\w+)#([1-5])|L(\w+)|(\w+)L)", re.IGNORECASE)


class BadField(ValueError):
    """Part of a spec that cannot be read, and why."""


@dataclass(frozen=True, slots=True)
class Cron:
    """Spec that is written out.

    Attributes:
        fields: second, minute, … day of week: "*", or numbers with commas, or L, 15W, 1#2, L5.
        has_seconds: whether it said them.
        follows_clock: its time of day has a `*`, `?` or step; else it is a fixed time of the day.
    """

    fields: tuple[str, ...]
    has_seconds: bool
    follows_clock: bool


def parse_cron(text: str, *, name: str) -> Cron:
    """Read five or six fields. `name`: what `H` is made of.

    Raises:
        BadField: they cannot be read.
    """
    words = text.split()
    if len(words) not in (5, 6):
        raise BadField(f"found {len(words)} fields (expected 5, or 6 with the seconds first)")
    has_seconds = len(words) == 6
    if not has_seconds:
        words = ["0", *words]
    found = [_field(word, field, name) for word, field in zip(words, FIELDS, strict=True)]
    _check_days(found[3], found[5])
    if found[3] != "*" and found[5] != "*" and "all" in (found[3], found[5]):
        found[3] = found[5] = "all"  # either may match, and one always does
    if found[5] != "*" and not _has_day(found[3], found[4]):
        # As `31 2 MON`: the other field alone decides (croniter 6 finds nothing at all).
        found[3] = "*"
    follows = any(mark in word for word in words[:3] for mark in "*?/")
    return Cron(tuple("*" if one == "all" else one for one in found), has_seconds, follows)


def _has_day(day: str, month: str) -> bool:
    """Return whether one of these months has one of these days."""
    if not day[0].isdigit() or not day.replace(",", "").isdigit():
        return True
    months = range(1, 13) if month in ("*", "all") else map(int, month.split(","))
    return min(map(int, day.split(","))) <= max(
        29 if one == 2 else 30 if one in (4, 6, 9, 11) else 31 for one in months
    )


def _check_days(day: str, weekday: str) -> None:
    for special, other in ((day, weekday), (weekday, day)):
        if special[0].isalnum() and any(mark in special for mark in "LW#") and other != "*":
            raise BadField(
                f"{special!r} works with '*' in the other field of days only (found {other!r})"
            )


def _field(word: str, field: Field, name: str) -> str:
    """Return the numbers; "*" where Go leaves the day to the other field; "all" for all."""
    special = _specials(word, field)
    if special:
        return special
    numbers: set[int] = set()
    star = False
    for part in word.split(","):
        if not part:
            continue  # Go passes over it
        if part[0] in "hH" and (match := _HASHED.fullmatch(part)):
            numbers |= _hashed(match, part, field, name)
            continue
        low, high, step, is_star = _range(part, field)
        star = star or is_star
        numbers |= set(range(low, high + 1, step))
    if not numbers:
        raise BadField(f"{field.name} {word!r}: holds no number, so it would never be due")
    if star:
        return "*"
    return (
        "all" if len(numbers) == field.high - field.low + 1 else ",".join(map(str, sorted(numbers)))
    )


def _range(part: str, field: Field) -> tuple[int, int, int, bool]:
    """Return first, last, step, and whether it is a plain star."""
    ends, *steps = part.split("/")
    if len(steps) > 1:
        raise BadField(f"{field.name} {part!r}: found two slashes")
    bounds = ends.split("-")
    if len(bounds) > 2:
        raise BadField(f"{field.name} {part!r}: found two hyphens")
    star = bounds[0] in ("*", "?")
    if star and len(bounds) > 1:
        raise BadField(f"{field.name} {part!r}: a range ends with a number, and begins with one")
    low = field.low if star else _number(bounds[0], part, field)
    high = field.high if star else _number(bounds[-1], part, field)
    step = 1
    if steps:
        if not _NUMBER.fullmatch(steps[0]) or int(steps[0]) == 0:
            raise BadField(
                f"{field.name} {part!r}: found step {steps[0]!r} (expected a number from 1)"
            )
        step = int(steps[0])
        if len(bounds) == 1:
            high = field.high
    if low < field.low or high > field.high:
        raise _out_of_range(field, part)
    if low > high:
        raise BadField(f"{field.name} {part!r}: begins behind its end (write two ranges)")
    return low, high, step, star and step == 1


def _out_of_range(field: Field, part: str) -> BadField:
    return BadField(f"{field.name} {part!r}: out of range (expected {field.low} to {field.high})")


def _number(text: str, part: str, field: Field) -> int:
    if text.upper() in field.names:
        return field.low + field.names.index(text.upper())
    if not _NUMBER.fullmatch(text):
        names = f", or {field.names[0]} to {field.names[-1]}" if field.names else ""
        raise BadField(
            f"{field.name} {part!r}: found {text!r} (expected {field.low} to {field.high}{names})"
        )
    return int(text)


def _hashed(match: re.Match[str], part: str, field: Field, name: str) -> set[int]:
    low, high, step = match.groups()
    first = int(low) if low else field.low
    last = int(high) if high else field.hashed_high if field.hashed_high > 0 else field.high
    if not field.low <= first <= last <= field.high:
        raise _out_of_range(field, part)
    every = int(step) if step else 0
    if step and not 0 < every <= last - first + 1:
        raise BadField(
            f"{field.name} {part!r}: found step {step} (expected 1 to {last - first + 1})"
        )
    seed = zlib.crc32(f"{name}/{field.name}".encode("utf-8", "backslashreplace"))
    start = first + seed % (every or last - first + 1)
    return set(range(start, last + 1, every)) if every else {start}


def _specials(word: str, field: Field) -> str:
    """Return L, W and # as the calendar library takes them, or ""."""
    if field.name == "day of month" and _SPECIAL_DAY.fullmatch(word):
        day = re.sub(r"[LWlw]", "", word)
        if day and not 1 <= int(day) <= 31:
            raise BadField(f"{field.name} {word!r}: out of range (expected 1W to 31W)")
        return f"{int(day)}W" if day else "L"
    if field.name != "day of week":
        return ""
    parts = [_SPECIAL_WEEKDAY.fullmatch(part) for part in word.split(",")]
    found = [_special_weekday(match, field) for match in parts if match]
    if found and len(found) != len(parts):
        raise BadField(
            f"{field.name} {word!r}: '#' and 'L' cannot stand in one list with plain days"
        )
    return ",".join(found)


def _special_weekday(match: re.Match[str], field: Field) -> str:
    nth_of, nth, last, last_of = match.groups()
    number, _, _, _ = _range(nth_of or last or last_of, field)
    return f"{number}#{nth}" if nth else f"L{number}"


_UNITS = {
    "ns": 1,
    "us": 10**3,
    "µs": 10**3,
    "μs": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?([^0-9.]+)")


def parse_every(text: str) -> int:
    """Return the whole seconds of a Go duration such as `1h30m`; at least 1, as in Go.

    Raises:
        BadField: it is none.
    """
    rest, sign = (text[1:], -1 if text[0] == "-" else 1) if text[:1] in ("-", "+") else (text, 1)
    if rest == "0":
        return 1
    total, at = 0, 0
    while at < len(rest):
        match = _PART.match(rest, at)
        whole, fraction, unit = match.groups() if match else ("", None, "")
        if match is None or not (whole or fraction) or unit not in _UNITS:
            raise BadField(f"found {text!r} (expected a length such as 1h30m, 90s or 500ms)")
        digits = (fraction or "0")[:18]
        total += int(whole or "0") * _UNITS[unit] + int(digits) * _UNITS[unit] // 10 ** len(digits)
        at = match.end()
    if at == 0 or total > 2**63 - 1:
        raise BadField(f"found {text!r} (expected a length such as 1h30m, at most 2562047h)")
    return max(1, sign * total // 10**9)


def written(cron: Cron) -> str:
    """Return it as the calendar library takes it."""
    fields: Sequence[str] = cron.fields if cron.has_seconds else cron.fields[1:]
    return " ".join(fields)

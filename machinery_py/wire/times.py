"""Moments off the wire: RFC 3339, as Go reads it."""

from __future__ import annotations

import datetime as dt
import re

from machinery_py.errors import DecodeError

FIRST_MOMENT = dt.datetime.min.replace(tzinfo=dt.UTC)
LAST_MOMENT = dt.datetime.max.replace(tzinfo=dt.UTC)
_RFC3339 = re.compile(
    # Go 1.24 is laxer than the RFC: a one-digit hour, a comma, an offset of 24 h or 60 min.
    r"(\d{4})-(\d\d)-(\d\d)T(\d\d?):(\d\d):(\d\d)(?:[.,](\d+))?(?:Z|([+-])(\d\d):(\d\d))",
    re.ASCII,
)
_USUAL = re.compile(r"\d{4}-\d\d-\d\dT(?!24)\d\d:\d\d:\d\d(?:\.\d{1,6})?Z", re.ASCII)


def parse_time(text: str) -> dt.datetime:
    """Return the moment in UTC, cut to microseconds, or the nearest one in Python's range.

    Raises:
        DecodeError: Go would not read it.
    """
    if _USUAL.fullmatch(text):  # much quicker
        try:
            return dt.datetime.fromisoformat(text)
        except ValueError:
            pass
    match = _RFC3339.fullmatch(text)
    if match is None:
        raise DecodeError(f"{text[:100]!r} is no RFC 3339 time (2026-01-02T03:04:05Z)")
    year, month, day, hour, minute, second = map(int, match.group(1, 2, 3, 4, 5, 6))
    fraction, sign, hours, minutes = match.group(7, 8, 9, 10)
    try:
        # Python has no year 0; the year 4 has its leap day.
        moment = dt.datetime(year or 4, month, day, hour, minute, second, tzinfo=dt.UTC)
    except ValueError as error:
        raise DecodeError(f"{text[:100]!r} is no time: {error}") from None
    if fraction:
        moment = moment.replace(microsecond=int(fraction[:6].ljust(6, "0")))
    if sign:
        if int(hours) > 24 or int(minutes) > 60:
            raise DecodeError(f"{text[:100]!r} is no time: its offset is out of range")
        offset = dt.timedelta(hours=int(hours), minutes=int(minutes))
        try:
            moment -= offset if sign == "+" else -offset
        except OverflowError:
            return FIRST_MOMENT if sign == "+" else LAST_MOMENT
    return moment if year else FIRST_MOMENT

"""Times of a cron spec. croniter searches the calendar; zones and clock changes are ours.

croniter gets what `cron.py` has written out, and a calendar without zones. So these of its habits
do no harm: seconds at the end, times twice or shifted when clocks change, `1,1#2` without the 1,
`15W` beside a day of the week.

When clocks change, with `dst="once"`, a fixed time runs once a day: the first time if it comes
twice, right after the gap if it does not come. A time with `*`, `?` or a step follows the clock on
the wall: twice, or not at all. With `dst="go"` every time follows the clock on the wall, as in Go.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any, Literal

from machinery_py.errors import ScheduleError
from machinery_py.schedules.cron import DESCRIPTORS, BadField, parse_cron, parse_every, written

Dst = Literal["once", "go"]

SECOND = dt.timedelta(seconds=1)
FAR = dt.datetime(9990, 1, 1, tzinfo=dt.timezone.utc)  # nothing is looked for behind it
_START = dt.datetime(2000, 1, 1)  # a spec that finds nothing behind this is never due
_UTC = dt.timezone.utc


class Schedule:
    """Spec that can be due. Belongs to one thread at a time.

    Attributes:
        spec: as it was given.
        zone: the name of the zone that its times are of.
    """

    def __init__(self, spec: str, *, tz: str = "", name: str = "", dst: Dst = "once") -> None:
        """Read a spec.

        Args:
            tz: for a spec that has no `TZ=` or `CRON_TZ=` in front; UTC if that is empty, too.
            name: what `H` in the spec is made of.

        Raises:
            ScheduleError: it cannot be read, or can never be due.
        """
        if not isinstance(spec, str):
            raise ScheduleError(
                f"schedule {spec!r}: found a {type(spec).__name__} (expected a text as "
                "'0 6 * * MON-FRI', '@daily' or '@every 30s')"
            )
        self.spec = spec
        if dst not in ("once", "go"):
            raise ScheduleError(f"schedule {spec!r}: dst={dst!r} (expected 'once' or 'go')")
        try:
            rest, zone = _zone_of(spec, tz)
            self.zone: str = zone
            self._tz = _open_zone(self.zone)
            self.every: int = 0
            self._times: _Times | None = None
            if rest.startswith("@every "):
                self.every = parse_every(rest.removeprefix("@every "))
            else:
                self._times = _Times(_fields_of(rest), name)
        except BadField as error:
            raise ScheduleError(f"schedule {spec!r}: {error}") from None
        self._asked: dt.datetime | None = None  # the last question, which is often the next, too
        self._answer: dt.datetime | None = None
        self._follows = self._times is not None and (dst == "go" or self._times.cron.follows_clock)

    def next(self, after: dt.datetime) -> dt.datetime | None:
        """Return the first time after that moment, in UTC; None if there is none before FAR.

        Raises:
            ValueError: the moment is naive.
        """
        if after.tzinfo is None:
            raise ValueError(f"{after!r} is naive (give it a time zone)")
        after = after.astimezone(_UTC)
        if after >= FAR:
            return None
        if self._times is None:
            try:
                return (after + dt.timedelta(seconds=self.every)).replace(microsecond=0)
            except OverflowError:
                return None
        if after != self._asked:
            find = self._on_wall if self._follows else self._once
            self._answer = find(self._times, after)
            self._asked = after
        return self._answer

    def upcoming(self, after: dt.datetime, count: int) -> list[dt.datetime]:
        """Return the next times, at most so many."""
        found: list[dt.datetime] = []
        while len(found) < count:
            moment = self.next(found[-1] if found else after)
            if moment is None:
                break
            found.append(moment)
        return found

    def between(self, after: dt.datetime, until: dt.datetime) -> Iterator[dt.datetime]:
        """Yield the times after `after` up to and with `until`."""
        moment = self.next(after)
        while moment is not None and moment <= until:
            yield moment
            moment = self.next(moment)

    def _local(self, moment: dt.datetime) -> dt.datetime:
        """Return the time on the wall, in whole seconds. `fold` is kept."""
        return moment.astimezone(self._tz).replace(tzinfo=None, microsecond=0)

    def _moments(self, wall: dt.datetime) -> list[dt.datetime]:
        """Return the moments at which the wall shows this: one, two or none."""
        first, second = (
            wall.replace(tzinfo=self._tz, fold=fold).astimezone(_UTC) for fold in (0, 1)
        )
        if first == second:
            return [first]
        return [first, second] if first < second else []

    def _change_near(self, low: dt.datetime, high: dt.datetime) -> dt.datetime:
        """The first second of the other offset; low and high differ in theirs."""
        before = low.astimezone(self._tz).utcoffset()
        seconds = int((high - low).total_seconds())
        first, last = 0, seconds
        while last - first > 1:
            middle = (first + last) // 2
            if (low + middle * SECOND).astimezone(self._tz).utcoffset() == before:
                first = middle
            else:
                last = middle
        return low + last * SECOND

    def _behind_gap(self, wall: dt.datetime) -> dt.datetime:
        """Return the moment at which the clock jumps over this time."""
        # PEP 495: in a gap, fold=0 takes the offset before it and lies after the change, fold=1
        # lies before it.
        late, early = (wall.replace(tzinfo=self._tz, fold=fold).astimezone(_UTC) for fold in (0, 1))
        return self._change_near(early, late)

    def _once(self, times: _Times, after: dt.datetime) -> dt.datetime | None:
        """Return the next moment, if each time has one, in the order of the times."""
        wall = self._local(after)
        if wall.fold:
            first, second = self._moments(wall)
            wall = self._last_of_overlap(first, second)
        found = times.behind(wall)
        while found is not None:
            moments = self._moments(found)
            moment = moments[0] if moments else self._behind_gap(found)
            if moment > after:
                return moment
            found = times.behind(found)
        return None

    def _last_of_overlap(self, first: dt.datetime, second: dt.datetime) -> dt.datetime:
        """Return the last second that the wall shows twice; at both moments it shows the same."""
        return self._local(self._change_near(first, second) - SECOND).replace(fold=0)

    def _on_wall(self, times: _Times, after: dt.datetime) -> dt.datetime | None:
        """Return the next moment at which the wall shows one of the times."""
        wall = self._local(after)
        moments = self._moments(wall)
        found = times.behind(wall.replace(fold=0))
        if len(moments) == 2 and not wall.fold:
            change = self._change_near(*moments)
            if found is None or self._moments(found)[:1] == [] or self._moments(found)[0] >= change:
                # The first round is over: the wall goes back, and shows some of it once more.
                found = times.behind(self._local(change).replace(fold=0) - SECOND)
        while found is not None:
            moment = next((one for one in self._moments(found) if one > after), None)
            if moment is not None:
                return moment
            if not self._moments(found):
                found = self._local(self._behind_gap(found)).replace(fold=0) - SECOND
            found = times.behind(found)
        return None


class _Times:
    """Times of a cron spec on a calendar without zones."""

    def __init__(self, fields: str, name: str) -> None:
        self.cron = parse_cron(fields, name=name)
        self._search: Any = None
        if self.behind(_START) is None:
            raise BadField("is never due (there is no such day)")

    def behind(self, wall: dt.datetime) -> dt.datetime | None:
        """Return the first time after this one."""
        # 30 ms that only those with schedules pay.
        from croniter import CroniterBadDateError, croniter

        if self._search is None:
            self._search = croniter(
                written(self.cron), wall, second_at_beginning=self.cron.has_seconds
            )
        try:
            found: dt.datetime = self._search.get_next(dt.datetime, start_time=wall.replace(fold=0))
        except (CroniterBadDateError, OverflowError):
            return None
        return found


def _fields_of(rest: str) -> str:
    if not rest.startswith("@"):
        return rest
    fields = DESCRIPTORS.get(rest)
    if fields is None:
        raise BadField(f"unknown descriptor (known: {', '.join(DESCRIPTORS)}, '@every 1h30m')")
    return fields


def _zone_of(spec: str, tz: str) -> tuple[str, str]:
    """Return the spec without its prefix, and the name of its zone."""
    for prefix in ("CRON_TZ=", "TZ="):
        if spec.startswith(prefix):
            name, space, rest = spec.removeprefix(prefix).partition(" ")
            if not space:
                raise BadField(f"nothing stands behind {spec!r} (expected a space and a spec)")
            return rest.strip(), name or "UTC"
    return spec, tz or "UTC"


def _open_zone(name: str) -> dt.tzinfo:
    if name == "UTC":
        return _UTC
    if name == "Local":
        name = _local_name()
    from zoneinfo import ZoneInfo  # a few ms that only those with zones pay

    try:
        return ZoneInfo(name)
    except (ValueError, OSError, LookupError):
        raise BadField(
            f"unknown time zone {name!r} "
            "(as in Europe/Berlin; without system tables: pip install tzdata)"
        ) from None


def _local_name() -> str:
    """Return the zone of this machine: TZ, else the target of /etc/localtime."""
    import os

    name = os.environ.get("TZ", "").lstrip(":")
    if name:
        return name
    path = os.path.realpath("/etc/localtime")
    _, found, name = path.partition("/zoneinfo/")
    return name if found else "UTC"

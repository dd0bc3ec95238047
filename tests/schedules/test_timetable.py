"""Schedules against Go's recordings, our additions, and clock changes against brute force."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

import pytest

from machinery_py.errors import ScheduleError
from machinery_py.schedules.timetable import Schedule

UTC = dt.timezone.utc
GOLDEN = Path(__file__).parents[1] / "wire" / "golden"
CHANGES = int(
    os.environ.get("SCHEDULE_CHANGES", "200")
)  # clock changes that the brute-force tests look at; make chaos: all


def lines(name: str, **wanted: object) -> list[dict[str, Any]]:
    with (GOLDEN / name).open(encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    return [line for line in found if all(line.get(key) == value for key, value in wanted.items())]


def at(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text).replace("Z", "+00:00"))


TIMED = [line for line in lines("cron_next.jsonl") if "next" in line]
NEVER = ["0 0 31 4,6,9,11 *", "0 0 30 2 *", ", * * * *"]
OURS = {"* * * * * *", "* * L * *", "* * 15W * *", "0 0 H * *"}  # Go refuses them


@pytest.mark.parametrize("line", TIMED, ids=lambda line: f"{line['spec']!r} {line['after']}")
def test_times_are_gos(line: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", line["zone"])
    if line["spec"] in NEVER:
        with pytest.raises(ScheduleError, match="never due"):
            Schedule(line["spec"])
        return
    schedule = Schedule(line["spec"], tz="Local", dst="go")
    if line["next"] is None:
        # Go gives up after five years, and would never fire again; we look on.
        assert schedule.next(at(line["after"])) == dt.datetime(2104, 2, 29, tzinfo=UTC)
        return

    found = schedule.upcoming(at(line["after"]), 1 + len(line["then"]))

    assert found == [at(text) for text in [line["next"], *line["then"]]]
    assert all(moment.tzinfo is UTC for moment in found)


@pytest.mark.parametrize(
    "spec", sorted({line["spec"] for line in lines("cron_next.jsonl") if "error" in line} - OURS)
)
def test_payload_that_go_refuses_is_refused(spec: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(f"schedule {spec!r}: ")):
        Schedule(spec)


@pytest.mark.parametrize(
    "spec", [line["spec"] for line in lines("poison.jsonl", kind="cron_spec")] + NEVER
)
def test_cron_spec_that_kills_go_or_is_never_due_is_refused(spec: str) -> None:
    with pytest.raises(ScheduleError):
        Schedule(spec)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("0 24 * * *", "hour '24': out of range (expected 0 to 23)"),
        ("x * * * *", "minute 'x': found 'x' (expected 0 to 59)"),
        ("* * * * MONDAY", "found 'MONDAY' (expected 0 to 6, or SUN to SAT)"),
        ("@every 1d", "found '1d' (expected a length such as 1h30m, 90s or 500ms)"),
        ("@reboot", "unknown descriptor (known: @yearly,"),
        ("TZ=Mars/Phobos 0 6 * * *", "unknown time zone 'Mars/Phobos'"),
        ("0 6 * *", "found 4 fields (expected 5, or 6 with the seconds first)"),
        ("* * * * * * 2027", "found 7 fields"),
        ("0 0 * * 1,1#2", "'#' and 'L' cannot stand in one list with plain days"),
        ("0 0 15W * 1", "works with '*' in the other field of days only"),
        ("0 0 1,15W * *", "found '15W'"),
        ("H/99 * * * *", "found step 99"),
    ],
)
def test_refusals_name_the_found_and_the_expected_value(spec: str, text: str) -> None:
    with pytest.raises(ScheduleError, match=re.escape(text)):
        Schedule(spec)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("10,40 4 3 * * *", ["2026-01-02T03:04:10", "2026-01-02T03:04:40", "2026-01-03T03:04:10"]),
        ("*/20 * * * * *", ["2026-01-02T03:04:20", "2026-01-02T03:04:40", "2026-01-02T03:05:00"]),
        ("0 0 L * *", ["2026-01-31T00:00:00", "2026-02-28T00:00:00", "2026-03-31T00:00:00"]),
        ("0 0 15W * *", ["2026-01-15T00:00:00", "2026-02-16T00:00:00", "2026-03-16T00:00:00"]),
        ("0 0 * * MON#2", ["2026-01-12T00:00:00", "2026-02-09T00:00:00", "2026-03-09T00:00:00"]),
        (
            "0 0 * * 1#2,WED#1",
            ["2026-01-07T00:00:00", "2026-01-12T00:00:00", "2026-02-04T00:00:00"],
        ),
        ("0 0 * * L5", ["2026-01-30T00:00:00", "2026-02-27T00:00:00", "2026-03-27T00:00:00"]),
        ("0 0 * * FRIL", ["2026-01-30T00:00:00", "2026-02-27T00:00:00", "2026-03-27T00:00:00"]),
        ("0 0 1-31 * MON", ["2026-01-03T00:00:00", "2026-01-04T00:00:00", "2026-01-05T00:00:00"]),
        ("0 0 29 2 *", ["2028-02-29T00:00:00", "2032-02-29T00:00:00", "2036-02-29T00:00:00"]),
        (
            "TZ=Asia/Tokyo 0 6 * * *",
            ["2026-01-02T21:00:00", "2026-01-03T21:00:00", "2026-01-04T21:00:00"],
        ),
    ],
)
def test_cron_extensions_beyond_go_give_these_times(spec: str, expected: list[str]) -> None:
    found = Schedule(spec).upcoming(at("2026-01-02T03:04:05+00:00"), 3)
    assert found == [at(f"{text}+00:00") for text in expected]


def test_a_hash_stands_for_a_time_of_the_schedules_own() -> None:
    start = at("2026-01-02T03:04:05+00:00")
    times = {Schedule("H H * * *", name=f"schedule {number}").next(start) for number in range(50)}

    assert len(times) > 40
    assert Schedule("H H * * *", name="a").next(start) == Schedule("H H * * *", name="a").next(
        start
    )
    quarters = Schedule("H/15 * * * *", name="a").upcoming(start, 5)
    assert [later - earlier for earlier, later in itertools.pairwise(quarters)] == [
        dt.timedelta(minutes=15)
    ] * 4
    assert all(
        Schedule("H(10-12) * * * *", name=str(n)).next(start).minute in (10, 11, 12)
        for n in range(20)
    )  # type: ignore[union-attr]
    # It stays where it is: another version must not move the times of running schedules.
    assert Schedule("H H H * *", name="digest").next(start) == at(DIGEST)


DIGEST = "2026-01-17T00:29:00+00:00"


def test_the_zone_is_utc_unless_one_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    start = at("2026-01-02T03:04:05+00:00")

    assert Schedule("0 6 * * *").next(start) == at("2026-01-02T06:00:00+00:00")
    assert Schedule("0 6 * * *", tz="Europe/Berlin").next(start) == at("2026-01-02T05:00:00+00:00")
    assert Schedule("TZ=America/New_York 0 6 * * *", tz="Europe/Berlin").next(start) == at(
        "2026-01-02T11:00:00+00:00"
    )
    assert Schedule("0 6 * * *", tz="Local").next(start) == at("2026-01-02T21:00:00+00:00")
    with pytest.raises(ValueError, match="naive"):
        Schedule("* * * * *").next(dt.datetime(2026, 1, 1))


@pytest.mark.parametrize(
    ("spec", "zone", "start", "expected"),
    [
        # A fixed time: right behind the gap, and the first of two.
        ("30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00Z", ["03-29T01:00", "03-30T00:30"]),
        ("30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z", ["10-25T00:30", "10-26T01:30"]),
        (
            "0,30 2 * * *",
            "Europe/Berlin",
            "2026-03-28T12:00:00Z",
            ["03-29T01:00", "03-30T00:00", "03-30T00:30"],
        ),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T00:45:00Z", ["10-26T01:30"]),
        ("30 2 * * *", "Europe/Berlin", "2026-10-25T01:15:00Z", ["10-26T01:30"]),
        # A day that begins behind its midnight, and half an hour.
        ("0 0 * * *", "America/Sao_Paulo", "2018-11-03T09:00:00Z", ["11-04T03:00", "11-05T02:00"]),
        (
            "45 1 * * *",
            "Australia/Lord_Howe",
            "2026-04-04T00:00:00Z",
            ["04-04T14:45", "04-05T15:15"],
        ),
        # A day that there was not: its run comes when the clock jumps over it.
        (
            "30 2 * * *",
            "Pacific/Apia",
            "2011-12-29T00:00:00Z",
            ["12-29T12:30", "12-30T10:00", "12-30T12:30"],
        ),
        # `*` and steps follow the wall: none in the gap, twice in the overlap.
        ("*/30 2 * * *", "Europe/Berlin", "2026-03-28T12:00:00Z", ["03-30T00:00", "03-30T00:30"]),
        (
            "*/30 2 * * *",
            "Europe/Berlin",
            "2026-10-24T12:00:00Z",
            ["10-25T00:00", "10-25T00:30", "10-25T01:00", "10-25T01:30"],
        ),
        (
            "0 */2 * * *",
            "Europe/Berlin",
            "2026-10-24T23:00:00Z",
            ["10-25T00:00", "10-25T01:00", "10-25T03:00"],
        ),
        ("@every 45m", "Europe/Berlin", "2026-03-29T00:30:00Z", ["03-29T01:15", "03-29T02:00"]),
    ],
)
def test_clock_changes(spec: str, zone: str, start: str, expected: list[str]) -> None:
    found = Schedule(spec, tz=zone).upcoming(at(start), len(expected))
    assert [moment.strftime("%m-%dT%H:%M") for moment in found] == expected


# Against brute force: every minute around a change of a clock is looked at.


def changes_of(zone: str, first: int = 1970, last: int = 2037) -> Iterator[dt.datetime]:
    """The moments at which the offset of the zone changes, to the second."""
    info = ZoneInfo(zone)
    step = dt.timedelta(hours=12)
    moment = dt.datetime(first, 1, 1, tzinfo=UTC)
    offset = moment.astimezone(info).utcoffset()
    while moment.year <= last:
        later = moment + step
        now = later.astimezone(info).utcoffset()
        if now != offset:
            low, high = moment, later
            while high - low > dt.timedelta(seconds=1):
                middle = low + dt.timedelta(seconds=int((high - low).total_seconds()) // 2)
                low, high = (
                    (middle, high)
                    if middle.astimezone(info).utcoffset() == offset
                    else (low, middle)
                )
            yield high
            offset = now
        moment = later


def sample() -> list[tuple[str, dt.datetime]]:
    rng = random.Random(6)
    zones = sorted(available_timezones() - {"localtime", "posixrules"})
    if CHANGES >= 100_000:
        # Many names are one zone.
        histories = {tuple(changes_of(zone)): zone for zone in zones}
        return [(zone, change) for history, zone in histories.items() for change in history]
    always = [
        ("Pacific/Apia", 2011),
        ("Australia/Lord_Howe", 2026),
        ("America/Sao_Paulo", 2018),
        ("Africa/Monrovia", 1972),
        ("Antarctica/Troll", 2026),
        ("Pacific/Kwajalein", 1993),
        ("Europe/Dublin", 2026),
        ("Africa/Casablanca", 2026),
    ]
    found = [(zone, change) for zone, year in always for change in changes_of(zone, year, year)]
    while len(found) < CHANGES:
        zone, year = rng.choice(zones), rng.randint(1970, 2036)
        found += [(zone, change) for change in changes_of(zone, year, year)][:2]
    return found


def minutes_of(field: str, high: int) -> set[int]:
    found: set[int] = set()
    for part in field.split(","):
        ends, _, step = part.partition("/")
        low, _, to = ends.partition("-")
        first, last = (0, high) if low == "*" else (int(low), int(to or low))
        found |= set(range(first, last + 1, int(step or 1)))
    return found


def brute_force(
    spec: str, zone: str, start: dt.datetime, end: dt.datetime, *, fixed: bool
) -> list[dt.datetime]:
    """Look at every minute.

    A fixed time comes once for each minute of the calendar, when the wall first shows or passes it.
    """
    minute_field, hour_field, *_ = spec.split()
    minutes, hours = minutes_of(minute_field, 59), minutes_of(hour_field, 23)
    info = ZoneInfo(zone)
    minute = dt.timedelta(minutes=1)
    found: list[dt.datetime] = []
    moment = start
    seen = moment.astimezone(info).replace(
        tzinfo=None
    )  # up to here the calendar has been lived through
    while moment < end:
        moment += minute
        wall = moment.astimezone(info).replace(tzinfo=None, fold=0)
        if not fixed:
            if wall.hour in hours and wall.minute in minutes:
                found.append(moment)
            continue
        due = False
        while seen < wall:
            seen += minute
            due = due or (seen.hour in hours and seen.minute in minutes)
        if due:
            found.append(moment)
    return found


SPECS = (
    "30 2 * * *",
    "0 0 * * *",
    "0,30 0-3 * * *",
    "15 1,2,3,12 * * *",
    "59 23 * * *",
    "*/30 * * * *",
    "*/20 2 * * *",
    "0 */2 * * *",
    "* 1 * * *",
    "5 * * * *",
)


@pytest.mark.slow
def test_every_clock_change_against_brute_force() -> None:
    """Around changes of all zones: fixed times come once, the others as the wall shows them.

    `go` always follows the wall.
    """
    wrong: list[str] = []
    rng = random.Random(7)
    looked = 0
    for zone, change in sample():
        # Zones whose offsets have seconds are checked where minutes of the wall are minutes of UTC.
        around = [change - dt.timedelta(hours=26), change + dt.timedelta(hours=26)]
        offsets = [
            moment.astimezone(ZoneInfo(zone)).utcoffset() or dt.timedelta() for moment in around
        ]
        if change.second or any(offset.seconds % 60 for offset in offsets):
            continue
        looked += 1
        for spec in rng.sample(SPECS, 2):
            for dst in ("once", "go"):
                fixed = dst == "once" and not any(
                    mark in "".join(spec.split()[:2]) for mark in "*/"
                )
                expected = brute_force(spec, zone, *around, fixed=fixed)
                schedule = Schedule(spec, tz=zone, dst=dst)  # type: ignore[arg-type]
                found = list(schedule.between(*around))
                if found != expected:
                    wrong.append(f"{spec} {zone} {change} {dst}: {found} instead of {expected}")
                # Wherever one starts, the next time is the same.
                inside = around[0] + dt.timedelta(seconds=rng.randrange(26 * 7200 - 7200))
                following = next((moment for moment in expected if moment > inside), None)
                if following is not None and schedule.next(inside) != following:
                    wrong.append(
                        f"{spec} {zone} {dst} behind {inside}: "
                        f"{schedule.next(inside)} instead of {following}"
                    )

    assert looked >= min(200, CHANGES // 2)
    assert not wrong, f"{len(wrong)} of {looked}\n" + "\n".join(wrong[:10])

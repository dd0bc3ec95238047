"""Schedules as they are stored: what is sent, by which rule, and how far it is. Pure.

What happens to them, step by step: docs/explanation/periodic.md.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from machinery_py.errors import DecodeError
from machinery_py.schedules.timetable import Dst, Schedule
from machinery_py.tasks.linking import PlannedStep
from machinery_py.tasks.states import State, TaskState
from machinery_py.values.malformed import MALFORMED

CatchUp = Literal["skip", "latest", "all"]
Overlap = Literal["allow", "skip", "queue"]

# Seconds that a tick is on time, at least and at most; between them until the next tick.
ON_TIME = 10.0, 60.0
# Seconds back that missed ticks are looked for.
WINDOWS: dict[CatchUp, float] = {"skip": 0.0, "latest": 86400.0, "all": 3600.0}
LONGEST_RUN = 86400.0  # seconds after which a run that has not ended holds the next one up no more
MOST_WAITING = 100  # ticks that wait for the one before them; more are left out
AHEAD = 60.0  # seconds that the last tick may lie ahead of the clock, however short the interval
COUNTED = 1000  # missed ticks that are counted at once


class Definition(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Definition of a schedule.

    Attributes:
        work: what is sent, from `wire.steps.pack_step`.
        catch_up, window, overlap: see PeriodicOptions.
    """

    spec: str
    work: msgspec.Raw
    tz: str = ""
    dst: Dst = "once"
    catch_up: CatchUp = "skip"
    window: float = 0.0
    overlap: Overlap = "allow"

    @property
    def digest(self) -> str:
        import hashlib  # 5 ms that only those pay who come here

        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]

    def schedule(self, name: str) -> Schedule:
        return Schedule(self.spec, tz=self.tz, name=name, dst=self.dst)


class ScheduleEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Record of a schedule in the store.

    Attributes:
        id: random; one that is made anew under the same name is another.
        declared: digest of the definition that code brought; "" for one that was added at run time.
        owner: the application whose code brought it; "" if nobody has noted it.
        last: the last tick that was decided on, or the moment from which it counts.
        ran: the last tick that was sent.
        run: its tasks, step by step; empty if it does not matter whether they are over.
        claimed: since when a scheduler tries to get Go's lock for the next tick.
        waiting: ticks to be sent when the run before them is over.
        sent, missed, held: ticks that were sent, missed, or left out because of `overlap`.
    """

    name: str
    id: str
    definition: Definition
    last: dt.datetime
    declared: str = ""
    owner: str = ""
    paused: bool = False
    ran: dt.datetime | None = None
    run: tuple[tuple[str, ...], ...] = ()
    claimed: dt.datetime | None = None
    waiting: tuple[dt.datetime, ...] = ()
    sent: int = 0
    missed: int = 0
    held: int = 0

    def replace(self, **changes: Any) -> ScheduleEntry:
        return msgspec.structs.replace(self, **changes)


_decode_entry = msgspec.json.Decoder(ScheduleEntry).decode


def encode_entry(entry: ScheduleEntry) -> bytes:
    return msgspec.json.encode(entry)


def decode_entry(body: bytes) -> ScheduleEntry:
    """Read what `encode_entry` wrote.

    Raises:
        DecodeError: it is something else, or a newer version's.
    """
    try:
        return _decode_entry(body)
    except MALFORMED as error:
        raise DecodeError(f"this is no schedule of this version: {error}") from error


class Due(msgspec.Struct, frozen=True, kw_only=True):
    """Ticks of a schedule that are due now.

    Attributes:
        tick: to be sent; None: only that `missed` ticks were missed is to be noted.
        last: the tick up to which all is decided then.
    """

    tick: dt.datetime | None
    last: dt.datetime
    missed: int = 0


def due(entry: ScheduleEntry, schedule: Schedule, now: dt.datetime) -> Due | None:
    """Return what is to be done next, or None. `now`, by the store's clock, may have gone back."""
    first = schedule.next(entry.last)
    if first is None or first > now:
        return None
    if (now - first).total_seconds() <= ON_TIME[0]:
        return Due(tick=first, last=first)  # as nearly always
    wanted = _first_wanted(entry, schedule, now)
    if wanted is None:
        last = _latest(schedule, entry.last, now) or first
        return Due(tick=None, last=last, missed=_count(schedule, entry.last, last) + 1)
    return Due(tick=wanted, last=wanted, missed=_count(schedule, entry.last, wanted))


def is_ahead(entry: ScheduleEntry, schedule: Schedule, now: dt.datetime) -> bool:
    """Return whether `last` is wrong: more than one tick, and AHEAD, behind `now`.

    It was written while the store's clock was ahead. Nothing would be sent until that moment.
    """
    if (entry.last - now).total_seconds() <= AHEAD:
        return False
    first = schedule.next(now)
    second = schedule.next(first) if first is not None else None
    return second is not None and second <= entry.last


def _first_wanted(entry: ScheduleEntry, schedule: Schedule, now: dt.datetime) -> dt.datetime | None:
    """Return the first tick to be sent: the first on time, if none is to be caught up."""
    definition = entry.definition
    if definition.catch_up == "all":
        start = _grid(
            schedule, entry.last, now - dt.timedelta(seconds=definition.window or WINDOWS["all"])
        )
        return next(iter(schedule.between(start, now)), None)
    for tick in schedule.between(
        _grid(schedule, entry.last, now - dt.timedelta(seconds=ON_TIME[1])), now
    ):
        if (now - tick).total_seconds() <= _on_time(schedule, tick):
            return tick
    if definition.catch_up == "skip":
        return None
    latest = _latest(schedule, entry.last, now)
    window = definition.window or WINDOWS["latest"]
    return latest if latest is not None and (now - latest).total_seconds() <= window else None


def _on_time(schedule: Schedule, tick: dt.datetime) -> float:
    """Return the seconds that a tick may be late and is not missed."""
    following = schedule.next(tick)
    least, most = ON_TIME
    return most if following is None else max(least, min(most, (following - tick).total_seconds()))


def _latest(schedule: Schedule, after: dt.datetime, now: dt.datetime) -> dt.datetime | None:
    """Return the last tick after `after` up to `now`."""
    back = 60.0
    while True:
        start = _grid(schedule, after, now - dt.timedelta(seconds=back))
        found = list(schedule.between(start, now))
        if found or start <= after:
            return found[-1] if found else None
        back *= 60.0


def _grid(schedule: Schedule, last: dt.datetime, wanted: dt.datetime) -> dt.datetime:
    """Return the last moment before `wanted` from which the same ticks follow as from `last`."""
    if wanted <= last:
        return last
    if not schedule.every:
        return wanted
    return last.replace(microsecond=0) + (wanted - last) // dt.timedelta(
        seconds=schedule.every
    ) * dt.timedelta(seconds=schedule.every)


def _count(schedule: Schedule, after: dt.datetime, before: dt.datetime) -> int:
    """Return the number of ticks between the two, at most COUNTED."""
    if schedule.every:
        return max(
            0, (before - after.replace(microsecond=0)) // dt.timedelta(seconds=schedule.every) - 1
        )
    count = 0
    for tick in schedule.between(after, before):
        if tick >= before or count >= COUNTED:
            break
        count += 1
    return count


def run_of(steps: Sequence[PlannedStep]) -> tuple[tuple[str, ...], ...]:
    """Return the tasks of a workflow, step by step, for `is_over`."""
    return tuple((*step.leading, *step.uuids) for step in steps)


def is_over(entry: ScheduleEntry, states: dict[str, TaskState], now: dt.datetime) -> bool:
    """Return whether the last run has ended; `states` are those of the tasks in `entry.run`."""
    if entry.ran is None or (now - entry.ran).total_seconds() > LONGEST_RUN or not states:
        return True
    if not all(state.is_finished for state in states.values()):
        return False
    failed = any(state.state is State.FAILURE for state in states.values())
    # All that is known is over, but the last step is not there yet: its message is just being sent.
    return failed or all(uuid in states for uuid in entry.run[-1])

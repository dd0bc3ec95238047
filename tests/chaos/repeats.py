"""Reasons for a second run: a fault took the task from its process, or made two messages of it.

Where one store has messages and states, a process loses what it holds only by dying, standing still
or being cut off for a lease. PostgreSQL does not wait for the disk with a claim, so a killed server
may have forgotten it (History.forgets). Over AMQP (History.doubles) there is more:

    lost        a delivery ends with its connection: a reset or a killed server takes it as well
    doubled     what was published and not confirmed is published again, with its UUID: of two such
                messages, the result backend lets one finish

A message can be doubled where it is published, and nowhere else:

    by the loader           from its first attempt until it was told         the server is killed
    by a task               the same                                         so is its worker, or
                                                                             its connection
    as what follows a task  from the start of a run until that is settled    the same
    as a chord's callback   from the end of the last member on, by anybody   any fault
    held in another way     since it came back before; both messages say so  any fault
                            (brokers/rabbitmq/holding.py)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.history import Happened, History, Run

EXPLAINS = frozenset({"kill", "freeze", "hole"})  # after which a task may run again
ZOMBIES = frozenset({"freeze", "hole"})  # whose victim comes back, and may still run what it held
BREAKS = frozenset({"server", "reset", *EXPLAINS})  # end connections
ZOMBIE = 5.0  # seconds that a zombie may go on
NOTICED = (
    0.5  # seconds until a process has noticed that its connection is broken, on a busy machine
)
EVERYBODY = ""  # the worker of a fault that hits all


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When somebody published. `by` None: any of the workers may have."""

    start: float
    end: float
    by: str | None


class Repeats:
    """What is known of the faults, asked about pairs of executions of one run."""

    def __init__(self, history: History, runs: Mapping[str, Sequence[Run]]) -> None:
        self._history = history
        self._runs = runs
        self.faults: dict[str, list[Happened]] = defaultdict(list)
        for fault in history.faults:
            self.faults[fault.worker].append(fault)
        self._breaks = [fault for fault in history.faults if fault.kind in BREAKS]

    def is_explained(self, before: Run, after: Run) -> bool:
        """Whether both may have run without a defect of ours."""
        lost = (
            self.was_taken(before, after.start) or self.is_zombie(before) or self.is_zombie(after)
        )
        return lost or self.is_forgotten(before, after.start) or self.is_doubled(before, after)

    def was_taken(self, one: Run, until: float) -> bool:
        """Whether a fault hit its process between start and settlement, and before `until`."""
        last = min(until, one.settled if one.settled is not None else until)
        kinds = BREAKS if self._history.doubles else EXPLAINS
        return any(
            fault.kind in kinds and fault.start <= last and fault.end >= one.start
            for fault in self._at(one.worker)
        )

    def lost_processes(self, runs: Sequence[Run]) -> int:
        """Return how many of these executions may have lost their task process."""
        return sum(
            any(
                fault.kind == "child"
                and one.start - NOTICED <= fault.end
                and (one.settled is None or fault.start <= one.settled)
                for fault in self.faults[one.worker]
            )
            for one in runs
        )

    def lost_runs(self, uuid: str) -> set[tuple[int, str]]:
        """Return the runs that a worker ended for a lost process, which noted them or not.

        While its connections are broken it cannot settle what has ended.
        """
        return {
            (one.run, one.worker)
            for one in self._history.settled
            if one.uuid == uuid
            and any(
                fault.kind == "child" and fault.start <= one.at <= self._settled_by(fault)
                for fault in self.faults[one.worker]
            )
        }

    def _settled_by(self, fault: Happened) -> float:
        """Return until when a worker has settled what such a fault ended."""
        until = fault.end + NOTICED
        for broken in sorted(self._at(fault.worker), key=lambda one: one.start):
            if broken.kind != "child" and broken.start <= until <= broken.end + NOTICED:
                until = broken.end + NOTICED
        return until

    def is_zombie(self, one: Run) -> bool:
        """Whether its process had just been out of reach.

        It may not have known then that the task was no longer its own.
        """
        return any(
            fault.start <= one.start <= fault.end + (ZOMBIE if fault.kind in ZOMBIES else NOTICED)
            for fault in self._at(one.worker)
            if fault.kind in ZOMBIES or (self._history.doubles and fault.kind in BREAKS)
        )

    def is_forgotten(self, one: Run, until: float) -> bool:
        """Whether the server was killed soon after it was claimed, or while it ran."""
        last = min(until, one.settled if one.settled is not None else until)
        return self._history.forgets and any(
            fault.kind == "server" and fault.start <= last and fault.end + ZOMBIE >= one.start
            for fault in self.faults[EVERYBODY]
        )

    def is_doubled(self, before: Run, after: Run) -> bool:
        """Whether there may have been two messages."""
        if not self._history.doubles:
            return False
        windows = list(self._published(after.uuid, after.run))
        if any(self._is_hit(window, after.start) for window in windows):
            return True
        since = min((window.start for window in windows), default=math.inf)
        moved = Window(start=since, end=after.start, by=None)
        return before.again and after.again and self._is_hit(moved, after.start)

    def _at(self, worker: str) -> Iterator[Happened]:
        yield from self.faults[worker]
        if worker != EVERYBODY:
            yield from self.faults[EVERYBODY]

    def _is_hit(self, window: Window, until: float) -> bool:
        faults = self._breaks if window.by is None else self._at(window.by)
        last = min(window.end, until)
        return any(
            fault.kind in BREAKS and fault.start <= last and fault.end >= window.start
            for fault in faults
        )

    def _published(self, uuid: str, run: int) -> Iterator[Window]:
        """When the message of this run of the task may have been published."""
        if run:
            yield from self._settlements(uuid, run - 1)
            return
        call, sent = self._history.calls.get(uuid), self._history.sent.get(uuid)
        if sent is not None:
            by = (
                uuid.split(".")[-3] if sent.parent else EVERYBODY
            )  # as app.spawn names what it sends
            yield Window(
                start=sent.tried, end=sent.at if sent.word == "accepted" else math.inf, by=by
            )
        elif call is not None and call.gathers:
            ends = [
                min(
                    (one.end for one in self._runs.get(member, ()) if one.end is not None),
                    default=0.0,
                )
                for member in call.gathers
            ]
            yield Window(start=max(ends), end=math.inf, by=None)
        elif call is not None:
            parent = call.follows or call.catches
            if self._runs.get(parent):
                last = max(one.run for one in self._runs[parent])
                yield from self._settlements(parent, last)
            else:  # the callback of a failed member: whoever settled the group sent what follows
                yield from self._published(parent, 0)

    def _settlements(self, uuid: str, run: int) -> Iterator[Window]:
        for one in self._runs.get(uuid, ()):
            if one.run == run:
                end = (
                    one.settled
                    if one.settled is not None
                    else math.inf
                    if one.end is None
                    else one.end + ZOMBIE
                )
                yield Window(start=one.start, end=end, by=one.worker)

"""Schedules at run time: `server.schedules`. Workers follow a change in about a second."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypedDict, Unpack, get_args

import msgspec

from machinery_py.app import NOTHING, Application, Outgoing
from machinery_py.async_twins import twin
from machinery_py.clock import LONGEST, Seconds, seconds_of
from machinery_py.errors import (
    DecodeError,
    MachineryError,
    ScheduleError,
    ScheduleNotFound,
    nearest,
)
from machinery_py.registry.hooks import NothingSent
from machinery_py.schedules.definition import (
    WINDOWS,
    CatchUp,
    Definition,
    Overlap,
    ScheduleEntry,
    decode_entry,
    encode_entry,
)
from machinery_py.schedules.scheduler import (
    Declared,
    amend,
    new_entry,
    owner_of,
    redefined,
    sending,
)
from machinery_py.schedules.timetable import Dst
from machinery_py.tasks.signature import Step
from machinery_py.texts import get_logger
from machinery_py.wire.steps import pack_step, task_names, unpack_step

logger = get_logger(__name__)

NEXT = 3  # times that a listing shows
UNSENT = 3.0  # seconds after which a tick that nobody has sent tells that nobody will
TRIES = 100  # at a change that others are always faster with


class PeriodicOptions(TypedDict, total=False):
    """Options of a schedule.

    tz: zone of its times, if the spec names none; by default UTC.
    catch_up: ticks that no worker was there for: "skip" (or False), "latest" (or True), "all".
    window: seconds (or a timedelta) back that "latest" (a day) and "all" (an hour) look.
    overlap: a tick while the last run goes on is sent ("allow"), left out ("skip") or waits
        ("queue").
    dst: when clocks change: "once", or "go" for Go's rules.
    """

    tz: str
    catch_up: bool | CatchUp
    window: Seconds
    overlap: Overlap
    dst: Dst


class ScheduleReport(msgspec.Struct, frozen=True, kw_only=True):
    """One schedule as it stands.

    Attributes:
        declared: by code of any program; False: added at run time.
        owner: the application whose code declared it.
        stored: False: this code declares it, and no worker of it has started yet.
        dropped: its last tick is late by UNSENT and nobody has sent it: no worker's code declares
            it any more, or no such worker runs.
        last_run: the last tick that was sent.
        next_runs: the next three ticks; none while it is paused.
        waiting: ticks that wait for the run before them.
        sent, missed, held: ticks that were sent; without a worker; left out by `overlap`.
    """

    name: str
    spec: str
    tz: str
    dst: str
    tasks: Sequence[str]
    paused: bool
    declared: bool
    owner: str = ""
    stored: bool = True
    dropped: bool = False
    catch_up: str
    window: float
    overlap: str
    last_run: dt.datetime | None
    next_runs: Sequence[dt.datetime]
    waiting: int
    sent: int
    missed: int
    held: int


def definition_of(spec: str, step: Step[Any], options: PeriodicOptions) -> Definition:
    """Return a definition; all but its spec is checked.

    Raises:
        ScheduleError: an option makes no sense.
        ArgumentError: something in the step cannot be sent.
    """
    return _with_options(Definition(spec=spec, work=pack_step(step)), options)


def _with_options(definition: Definition, options: PeriodicOptions) -> Definition:
    unknown = sorted(set(options) - set(PeriodicOptions.__annotations__))
    if unknown:
        raise ScheduleError(
            f"no option {unknown[0]!r} (known: {', '.join(PeriodicOptions.__annotations__)}"
            f"{nearest(unknown[0], PeriodicOptions.__annotations__)})"
        )
    changes: dict[str, Any] = {**options}
    try:
        if "window" in changes:
            changes["window"] = seconds_of("window", changes["window"], most=LONGEST)
    except (TypeError, ValueError) as error:
        raise ScheduleError(f"schedule {definition.spec!r}: {error}") from None
    if isinstance(caught := changes.get("catch_up"), bool):
        changes["catch_up"] = "latest" if caught else "skip"
    changed = msgspec.structs.replace(definition, **changes)
    for option, fits, expected in (
        ("catch_up", changed.catch_up in WINDOWS, "'skip', 'latest' or 'all'"),
        ("overlap", changed.overlap in get_args(Overlap), "'allow', 'skip' or 'queue'"),
    ):
        if not fits:
            found = f"{option}={getattr(changed, option)!r}"
            raise ScheduleError(f"schedule {changed.spec!r}: {found} (expected {expected})")
    return changed


class Schedules:
    """The methods of `server.schedules`. May be used from any thread.

    Raises (each method):
        Unsupported: the result backend keeps no schedules.
        BackendUnavailable, BrokerUnavailable: no answer; the change may have been made.
        ScheduleNotFound: there is none of that name.
    """

    def __init__(self, app: Application, declared: Declared) -> None:
        self._app = app
        self._declared = declared

    def list(self, *, dropped: bool = False) -> list[ScheduleReport]:
        """Return all that are in force, or declared by this program, by name.

        Args:
            dropped: those as well that code has declared and no worker sends any more.
        """
        records = self._app.store.backend.records()
        entries = _readable(records.bodies or {})
        reports = [self._report(entry, records.now) for entry in entries]
        found = {one.name: one for one in reports if dropped or not one.dropped}
        for name, definition in self._declared.all().items():
            if name not in found:
                entry = self._new(name, definition, records.now)
                report = self._report(entry, records.now)
                found[name] = msgspec.structs.replace(report, stored=False)
        return [found[name] for name in sorted(found)]

    list_async: Final = twin(list)

    def get(self, name: str) -> ScheduleReport:
        """Return one of them."""
        return self._report(self._find(name)[1], self._app.now())

    get_async: Final = twin(get)

    def add(
        self, spec: str, name: str, step: Step[Any], **options: Unpack[PeriodicOptions]
    ) -> None:
        """Store a new schedule, now. Workers need not know it from their code.

        Raises:
            ScheduleError: it cannot be read or never be due, or there is one of that name.
            ArgumentError: something in the step cannot be sent.
        """
        if not name:
            raise ScheduleError(f"schedule {spec!r}: it has no name")
        definition = definition_of(spec, step, options)
        definition.schedule(name)
        entry = new_entry(name, definition, self._app.store.backend.records().now)
        body = encode_entry(entry)
        if not amend(self._app, name, None, body) and self._body(name) != body:
            raise ScheduleError(f"schedule {name!r} is there already (change or remove it)")

    add_async: Final = twin(add)

    def pause(self, name: str) -> None:
        """Send no ticks until `resume`, also after a restart."""
        self._change(name, lambda entry, _: entry.replace(paused=True))

    pause_async: Final = twin(pause)

    def resume(self, name: str) -> None:
        """Send ticks again, from now on; those of the pause do not count as missed."""
        self._change(
            name,
            lambda entry, now: (
                entry.replace(paused=False, last=max(entry.last, now)) if entry.paused else entry
            ),
        )

    resume_async: Final = twin(resume)

    def run_now(self, name: str) -> None:
        """Send it once, now, also if it is paused. Its ticks stay as they are.

        Raises:
            ArgumentError: what it sends cannot be sent.
            PublishUnknown: no answer; it may have been sent.
        """

        def send(body: bytes, entry: ScheduleEntry) -> bool:
            now = self._app.store.backend.records().now
            with suppress(NothingSent), sending(self._app, entry, now) as (after, out):
                # A lost reply is repeated, and refused: then the record is ours.
                if not self._amend(entry, body, after, out, now) and (
                    self._body(name) != encode_entry(after)
                ):
                    raise NothingSent
                self._app.report_sent(out.signatures)
                return True
            return False

        self._try(name, send)

    run_now_async: Final = twin(run_now)

    def remove(self, name: str) -> None:
        """Remove it. One that code declares comes back with a worker of that code: pause it."""
        self._try(
            name, lambda body, _: amend(self._app, name, body, None) or self._body(name) is None
        )

    remove_async: Final = twin(remove)

    def change(
        self,
        name: str,
        *,
        spec: str | None = None,
        step: Step[Any] | None = None,
        **options: Unpack[PeriodicOptions],
    ) -> None:
        """Change what is given, until the code that declares it changes.

        Raises:
            ScheduleError, ArgumentError: as `add`.
        """

        def changed(entry: ScheduleEntry, now: dt.datetime) -> ScheduleEntry:
            definition = entry.definition
            if spec is not None:
                definition = msgspec.structs.replace(definition, spec=spec)
            if step is not None:
                definition = msgspec.structs.replace(definition, work=pack_step(step))
            definition = _with_options(definition, options)
            definition.schedule(name)
            return redefined(entry, definition, now)

        self._change(name, changed)

    change_async: Final = twin(change)

    def undeclared(self) -> Sequence[str]:
        """Return the names of those that code of this application declared, and this code does not.

        Of programs that share a store, each has an `application` or a `default_queue` of its own.
        """
        declared, owner = self._declared.all(), owner_of(self._app)
        entries = _readable(self._bodies())
        return sorted(
            one.name
            for one in entries
            if one.declared and one.owner in ("", owner) and one.name not in declared
        )

    undeclared_async: Final = twin(undeclared)

    def remove_undeclared(self) -> Sequence[str]:
        """Remove those of `undeclared`, and return their names.

        A worker whose code declares one stores it anew when it starts: so do it when the last one
        of the old code has ended.
        """
        names = self.undeclared()
        for name in names:
            with suppress(ScheduleNotFound):
                self.remove(name)
        return names

    remove_undeclared_async: Final = twin(remove_undeclared)

    # Inside

    def _new(self, name: str, definition: Definition, now: dt.datetime) -> ScheduleEntry:
        digest, owner = definition.digest, owner_of(self._app)
        return new_entry(name, definition, now, declared=digest, owner=owner)

    def _bodies(self) -> dict[str, bytes]:
        return dict(self._app.store.backend.records().bodies or {})

    def _body(self, name: str) -> bytes | None:
        return self._bodies().get(name)

    def _find(self, name: str) -> tuple[bytes, ScheduleEntry]:
        bodies = self._bodies()
        definition = self._declared.all().get(name)
        if name not in bodies and definition is not None:
            # No worker has started yet: store it, so that it can be paused before one does.
            now = self._app.store.backend.records().now
            entry = self._new(name, definition, now)
            amend(self._app, name, None, encode_entry(entry))
            bodies = self._bodies()
        if name not in bodies:
            raise ScheduleNotFound(name, {*bodies, *self._declared.all()})
        return bodies[name], decode_entry(bodies[name])

    def _change(
        self, name: str, function: Callable[[ScheduleEntry, dt.datetime], ScheduleEntry]
    ) -> None:
        def change(body: bytes, entry: ScheduleEntry) -> bool:
            after = function(entry, self._app.store.backend.records().now)
            return after == entry or self._amend(entry, body, after)

        self._try(name, change)

    def _try(self, name: str, attempt: Callable[[bytes, ScheduleEntry], bool]) -> None:
        """Try it with the record as it stands, until no other change comes in between."""
        for _ in range(TRIES):
            if attempt(*self._find(name)):
                return
        raise MachineryError(
            f"schedule {name!r}: {TRIES} tries to change it met another change each (try again)"
        )

    def _amend(
        self,
        entry: ScheduleEntry,
        body: bytes,
        after: ScheduleEntry,
        out: Outgoing = NOTHING,
        tick: dt.datetime | None = None,
    ) -> bool:
        return amend(self._app, entry.name, body, encode_entry(after), entry.id, out, tick)

    def _report(self, entry: ScheduleEntry, now: dt.datetime) -> ScheduleReport:
        definition = entry.definition
        schedule = definition.schedule(entry.name)
        following = schedule.next(entry.last)
        is_late = following is not None and (now - following).total_seconds() > UNSENT
        may_drop = entry.declared and not entry.paused and entry.name not in self._declared.all()
        start = entry.last if schedule.every else max(entry.last, self._app.now())
        return ScheduleReport(
            name=entry.name,
            spec=definition.spec,
            tz=schedule.zone,
            dst=definition.dst,
            tasks=task_names(unpack_step(definition.work)),
            paused=entry.paused,
            declared=bool(entry.declared),
            owner=entry.owner,
            dropped=bool(may_drop and is_late),
            catch_up=definition.catch_up,
            window=definition.window or WINDOWS[definition.catch_up],
            overlap=definition.overlap,
            last_run=entry.ran,
            next_runs=() if entry.paused else schedule.upcoming(start, NEXT),
            waiting=len(entry.waiting),
            sent=entry.sent,
            missed=entry.missed,
            held=entry.held,
        )


def _readable(bodies: Mapping[str, bytes]) -> list[ScheduleEntry]:
    """Return the records that are ours, and log the others: one must not hide the rest."""
    entries: list[ScheduleEntry] = []
    for name, body in bodies.items():
        try:
            entries.append(decode_entry(body))
        except DecodeError as error:
            logger.warning("schedule %s is left out: %s", name, error)
    return entries

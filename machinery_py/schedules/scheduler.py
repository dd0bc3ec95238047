"""Scheduler: sends what is due. Any number of them work on one store, without a leader.

A tick is one step of the store: if the record still holds what was read, it holds the next tick,
and the messages are sent. Of all that have read the same one succeeds
(docs/explanation/periodic.md).
"""

from __future__ import annotations

import datetime as dt
import threading
import uuid as _uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from machinery_py.app import NOTHING, Application, Outgoing
from machinery_py.backends.base import Rider, tick_key
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    DecodeError,
    MachineryError,
    PublishUnknown,
    ScheduleError,
)
from machinery_py.locks.base import go_lock_key
from machinery_py.registry.hooks import NothingSent
from machinery_py.schedules.definition import (
    MOST_WAITING,
    Definition,
    Due,
    ScheduleEntry,
    decode_entry,
    due,
    encode_entry,
    is_ahead,
    is_over,
    run_of,
)
from machinery_py.schedules.timetable import Schedule
from machinery_py.stores.base import Submission
from machinery_py.tasks.linking import link
from machinery_py.tasks.signature import HEADER_SCHEDULE, HEADER_TICK
from machinery_py.texts import get_logger
from machinery_py.wire.steps import unpack_step

logger = get_logger(__name__)

LOOK_EVERY = 1.0  # seconds between two looks at the store; so late is a change seen
LOOK_IDLE = 5.0  # the same while there is no schedule at all
CLAIM = 10.0  # seconds that one scheduler may try to get Go's lock for a tick
TROUBLE = 5.0  # seconds until a schedule is tried again that its store refuses
SKEW = 1.0  # seconds that this clock may differ from the store's without a warning
AT_ONCE = 1000  # ticks of one schedule that are sent before the others have their turn


class Declared:
    """Schedules that this program's code declares. May be used from any thread."""

    def __init__(self) -> None:
        self._definitions: dict[str, Definition] = {}
        self._lock = threading.Lock()

    def add(self, name: str, definition: Definition) -> None:
        """
        Raises:
            ScheduleError: it can never be due, or the name is taken.
        """
        if not name:
            raise ScheduleError(f"schedule {definition.spec!r}: it has no name")
        definition.schedule(name)
        with self._lock:
            before = self._definitions.setdefault(name, definition)
        if before is not definition and before != definition:
            raise ScheduleError(
                f"schedule {name!r} is declared already, as {before.spec!r} "
                "(give this one a name of its own)"
            )

    def all(self) -> Mapping[str, Definition]:
        with self._lock:
            return dict(self._definitions)

    def __len__(self) -> int:
        return len(self._definitions)


@dataclass(slots=True)
class Known:
    """A record as it was read."""

    body: bytes
    entry: ScheduleEntry
    schedule: Schedule
    due_at: dt.datetime | None  # None: never


class Scheduler:
    """Scheduler of one worker. Belongs to one thread at a time.

    Args:
        stopping: called between two ticks; when it returns True, `step` returns.
    """

    def __init__(
        self, app: Application, declared: Declared, *, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self._app = app
        self._stopping = stopping
        self._declared = declared
        self._synced = -1  # how many declarations the store has been told; -1: not yet
        self._known: dict[str, Known] = {}
        self._unreadable: dict[str, bytes] = {}
        self._version = ""
        self._stale = True
        self._read_at = 0.0
        self._read_now = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)  # the store's time then
        self._warned = False
        self._others = frozenset[str]()  # that code has declared, and not this program's

    # The round

    def step(self) -> float:
        """Send what is due. Returns the seconds after which it wants to be called again.

        Raises:
            Unsupported: the backend keeps no schedules.
            MachineryError: the store does not answer; what is due stays due.
        """
        monotonic = self._app.clock.monotonic()
        look = LOOK_EVERY if self._known else LOOK_IDLE
        if self._stale or monotonic - self._read_at >= look or len(self._declared) != self._synced:
            self._read()
        for _ in range(2):
            for name in [
                name
                for name, known in self._known.items()
                if known.due_at and known.due_at <= self.now()
            ]:
                self._try(name)
            if not self._stale:
                break
            self._read()  # others were faster somewhere: see what they left
        return self._pause()

    def now(self) -> dt.datetime:
        """Return the moment by the store's clock."""
        return self._read_now + dt.timedelta(seconds=self._app.clock.monotonic() - self._read_at)

    @property
    def next_due(self) -> dt.datetime | None:
        """Moment of the next step, as far as it was read."""
        return min((known.due_at for known in self._known.values() if known.due_at), default=None)

    def refresh(self) -> None:
        """Read what there is, and bring what code declares."""
        self._stale = True
        self._read()

    def _pause(self) -> float:
        look = LOOK_EVERY if self._known else LOOK_IDLE
        left = self._read_at + look - self._app.clock.monotonic()
        next_due = self.next_due
        if next_due is not None:
            left = min(left, (next_due - self.now()).total_seconds())
        return 0.0 if self._stale else max(0.0, left)

    # What the store says

    def _read(self) -> None:
        records = self._app.store.backend.records(self._version)
        self._read_at = self._app.clock.monotonic()  # after the answer: rather late than early
        self._stale = False
        self._read_now = records.now
        self._compare_clocks(records.now)
        if records.bodies is not None:
            self._version = records.version
            self._take(records.bodies)
        self._find_ahead()
        if len(self._declared) != self._synced:
            count = len(self._declared)
            self._sync()
            self._synced = count

    def _compare_clocks(self, now: dt.datetime) -> None:
        off = (self._app.clock.now() - now).total_seconds()
        if abs(off) > SKEW and not self._warned:
            self._warned = True
            logger.warning(
                "this machine's clock is %.1f s %s the store's; schedules go by the store's",
                abs(off),
                "ahead of" if off > 0 else "behind",
            )

    def _take(self, bodies: Mapping[str, bytes]) -> None:
        for name in [name for name in self._known if name not in bodies]:
            del self._known[name]
        for name, body in bodies.items():
            known = self._known.get(name)
            if (known is None or known.body != body) and self._unreadable.get(name) != body:
                self._learn(name, body)

    def _learn(self, name: str, body: bytes) -> None:
        try:
            entry = decode_entry(body)
            before = self._known.get(name)
            same = before is not None and before.entry.definition == entry.definition
            schedule = (
                before.schedule if same and before is not None else entry.definition.schedule(name)
            )
        except (DecodeError, ScheduleError) as error:
            self._unreadable[name] = body
            self._known.pop(name, None)
            logger.error("schedule %s is left alone: %s", name, error)
            return
        self._known[name] = Known(body, entry, schedule, self._due_at(entry, schedule))

    def _find_ahead(self) -> None:
        """Let those be repaired at once whose last tick lies ahead: the clock was, at that look."""
        now = self.now()
        for known in self._known.values():
            if not self._is_ours(known.entry):
                continue
            if known.entry.last > now and is_ahead(known.entry, known.schedule, now):
                known.due_at = now

    def _is_ours(self, entry: ScheduleEntry) -> bool:
        """Return whether this worker sends it: what code declares is sent where that code runs.

        So a schedule ends with the last worker whose code has it, and its record keeps its place.
        """
        return not entry.declared or entry.name in self._declared.all()

    def _due_at(self, entry: ScheduleEntry, schedule: Schedule) -> dt.datetime | None:
        if entry.paused or not self._is_ours(entry):
            return None
        following = schedule.next(entry.last)
        if not entry.waiting:
            return following
        look = self.now() + dt.timedelta(seconds=LOOK_EVERY)  # whether the run before is over
        return look if following is None else min(look, following)

    # What code declares

    def _sync(self) -> None:
        """Store what code declares. Changed code wins; what is paused stays paused."""
        declared = self._declared.all()
        for name, definition in declared.items():
            # Another may be bringing it just now; one that cannot be read is a newer version's.
            while name not in self._unreadable and not self._bring(name, definition):
                self._version = ""
                self._take(self._app.store.backend.records().bodies or {})
        others = [name for name, known in self._known.items() if not self._is_ours(known.entry)]
        told, self._others = self._others, frozenset(others)
        if left := sorted(self._others - told):
            logger.warning(
                "this program's code does not declare what code has declared once: %s; this worker "
                "does not send it (machinery periodic remove APP --undeclared, if no code does)",
                ", ".join(left),
            )

    def _bring(self, name: str, definition: Definition) -> bool:
        known = self._known.get(name)
        digest = definition.digest
        if known is None:
            owner = owner_of(self._app)
            entry = new_entry(name, definition, self.now(), declared=digest, owner=owner)
            return self._amend(None, entry)
        before = known.entry
        if before.declared == digest:
            if known.due_at is None:  # it was not ours when it was read
                known.due_at = self._due_at(before, known.schedule)
            return True
        text = "schedule %s is changed by this program's code: %r (was %r)"
        logger.warning(text, name, definition.spec, before.definition.spec)
        after = redefined(before, definition, self.now())
        after = after.replace(declared=digest, owner=owner_of(self._app))
        return self._amend(known, after)

    # What is due

    def _try(self, name: str) -> None:
        try:
            self._work_on(name)
        except (BrokerUnavailable, BackendUnavailable, PublishUnknown):
            raise  # it concerns all of them
        except MachineryError as error:
            text = "schedule %s cannot be worked on, and is tried again in %g s: %s"
            logger.error(text, name, TROUBLE, error)
            self._known[name].due_at = self.now() + dt.timedelta(seconds=TROUBLE)

    def _work_on(self, name: str) -> None:
        for _ in range(AT_ONCE):
            known = self._known[name]
            now = self.now()
            if known.due_at is None or known.due_at > now or self._stopping():
                return
            if not self._act(known, now):
                self._stale = True
                return

    def _act(self, known: Known, now: dt.datetime) -> bool:
        """Do one step of one schedule. False: another scheduler was faster."""
        entry = known.entry
        if is_ahead(entry, known.schedule, now):
            return self._set_right(known, now)
        if entry.waiting and self._is_over(entry, now):
            tick, *rest = entry.waiting
            return self._send(known, entry.replace(waiting=tuple(rest)), tick)
        step = due(entry, known.schedule, now)
        if step is None:
            known.due_at = self._due_at(entry, known.schedule)
            return True
        return self._take_step(known, step, now)

    def _set_right(self, known: Known, now: dt.datetime) -> bool:
        entry = known.entry
        logger.warning(
            "schedule %s: its last tick is at %s, %.0f s from now: the store's clock was ahead, or "
            "is behind now (is NTP running?); it goes on from now",
            entry.name,
            entry.last.isoformat(),
            (entry.last - now).total_seconds(),
        )
        waiting = tuple(tick for tick in entry.waiting if tick <= now)
        return self._amend(known, entry.replace(last=now, claimed=None, waiting=waiting))

    def _take_step(self, known: Known, step: Due, now: dt.datetime) -> bool:
        entry = known.entry.replace(last=step.last, missed=known.entry.missed + step.missed)
        if step.missed:
            logger.warning("schedule %s: missed ticks: %d", entry.name, step.missed)
        if step.tick is None:
            return self._amend(known, entry)
        overlap = entry.definition.overlap
        if overlap != "allow" and (entry.waiting or not self._is_over(entry, now)):
            if overlap == "queue" and len(entry.waiting) < MOST_WAITING:
                return self._amend(known, entry.replace(waiting=(*entry.waiting, step.tick)))
            return self._amend(known, entry.replace(held=entry.held + 1))
        return self._send(known, entry, step.tick)

    def _is_over(self, entry: ScheduleEntry, now: dt.datetime) -> bool:
        uuids = [uuid for step in entry.run for uuid in step]
        return is_over(entry, self._app.store.backend.get_states(uuids) if uuids else {}, now)

    def _send(self, known: Known, entry: ScheduleEntry, tick: dt.datetime) -> bool:
        if self._app.config.go_program:
            return self._send_under_gos_lock(known, entry, tick)
        return self._send_it(known, entry, tick)

    def _send_under_gos_lock(self, known: Known, entry: ScheduleEntry, tick: dt.datetime) -> bool:
        """Claim the tick among our schedulers, take Go's lock, and send.

        As in Go, a tick is lost if its scheduler dies between the lock and the sending. A tick that
        is late until the next is due is given up: Go's lock for it is over, so Go may have sent it.
        """
        now, claimed = self.now(), entry.claimed
        following = known.schedule.next(tick) or tick + dt.timedelta(days=1)
        if following <= now:
            return self._amend(known, entry.replace(missed=entry.missed + 1))
        if claimed is not None and abs((now - claimed).total_seconds()) < CLAIM:
            known.due_at = claimed + dt.timedelta(seconds=CLAIM)
            return True
        if not self._amend(known, known.entry.replace(claimed=now)):
            return False
        known, entry = self._known[entry.name], entry.replace(claimed=None)
        spec = entry.definition.spec
        key = go_lock_key(self._app.config.go_program, entry.name, spec)
        if self._app.stores.lock.go().lock_with_retries(key, round(following.timestamp()) * 10**9):
            return self._send_it(known, entry, tick)
        return self._amend(known, entry)

    def _send_it(self, known: Known, entry: ScheduleEntry, tick: dt.datetime) -> bool:
        with suppress(NothingSent), ExitStack() as stack:
            return self._send_within(stack, known, entry, tick)
        return False

    def _send_within(
        self, stack: ExitStack, known: Known, entry: ScheduleEntry, tick: dt.datetime
    ) -> bool:
        """Send a tick, between the halves of `around_send`, which the stack then has."""
        after, out = entry, NOTHING
        try:
            after, out = stack.enter_context(sending(self._app, entry, tick))
        except Exception as error:  # the pre-publish hook is user code: the tick is given up
            logger.error(
                "schedule %s: its tick at %s cannot be sent: %s",
                entry.name,
                tick.isoformat(),
                error,
                exc_info=not isinstance(error, MachineryError),
            )
        try:
            if not self._amend(known, after, out, tick):
                raise NothingSent
        except MachineryError as error:
            if not error.permanent:
                raise
            # Between two stores the tick is over by now, and what it sent has failed.
            logger.error(
                "schedule %s: what its tick at %s sends is refused: %s",
                entry.name,
                tick.isoformat(),
                error,
            )
            return self._amend(known, entry)
        self._app.report_sent(out.signatures)
        return True

    def _amend(
        self,
        known: Known | None,
        entry: ScheduleEntry,
        out: Outgoing = NOTHING,
        tick: dt.datetime | None = None,
    ) -> bool:
        body, before = encode_entry(entry), known.body if known else None
        self._stale = True  # until we know what became of it
        if not amend(self._app, entry.name, before, body, entry.id, out, tick):
            return False
        self._stale = False
        self._learn(entry.name, body)
        return True


def owner_of(app: Application) -> str:
    """Return the name under which the code of this application declares schedules."""
    return app.config.application or app.config.default_queue


def new_entry(
    name: str, definition: Definition, now: dt.datetime, *, declared: str = "", owner: str = ""
) -> ScheduleEntry:
    return ScheduleEntry(
        name=name,
        id=_uuid.uuid4().hex,
        definition=definition,
        last=now,
        declared=declared,
        owner=owner,
    )


def redefined(entry: ScheduleEntry, definition: Definition, now: dt.datetime) -> ScheduleEntry:
    """Return it with another definition; if its times change, it counts from now."""
    old = entry.definition
    times = (old.spec, old.tz, old.dst) != (definition.spec, definition.tz, definition.dst)
    return entry.replace(definition=definition, last=max(entry.last, now) if times else entry.last)


@contextmanager
def sending(
    app: Application, entry: ScheduleEntry, tick: dt.datetime
) -> Iterator[tuple[ScheduleEntry, Outgoing]]:
    """Give the entry after a tick, and what the tick sends, between the halves of `around_send`.

    Raise NothingSent in its block, to tell them, if another scheduler was faster.

    Raises:
        ArgumentError, DecodeError: it cannot be sent.
    """
    plan = link(unpack_step(entry.definition.work), now=app.now())
    headers = {HEADER_SCHEDULE: entry.name, HEADER_TICK: tick.isoformat()}
    first = [signature.with_headers(**headers) for signature in plan.first]
    run = run_of(plan.steps) if entry.definition.overlap != "allow" else ()
    with app.sending(first) as complete:
        out = app.outgoing(complete, plan.groups, plan.awaited)
        yield entry.replace(ran=tick, run=run, sent=entry.sent + 1), out


def amend(
    app: Application,
    name: str,
    expected: bytes | None,
    body: bytes | None,
    id: str = "",
    out: Outgoing = NOTHING,
    tick: dt.datetime | None = None,
) -> bool:
    """Change a record, and send with it."""
    key = tick_key(name, f"{id}/{tick.isoformat()}") if tick is not None else ""
    return app.store.submit(
        Submission(
            token=key,
            messages=out.messages,
            states=out.states,
            groups=out.groups,
            riders=[Rider(name=name, expected=expected, body=body)],
        )
    )

"""Crash points of a task: it is killed once at each of its writes, and must still come to its end.

    def test_onboarding_survives(crash_points):
        report = crash_points.run(
            onboard,
            7,
            signals={"approval": {"by": "ada"}},
            effects={"payment": payments},
            at_least_once={"mail": mails},
        )
        assert report.lost == [] and report.doubled == []
        print(report)        # mail twice: killed between its effect and the checkpoint "welcome"

The task runs on a Harness, in virtual time. A first run without a crash counts the points: one
before and one after each write of the stores. Then there is a run for each of them, in new stores:

    worker ──► point ──► Crash; it writes no more, and closes nothing
                           │ its lease runs out, in virtual time
                           ▼
                         a new worker ──► the end, which is compared with that of the first run

Limits: the crash is an exception, so `finally` and `with` blocks of the task run, as they would not
in a process that is killed; what they write to the stores is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

from machinery_py.backends.base import SETTLED, Keeping, Verdict
from machinery_py.brokers.base import Delivery
from machinery_py.errors import DecodeError
from machinery_py.registry.task import Task
from machinery_py.server import Server
from machinery_py.signals import open_wait
from machinery_py.stores.base import Firing, Mark, Session, Settlement, Store, Submission
from machinery_py.stores.open import Stores
from machinery_py.tasks.signature import Signature, Step, new_uuid
from machinery_py.tasks.states import FINISHED, State, TaskState
from machinery_py.testing.harness import Harness
from machinery_py.wire.signatures import decode_signature
from machinery_py.worker.inline import Inline

MOST_POINTS = 5_000  # of one run; a task that has more does not come to an end
SHOWN = 3  # points that a sentence lists
MARGIN = 1.0  # seconds after the lease of a dead worker

T = TypeVar("T")


class Effects(Protocol):
    """Effects of a task outside, as a fake of the test notes them: a list, set or dict.

    A list holds an entry for each call. A dict or set by `step_key` is a system that knows its
    idempotency keys: a second call with the same key changes nothing.
    """

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Any]: ...
    def clear(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashReport:
    """Report on a task that was killed at each of its points; `str` of it is for people.

    Attributes:
        points: crash points of the run without a crash.
        lost: a sentence for each effect or task that is missing after a crash.
        doubled: a sentence for each one that came more often than without it.
        repeated: the same, of `at_least_once`.
    """

    name: str
    points: int
    lost: list[str]
    doubled: list[str]
    repeated: list[str]

    def __str__(self) -> str:
        counts = f"{len(self.lost)} lost, {len(self.doubled)} doubled"
        head = f"{self.name}: {self.points} crash points, {counts}, {len(self.repeated)} repeated"
        return "\n".join([head, *self.lost, *self.doubled, *self.repeated])


class CrashPoints:
    """Runs tasks of a Server, and crashes them: the fixture `crash_points`."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def run(
        self,
        task: Task[..., Any] | Step[Any],
        /,
        *args: Any,
        effects: Mapping[str, Effects] | None = None,
        at_least_once: Mapping[str, Effects] | None = None,
        signals: Mapping[str, Any] | None = None,
        reset: Callable[[], object] | None = None,
        **kwargs: Any,
    ) -> CrashReport:
        """Run a task, or a workflow, once without a crash, and once with each crash.

        Tasks that it sends run as well, and count as effects: `task NAME`. Its UUID, and so the
        keys of its steps, are the same in each run. Schedules send nothing.

        Args:
            effects: what must be there as often as without a crash: name → what the test's fakes
                have noted. All are cleared before each run.
            at_least_once: what may come again, and must not be missing. A name such as `task NAME`
                of it allows that for a task that is sent.
            signals: name → value, which the task gets as soon as it waits for that signal.
            reset: called before each run, for other things that the task changes outside.

        Raises:
            AssertionError: without a crash the task fails, does not come to an end, or makes other
                writes in each run.
        """
        step = task.signature(*args, **kwargs) if isinstance(task, Task) else task
        if isinstance(step, Signature):
            step = step.replace(uuid=step.uuid or new_uuid())
        noted = {**(effects or {}), **(at_least_once or {})}
        player = _Player(self.server, step, noted, signals or {}, reset)
        first, second = player.play(), player.play()
        name, uuid = (step.name, step.uuid) if isinstance(step, Signature) else ("workflow", "")
        _check_first(first, second, name, uuid)
        judge = _Judge(first, second, name, uuid, frozenset(at_least_once or ()))
        for number in range(len(first.points)):
            judge.compare(player.play(number))
        return judge.report()


class Crash(BaseException):
    """The end of the worker's process. `except Exception` does not catch it."""


@dataclass(frozen=True, slots=True)
class _Point:
    """A moment before, or after, a write."""

    when: str
    write: str

    def __str__(self) -> str:
        return f"{self.when} {self.write}"


@dataclass(slots=True)
class _Played:
    """One run of the task, from its sending to its end.

    Attributes:
        points: that were reached, in order.
        crash: the point of the crash.
        fresh: effects that were noted between that and the point before it.
        ends: last states by UUID, also of the tasks that it has sent.
        effects: each by name, as text, and how often it was there.
    """

    points: list[_Point] = field(default_factory=list)
    crash: _Point | None = None
    fresh: frozenset[str] = frozenset()
    ends: dict[str, TaskState] = field(default_factory=dict)
    effects: dict[str, Counter[str]] = field(default_factory=dict)


# Running


class _Player:
    """Runs the task in new stores, as often as it is asked to."""

    def __init__(
        self,
        server: Server,
        step: Step[Any],
        effects: Mapping[str, Effects],
        signals: Mapping[str, Any],
        reset: Callable[[], object] | None,
    ) -> None:
        self._server = server
        self._step = step
        self._effects = effects
        self._signals = signals
        self._reset = reset

    def play(self, crash_at: int | None = None) -> _Played:
        """Run the task to its end, with a crash at the point of this number."""
        for effect in self._effects.values():
            effect.clear()
        if self._reset is not None:
            self._reset()
        played = _Played()
        with Harness(self._server) as machinery:
            self._server.send(self._step)
            self._work(machinery, played, crash_at)
        played.effects = {
            name: Counter(map(repr, effect)) for name, effect in self._effects.items()
        }
        return played

    def _work(self, machinery: Harness, played: _Played, crash_at: int | None) -> None:
        """Let one worker after the other run what is due, until nothing more will be."""
        app, real = self._server.app, self._server.app.stores
        for _ in range(MOST_POINTS):
            worker = _DoomedWorker(played, self._effects, crash_at)
            app.swap(app.config, app.clock, worker.stores(real))
            try:
                Inline(app, name="crash-points").drain()
                pause = self._pause(machinery, real.store)
            except Crash:
                crash_at, pause = None, app.config.lease + MARGIN
            finally:
                for keeper in app.locks, app.slots:
                    keeper.close()  # what a dead worker holds ends with its lease
                app.swap(app.config, app.clock, real)
            if self._signal():
                continue
            if pause is None:
                return
            machinery.clock.advance(pause)
            real.store.tend()

    def _signal(self) -> bool:
        """Give the task the signal that it waits for. False: it waits for none of those."""
        uuid = self._step.uuid if self._signals and isinstance(self._step, Signature) else ""
        state = self._server.app.store.backend.get_states([uuid]).get(uuid) if uuid else None
        wait = open_wait(self._server.app, state) if state is not None else None
        if wait is None or wait.name not in self._signals:
            return False
        return self._server.signal(uuid, wait.name, self._signals[wait.name])

    def _pause(self, machinery: Harness, store: Store) -> float | None:
        """Return the seconds until something happens; None: nothing will."""
        if any(one.running for one in store.broker.stats()):  # a dead worker has it
            return self._server.app.config.lease + MARGIN
        moments = [one.eta for one in store.broker.delayed(MOST_POINTS) if one.eta is not None]
        if not moments:
            return None
        return max(0.0, (min(moments) - machinery.clock.now()).total_seconds())


class _DoomedWorker:
    """Worker from its start to its end or its crash: what its calls of the stores pass through."""

    def __init__(
        self, played: _Played, effects: Mapping[str, Effects], crash_at: int | None
    ) -> None:
        self._played = played
        self._effects = effects
        self._crash_at = crash_at
        self._sizes = self._measured()
        self._is_dead = False

    def stores(self, real: Stores) -> Stores:
        """Return the stores as this worker sees them."""
        store, backend, lock, limits = real.store, real.store.backend, real.lock, real.limits
        write, end = self._writing, self._ending
        seen_backend = _Seen(
            backend,
            apply=write(backend.apply, _words("a change of states")),
            release=write(backend.release, _words("the release of a unique key")),
            revoke=write(backend.revoke, _words("a revocation")),
            end_checkpoints=write(backend.end_checkpoints, _words("the expiry of the checkpoints")),
        )
        seen_store = _Seen(
            store,
            backend=seen_backend,
            submit=write(store.submit, _name_sending),
            fire=write(self._fire_on(store), _name_firing),
            open_session=lambda queues, *, worker: self._session(
                store.open_session(queues, worker=worker)
            ),
        )
        seen_lock = _Seen(
            lock,
            acquire=write(lock.acquire, lambda name, **_: f"the lock {name!r}"),
            release=end(lock.release, lambda held: False),
            renew=end(lock.renew, lambda held, **_: False),
        )
        seen_limits = _Seen(
            limits,
            enter_all=write(limits.enter_all, _words("the admission by its limits")),
            leave=end(limits.leave, lambda held: None),
            renew=end(limits.renew, lambda held, **_: [False] * len(held)),
        )
        return cast(Stores, _Seen(real, store=seen_store, lock=seen_lock, limits=seen_limits))

    def _session(self, real: Session) -> Session:
        def receive(limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
            self._check()
            deliveries = real.receive(limit, timeout, order)
            if deliveries:
                names = ", ".join(_name_of(one.body) for one in deliveries)
                self._reach(_Point("after", f"the claim of {names}"))
            return deliveries

        def settle(
            settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
        ) -> Sequence[Verdict]:
            verdicts = real.settle(settlements, marks)
            for one, verdict in zip(settlements, verdicts, strict=True):
                if verdict is SETTLED:
                    self._note_ends(one.states)
            return verdicts

        seen = _Seen(
            real,
            receive=receive,
            settle=self._writing(settle, _name_settling),
            keep=self._writing(real.keep, _name_keeping),
            close=self._ending(real.close, lambda: None),
        )
        return cast(Session, seen)

    def _fire_on(self, store: Store) -> Callable[[Firing], bool]:
        def fire(firing: Firing) -> bool:
            fired = store.fire(firing)
            if fired:
                self._note_ends(firing.states)
            return fired

        return fire

    def _writing(self, call: Callable[..., T], name: Callable[..., str]) -> Callable[..., T]:
        """Return the call with a point before and after it, unless it writes nothing."""

        def calling(*args: Any, **kwargs: Any) -> T:
            self._check()
            write = name(*args, **kwargs)
            if not write:
                return call(*args, **kwargs)
            self._reach(_Point("before", write))
            done = call(*args, **kwargs)
            self._reach(_Point("after", write))
            return done

        return calling

    def _ending(self, call: Callable[..., T], dead: Callable[..., T]) -> Callable[..., T]:
        """Return a call that gives something back, which a dead worker does not."""

        def calling(*args: Any, **kwargs: Any) -> T:
            return (dead if self._is_dead else call)(*args, **kwargs)

        return calling

    def _check(self) -> None:
        if self._is_dead:
            raise Crash

    def _reach(self, point: _Point) -> None:
        """Come to a point, and crash there if it is its turn."""
        played, before, self._sizes = self._played, self._sizes, self._measured()
        number = len(played.points)
        if number == MOST_POINTS:
            raise AssertionError(f"no end after {MOST_POINTS:,} writes; this one is {point}")
        played.points.append(point)
        if number == self._crash_at:
            played.crash = point
            played.fresh = frozenset(
                name for name, size in self._sizes.items() if size > before[name]
            )
            self._is_dead = True
            raise Crash

    def _measured(self) -> dict[str, int]:
        return {name: len(effect) for name, effect in self._effects.items()}

    def _note_ends(self, states: Sequence[TaskState]) -> None:
        for state in states:
            if state.state in FINISHED:
                self._played.ends[state.task_uuid] = state


class _Seen:
    """An object of the stores, some of whose attributes are others for a worker."""

    def __init__(self, real: object, **others: object) -> None:
        self._real = real
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


# Names of writes


def _words(text: str) -> Callable[..., str]:
    return lambda *args, **kwargs: text


def _name_sending(submission: Submission) -> str:
    return f"the submission of {', '.join(message.name for message in submission.messages)}"


def _name_firing(firing: Firing) -> str:
    return "the callback of a group" if firing.group_uuid else "the end of a task that waits"


def _name_settling(settlements: Sequence[Settlement], marks: Sequence[Mark] = ()) -> str:
    names = [f"the state {mark.state.state} of {mark.state.task_name}" for mark in marks]
    for one in settlements:
        state = f" ({one.states[0].state})" if one.states else ""
        names.append(f"the settlement of {one.name}{state}")
    return ", ".join(names)


def _name_keeping(delivery: Delivery, keeping: Keeping) -> str:
    steps = [name.partition(":")[2] for name in keeping.rows]
    return f"the checkpoint {', '.join(map(_quoted, steps))}"


def _quoted(text: str) -> str:
    return f'"{text}"'


def _name_of(body: bytes) -> str:
    try:
        return decode_signature(body).name
    except DecodeError:
        return "what is no task"


# Judging


def _check_first(first: _Played, second: _Played, name: str, uuid: str) -> None:
    """Raise AssertionError unless runs without a crash are good, and the same.

    Args:
        uuid: of the task; "" for a workflow.
    """
    end = first.ends.get(uuid)
    if not first.ends or (uuid and end is None):
        raise AssertionError(f"{name} does not come to an end, also without a crash")
    if end is not None and end.state is not State.SUCCESS:
        raise AssertionError(f"{name} ends with {end.state} without a crash: {end.error}")
    if Counter(first.points) != Counter(second.points):
        changed = (Counter(first.points) - Counter(second.points)) or (
            Counter(second.points) - Counter(first.points)
        )
        raise _changes(name, next(iter(changed)))


def _changes(name: str, point: _Point) -> AssertionError:
    return AssertionError(
        f"{name} has other crash points in each run, such as the one {point} (what does it depend "
        "on? reset= sets back what it changes outside)"
    )


class _Judge:
    """Compares runs with a crash with one without."""

    def __init__(
        self, first: _Played, second: _Played, name: str, uuid: str, tolerated: frozenset[str]
    ) -> None:
        self._first = first
        self._name = name
        self._uuid = uuid
        self._tolerated = tolerated
        #: Effects that are the same in each run; of others only the number can be compared.
        self._same = {
            name for name, noted in first.effects.items() if noted == second.effects[name]
        }
        # What happened → where the worker was killed.
        self._lost: dict[str, list[str]] = {}
        self._doubled: dict[str, list[str]] = {}
        self._repeated: dict[str, list[str]] = {}

    def report(self) -> CrashReport:
        return CrashReport(
            name=self._name,
            points=len(self._first.points),
            lost=_sentences(self._lost),
            doubled=_sentences(self._doubled),
            repeated=_sentences(self._repeated),
        )

    def compare(self, crashed: _Played) -> None:
        """Note what is missing, or came more often, in a run with a crash."""
        point = crashed.crash
        if point is None:
            raise _changes(self._name, self._first.points[len(crashed.points) - 1])
        end = crashed.ends.get(self._uuid)
        if end is None:
            if self._uuid:
                _note(self._lost, f"{self._name} never ended", str(point))
        elif end.state is not State.SUCCESS:
            _note(self._lost, f"{self._name} ended with {end.state} ({end.error})", str(point))
        self._compare("", _sent(self._first, self._uuid), _sent(crashed, self._uuid), crashed)
        for name, wanted in self._first.effects.items():
            found = crashed.effects[name]
            if name in self._same:
                self._compare(name, wanted, found, crashed)
            else:
                totals = Counter({name: wanted.total()}), Counter({name: found.total()})
                self._compare("", *totals, crashed)

    def _compare(
        self, name: str, wanted: Counter[str], found: Counter[str], crashed: _Played
    ) -> None:
        """Compare how often each was there; `name`: of the effect that they belong to, if any."""
        point, alone = crashed.crash, len(wanted | found) == 1
        assert point is not None
        for each in wanted | found:
            label = name if name and alone else f"{name} {each}".lstrip()
            text = f"{label} {_times(found[each], wanted[each])}"
            if found[each] < wanted[each]:
                _note(self._lost, text, str(point))
            elif found[each] > wanted[each]:
                key = name or each
                kind = self._repeated if key in self._tolerated else self._doubled
                just_now = key in crashed.fresh and point.when == "before"
                where = f"between its effect and {point.write}" if just_now else str(point)
                _note(kind, text, where)


def _note(notes: dict[str, list[str]], text: str, where: str) -> None:
    places = notes.setdefault(text, [])
    if where not in places:
        places.append(where)


def _sentences(notes: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{text}: killed {_listed(places)}" for text, places in notes.items()]


def _listed(places: Sequence[str]) -> str:
    more = len(places) - SHOWN
    return "; ".join([*places[:SHOWN], *([f"{more} more"] if more > 0 else [])])


def _sent(played: _Played, uuid: str) -> Counter[str]:
    """Return the tasks that the task of this UUID has sent, as effects."""
    others = [state for state in played.ends.values() if state.task_uuid != uuid]
    return Counter(
        f"task {one.task_name or 'of a later step'}"
        + ("" if one.state is State.SUCCESS else f" ({one.state})")
        for one in others
    )


def _times(found: int, wanted: int) -> str:
    words = {0: "never", 1: "once", 2: "twice"}
    text = words.get(found, f"{found} times")
    if wanted == 0:
        return f"{text}, and never without a crash"
    if (found, wanted) == (0, 1) or (found > 1 and wanted == 1):
        return text
    return f"{text} instead of {words.get(wanted, f'{wanted} times')}"

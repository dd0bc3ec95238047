"""The scheduler on memory stores and a manual clock: policies, changes, races, faults."""

from __future__ import annotations

import datetime as dt
import logging
import pathlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from machinery_py import ArgumentError, Server, Signature, chain, group
from machinery_py.backends.base import Rider
from machinery_py.errors import MachineryError, ScheduleError, ScheduleNotFound, Unsupported
from machinery_py.schedules.scheduler import Scheduler
from machinery_py.tasks.signature import HEADER_EXPIRES, HEADER_SCHEDULE, HEADER_TICK
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.flaky import Faults, FlakyStore
from machinery_py.testing.waiting import together, wait_until
from machinery_py.wire.signatures import decode_signature
from machinery_py.worker.inline import Inline

START = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc)


class App:
    """A program with one task, and what it has sent."""

    def __init__(self, clock: ManualClock, url: str = "memory://") -> None:
        self.clock = clock
        self.server = Server(url, clock=clock)
        self.ran: list[str] = []
        self.task = self.server.register_task("note", lambda: self.ran.append(self.time()))
        self.server.register_task("tell", self.ran.append)
        self.scheduler = Scheduler(self.server.app, self.server.declared)
        self.inline = Inline(self.server.app)

    def time(self) -> str:
        return self.clock.now().strftime("%H:%M:%S")

    def declare(self, spec: str, name: str = "s", **options: Any) -> None:
        self.server.register_periodic_task(spec, name, Signature(name="note"), **options)
        self.scheduler.step()

    def restart(self) -> None:
        """Another worker of the same program, which knows nothing yet."""
        self.scheduler = Scheduler(self.server.app, self.server.declared)

    def go(self, seconds: float, step: float = 1.0) -> None:
        """Let time pass with the scheduler at work."""
        for _ in range(round(seconds / step)):
            self.clock.advance(step)
            self.scheduler.step()

    def ticks(self, name: str = "s") -> list[str]:
        """The ticks whose messages wait, in order."""
        return [
            signature.headers[HEADER_TICK][11:19]
            for signature in self.server.broker.get_pending_tasks()
            if signature.headers[HEADER_SCHEDULE] == name
        ]

    def run(self) -> None:
        self.inline.drain()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(START)


@pytest.fixture
def app(clock: ManualClock) -> App:
    return App(clock)


# Ticks


def test_each_tick_is_sent_at_its_time(app: App) -> None:
    app.declare("* * * * *")
    app.declare("@every 90s", "e")
    app.go(300)

    assert app.ticks() == ["03:05:00", "03:06:00", "03:07:00", "03:08:00", "03:09:00"]
    assert app.ticks("e") == ["03:05:35", "03:07:05", "03:08:35"]
    app.run()
    assert len(app.ran) == 8


def test_scheduler_sleeps_until_the_next_tick_or_a_change(app: App) -> None:
    assert app.scheduler.step() == 5.0
    app.declare("* * * * *")
    assert app.scheduler.step() == 1.0
    app.clock.advance(54.4)
    assert app.scheduler.step() == pytest.approx(0.6)
    app.clock.advance(0.6)
    app.scheduler.step()
    assert app.ticks() == ["03:05:00"]


def test_tick_names_its_time_and_each_run_has_its_own_uuid(app: App) -> None:
    app.server.register_periodic_task("* * * * *", "s", Signature(name="note", uuid="mine"))
    app.scheduler.step()
    app.go(120)

    sent = app.server.broker.get_pending_tasks()
    assert [signature.headers for signature in sent] == [
        {HEADER_SCHEDULE: "s", HEADER_TICK: f"2026-01-02T03:0{minute}:00+00:00"}
        for minute in (5, 6)
    ]
    assert len({signature.uuid for signature in sent} - {"mine"}) == 2


def test_delay_and_expiry_count_from_the_tick(app: App) -> None:
    late = app.task.options(delay=3600, expires=7200).signature()
    app.server.register_periodic_task("0 6 * * *", "s", late)
    app.server.register_periodic_chain(
        "0 6 * * *", "c", app.task.options(delay=60).signature(), late
    )
    app.scheduler.step()
    app.clock.advance(hours=2, minutes=55, seconds=55)
    for day in (2, 3):
        six = dt.datetime(2026, 1, day, 6, tzinfo=dt.timezone.utc)
        app.scheduler.step()
        sent = [decode_signature(message.body) for message in app.server.broker.delayed(10)]
        delayed = {signature.headers[HEADER_SCHEDULE]: signature for signature in sent}
        assert (delayed["s"].eta, delayed["c"].eta) == (
            six + dt.timedelta(hours=1),
            six + dt.timedelta(minutes=1),
        )
        assert delayed["s"].headers[HEADER_EXPIRES] == repr(
            (six + dt.timedelta(hours=2)).timestamp()
        )
        for _ in range(2):
            app.clock.advance(hours=1, minutes=1)
            app.run()
        assert app.ran == ["07:01:00", "07:01:00", "08:02:00"] * (day - 1)
        app.clock.advance(hours=21, minutes=58)


def test_a_declaration_with_a_delay_is_the_same_at_each_start(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        program = App(clock, "memory://starts")
        program.server.register_periodic_task(
            "0 6 * * *", "s", program.task.options(delay=60, expires=60).signature()
        )
        program.scheduler.step()
        clock.advance(hours=1)
    assert "is changed" not in caplog.text


def test_workflows_are_sent_whole(app: App) -> None:
    server = app.server
    server.register_task("add", lambda *numbers: sum(numbers))
    server.register_task("keep", lambda *numbers: app.ran.append(str(numbers)))
    add = lambda *numbers: Signature.of("add", *numbers)  # noqa: E731
    server.register_periodic_chain("0 6 * * *", "chain", add(1, 1), add(5), Signature(name="keep"))
    server.register_periodic_group("0 6 * * *", "group", 10, add(1, 2), Signature(name="note"))
    server.register_periodic_chord(
        "0 6 * * *", "chord", 10, Signature(name="keep"), add(1, 2), add(3, 4)
    )
    server.schedules.add(
        "0 6 * * *", "nested", chain(add(1, 0), group(add(1), add(2)), Signature(name="keep"))
    )
    app.scheduler.step()
    app.clock.advance(hours=2, minutes=55, seconds=55)
    for _ in range(2):
        app.scheduler.step()
        app.run()
        app.clock.advance(hours=24)

    assert Counter(app.ran) == Counter({"(7,)": 2, "(3, 7)": 2, "(2, 3)": 2, "06:00:00": 2})


def test_a_task_that_no_scheduler_knows_can_be_sent(clock: ManualClock) -> None:
    url = "memory://shared-by-two"
    web, worker = App(clock, url), App(clock, url)
    web.server.register_task("mail", lambda: None)
    web.server.schedules.add(
        "* * * * *", "s", Signature(name="mail", routing_key="machinery_tasks")
    )
    worker.scheduler.step()
    worker.go(60)
    assert [one.name for one in web.server.broker.get_pending_tasks()] == ["mail"]


# Missed ticks


@pytest.mark.parametrize(
    ("catch_up", "window", "away", "expected", "missed"),
    [
        ("skip", 0, 600, ["03:14:00"], 9),
        ("skip", 0, 55 + 20, ["03:05:00"], 0),  # a minute's tick is on time for a minute
        (False, 0, 55 + 59, ["03:05:00"], 0),
        ("latest", 0, 600 - 5, ["03:14:00"], 9),
        (True, 0, 600 - 5, ["03:14:00"], 9),
        ("latest", 0, 3 * 86400, ["03:04:00"], 3 * 1440 - 1),
        ("all", 0, 300, ["03:05:00", "03:06:00", "03:07:00", "03:08:00", "03:09:00"], 0),
        ("all", 120, 300, ["03:08:00", "03:09:00"], 3),
    ],
)
def test_missed_ticks(
    app: App, catch_up: Any, window: float, away: float, expected: list[str], missed: int
) -> None:
    app.declare("* * * * *", catch_up=catch_up, window=window)
    app.clock.advance(away)
    app.restart()
    app.scheduler.step()

    assert app.ticks() == expected
    report = app.server.schedules.get("s")
    assert report.sent == len(expected)
    assert report.missed == (missed if missed < 1000 else report.missed)
    assert min(missed, 1000) <= report.missed
    app.go(60)
    assert len(app.ticks()) == len(expected) + 1


def test_latest_looks_back_as_far_as_its_window(app: App) -> None:
    app.declare("0 6 * * *", catch_up=True)
    app.declare("0 6 * * *", "short", catch_up=True, window=3600)
    app.declare("0 6 * * *", "skip")
    app.clock.advance(hours=8)
    app.restart()
    app.scheduler.step()
    assert (app.ticks(), app.ticks("short"), app.ticks("skip")) == (["06:00:00"], [], [])
    assert [one.missed for one in app.server.schedules.list()] == [0, 1, 1]


def test_fast_schedule_catches_up_short_outages_only(
    app: App,
) -> None:
    app.declare("* * * * * *")
    app.clock.advance(8)
    app.scheduler.step()
    assert len(app.ticks()) == 8
    app.clock.advance(3600)
    app.scheduler.step()
    assert len(app.ticks()) == 8 + 11  # those of the last 10 s
    assert app.server.schedules.get("s").missed >= 1000


def test_every_stays_on_its_grid(app: App) -> None:
    app.declare("@every 90s")
    app.clock.advance(days=30, seconds=7)
    app.scheduler.step()
    app.go(90)
    (first, second) = app.ticks()
    assert (first, second) == ("03:04:05", "03:05:35")


def test_a_clock_that_goes_back_a_little_fires_nothing_twice(app: App) -> None:
    app.declare("* * * * *")
    app.declare("@every 30m", "e")
    app.go(120)
    assert len(app.ticks()) == 2
    app.clock._start -= dt.timedelta(seconds=55)
    app.restart()
    app.go(55)
    assert len(app.ticks()) == 2
    app.go(60)
    assert app.ticks()[2:] == ["03:07:00"]


@pytest.mark.parametrize("url", ["memory://", "sqlite"])
@pytest.mark.parametrize("is_running", [True, False])
def test_clock_that_was_ahead_once_stops_no_schedule(
    clock: ManualClock,
    url: str,
    is_running: bool,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App(clock, f"sqlite:///{tmp_path}/store.db" if url == "sqlite" else url)
    app.declare("* * * * *", catch_up="skip")
    app.declare("@every 40s", "e")
    app.declare("0 5 * * *", "daily")
    app.go(120)
    clock._start += dt.timedelta(days=1)
    app.go(1)
    clock._start -= dt.timedelta(days=1)
    if not is_running:
        app.restart()

    app.go(120)

    assert app.ticks()[-2:] == ["03:07:00", "03:08:00"]
    assert app.ticks("e")[-2:] == ["03:06:47", "03:07:27"]
    logged = [one.getMessage() for one in caplog.records]
    found = [line for line in logged if "its last tick is at" in line]
    assert sorted(line.split()[1].rstrip(":") for line in found) == ["e", "s"]
    app.server.close()


class _Wrong:
    """A machine's clock that is an hour off; lengths are right."""

    def __init__(self, clock: ManualClock, hours: int) -> None:
        self._clock, self._off = clock, dt.timedelta(hours=hours)

    def now(self) -> dt.datetime:
        return self._clock.now() + self._off

    def monotonic(self) -> float:
        return self._clock.monotonic()


@pytest.mark.parametrize("hours", [-1, 1, 30])
def test_a_worker_with_a_wrong_clock_goes_by_the_stores(
    app: App, clock: ManualClock, hours: int, caplog: pytest.LogCaptureFixture
) -> None:
    app.declare("0 * * * *")
    inner = app.server.app
    inner.swap(inner.config, _Wrong(clock, hours), inner.stores)
    app.restart()

    app.go(3500, step=50)

    assert app.ticks() == ["04:00:00"]
    assert f"this machine's clock is {abs(hours) * 3600}.0 s" in caplog.text
    inner.swap(inner.config, clock, inner.stores)


# Runs that overlap


def test_overlap_skip_leaves_out_ticks_while_a_run_goes_on(app: App) -> None:
    app.declare("* * * * *", overlap="skip")
    app.go(180)
    assert app.ticks() == ["03:05:00"]
    assert app.server.schedules.get("s").held == 2
    app.run()
    app.go(60)
    assert app.ticks() == ["03:08:00"]


def test_overlap_queue_sends_one_when_the_one_before_is_over(app: App) -> None:
    app.declare("* * * * *", overlap="queue")
    app.go(180)
    assert (app.ticks(), app.server.schedules.get("s").waiting) == (["03:05:00"], 2)
    seen = []
    for _ in range(3):
        seen += app.ticks()
        app.run()
        app.go(2)
    assert seen == ["03:05:00", "03:06:00", "03:07:00"]
    assert app.server.schedules.get("s").waiting == 0
    app.go(60)
    assert app.ticks() == ["03:08:00"]


def test_a_chain_holds_the_next_run_up_until_its_last_step(app: App) -> None:
    app.server.register_periodic_chain(
        "* * * * *",
        "s",
        Signature.of("tell", "one"),
        Signature.of("tell", "two").replace(routing_key="slow"),
        overlap="skip",
    )
    app.scheduler.step()
    app.go(60)
    fast = Inline(app.server.app, ["machinery_tasks"])
    fast.drain()
    app.go(60)
    assert (app.ran, app.server.schedules.get("s").sent) == (["one"], 1)
    app.run()
    app.go(60)
    assert (app.ran, app.server.schedules.get("s").sent) == (["one", "two"], 2)


def test_a_run_that_failed_is_over(app: App) -> None:
    app.server.register_task("bad", lambda: 1 / 0)
    app.server.register_periodic_chain(
        "* * * * *", "s", Signature(name="bad"), Signature(name="note"), overlap="skip"
    )
    app.scheduler.step()
    for _ in range(3):
        app.go(60)
        app.run()
    assert app.server.schedules.get("s").sent == 3


def test_purged_run_does_not_block_its_schedule(app: App) -> None:
    app.declare("0 * * * *", overlap="skip")
    app.go(3600, step=60)
    app.server.broker.purge("machinery_tasks")
    app.go(26 * 3600, step=60)
    assert app.server.schedules.get("s").sent == 2


# Changes at run time


def test_paused_schedule_stays_paused_over_a_restart(app: App) -> None:
    app.declare("* * * * *", catch_up="all")
    app.server.schedules.pause("s")
    app.restart()
    app.go(300)
    report = app.server.schedules.get("s")
    assert (app.ticks(), report.paused, report.next_runs) == ([], True, ())

    app.server.schedules.resume("s")
    app.go(60)
    assert app.ticks() == ["03:10:00"]
    assert app.server.schedules.get("s").missed == 0


def test_declared_schedule_can_be_paused_before_any_worker(app: App) -> None:
    app.server.register_periodic_task("* * * * *", "s", Signature(name="note"))
    app.server.schedules.pause("s")
    app.go(120)
    assert (app.ticks(), app.server.schedules.get("s").paused) == ([], True)


def test_a_listing_shows_the_last_run_and_the_next_three(app: App) -> None:
    app.declare("0 6 * * *", tz="Europe/Berlin")
    app.clock.advance(hours=1, minutes=56)
    app.scheduler.step()
    (report,) = app.server.schedules.list()

    assert (report.name, report.spec, report.tz, report.tasks) == (
        "s",
        "0 6 * * *",
        "Europe/Berlin",
        ["note"],
    )
    assert report.last_run == dt.datetime(2026, 1, 2, 5, tzinfo=dt.timezone.utc)
    assert report.next_runs == [
        dt.datetime(2026, 1, day, 5, tzinfo=dt.timezone.utc) for day in (3, 4, 5)
    ]
    assert (report.declared, report.paused, report.sent, report.catch_up) == (
        True,
        False,
        1,
        "skip",
    )


def test_run_now_sends_once_and_leaves_the_ticks(app: App) -> None:
    app.declare("0 6 * * *")
    app.server.schedules.pause("s")
    app.server.schedules.run_now("s")
    app.server.schedules.resume("s")
    assert app.ticks() == ["03:04:05"]
    app.clock.advance(hours=2, minutes=56)
    app.scheduler.step()
    assert app.ticks() == ["03:04:05", "06:00:00"]


def test_added_changed_and_removed(app: App) -> None:
    schedules = app.server.schedules
    schedules.add("* * * * *", "s", app.task.signature())
    with pytest.raises(ScheduleError, match="schedule 's' is there already"):
        schedules.add("* * * * *", "s", app.task.signature())
    app.scheduler.step()
    app.go(60)
    schedules.change("s", spec="30 * * * *", overlap="skip")
    app.go(1600)
    assert app.ticks() == ["03:05:00", "03:30:00"]
    assert (schedules.get("s").overlap, schedules.get("s").declared) == ("skip", False)
    schedules.change("s", step=Signature.of("tell", "x"), spec="* * * * *", overlap="allow")
    app.go(60)
    assert app.server.broker.get_pending_tasks()[-1].name == "tell"
    schedules.remove("s")
    app.go(120)
    assert (len(app.ticks()), schedules.list()) == (3, [])


def test_what_is_wrong_is_refused(app: App) -> None:
    schedules, server = app.server.schedules, app.server
    app.declare("* * * * *", "digest")
    with pytest.raises(
        ScheduleNotFound,
        match=r"no schedule 'digets' \(there are: digest; did you mean 'digest'\?\)",
    ):
        schedules.pause("digets")
    for call in (
        schedules.resume,
        schedules.remove,
        schedules.run_now,
        schedules.get,
        schedules.change,
    ):
        with pytest.raises(ScheduleNotFound):
            call("x")
    with pytest.raises(ScheduleError, match="hour '25'"):
        schedules.change("digest", spec="0 25 * * *")
    with pytest.raises(ScheduleError, match="overlap='maybe'"):
        server.register_periodic_task("* * * * *", "x", app.task.signature(), overlap="maybe")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="catch_up='some'"):
        server.register_periodic_task("* * * * *", "x", app.task.signature(), catch_up="some")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match="no option 'oberlap'"):
        server.register_periodic_task("* * * * *", "x", app.task.signature(), oberlap="skip")  # type: ignore[call-arg]
    with pytest.raises(ScheduleError, match="never due"):
        server.register_periodic_task("0 0 31 2 *", "x", app.task.signature())
    with pytest.raises(ScheduleError, match="'digest' is declared already"):
        server.register_periodic_task("0 0 * * *", "digest", app.task.signature())
    with pytest.raises(ArgumentError, match="missing argument 'shop'"):

        @server.periodic("@daily")
        @server.task
        def wants(shop: int) -> None: ...

    assert [one.name for one in schedules.list()] == ["digest"]


def test_the_decorator_takes_tasks_and_functions(app: App) -> None:
    @app.server.periodic("@every 30s")
    def pulse() -> int:
        return 1

    @app.server.periodic("0 6 * * MON-FRI", tz="Europe/Berlin", name="weekdays")
    @app.server.task("mail.digest")
    def digest() -> None: ...

    assert pulse() == 1
    assert [(one.name, one.stored) for one in app.server.schedules.list()] == [
        ("pulse", False),
        ("weekdays", False),
    ]
    assert app.server.backend.records().bodies == {}  # nothing is stored before a worker starts
    app.scheduler.step()
    assert [one.stored for one in app.server.schedules.list()] == [True, True]
    assert [(one.name, one.tasks) for one in app.server.schedules.list()] == [
        ("pulse", ["pulse"]),
        ("weekdays", ["mail.digest"]),
    ]


# What code declares


def changed_code(app: App, spec: str, **options: Any) -> Scheduler:
    """A worker of the next version of the program."""
    other = Server(app.server.config, clock=app.clock)
    other.app.swap(app.server.config, app.clock, app.server.app.stores)
    other.register_periodic_task(spec, "s", Signature(name="note"), **options)
    return Scheduler(other.app, other.declared)


def test_changed_code_replaces_a_schedule_but_not_its_pause(app: App) -> None:
    app.declare("* * * * *")
    app.server.schedules.pause("s")
    new = changed_code(app, "30 * * * *", overlap="skip")
    new.step()
    report = app.server.schedules.get("s")
    assert (report.spec, report.overlap, report.paused) == ("30 * * * *", "skip", True)


def test_change_at_run_time_stays_until_the_code_changes(app: App) -> None:
    app.declare("* * * * *")
    app.server.schedules.change("s", spec="15 * * * *")
    app.restart()
    app.scheduler.step()
    assert app.server.schedules.get("s").spec == "15 * * * *"
    changed_code(app, "30 * * * *").step()
    assert app.server.schedules.get("s").spec == "30 * * * *"


def test_a_changed_spec_counts_from_now(app: App) -> None:
    app.declare("0 6 * * *", catch_up="all", window=86400)
    app.clock.advance(hours=2)
    changed_code(app, "*/10 * * * *", catch_up="all", window=86400).step()
    app.restart()
    app.scheduler.step()
    assert app.ticks() == []


@pytest.mark.parametrize("knows_the_task", [True, False])
def test_dropped_schedule_ends_with_the_code_that_declares_it(
    clock: ManualClock, knows_the_task: bool, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory://dropped-{knows_the_task}"
    old, new = App(clock, url), App(clock, url)
    task = "note" if knows_the_task else "gone"
    old.server.register_periodic_task("* * * * *", "s", Signature(name=task))
    old.server.schedules.add("* * * * *", "added", old.task.signature())
    old.scheduler.step()
    new.scheduler.step()
    assert "code has declared once: s; this worker does not send it" in caplog.text

    old.go(60)  # both codes are deployed
    new.go(120)  # only the new one is

    assert new.ticks() == ["03:05:00"]
    assert new.ticks("added") == ["03:05:00", "03:06:00", "03:07:00"]
    schedules = new.server.schedules
    assert [one.name for one in schedules.list()] == ["added"]
    assert [(one.name, one.dropped) for one in schedules.list(dropped=True)] == [
        ("added", False),
        ("s", True),
    ]
    old.server.schedules.pause("s")
    old.restart()
    old.go(60)
    assert old.ticks() == ["03:05:00"]  # the code came back, and its pause is still there
    old.server.schedules.resume("s")
    old.go(60)
    assert old.ticks() == ["03:05:00", "03:09:00"]

    assert (old.server.schedules.undeclared(), schedules.undeclared()) == ([], ["s"])
    assert schedules.remove_undeclared() == ["s"]
    assert [one.name for one in schedules.list(dropped=True)] == ["added"]


def test_schedules_of_another_application_are_not_removed(clock: ManualClock) -> None:
    app = App(clock, "memory://of-another-application")
    app.declare("* * * * *")
    other = Server(app.server.config.replace(application="other"), clock=clock)

    assert other.schedules.undeclared() == other.schedules.remove_undeclared() == []
    assert [one.owner for one in app.server.schedules.list()] == ["machinery_tasks"]


def test_schedule_declared_while_a_worker_runs_is_sent(app: App) -> None:
    app.scheduler.step()
    app.server.register_periodic_task("* * * * *", "late", Signature(name="note"))
    app.go(60)
    assert app.ticks("late") == ["03:05:00"]


# Many schedulers, faults


def test_ten_schedulers_send_each_tick_once(app: App) -> None:
    app.declare("* * * * * *")
    schedulers = [Scheduler(app.server.app, app.server.declared) for _ in range(10)]
    for _ in range(20):
        app.clock.advance(1)
        together(10, lambda index: schedulers[index].step())
    assert len(app.ticks()) == 20
    assert len(set(app.ticks())) == 20


@pytest.mark.parametrize("seed", range(8))
def test_faults_lose_no_tick_and_double_none(clock: ManualClock, seed: int) -> None:
    """Refused calls and lost replies at random, and schedulers that are forgotten at any moment."""
    app, rng = App(clock), random.Random(seed)
    store = app.server.app.stores.store
    faults = Faults(rng=random.Random(seed + 100), probability=0.4)
    app.declare("* * * * * *", catch_up="all")
    app.server.register_periodic_task("*/2 * * * * *", "q", Signature(name="note"), overlap="queue")
    app.scheduler.step()
    app.server.app.stores.store = FlakyStore(store, faults)
    schedulers = [Scheduler(app.server.app, app.server.declared) for _ in range(4)]
    for _ in range(60):
        clock.advance(1)
        for index in rng.sample(range(4), 3):
            if rng.random() < 0.1:
                schedulers[index] = Scheduler(app.server.app, app.server.declared)
            try:
                schedulers[index].step()
            except MachineryError:
                pass
    app.server.app.stores.store = store
    Scheduler(app.server.app, app.server.declared).step()

    assert len(faults.failed) > 10
    assert app.ticks() == [
        (START + dt.timedelta(seconds=n)).strftime("%H:%M:%S") for n in range(1, 61)
    ]
    assert app.ticks("q") == ["03:04:06"]
    assert app.server.schedules.get("q").waiting + app.server.schedules.get("q").held == 29


def test_one_that_cannot_be_sent_does_not_stop_the_others(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    app.declare("* * * * *")
    app.declare("* * * * *", "a-broken")
    backend = app.server.backend
    body = (backend.records().bodies or {})["a-broken"]
    assert backend.amend(
        Rider(name="a-broken", expected=body, body=body.replace(b'{"task":', b'{"tusk":'))
    )
    assert backend.amend(Rider(name="b-unreadable", expected=None, body=b"\xff"))
    with caplog.at_level(logging.ERROR):
        app.go(120)
    assert app.ticks() == ["03:05:00", "03:06:00"]
    assert "schedule a-broken: its tick at 2026-01-02T03:05:00+00:00 cannot be sent" in caplog.text
    assert caplog.text.count("schedule b-unreadable is left alone") == 1


def test_a_hook_that_fails_does_not_stop_the_others(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    app.declare("* * * * *", "a")
    app.declare("* * * * *", "b")

    @app.server.set_pre_publish_handler
    def hook(signature: Signature[Any]) -> None:
        if signature.headers[HEADER_SCHEDULE] == "a":
            raise RuntimeError("not this one")

    app.go(120)
    assert (app.ticks("a"), app.ticks("b")) == ([], ["03:05:00", "03:06:00"])
    assert (
        "schedule a: its tick at 2026-01-02T03:05:00+00:00 cannot be sent: not this one"
        in caplog.text
    )


def test_a_backend_that_keeps_nothing_is_said_so(
    clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(broker="memory://", result_backend="null", clock=clock)
    server.register_periodic_task("* * * * *", "s", Signature(name="note"))
    with pytest.raises(Unsupported, match="the null backend keeps no schedules"):
        server.schedules.list()
    with server.new_worker(concurrency=1):
        wait_until(lambda: "no schedule will be sent by this worker" in caplog.text)


def worker_options() -> list[tuple[dict[str, bool], bool]]:
    return [({}, True), ({"scheduler": False}, False), ({"burst": True}, False)]


@pytest.mark.parametrize(("options", "expected"), worker_options())
def test_workers_carry_the_scheduler(options: dict[str, bool], expected: bool) -> None:
    server = Server("memory://")
    ran: list[int] = []

    @server.periodic("* * * * * *")
    def pulse() -> None:
        ran.append(1)

    with server.new_worker(concurrency=1, **options):
        if expected:
            wait_until(lambda: len(ran) >= 2)
            names: Callable[[], list[str]] = lambda: [one.name for one in server.schedules.list()]  # noqa: E731
            assert names() == ["pulse"]
    assert bool(server.backend.records().bodies) is expected


def test_eager_runs_at_once() -> None:
    server = Server("eager")
    ran: list[int] = []
    task = server.register_task("t", lambda: ran.append(1))
    server.schedules.add("@daily", "s", task.signature())
    server.schedules.run_now("s")
    assert ran == [1]
    assert server.schedules.get("s").sent == 1


def test_year_of_many_cron_specs_equals_a_brute_force_search(app: App) -> None:
    for name, spec in (("h", "7 */4 * * *"), ("d", "30 2 * * *"), ("m", "0 0 L * *")):
        app.declare(spec, name, tz="Europe/Berlin")
    end = START + dt.timedelta(days=365)
    while (moment := app.scheduler.next_due) is not None and moment <= end:
        app.clock.advance((moment - app.clock.now()).total_seconds())
        app.scheduler.step()
    reports = {one.name: one.sent for one in app.server.schedules.list()}
    assert reports == {"h": 2190, "d": 365, "m": 12}


# Go's lock


def go_app(clock: ManualClock) -> App:
    app = App(clock)
    inner = app.server.app
    inner.swap(inner.config.replace(go_program="/opt/app/bin/worker"), clock, inner.stores)
    return app


def test_a_tick_that_go_has_locked_is_left_to_go(clock: ManualClock) -> None:
    app = go_app(clock)
    app.declare("* * * * *")
    app.go(60)
    assert app.ticks() == ["03:05:00"]
    go = app.server.app.stores.lock.go()
    minute = dt.timedelta(minutes=1)
    tick = dt.datetime(2026, 1, 2, 3, 6, tzinfo=dt.timezone.utc)
    app.clock.advance((tick - clock.now()).total_seconds())
    assert go.lock("machinery_lock_workers* * * * *", round((tick + minute).timestamp()) * 10**9)
    app.go(120)
    assert app.ticks() == ["03:05:00", "03:07:00", "03:08:00"]
    assert not go.lock(
        "machinery_lock_workers* * * * *", round((tick + 9 * minute).timestamp()) * 10**9
    )


def test_ten_schedulers_under_gos_lock_send_each_tick_once(clock: ManualClock) -> None:
    app = go_app(clock)
    app.declare("* * * * * *")
    schedulers = [Scheduler(app.server.app, app.server.declared) for _ in range(10)]
    for _ in range(20):
        app.clock.advance(1)
        together(10, lambda index: schedulers[index].step())
    assert len(app.ticks()) == 20
    assert len(set(app.ticks())) == 20


def test_death_under_gos_lock_delays_the_next_tick_only_briefly(
    clock: ManualClock,
) -> None:
    app = go_app(clock)
    app.declare("* * * * *")
    app.clock.advance(55)
    store = app.server.app.stores.store
    flaky = FlakyStore(store)
    flaky.next_call("submit", lose_reply=True)  # dies when it has claimed the tick
    app.server.app.stores.store = flaky
    with pytest.raises(MachineryError):
        app.scheduler.step()
    app.server.app.stores.store = store
    app.restart()
    app.scheduler.step()
    assert app.ticks() == []
    app.go(11)
    assert app.ticks() == ["03:05:00"]

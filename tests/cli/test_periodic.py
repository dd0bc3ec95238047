"""`machinery periodic …`, on a SQLite file."""

from __future__ import annotations

import re

import pytest

from machinery_py.testing.waiting import wait_until
from tests.cli.app import HANG, App, app_in_a_folder

app = app_in_a_folder

SCHEDULES = """
server.register_periodic_task(
    "0 6 * * MON-FRI", "weekdays", note.signature("six"), tz="Europe/Berlin"
)
server.register_periodic_task("* * * * * *", "pulse", note.signature("tick"), catch_up=True)
"""


@pytest.fixture
def clockwork(app: App) -> App:
    app.write("tasks.py", (app.folder / "tasks.py").read_text() + SCHEDULES)
    return app


def states(app: App) -> dict[str, bool]:
    return {one["name"]: one["paused"] for one in app.json("periodic", "tasks")}


def test_an_app_without_schedules_lists_none(app: App) -> None:
    assert app.json("periodic", "tasks") == []


def test_listing_shows_when_each_schedule_is_due(clockwork: App) -> None:
    head, pulse, weekdays = clockwork.run("periodic", "tasks").stdout.splitlines()
    assert head.split() == ["NAME", "SPEC", "ZONE", "SENDS", "STATE", "LAST", "RUN", "NEXT", "RUNS"]
    assert re.match(r"pulse +\* \* \* \* \* \* +UTC +note +no worker yet +- +20\d\d-", pulse)
    assert re.match(
        r"weekdays +0 6 \* \* MON-FRI +Europe/Berlin +note +no worker yet +- +"
        r"20\d\d-\d\d-\d\d \d\d:00, ",
        weekdays,
    )
    one = clockwork.json("periodic", "tasks")[1]
    assert (one["name"], one["tasks"], one["stored"], one["catch_up"], len(one["next_runs"])) == (
        "weekdays",
        ["note"],
        False,
        "skip",
        3,
    )


def test_worker_sends_schedules_and_keeps_pauses_over_a_restart(clockwork: App) -> None:
    notes = clockwork.folder / "notes.txt"
    worker = clockwork.worker("-c", "1")
    wait_until(lambda: notes.exists() and notes.read_text().count("tick") >= 2, HANG, "two ticks")
    assert clockwork.run("periodic", "pause", "tasks", "pulse").stdout == "paused: pulse\n"
    assert worker.stop() == 0
    before = notes.read_text()

    clockwork.worker("-c", "1")
    assert clockwork.run("periodic", "run", "tasks", "weekdays").stdout == "sent: weekdays\n"
    wait_until(lambda: "six" in notes.read_text(), HANG, "the run that was asked for")
    assert states(clockwork) == {"pulse": True, "weekdays": False}
    assert notes.read_text().count("tick") == before.count("tick")
    clockwork.run("periodic", "resume", "tasks", "pulse")
    wait_until(
        lambda: notes.read_text().count("tick") > before.count("tick"),
        HANG,
        "a tick behind the pause",
    )


def test_schedule_that_is_removed_as_it_is_sent_is_no_error(app: App) -> None:
    text = """
from machinery_py.events import TaskSent

server.schedules.add("@daily", "once", note.signature("now"))
server.events.subscribe(TaskSent, lambda _: server.schedules.remove("once"))
"""
    app.write("tasks.py", (app.folder / "tasks.py").read_text() + text)
    assert app.run("periodic", "run", "tasks", "once").stdout == "sent: once\n"


def test_no_scheduler_sends_nothing(clockwork: App) -> None:
    clockwork.worker("--no-scheduler")
    clockwork.json("periodic", "run", "tasks", "weekdays")
    wait_until((clockwork.folder / "notes.txt").exists, HANG)
    assert "tick" not in (clockwork.folder / "notes.txt").read_text()
    assert [one["stored"] for one in clockwork.json("periodic", "tasks")] == [False, True]


def test_change_and_remove(clockwork: App) -> None:
    words = (
        "--spec",
        "30 7 * * *",
        "--tz",
        "UTC",
        "--catch-up",
        "all",
        "--window",
        "2h",
        "--overlap",
        "skip",
    )
    one = clockwork.json("periodic", "change", "tasks", "weekdays", *words)
    assert [one[key] for key in ("spec", "tz", "catch_up", "window", "overlap")] == [
        "30 7 * * *",
        "UTC",
        "all",
        7200.0,
        "skip",
    ]
    said = clockwork.run("periodic", "change", "tasks", "weekdays", "--spec", "0 8 * * *").stdout
    assert re.match(r"changed: weekdays; next: 20\d\d-\d\d-\d\d ", said)
    assert (
        clockwork.run("periodic", "pause", "tasks", "weekdays", "pulse", "--yes").stdout
        == "paused: weekdays, pulse\n"
    )
    assert clockwork.json("periodic", "remove", "tasks", "weekdays", "pulse", "--yes") == [
        "weekdays",
        "pulse",
    ]
    assert [one["stored"] for one in clockwork.json("periodic", "tasks")] == [False, False]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("pause", "tasks", "weekday"),
            "no schedule 'weekday' (there are: pulse, weekdays; did you mean 'weekdays'?)",
        ),
        (("change", "tasks", "weekdays"), "nothing to change"),
        (
            ("change", "tasks", "weekdays", "--spec", "61 * * * *"),
            "schedule '61 * * * *': minute '61': out of range",
        ),
        (
            ("remove", "tasks", "weekdays"),
            "remove 1 schedule: weekdays? (nobody to ask here: say --yes)",
        ),
        (("pause", "tasks"), "too few arguments"),
    ],
)
def test_wrong_command_changes_no_schedule(
    clockwork: App, words: tuple[str, ...], text: str
) -> None:
    clockwork.run("periodic", "pause", "tasks", "pulse")
    done = clockwork.run("periodic", *words, code=2)
    assert text in done.stderr
    assert states(clockwork) == {"pulse": True, "weekdays": False}

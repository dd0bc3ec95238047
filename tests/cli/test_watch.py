"""`machinery events`, `machinery top` and `worker -E`, as a user types them."""

from __future__ import annotations

import datetime as dt
import json
import os
import pty
import subprocess
import sys
import termios
import time

from machinery_py.brokers.base import QueueStats, WorkerInfo
from machinery_py.cli.watch import picture
from machinery_py.clock import UTC
from machinery_py.control.fleet import FleetState
from machinery_py.events import WorkerHeartbeat
from machinery_py.testing.waiting import wait_until
from tests.cli.app import HANG, TASKS, App, app_in_a_folder

app = app_in_a_folder

WORK = ("worker", "tasks", "--burst", "-c", "1", "-n", "web-1")
ENDS = ("TaskSucceeded", "TaskFailed", "WorkerOffline")


def test_events_of_a_worker_are_printed_as_text_and_as_json(app: App) -> None:
    """T36, T42: of the worker with -E alone, which wins over the setting."""
    app.write(
        "tasks.py",
        TASKS.replace("Server()", "Server(Config(events=False))").replace(
            "import Server", "import Config, Server"
        ),
    )
    app.run("send", "tasks", "add", "1", "2")
    app.run(*WORK)
    uuid = app.send("add", "20", "22")
    app.send("boom")
    app.run(*WORK, "-E")

    words = ("events", "tasks", *ENDS, "--since", "60", "--limit", "3")
    records = [json.loads(one) for one in app.run(*words, "--json").stdout.splitlines()]
    text = app.run(*words).stdout

    done, failed, offline = records
    assert [one["kind"] for one in records] == list(ENDS)
    assert (done["uuid"], done["name"], done["result"], done["worker"]) == (
        uuid,
        "add",
        "42",
        "web-1",
    )
    assert (failed["error_type"], failed["attempt"]) == ("ValueError", 1)
    assert "ValueError: no" in failed["traceback"]
    assert (offline["processed"], offline["worker"]) == (2, "web-1")
    assert done["clock"] < failed["clock"] < offline["clock"]
    first, second, _ = text.splitlines()
    assert f" TaskSucceeded     web-1 add {uuid[:13]}… runtime=" in first
    assert " result=42 " in first
    assert " error=no error_type=ValueError " in second


def test_task_in_a_process_of_its_own_sends_events_as_its_worker_does(app: App) -> None:
    """L07: what it sends is later than its start, and its end is later than that."""
    relay = "@server.task(pool='process')\ndef relay() -> None:\n    note.send('x')\n"
    app.write("tasks.py", TASKS + relay)
    app.send("relay")
    app.run(*WORK, "-E")

    words = ("events", "tasks", "TaskEvent", "WorkerOffline", "--since", "60", "--limit", "8")
    found = [json.loads(one) for one in app.run(*words, "--json").stdout.splitlines()]

    clock = {(one.get("name"), one["kind"]): one["clock"] for one in found}
    assert (
        clock["relay", "TaskReceived"]
        < clock["relay", "TaskStarted"]
        < clock["note", "TaskSent"]
        < clock["relay", "TaskSucceeded"]
    )
    assert clock["note", "TaskSent"] < clock["note", "TaskReceived"]
    assert len({one["pid"] for one in found}) == 2


def test_event_that_does_not_exist_is_refused_with_the_nearest(app: App) -> None:
    done = app.run("events", "tasks", "TaskFaild", code=2)
    assert done.stderr == (
        "machinery: no event is called 'TaskFaild'; did you mean 'TaskFailed'?\n"
    )


def test_top_prints_the_fleet_once_for_scripts(app: App) -> None:
    app.send("add", "1", "2", "--queue", "mail")
    app.send("add", "20", "22")
    app.send("boom")
    app.run(*WORK, "-E")
    app.worker("-E", "-n", "web-2", "-c", "1", "-Q", "other")

    text = app.run("top", "tasks", "--since", "5m", "--once", "--every", "1s").stdout
    record = app.json("top", "tasks", "--since", "5m", "--every", "1s")

    head, *_ = text.splitlines()
    assert head.startswith("machinery top · ")
    assert " · 1 worker, 0 tasks held, " in head
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "mail 1 0 0 0 0.0" in lines
    assert any(line.startswith("web-2 ") and " alive " in line for line in lines)
    assert not any(line.startswith("web-1 ") for line in lines)  # it has told its end
    assert any(line.startswith("boom 0.0 0 1 0 - -") for line in lines)
    assert any(line.startswith("boom task_") and line.endswith(" no") for line in lines)
    assert (record["tasks"]["add"]["succeeded"], record["tasks"]["boom"]["failed"]) == (1, 1)
    assert [one["name"] for one in record["workers"]] == ["web-2"]


def test_top_redraws_until_q_is_pressed(app: App) -> None:
    own, its = pty.openpty()
    before = termios.tcgetattr(its)
    process = subprocess.Popen(
        [sys.executable, "-m", "machinery_py", "top", "tasks", "--every", "100ms"],
        cwd=app.folder,
        env=app.env,
        stdin=its,
        stdout=its,
        stderr=subprocess.PIPE,
    )
    shown = b""

    def drawn(times: int) -> bool:
        nonlocal shown
        shown += os.read(own, 4096)
        return shown.count(b"machinery top") >= times

    wait_until(lambda: drawn(3))
    os.write(own, b"xq")

    assert process.wait(HANG) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert b"no events so far" in shown
    assert termios.tcgetattr(its) == before
    os.close(own)
    os.close(its)


def test_top_shows_stalled_and_lost_workers_and_a_broker_that_is_away() -> None:
    """T46, T47."""
    now, state = dt.datetime.now(UTC), FleetState()
    long_ago = FleetState(lambda: time.monotonic() - 60.0)
    long_ago.apply([WorkerHeartbeat(worker="gone", host="h", pid=7, active=2, interval=2.5)])
    state.workers.update(long_ago.workers)
    state.apply([WorkerHeartbeat(worker="unlisted", host="h", pid=9, active=2, interval=2.5)])
    stalled = WorkerInfo(
        session="s",
        name="busy",
        host="h",
        pid=8,
        queues=("q",),
        started_at=now,
        beat_at=now,
        stalled=True,
    )
    queues = [QueueStats(queue="q", paused=True)]

    text = picture(state, queues, [stalled], now=now, trouble="Redis is away")

    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "the broker cannot be asked: Redis is away" in lines
    assert any(line.startswith("busy h 8 stalled - - - ") for line in lines)
    assert any(line.startswith("gone h 7 lost - - - ") for line in lines)
    assert any(line.startswith("unlisted h 9 alive - - - ") for line in lines)
    assert "q (paused) 0 0 0 0 0.0" in lines

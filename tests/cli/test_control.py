"""`machinery control`, as a user types it."""

from __future__ import annotations

import json
import os
import signal

from machinery_py.testing.waiting import wait_until
from tests.cli.app import App, app_in_a_folder, children, is_alive

app = app_in_a_folder


def test_workers_are_asked_and_changed_from_a_shell(app: App) -> None:
    app.worker("-n", "web-1", "-c", "1")

    done = app.run("control", "tasks", "set-concurrency", "3", "--timeout", "30")
    assert done.stdout == "web-1:\n  done\n"
    words = ("control", "tasks", "cancel-queue", "machinery_tasks", "--timeout", "30")
    assert "web-1: 'machinery_tasks' is the only queue" in app.run(*words, code=1).stderr
    assert "only queue" in json.loads(app.run(*words, "--json", code=1).stdout)["errors"]["web-1"]
    facts = app.json("control", "tasks", "stats", "--worker", "web-*", "--timeout", "30")
    assert facts["answers"]["web-1"]["concurrency"] == 3
    text = app.run("control", "tasks", "stack", "--timeout", "30").stdout
    assert text.startswith("web-1:\n")
    assert "web-1-agent" in text


def test_running_task_is_terminated_from_a_shell(app: App) -> None:
    one = app.worker("-n", "web-1", "--pool", "process", "-c", "1")
    uuid = app.send("hold", "a")
    wait_until(lambda: bool(app.notes))

    done = app.run("revoke", "tasks", uuid, "--terminate", "--timeout", "30")
    assert done.stdout == f"revoked 1 task\nweb-1:\n  {uuid} = killed\n"
    wait_until(lambda: app.state(uuid) == "FAILURE")
    assert "lost its process" not in one.err


def test_order_that_cannot_be_given_is_refused_in_words(app: App) -> None:
    unknown = app.run("control", "tasks", "pong", code=2)
    assert "no order is called 'pong'" in unknown.stderr
    wrong = app.run("control", "tasks", "set-concurrency", "many", code=2)
    assert "order 'set_concurrency': Expected `int`" in wrong.stderr
    few = app.run("control", "tasks", "set-concurrency", code=2)
    assert "found 0 arguments (expected CONCURRENCY)" in few.stderr
    long = app.run("control", "tasks", "ping", "--timeout", "2h", code=2)
    assert long.stderr.startswith("machinery: timeout: found 7200.0 (expected")
    nobody = app.run("control", "tasks", "ping", "--worker", "gone", "--json", code=1)
    assert json.loads(nobody.stdout)["missing"] == ["gone"]


def test_worker_that_is_shut_down_by_order_is_not_started_again(app: App) -> None:
    one = app.worker("-n", "web", "-p", "2", "-c", "1")
    first, second = (app.json("control", "tasks", "stats")["answers"][f"web-{n}"] for n in (1, 2))
    app.send("hold", "a")
    app.send("hold", "b")
    wait_until(lambda: len(app.notes) == 2)

    def shut_down(name: str) -> None:
        app.run("control", "tasks", "shutdown", "--worker", name, "--timeout", "30")

    # A task may end its process while the order is carried out: it runs again, in the other one.
    shut_down("web-1")
    os.kill(first["pid"], signal.SIGKILL)
    wait_until(lambda: [pid for pid in children(one.pid) if is_alive(pid)] == [second["pid"]])
    shut_down("web-*")
    assert is_alive(second["pid"])
    app.go("a")
    app.go("b")
    assert one.wait() == 1
    assert f"(pid {first['pid']}) was killed by signal 9" in one.err
    assert "starting another one" not in one.err

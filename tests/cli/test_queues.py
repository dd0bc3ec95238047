"""Commands on queues and workers, and `worker -Q`, as a user types them."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from argparse import Namespace
from contextlib import closing

import pytest

from machinery_py import PublishRefused, Server
from machinery_py.cli.queues import workers
from machinery_py.testing.waiting import wait_until
from tests.cli.app import HANG, App, app_in_a_folder

app = app_in_a_folder

BURST = ("worker", "tasks", "--burst", "-c", "1")


def answering(app: App, words: list[str], answer: str) -> tuple[int, str]:
    """Run a command on a terminal, and answer its question; exit code and output."""
    own, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "machinery_py", *words],
        cwd=app.folder,
        env=app.env,
        stdin=its,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    os.write(own, f"{answer}\n".encode())
    out, _ = process.communicate(timeout=HANG)
    os.close(own)
    os.close(its)
    return process.returncode, out


def test_paused_queue_is_shown_until_it_is_resumed(app: App) -> None:
    mail, main = app.send("add", "1", "2", "--queue", "mail"), app.send("add", "3", "4")

    done = app.run("pause", "tasks", "mail")
    assert (done.stdout, done.stderr) == ("paused 'mail' (1 task waiting)\n", "")
    assert {one["queue"]: one["paused"] for one in app.json("queues", "tasks")} == {
        "mail": True,
        "machinery_tasks": False,
    }
    assert app.run("queues", "tasks").stdout.splitlines()[2].startswith("mail (paused)  ")
    app.run(*BURST, "-Q", "mail,machinery_tasks")
    assert (app.state(mail), app.state(main)) == ("PENDING", "SUCCESS")

    assert app.run("resume", "tasks", "mail").stdout == "resumed 'mail'\n"
    app.run(*BURST, "-Q", "mail")
    assert app.state(mail) == "SUCCESS"


def test_unknown_queue_is_paused_with_a_note(app: App) -> None:
    app.send("add", "1", "2", "--queue", "mail")
    done = app.run("pause", "tasks", "mial", "new")
    assert done.stderr == (
        "machinery: there was no queue 'mial' so far; did you mean 'mail'?; "
        "it is paused for when there is\n"
        "machinery: there was no queue 'new' so far; it is paused for when there is\n"
    )
    assert done.stdout == "paused 'mial', 'new'\n"

    assert app.json("resume", "tasks", "mial", "mail") == {"resumed": ["mial", "mail"]}
    done = app.run("resume", "tasks", "mail")
    assert done.stderr == "machinery: queue 'mail' was not paused (paused are: 'new')\n"
    assert app.json("pause", "tasks", "mail", "mail") == {"paused": ["mail"]}
    assert app.run("pause", "tasks", code=2).stderr.startswith("machinery: ")


def test_queue_that_is_over_is_forgotten_and_no_other(app: App) -> None:
    app.send("add", "1", "2", "--queue", "over")
    app.send("add", "1", "2", "--queue", "used")
    app.run("purge", "tasks", "over")

    done = app.run("forget", "tasks", "over", "used", code=1)

    assert done.stdout == "forgot 'over'\n"
    assert done.stderr.startswith("machinery: queue 'used' is in use, and was left as it is")
    assert [one["queue"] for one in app.json("queues", "tasks")] == ["used"]
    assert "no queue 'over'" in app.run("forget", "tasks", "over", code=2).stderr
    app.run("purge", "tasks", "used")
    assert app.json("forget", "tasks", "used") == {"forgotten": ["used"]}


def test_the_doctor_says_that_a_queue_is_paused(app: App) -> None:
    app.send("add", "1", "2", "--queue", "mail")
    app.run("pause", "tasks", "mail", "empty")

    notes = [
        one["text"]
        for one in app.json("doctor", "tasks")
        if (one["check"], one["mark"]) == ("queues", "note")
    ]

    assert notes[0] == "'empty' is paused, and empty"
    assert notes[1].startswith("'mail': 1 task waiting, the oldest for ")
    assert notes[1].endswith("; it is paused (machinery resume tasks mail)")


def test_task_of_a_killed_worker_waits_in_its_paused_queue(app: App) -> None:
    uuid = app.send("hold", "here", "--queue", "mail")
    worker = app.worker("-Q", "mail")
    wait_until(lambda: len(app.notes) == 1, HANG, "a running task")
    app.run("pause", "tasks", "mail")
    first = worker.worker
    worker.close()
    other = app.worker("-Q", "mail,other")

    wait_until(
        lambda: {one["queue"]: one["waiting"] for one in app.json("queues", "tasks")}["mail"] == 1,
        HANG,
        "given back",
    )
    app.run("send", "tasks", "add", "1", "2", "--queue", "other", "--wait")
    assert len(app.notes) == 1
    app.go("here")
    app.run("resume", "tasks", "mail")

    assert app.run("result", "tasks", uuid, "--wait", "--timeout", f"{HANG}s").returncode == 0
    assert [pid for _, pid in app.notes] == [first, other.worker]


def test_several_processes_have_the_weights(app: App) -> None:
    worker = app.worker("-p", "2", "-c", "1", "-Q", "high:6,low:1")
    for queue in ("high", "low"):
        app.run("send", "tasks", "add", "1", "2", "--queue", queue, "--wait")
    assert [one["queues"] for one in app.json("workers", "tasks")] == [["high", "low"]] * 2
    assert worker.stop() == 0


def test_a_worker_goes_through_its_queues_by_weights(app: App) -> None:
    uuids = [app.send("add", "1", "2", "--queue", queue) for queue in ("high", "low", "high")]
    out = app.run(*BURST, "-Q", "high:6,low").stdout
    assert "  queues   high:6, low:1" in out.splitlines()
    assert [app.state(uuid) for uuid in uuids] == ["SUCCESS"] * 3
    assert (
        "  queues   low:2, high:1"
        in app.run(*BURST, MACHINERY_QUEUES="low:2,high").stdout.splitlines()
    )


@pytest.mark.parametrize(
    ("queues", "said"),
    [
        (
            "critical:x",
            "queue 'critical:x': found the weight 'x' "
            "(expected a number greater than 0, as critical:6",
        ),
        ("critical:-1", "found the weight '-1'"),
        ("critical:0", "found the weight '0'"),
        (",", "no queue named"),
    ],
)
def test_a_weight_that_is_none_is_refused(app: App, queues: str, said: str) -> None:
    done = app.run(*BURST, "-Q", queues, code=2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_age_that_the_broker_does_not_know_is_not_made_up(app: App) -> None:
    app.write(
        "forgetful.py",
        """
import msgspec
from machinery_py import Server
from machinery_py.brokers.sqlite.broker import SQLiteBroker

class Forgetful(SQLiteBroker):
    def stats(self):
        return [msgspec.structs.replace(one, oldest_at=None) for one in super().stats()]

server = Server()
server.broker.__class__ = Forgetful
server.task("add")(lambda a, b: a + b)
""",
    )
    app.send("add", "1", "2")

    assert app.run("queues", "forgetful").stdout.splitlines()[1].split() == [
        "machinery_tasks",
        "1",
        "0",
        "0",
        "0",
        "-",
        "0",
    ]
    doctor = app.run("doctor", "forgetful", code=1).stdout
    assert "'machinery_tasks': 1 task waiting; no worker on this queue" in doctor


def test_queues_are_a_table_with_right_aligned_numbers(app: App) -> None:
    for _ in range(2):
        app.send("add", "1", "2")
    app.send("add", "1", "2", "--delay", "1h")

    head, line = app.run("queues", "tasks").stdout.splitlines()
    assert head == "QUEUE            WAITING  HELD  DELAYED  FAILED  OLDEST  PER MIN"
    assert re.fullmatch(
        r"machinery_tasks        2     0        1       0 +[\d.]+ \w+        0", line
    )
    (one,) = app.json("queues", "tasks")
    assert {
        "queue": "machinery_tasks",
        "waiting": 2,
        "running": 0,
        "delayed": 1,
        "dead": 0,
        "failed": 0,
    }.items() <= one.items()
    assert one.keys() == {
        "queue",
        "waiting",
        "running",
        "delayed",
        "dead",
        "failed",
        "oldest",
        "per_minute",
        "paused",
    }


def test_workers_are_listed(app: App) -> None:
    worker = app.worker("-n", "ada", "-Q", "high,low", "-c", "3")

    (one,) = app.json("workers", "tasks", "--timeout", "30")
    assert (one["name"], one["pid"], one["queues"]) == ("ada", worker.worker, ["high", "low"])
    assert (one["stats"]["concurrency"], one["stats"]["pid"]) == (3, worker.worker)
    text = app.run("workers", "tasks", "--timeout", "30").stdout
    assert re.search(r"^ada +\S+ +\d+ +high,low +0 .* 0/3 thread +- +0 +0 ", text, re.MULTILINE)


def test_workers_are_listed_if_they_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PublishRefused("no right to write to the topic")

    with closing(Server("memory://")) as server, server.new_worker("ada", 1):
        monkeypatch.setattr(server.broker, "broadcast", refuse)
        assert workers(server, Namespace(timeout=HANG, json=False)) == 0

    shown = capsys.readouterr()
    assert "ada " in shown.out
    assert shown.err == "machinery: the workers cannot be asked: no right to write to the topic\n"


def test_a_purge_asks_first(app: App) -> None:
    for _ in range(3):
        app.send("add", "1", "2", "--queue", "mail")

    assert app.run("purge", "tasks", "mail", code=2).stderr == (
        "machinery: delete 3 tasks that wait in 'mail'? (nobody to ask here: say --yes)\n"
    )
    code, out = answering(app, ["purge", "tasks", "mail"], "n")
    assert (code, "nothing was done" in out, app.json("queues", "tasks")[0]["waiting"]) == (
        2,
        True,
        3,
    )
    code, out = answering(app, ["purge", "tasks", "mail"], "y")
    assert (
        code,
        "deleted 3 tasks from 'mail'" in out,
        app.json("queues", "tasks")[0]["waiting"],
    ) == (0, True, 0)


def test_one_task_is_purged_without_a_question(app: App) -> None:
    app.send("add", "1", "2")

    assert app.json("purge", "tasks", "machinery_tasks") == {
        "queue": "machinery_tasks",
        "deleted": 1,
    }

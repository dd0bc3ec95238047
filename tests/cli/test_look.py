"""Commands that look and commands that act, on a SQLite file."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from machinery_py.testing.waiting import wait_until
from tests.backends.memcached.case import empty_memcached
from tests.cli.app import HANG, App, app_in_a_folder
from tests.stores.rabbitmq.case import amqp_url, vhosts
from tests.support.servers import MemcachedServer

__all__ = ["amqp_url", "empty_memcached", "vhosts"]

app = app_in_a_folder

BURST = ("worker", "tasks", "--burst")


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


def write_garbage(app: App, count: int) -> None:
    """Messages that are no signature, in the queue."""
    app.write(
        "garbage.py",
        f"""
from machinery_py.brokers.base import Message
from tasks import server
message = Message(uuid="", name="", queue="machinery_tasks", body=b"\\x1b[31mno json")
server.broker.put([message] * {count}, token="")
""",
    )
    app.python("garbage.py")


# Looking


def test_every_listing_is_json_if_asked_and_empty_at_first(app: App) -> None:
    for words in (["queues"], ["tasks"], ["workers"], ["dead", "list"]):
        assert app.json(*words, "tasks") == []


def test_queues_are_a_table_with_right_aligned_numbers(app: App) -> None:
    for _ in range(2):
        app.send("add", "1", "2")
    app.send("add", "1", "2", "--delay", "1h")

    head, line = app.run("queues", "tasks").stdout.splitlines()
    assert head == "QUEUE            WAITING  RUNNING  DELAYED  FAILED  OLDEST  PER MIN"
    assert re.fullmatch(
        r"machinery_tasks        2        0        1       0 +[\d.]+ \w+        0", line
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


def test_tasks_are_listed_and_filtered(app: App) -> None:
    done, failed = app.send("add", "1", "2"), app.send("boom", "ca\x1b[31mlm")
    app.run(*BURST)
    waiting = app.send("greet", "ada", "--queue", "mail")

    assert {one["uuid"]: (one["name"], one["state"]) for one in app.json("tasks", "tasks")} == {
        done: ("add", "SUCCESS"),
        failed: ("boom", "FAILURE"),
        waiting: ("greet", "PENDING"),
    }
    for words, expected in [
        (["--state", "failure"], failed),
        (["--state", "Failed"], failed),
        (["--state", "done"], done),
        (["--name", "add", "--since", "1h"], done),
        (["--queue", "mail"], waiting),
    ]:
        assert [one["uuid"] for one in app.json("tasks", "tasks", *words)] == [expected]
    text = app.run("tasks", "tasks").stdout
    assert "ValueError: ca\\x1b[31mlm" in text
    assert "\x1b" not in text


def test_a_task_is_shown_by_the_start_of_its_uuid(app: App) -> None:
    failed = app.send("boom", '"so sad"')
    app.run(*BURST)

    text = app.run("show", "tasks", failed[:14]).stdout
    for line in (
        f"task +{failed}",
        "name +boom",
        "state +FAILURE",
        "attempt +1",
        "error +ValueError: so sad",
        'argument +"so sad"',
        "ended +.* ago\\)",
        "traceback",
        "  +raise ValueError\\(text\\)",
    ):
        assert re.search(f"^{line}$", text, re.MULTILINE), line
    shown = app.json("show", "tasks", failed)
    assert (shown["uuid"], shown["error"], shown["message"]["args"][0]["value"]) == (
        failed,
        "so sad",
        "so sad",
    )


def test_a_task_that_waits_is_shown_with_its_arguments(app: App) -> None:
    uuid = app.send("add", "1", "2")

    assert [arg["value"] for arg in app.json("show", "tasks", uuid)["message"]["args"]] == [1, 2]


def test_what_is_not_there_is_told(app: App) -> None:
    assert "no state of task_none" in app.run("show", "tasks", "task_none", code=2).stderr
    assert "no state of task_none" in app.run("result", "tasks", "task_none", code=2).stderr
    assert "no queue 'gone' (there is: none)" in app.run("purge", "tasks", "gone", code=2).stderr


def test_workers_are_listed(app: App) -> None:
    worker = app.worker("-n", "ada", "-Q", "high,low")

    (one,) = app.json("workers", "tasks")
    assert (one["name"], one["pid"], one["queues"]) == ("ada", worker.pid, ["high", "low"])
    assert re.search(
        r"^ada +\S+ +\d+ +high,low +0 ", app.run("workers", "tasks").stdout, re.MULTILINE
    )


def test_settings_are_told_with_their_origin(app: App) -> None:
    found = {one["key"]: one for one in app.json("config", "tasks")}
    assert found["broker"] == {
        "key": "broker",
        "value": "sqlite:///machinery.db",
        "unit": "",
        "source": "default",
    }
    assert found["results_expire_in"]["unit"] == "s"

    text = app.run("config", "tasks", MACHINERY_LEASE="7").stdout
    assert re.search(r"^lease +7\.0 s +MACHINERY_LEASE$", text, re.MULTILINE)
    assert re.search(r"^result_backend +- +default$", text, re.MULTILINE)


# The doctor


def test_the_doctor_finds_nothing_wrong_with_a_new_app(app: App) -> None:
    text = app.run("doctor", "tasks").stdout

    assert "WRONG" not in text
    assert "machinery.db is not there yet" in text
    assert {
        "versions",
        "packages",
        "app",
        "settings",
        "file",
        "broker",
        "backend",
        "clock",
        "workers",
        "dead",
    } == {line.split()[1] for line in text.splitlines()}


def test_the_doctor_finds_tasks_without_a_worker(app: App) -> None:
    app.send("add", "1", "2")

    found = app.json("doctor", "tasks", code=1)

    (wrong,) = [one for one in found if one["mark"] == "WRONG"]
    assert "no worker on this queue" in wrong["text"]
    assert any("schema 3 (known 3), journal wal, synchronous full" in one["text"] for one in found)


def test_the_doctor_never_shows_a_traceback(app: App) -> None:
    app.write("letter.db", "Dear Sir or Madam, " * 100)
    app.write("broken.py", "1 / 0")

    for done in (
        app.run("doctor", "tasks", code=1, MACHINERY_URL="sqlite:///letter.db"),
        app.run("doctor", "broken", code=2),
    ):
        assert "WRONG" in done.stdout
        assert "Traceback" not in done.stdout + done.stderr


def test_the_doctor_says_what_a_backend_forgets(
    app: App, amqp_url: str, empty_memcached: MemcachedServer
) -> None:
    text = app.run("doctor", "tasks", MACHINERY_RESULT_BACKEND=amqp_url).stdout
    assert (
        "forgets states when it restarts; the key of a unique task without a state is free" in text
    )
    assert "keeps a state for 1 h (results_expire_in), also of a task that waits or runs" in text
    assert "forgets results" not in text

    text = app.run("doctor", "tasks", MACHINERY_RESULT_BACKEND=empty_memcached.url).stdout
    assert "forgets results, schedules and keys of unique tasks when it restarts or is full" in text
    assert "keeps a state" not in text


# Sending


def test_a_sent_task_is_waited_for_and_its_result_printed(app: App) -> None:
    app.worker()

    done = app.run("send", "tasks", "add", "20", "22", "--wait").stdout
    assert re.fullmatch(r"task_\w{8}…  SUCCESS  42  \([\d.]+ m?s\)\n", done)
    failed = app.run("send", "tasks", "boom", "--wait", code=1).stdout
    assert re.fullmatch(r"task_\w{8}…  FAILURE  ValueError: no  \([\d.]+ m?s\)\n", failed)


def test_arguments_are_json_or_strings_as_the_task_wants_them(app: App) -> None:
    app.worker()

    for words, expected in [
        (["greet", "ada@example.com"], "en:ada@example.com"),
        (["greet", "42"], "en:42"),
        (["greet", '"42"'], "en:42"),
        (["greet", "ada", "--kw", "lang=fr"], "fr:ada"),
        (["add", "--kw", "b=2", "1"], 3),
        (["add", "-5", "3"], -2),
        (["greet", "--", "--wait"], "en:--wait"),
    ]:
        assert app.json("send", "tasks", "--wait", *words)["result"] == expected


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["add", "1"], "add: missing argument 'b'"),
        (["add", "1", "two"], "add argument 'b': 'two' is no int"),
        (["add", "1", "2", "3"], "add: too many positional arguments"),
        (["add", "1", "2", "--kw", "c=3"], "add: got an unexpected keyword argument 'c'"),
        (["add", "1", "--kw", "=3"], "--kw '=3': no name (expected NAME=JSON)"),
        (
            ["add", "1", "99999999999999999999"],
            "cannot send 99999999999999999999: it does not fit into 64 bits",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused_here(app: App, words: list[str], text: str) -> None:
    assert text in app.run("send", "tasks", *words, code=2).stderr
    assert app.json("queues", "tasks") == []


def test_a_result_is_waited_for_no_longer_than_asked(app: App) -> None:
    uuid = app.send("add", "1", "2")

    assert app.run("result", "tasks", uuid).stdout == f"{uuid[:13]}…  PENDING\n"
    late = app.run("result", "tasks", uuid, "--wait", "--timeout", "100ms", code=2).stderr
    assert (
        f"machinery: no result of {uuid} after 0.1 s; last state PENDING, no worker on 'machinery_tasks'"
        in late
    )


def test_a_result_is_found_later(app: App) -> None:
    uuid = app.send("add", "1", "2")
    app.run(*BURST)

    assert re.fullmatch(
        rf"{uuid[:13]}…  SUCCESS  3  \([\d.]+ \w+\)\n",
        app.run("result", "tasks", uuid[:12], "--wait").stdout,
    )


# Acting


def test_failed_tasks_are_sent_again(app: App) -> None:
    first, second = app.send("boom"), app.send("boom")
    app.run(*BURST)

    assert app.run("retry", "tasks", first[:12]).stdout == "sent 1 task again\n"
    assert app.state(first) == "PENDING"
    app.run(*BURST)
    refused = app.run("retry", "tasks", "--name", "boom", code=2)
    assert (
        refused.stderr == "machinery: send 2 failed tasks again? (nobody to ask here: say --yes)\n"
    )
    assert sorted(app.json("retry", "tasks", "--state", "failure", "--yes")["retried"]) == sorted(
        [first, second]
    )
    assert app.run("retry", "tasks", first).stdout == (
        "sent 0 tasks again; 1 other cannot be (not failed, or the message is not kept)\n"
    )


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


def test_a_revoked_task_is_never_started(app: App) -> None:
    uuid = app.send("note", "never")

    assert app.run("revoke", "tasks", uuid[:12]).stdout == "revoked 1 task\n"
    app.run(*BURST)

    assert app.notes == []
    assert app.state(uuid) == "FAILURE"


def test_dead_letters_are_listed_shown_and_deleted(app: App) -> None:
    write_garbage(app, 2)
    app.run(*BURST)

    letters = app.json("dead", "list", "tasks")
    assert [one["reason"] for one in letters] == ["undecodable", "undecodable"]
    assert "undecodable" in app.run("dead", "list", "tasks").stdout
    shown = app.run("dead", "show", "tasks", letters[0]["id"]).stdout
    assert "\\x1b[31mno json" in shown
    assert "\x1b" not in shown
    assert app.json("dead", "show", "tasks", letters[0]["id"])["body"] == "\x1b[31mno json"
    assert app.json("dead", "replay", "tasks", letters[0]["id"]) == {"replayed": []}
    assert (
        "ids and --all"
        in app.run("dead", "delete", "tasks", letters[0]["id"], "--all", code=2).stderr
    )
    assert "which? name ids, or --all" in app.run("dead", "delete", "tasks", code=2).stderr
    assert (
        "delete 2 dead letters? (nobody to ask here: say --yes)"
        in app.run("dead", "delete", "tasks", "--all", code=2).stderr
    )
    assert app.json("dead", "delete", "tasks", letters[0]["id"]) == {"deleted": 1}
    assert app.json("dead", "delete", "tasks", "--all") == {"deleted": 1}
    assert app.json("dead", "list", "tasks") == []


def test_a_dead_task_can_be_replayed(app: App) -> None:
    app.write(
        "other.py",
        "from machinery_py import Server, Signature\nserver = Server()\n"
        "if __name__ == '__main__':\n    print(server.send_task(Signature.of('add', 1, 2)).uuid)\n",
    )
    uuid = app.python("other.py")
    # A worker that does not know the task gives up at once.
    app.start("worker", "other", "--no-banner", MACHINERY_UNREGISTERED_TIMEOUT="0")
    wait_until(lambda: app.json("dead", "list", "tasks"), HANG)

    app.running[0].stop()
    assert app.json("dead", "replay", "tasks", "--all") == {"replayed": [uuid]}
    app.run(*BURST)

    assert app.state(uuid) == "SUCCESS"

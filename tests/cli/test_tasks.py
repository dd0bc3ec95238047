"""Commands on tasks, on a SQLite file."""

from __future__ import annotations

import contextlib
import re
import textwrap

import pytest

from machinery_py import Server, Signature
from tests.cli.app import App, app_in_a_folder

app = app_in_a_folder

BURST = ("worker", "tasks", "--burst")


def test_every_listing_is_json_if_asked_and_empty_at_first(app: App) -> None:
    for words in (["queues"], ["tasks"], ["workers"], ["dead", "list"]):
        assert app.json(*words, "tasks") == []


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
        (["--text", "valueerror", "--state", "failure"], failed),
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


def test_tries_before_the_last_are_shown(app: App) -> None:
    source = """
        from machinery_py import Server
        server = Server()

        @server.task(retries=1, backoff=[0])
        def boom(text: str) -> None:
            raise ValueError(text)
    """
    app.write("flaky.py", textwrap.dedent(source))
    uuid = app.run("send", "flaky", "boom", "sad").stdout.split()[0]
    app.run("worker", "flaky", "--burst")

    [attempt] = app.json("show", "flaky", uuid)["attempts"]
    text = app.run("show", "flaky", uuid).stdout

    assert (attempt["number"], attempt["error"]) == (1, "sad")
    assert re.search(r"^try 1 .* ago\)  ValueError: sad$", text, re.MULTILINE)
    assert "machinery_attempts" not in text


def test_steps_of_a_task_are_shown(app: App) -> None:
    source = """
        from machinery_py import Server, current_task
        from machinery_py.errors import StepFailed
        server = Server()

        def fail() -> None:
            raise ValueError("no money")

        @server.task
        def flow() -> str:
            task = current_task()
            try:
                task.step("charge", fail)
            except StepFailed:
                pass
            task.sleep(0.0)
            return task.step("mail", str, "sent")
    """
    app.write("flows.py", textwrap.dedent(source))
    uuid = app.run("send", "flows", "flow").stdout.split()[0]
    app.run("worker", "flows", "--burst")

    steps = app.json("show", "flows", uuid)["steps"]
    text = app.run("show", "flows", uuid).stdout

    assert [one["name"] for one in steps] == ["charge", "sleep", "mail"]
    assert [(one["results"], one["error"]) for one in (steps[0], steps[2])] == [
        ([], "no money"),
        (["sent"], ""),
    ]
    assert re.search(r'^step sleep .* ago\)  "20\d\d-[^{]*"$', text, re.MULTILINE)
    assert re.search(r"^step charge .* ago\)  ValueError: no money$", text, re.MULTILINE)
    assert re.search(r'^step mail .* ago\)  "sent"$', text, re.MULTILINE)


def test_signal_wakes_a_task(app: App) -> None:
    source = """
        from machinery_py import Server, current_task
        server = Server()

        @server.task
        def flow() -> object:
            return current_task().wait_for("approval")
    """
    app.write("flows.py", textwrap.dedent(source))
    uuid = app.run("send", "flows", "flow").stdout.split()[0]
    app.run("worker", "flows", "--burst")
    assert "waits for signal 'approval'" in app.run("why", "flows", uuid).stdout

    words = "signal", "flows", uuid[:14], "approval", '{"by": "ada"}', "--key", "click-81"
    assert app.json(*words) == {"given": True}
    assert app.json(*words) == {"given": False}

    app.run("worker", "flows", "--burst")
    assert app.json("result", "flows", uuid)["result"] == {"by": "ada"}
    assert "has ended" in app.run(*words, code=2).stderr


def test_a_task_that_waits_is_shown_with_its_arguments(app: App) -> None:
    uuid = app.send("add", "1", "2")

    assert [arg["value"] for arg in app.json("show", "tasks", uuid)["message"]["args"]] == [1, 2]


def test_missing_task_or_queue_is_reported(app: App) -> None:
    assert "no state of task_none" in app.run("show", "tasks", "task_none", code=2).stderr
    assert "no state of task_none" in app.run("result", "tasks", "task_none", code=2).stderr
    assert "no queue 'gone' (there is: none)" in app.run("purge", "tasks", "gone", code=2).stderr


# Sending


def test_options_of_a_call_are_sent_with_it(app: App) -> None:
    words = ("--priority", "7", "--expires", "1h", "--header", "tenant=a=b", "--header", "x=")
    uuid = app.send("add", "1", "2", "--eta", "2090-01-31T06:00+01:00", *words)

    message = app.json("show", "tasks", uuid)["message"]

    assert (message["priority"], message["eta"]) == (7, "2090-01-31T05:00:00+00:00")
    assert message["headers"].items() >= {"tenant": "a=b", "x": ""}.items()
    assert any("expires" in name for name in message["headers"])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--priority", "256"], "'256' is no whole number from 0 to 255"),
        (["--eta", "2030-01-31T06:00"], "'2030-01-31T06:00' is no moment with its zone"),
        (["--eta", "soon"], "'soon' is no moment with its zone"),
        (
            ["--delay", "5", "--eta", "2030-01-31T06:00Z"],
            "send: found --delay and --eta (expected one of the two)",
        ),
        (["--header", "tenant"], "--header 'tenant': no name (expected NAME=VALUE)"),
    ],
)
def test_wrong_option_of_a_call_is_refused(app: App, words: list[str], text: str) -> None:
    assert text in app.run("send", "tasks", "add", "1", "2", *words, code=2).stderr


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
        f"machinery: no result of {uuid} after 0.1 s; "
        f"last state PENDING, no worker on 'machinery_tasks'" in late
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


def test_a_revoked_task_is_never_started(app: App) -> None:
    uuid = app.send("note", "never")

    assert app.run("revoke", "tasks", uuid[:12]).stdout == "revoked 1 task\n"
    app.run(*BURST)

    assert app.notes == []
    assert app.state(uuid) == "FAILURE"
    again = app.run("revoke", "tasks", uuid).stdout
    assert again == "revoked 0 tasks; 1 task had ended before\n"
    assert app.json("revoke", "tasks", uuid)["finished"] == [uuid]


def test_tasks_are_revoked_by_their_headers(app: App) -> None:
    with contextlib.closing(Server(f"sqlite:///{app.folder}/machinery.db")) as server:
        tenants = [{"tenant": "acme"}, {"tenant": "globex"}]
        uuids = [server.send_task(Signature(name="note", headers=one)).uuid for one in tenants]
        revoke = ("revoke", "tasks", "--header", "tenant=acme")
        assert "revoke all tasks with tenant=acme? (nobody" in app.run(*revoke, code=2).stderr
        assert app.json(*revoke, "--yes") == {
            "revoked": uuids[:1],
            "finished": [],
            "answers": {},
            "missing": [],
            "errors": {},
        }
        assert [*server.backend.revoked(uuids)] == uuids[:1]
    assert "no task named" in app.run("revoke", "tasks", code=2).stderr
    assert "no name" in app.run("revoke", "tasks", "--header", "=x", code=2).stderr


FLOWS = """
from pathlib import Path
from machinery_py import Server, chain, group
server = Server()

@server.task
def fetch(name, *_):
    if name == "b" and not Path("fixed").exists():
        raise ConnectionError("refused")
    return name

@server.task
def merge(*names):
    return "+".join(names)

def nightly(delay):
    first = group(fetch.options(delay=delay).signature(name) for name in "abc")
    return chain(first, merge.partial()).send().workflow
"""


def test_workflow_is_shown_retried_and_cancelled(app: App) -> None:
    app.write("flows.py", FLOWS)
    app.write("night.py", "import flows; print(flows.nightly(0), flows.nightly(3600))")
    uuid, later = app.python("night.py").split()
    app.run("worker", "flows", "--burst")

    shown = app.run("flow", "flows", uuid, code=1).stdout.splitlines()
    assert shown[:2] == [
        "fetch ×3 | merge  2 of 2 steps  FAILURE",
        "├─ fetch ×3  2 SUCCESS, 1 FAILURE (ConnectionError: refused)",
    ]
    assert shown[2].startswith("└─ merge     FAILURE (ChordMemberFailed: chord member fetch")
    app.write("fixed", "")
    assert app.run("flow", "flows", uuid, "retry").stdout == "sent 1 task again\n"
    app.run("worker", "flows", "--burst")
    found = app.json("flow", "flows", uuid[:14])
    assert (found["state"], found["done"], found["failed"], found["total"]) == ("SUCCESS", 4, 0, 4)

    waiting = "├─ fetch ×3  3 PENDING\n└─ merge     not started\n"
    assert app.run("flow", "flows", later).stdout.endswith(waiting)
    assert "--yes" in app.run("flow", "flows", later, "cancel", code=2).stderr
    shown = app.run("flow", "flows", later, "cancel", "--yes", code=1).stdout.splitlines()
    assert shown[0] == "fetch ×3 | merge  2 of 2 steps  FAILURE, cancelled"
    assert "was cancelled" in app.run("flow", "flows", later, "retry", code=None).stderr
    assert (
        "expected nothing, cancel or retry" in app.run("flow", "flows", uuid, "x", code=None).stderr
    )

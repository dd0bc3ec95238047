"""machinery doctor and machinery config."""

from __future__ import annotations

import re
from importlib import metadata

from machinery_py.connections.sqlite.schema import VERSION
from tests.cli.app import App, app_in_a_folder
from tests.support.servers import MemcachedServer

app = app_in_a_folder

BURST = ("worker", "tasks", "--burst")


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


def test_the_doctor_finds_nothing_wrong_with_a_new_app(app: App) -> None:
    text = app.run("doctor", "tasks").stdout

    assert "WRONG" not in text
    assert "machinery.db is not there yet" in text
    assert f"croniter {metadata.version('croniter')}, psycopg {metadata.version('psycopg')}" in text
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
    known = f"schema {VERSION} (known {VERSION}), journal wal, synchronous full"
    assert any(known in one["text"] for one in found)


def test_the_doctor_never_shows_a_traceback(app: App) -> None:
    app.write("letter.db", "Dear Sir or Madam, " * 100)
    app.write("broken.py", "1 / 0")

    for done in (
        app.run("doctor", "tasks", code=1, MACHINERY_URL="sqlite:///letter.db"),
        app.run("doctor", "broken", code=2),
    ):
        assert "WRONG" in done.stdout
        assert "Traceback" not in done.stdout + done.stderr


def test_doctor_warns_of_a_backend_that_forgets(
    app: App, amqp_url: str, empty_memcached: MemcachedServer
) -> None:
    text = app.run("doctor", "tasks", MACHINERY_RESULT_BACKEND=amqp_url).stdout
    lacks = "keeps no keys of unique tasks, schedules, revocations, lists of tasks (put the results"
    assert "forgets states when it restarts" in text
    assert lacks in text
    assert "keeps a state for 1 h (results_expire_in), also of a task that waits or runs" in text
    assert "forgets results" not in text

    text = app.run("doctor", "tasks", MACHINERY_RESULT_BACKEND=empty_memcached.url).stdout
    assert "forgets results when it restarts or is full" in text
    assert lacks in text
    assert "keeps a state" not in text


def test_doctor_names_tasks_that_may_outlast_a_connection_to_rabbitmq(
    app: App, amqp_url: str
) -> None:
    app.write(
        "tasks.py",
        "from machinery_py import Server\nserver = Server()\n"
        "@server.task(time_limit=11)\ndef long() -> None: ...\n"
        "@server.task(time_limit=10)\ndef short() -> None: ...\n"
        "@server.task(time_limit=11, pool='process')\ndef apart() -> None: ...\n"
        "@server.task\ndef unlimited() -> None: ...\n",
    )

    def found() -> list[dict[str, str]]:
        return [one for one in app.json("doctor", "tasks") if one["check"] == "tasks"]

    assert found() == []
    app.env["MACHINERY_BROKER"] = amqp_url
    (note,) = found()
    assert note["mark"] == "note"
    assert note["text"].startswith("long: the time limit is longer than 10 s, two heartbeats")

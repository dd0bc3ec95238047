"""`machinery dashboard`, as a user types it."""

from __future__ import annotations

import re
import signal
import socket

import pytest

from tests.cli.app import App, Running, app_in_a_folder
from tests.dashboard.site import Site
from tests.dashboard.test_web import basic, event, open_stream

app = app_in_a_folder


def site_of(app: App, *words: str, **env: str) -> tuple[Running, Site]:
    process = app.start("dashboard", "tasks", "--port", "0", *words, **env)
    process.wait_for("Ctrl+C stops.\n")
    [address] = re.findall(r"^Dashboard of tasks: (http://\S+:\d+/)  Ctrl", process.out)
    return process, Site(address)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_answers_until_it_is_stopped(app: App, number: signal.Signals) -> None:
    uuid = app.send("add", "1", "2")
    process, site = site_of(app)
    stream = open_stream(site)

    assert event(stream)["queues"][0]["waiting"] == 1
    assert site.get("task", uuid=uuid)["python"] == "add.send(1, 2)"
    assert site.post("tasks/revoke", uuids=[uuid])["done"] == 1
    process.signal(number)

    assert process.wait() == 0
    assert stream.read() == b"\n"
    assert " INFO    machinery_py.dashboard.web: dashboard: tasks/revoke by " in process.err


def test_password_may_stand_in_the_environment(app: App) -> None:
    process, site = site_of(
        app, "--read-only", "--host", "0.0.0.0", MACHINERY_DASHBOARD_AUTH="ada:s3"
    )
    site.headers["Host"] = "far.example"

    assert site.request("GET", "api/queues").status == 401
    site.headers["Authorization"] = basic("ada:s3")
    assert site.get("overview")["read_only"] is True
    assert "DASHBOARD_AUTH" not in process.err  # as an unknown setting


def test_other_machines_are_answered_only_with_a_password_or_insecure(app: App) -> None:
    refused = app.run("dashboard", "tasks", "--host", "0.0.0.0", code=2)
    wrong = app.run("dashboard", "tasks", "--auth", "ada", code=2)
    _, site = site_of(app, "--host", "::1", "--insecure")
    site.headers["Host"] = "far.example"

    assert "no user and password, and other machines reach it" in refused.stderr
    assert "expected user:password" in wrong.stderr
    assert site.host == "::1"
    assert site.get("overview")["user"] == ""


def test_port_that_is_taken_is_told(app: App) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = app.run("dashboard", "tasks", "--port", port, code=2)

    assert f"127.0.0.1:{port}: address already in use (choose another --port" in done.stderr

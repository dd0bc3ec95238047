"""`machinery dashboard`, as a user types it."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from machinery_py.testing.waiting import wait_until
from tests.cli.app import HANG, App, Running, app_in_a_folder
from tests.dashboard.site import Site
from tests.dashboard.test_web import basic, event, open_stream
from tests.support.private import HOST, PrivateServer, require

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


# Behind a proxy


class NginxServer(PrivateServer):
    """One nginx with a `location`, which ada may see with the password s3."""

    PROGRAMS: ClassVar[Mapping[str, str]] = {"nginx": "nginx-light"}

    def __init__(self, location: str) -> None:
        super().__init__()
        self.location = location

    def command(self) -> Sequence[str | Path]:
        users, place = self.folder / "users", self.folder / "nginx.conf"
        users.write_text("ada:{PLAIN}s3\nb,c:{PLAIN}s3\n")
        location = self.location.replace("/etc/nginx/machinery.htpasswd", str(users))
        user = "" if os.geteuid() else "user root;"
        place.write_text(
            f"{user} daemon off; pid {self.folder}/pid; events {{}}\n"
            f"http {{ access_log off; client_body_temp_path {self.folder}/body;\n"
            f"proxy_temp_path {self.folder}/proxy; fastcgi_temp_path {self.folder}/fastcgi;\n"
            f"uwsgi_temp_path {self.folder}/uwsgi; scgi_temp_path {self.folder}/scgi;\n"
            f"server {{ listen {HOST}:{self.port}; {location} }} }}\n"
        )
        return [self.find("nginx"), "-p", self.folder, "-e", "stderr", "-c", place]

    def _answers(self) -> bool:
        with socket.create_connection((HOST, self.port), 1.0):
            return True


def test_user_of_nginx_stands_in_the_log_of_changes(app: App) -> None:
    require(NginxServer)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "dashboard.md").read_text()
    location = page.partition("```nginx\n")[2].partition("```")[0]
    process, past_nginx = site_of(app, "--insecure", "--user-header", "X-Remote-User")
    location = location.replace("127.0.0.1:8765", f"127.0.0.1:{past_nginx.port}")
    with NginxServer(location) as nginx:
        site = Site(f"http://{HOST}:{nginx.port}/machinery/")
        assert site.request("GET", "api/queues").status == 401
        site.headers = {
            "Authorization": basic("ada:s3"),
            "X-Remote-User": "eve",
            "X_Remote_User": "eve",
        }

        assert site.get("overview")["user"] == "ada"
        assert event(open_stream(site))["user"] == "ada"
        site.post("queues/pause", queue="machinery_tasks")
        wait_until(lambda: "queues/pause by 'ada' at 127.0.0.1" in process.err, HANG)
        site.headers["Authorization"] = basic("b,c:s3")
        assert site.request("GET", "api/queues").status == 403

    assert past_nginx.request("GET", "api/queues").status == 403
    past_nginx.headers = {"X_Remote_User": "eve"}
    assert past_nginx.request("GET", "api/queues").status == 403


def test_header_of_the_user_needs_a_proxy_that_alone_connects(app: App) -> None:
    words = ("dashboard", "tasks", "--port", "0", "--user-header")
    for wrong in (
        (*words, "X-Remote-User"),
        (*words, "X-Remote-User", "--insecure", "--host", "0.0.0.0"),
        (*words, "X_Remote_User", "--insecure"),
    ):
        assert "--user-header" in app.run(*wrong, code=2).stderr

    _, site = site_of(app, "--user-header", "X-User", "--auth", "nginx:s3", "--host", "0.0.0.0")
    site.headers = {"Host": "far.example", "X-User": "Zo\u00eb".encode().decode("latin-1")}
    assert site.request("GET", "api/queues").status == 403
    site.headers["Authorization"] = basic("nginx:s3")
    assert site.get("overview")["user"] == "Zo\u00eb"

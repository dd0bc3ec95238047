"""The dashboard over HTTP: who may do what, hostile requests, silent stores, streams."""

from __future__ import annotations

import asyncio
import base64
import http.client
import io
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from machinery_py import Config, ConfigError, Server
from machinery_py.cli import http as served
from machinery_py.cli.http import serve
from machinery_py.dashboard import live, web
from machinery_py.dashboard.guesses import FREE
from machinery_py.dashboard.routes import ROUTES
from machinery_py.dashboard.web import COOKIE, SECURITY, DashboardWSGI
from machinery_py.testing.waiting import HANG, wait_until
from tests.dashboard.site import TOKEN, Site, site_of
from tests.support.apps import Bench, bench
from tests.support.servers import RedisServer

__all__ = ["bench"]

JSON = {"Content-Type": "application/json"}
CHANGES = [path for path, found in ROUTES.items() if "POST" in found and found["POST"].changes]


@pytest.fixture
def site(bench: Bench) -> Iterator[Site]:
    with site_of(bench.server) as site:
        yield site


@pytest.fixture(scope="module")
def any_site() -> Iterator[Site]:
    """A dashboard for many requests, none of which changes anything."""
    server = Server(Config(broker="memory://"))
    with site_of(server) as site:
        yield site
    server.close()


def paused(bench: Bench) -> bool:
    return "machinery_tasks" in bench.server.broker.paused()


def pause(site: Site, **headers: str | None) -> Any:
    body = b'{"queue": "machinery_tasks"}'
    return site.request("POST", "api/queues/pause", body, **JSON | TOKEN | headers)


# Files and headers


@pytest.mark.parametrize("path", ["", "api/queues", "api/none", "none.js"])
def test_every_answer_forbids_foreign_scripts_and_frames(any_site: Site, path: str) -> None:
    reply = any_site.request("GET", path)

    assert SECURITY.items() <= dict(reply.headers).items()
    assert reply.headers["Cache-Control"] == ("no-store" if path else "no-cache")


def test_page_is_asked_for_again_by_its_tag(any_site: Site) -> None:
    first = any_site.request("GET", "")
    again = any_site.request("GET", "index.html", If_None_Match=first.headers["ETag"])
    head = any_site.request("HEAD", "")

    assert first.status == 200
    assert first.headers["Content-Type"] == "text/html; charset=utf-8"
    assert (again.status, again.body) == (304, b"")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Length"] == str(len(first.body))


@pytest.mark.parametrize(
    "path",
    [
        "../api.py",
        "..%2fapi.py",
        "vendor/../../api.py",
        "/etc/passwd",
        "//etc/passwd",
        "vendor",
        "%00",
        "\\..\\api.py",
        "index.html/",
        "%ff",
        "a" * 300,
        "a/" * 3000 + "a",
    ],
)
def test_no_other_file_is_served(any_site: Site, path: str) -> None:
    reply = any_site.request("GET", path)

    assert reply.status == 404
    assert reply.error.startswith("no page ")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "index.html", 405),
        ("PUT", "api/queues", 405),
        ("GET", "api/queues/pause", 405),
        ("POST", "api/live", 405),
        ("GET", "api/", 404),
        ("GET", "api/../tasks", 404),
        ("GET", "api/tasks?colour=red", 400),
        ("GET", "api/tasks?limit=many", 400),
        ("GET", "api/tasks?state=lost", 400),
        ("GET", "api/tasks?since=yesterday", 400),
        ("GET", "api/tasks?since=2026-01-01T00:00:00", 400),
        ("GET", "api/tasks?since=1e400", 400),
        ("GET", "api/tasks?cursor=%00", 400),
        ("GET", "api/tasks?" + "&".join(f"a{n}=1" for n in range(200)), 400),
        ("GET", "api/task?uuid=none", 404),
        ("GET", "api/task", 400),
    ],
)
def test_request_that_fits_no_route_is_refused(
    any_site: Site, method: str, path: str, status: int
) -> None:
    reply = any_site.request(method, path, b"" if method != "GET" else None)

    assert reply.status == status, reply.body
    assert reply.error


# Who may see it


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:80", "[::1]:8765", "LOCALHOST:1"])
def test_without_auth_names_of_this_machine_are_answered(any_site: Site, host: str) -> None:
    assert any_site.request("GET", "api/queues", Host=host).status == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil", ""])
def test_without_auth_a_rebound_name_is_refused(any_site: Site, host: str) -> None:
    reply = any_site.request("GET", "api/queues", Host=host)

    assert reply.status == 403
    assert "give it `auth`" in reply.error and "a proxy" not in reply.error


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
def test_without_auth_a_proxy_is_refused(any_site: Site, header: str) -> None:
    reply = any_site.request("GET", "api/queues", **{header: "for=10.0.0.7"})

    assert reply.status == 403
    assert "a proxy" in reply.error


def asked(server: Server, address: str, **options: Any) -> int:
    """Ask as a client of this address, in a server that answers one request at a time."""
    environ = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": "/api/live",
        "HTTP_HOST": "localhost",
        "REMOTE_ADDR": address,
        "wsgi.input": io.BytesIO(),
    }
    return server.dashboard.wsgi(**options).answer(environ).status


def test_without_auth_another_machine_is_refused(bench: Bench) -> None:
    assert asked(bench.server, "10.0.0.7") == 403
    assert asked(bench.server, "") == 204


def test_stream_in_a_server_with_one_thread_is_refused_for_good(bench: Bench) -> None:
    assert asked(bench.server, "10.0.0.7", auth=lambda environ: "ada") == 204


def basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def test_user_and_password_are_asked_for(bench: Bench) -> None:
    with site_of(bench.server, auth="ada:a pä:ss") as site:
        refused = [
            site.request("GET", path, Authorization=given)
            for path in ("", "api/queues")
            for given in (
                None,
                "Basic",
                "Basic !!",
                basic("ada:"),
                basic("eve:a pä:ss"),
                "Bearer x",
            )
        ]
        site.headers["Authorization"] = basic("ada:a pä:ss")
        overview = site.get("overview")

    assert {reply.status for reply in refused} == {401}
    assert refused[0].headers["WWW-Authenticate"].startswith("Basic ")
    assert overview["user"] == "ada"


def test_a_callable_decides_who_is_answered(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def who(environ: dict[str, Any]) -> str | None:
        if environ["HTTP_X_USER"] == "broken":
            raise LookupError("hunter2")
        return environ["HTTP_X_USER"] or None

    with site_of(bench.server, auth=who) as site:
        assert site.request("GET", "", X_User="", Host="far.example").status == 403
        assert site.request("GET", "api/queues", X_User="eve", Host="far.example").status == 200
        broken = site.request("GET", "api/queues", X_User="broken")

    assert broken.status == 500
    assert b"hunter2" not in broken.body
    assert "hunter2" in caplog.text


def guess(web: DashboardWSGI, password: str, address: str = "10.0.0.7", cookie: str = "") -> int:
    environ = {
        "REQUEST_METHOD": "GET",
        "PATH_INFO": "/api/schema",
        "REMOTE_ADDR": address,
        "HTTP_AUTHORIZATION": basic(f"ada:{password}"),
        "HTTP_COOKIE": f"{COOKIE}={cookie}",
        "wsgi.input": io.BytesIO(),
    }
    return web.answer(environ).status


def test_wrong_passwords_of_one_address_are_slowed(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    web = bench.server.dashboard.wsgi(auth="ada:s3")
    assert guess(web, "s3", cookie="known") == 200

    wrong = [guess(web, f"hunter{number}") for number in range(300)]

    assert wrong[:FREE] == [401] * FREE
    assert wrong.count(429) > 200
    assert guess(web, "s3", "10.0.0.8") == 200  # of another address
    assert guess(web, "s3", cookie="known") == 200  # of a browser that was let in
    told = [one.getMessage() for one in caplog.records if "wrong password" in one.message]
    assert told == ["dashboard: 1 wrong password from '10.0.0.7'"]
    assert "hunter" not in caplog.text


def test_refused_guess_says_when_another_is_tried(bench: Bench) -> None:
    with site_of(bench.server, auth="ada:s3") as site:
        site.headers["Authorization"] = basic("ada:no")
        replies = [site.request("GET", "api/queues") for _ in range(3 * FREE)]

    refused = [reply for reply in replies if reply.status == 429]
    assert refused[0].headers["Retry-After"] == "1"
    assert "too many wrong passwords" in refused[0].error


def test_right_password_is_never_slowed(bench: Bench) -> None:
    web = bench.server.dashboard.wsgi(auth="ada:s3")
    assert {guess(web, "s3") for _ in range(5 * FREE)} == {200}


@pytest.mark.parametrize("auth", ["ada", "ada:", ":secret", ""])
def test_auth_without_a_user_or_a_password_is_refused(bench: Bench, auth: str) -> None:
    with pytest.raises(ConfigError, match="expected user:password"):
        bench.server.dashboard.wsgi(auth=auth)


# Changes


def test_change_needs_the_cookie_again_as_a_header(bench: Bench, site: Site) -> None:
    given = site.request("GET", "").headers["Set-Cookie"]
    name, _, token = given.partition(";")[0].partition("=")
    assert "; SameSite=Strict; Path=/" in given and "HttpOnly" not in given
    own = {"Cookie": f"{name}={token}", "X-CSRF-Token": token}

    for headers in (
        {"X-CSRF-Token": None},
        {"Cookie": None},
        {"Cookie": None, "X-CSRF-Token": None},
        {"X-CSRF-Token": "other"},
        {"X-CSRF-Token": ""},
        {"Cookie": f"{name}=", "X-CSRF-Token": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        refused = pause(site, **own | headers)
        assert (refused.status, paused(bench)) == (403, False), headers

    origin = {"Origin": site.address.rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    assert pause(site, **own | origin).status == 200
    assert paused(bench)


def test_read_only_dashboard_changes_nothing(bench: Bench) -> None:
    failed = bench.fail.send("x")
    bench.drain()
    with site_of(bench.server, read_only=True) as site:
        replies = [site.try_post(path, uuids=[failed.uuid]) for path in CHANGES]
        count = site.post("tasks/count", filter={}, action="retry")
        overview = site.get("overview")

    assert len(CHANGES) > 10
    assert {reply.status for reply in replies} == {403}
    assert count["count"] == 1
    assert overview["read_only"] is True


def test_each_change_is_one_line_of_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "machinery_py.dashboard")
    with site_of(bench.server, auth=lambda environ: "ada\nlovelace") as site:
        site.post("tasks/revoke", uuids=["mail\n2026 INFO forged"])
        site.get("queues")
        site.try_post("schedules/run", name="none")

    [done, failed] = [one for one in caplog.records if "dashboard: " in one.message]
    assert done.levelname == "INFO"
    assert done.message.startswith("dashboard: tasks/revoke by 'ada\\nlovelace' at 127.0.0.1: ")
    assert "forged" in done.message and '"done":1' in done.message
    assert "\n" not in done.message
    assert failed.levelname == "WARNING" and "no schedule 'none'" in failed.message


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b'{"queue": "mail"}', {"Content-Type": "text/plain"}, 415),
        (b'{"queue": "mail"}', {"Content-Type": None}, 415),
        (b'{"queue": "mail"}', {"Content-Length": "-1"}, 400),
        (b'{"queue": "mail"}', {"Content-Length": "1e3"}, 400),
        (b'{"queue": "mail"}', {"Content-Length": "9" * 5000}, 413),
        (b" " * 1_000_001, {}, 413),
        (b" " * 3_000_000, {}, 413),
        (b"", {}, 400),
        (b"[" * 100_000, {}, 400),
        (b'{"queue": ' + b"[" * 100_000, {}, 400),
        (b'{"queue": 7}', {}, 400),
        (b'{"queue": "\\ud800"}', {}, 400),
        (b'{"queue": "mail", "force": true}', {}, 400),
        (b"\xff", {}, 400),
    ],
)
def test_body_that_fits_not_is_refused(
    any_site: Site, body: bytes, headers: dict[str, str | None], status: int
) -> None:
    reply = any_site.request("POST", "api/queues/pause", body, **JSON | TOKEN | headers)

    assert reply.status == status, reply.body
    assert reply.error


# Clients that are slow, or many


def test_slow_clients_hold_up_nobody_and_are_cut_off(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "TIMEOUT", 1.0)
    with site_of(bench.server) as site:
        slow = [socket.create_connection((site.host, site.port), HANG) for _ in range(20)]
        slow[0].sendall(b"GET / HT")
        slow[1].sendall(
            b"POST /api/queues/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n"
            b"Content-Type: application/json\r\nCookie: machinery_csrf=a\r\n"
            b"X-CSRF-Token: a\r\n\r\n{"
        )

        assert site.request("GET", "api/queues").status == 200
        assert all(one.recv(1) == b"" for one in (slow[0], slow[2]))
        assert b" 400 " in slow[1].makefile("rb").readline()
        for one in slow:
            one.close()


def asking(site: Site, head: bytes) -> socket.socket:
    one = socket.create_connection((site.host, site.port), HANG)
    one.sendall(head)
    return one


def test_silent_clients_leave_their_place_to_one_that_asks(bench: Bench) -> None:
    with site_of(bench.server) as site:
        held = [asking(site, b"GET / HT") for _ in range(served.MOST_CONNECTIONS)]
        for _ in range(3):
            assert site.request("GET", "api/queues").status == 200
        assert held[0].recv(1) == b""  # the oldest one
        for one in held:
            one.close()


def test_connections_that_got_no_thread_leave_room_for_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with site_of(bench.server) as site:
        with monkeypatch.context() as patch:
            patch.setattr(socketserver.ThreadingMixIn, "process_request", refuse)
            for _ in range(served.MOST_CONNECTIONS):
                with closing(socket.create_connection((site.host, site.port), HANG)) as one:
                    assert one.recv(1) == b""
        assert site.request("GET", "api/queues").status == 200


def over_asgi(server: Server, path: str, *messages: dict[str, Any]) -> list[Any]:
    """Ask the ASGI application, as a server with this body to give; return what it sends."""
    received, sent = iter(messages), []

    async def receive() -> dict[str, Any]:
        return next(received)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST" if messages[0].get("body") else "GET",
        "path": path,
        "query_string": b"",
        "headers": [
            *((key.lower().encode(), value.encode()) for key, value in (JSON | TOKEN).items()),
            (b"host", b"localhost"),
        ],
    }
    asyncio.run(server.dashboard.asgi()(scope, receive, send))
    return sent


@pytest.mark.parametrize("path", ["/" + "a" * 300, "/a\0", "/\udcff", "/api/" + "a" * 300])
def test_hostile_path_over_asgi_is_not_found(bench: Bench, path: str) -> None:
    sent = over_asgi(bench.server, path, {"type": "http.request"})
    assert sent[0]["status"] == 404


def test_body_over_asgi_that_does_not_come_whole_is_not_run(bench: Bench) -> None:
    body = {"type": "http.request", "body": b'{"queue": "machinery_tasks"}', "more_body": True}
    gone = {"type": "http.disconnect"}

    assert over_asgi(bench.server, "/api/queues/pause", body, gone) == []
    assert not paused(bench)
    whole = {"type": "http.request", "body": b""}
    assert over_asgi(bench.server, "/api/queues/pause", body, whole)[0]["status"] == 200
    assert paused(bench)


# Streams


def open_stream(site: Site) -> http.client.HTTPResponse:
    connection = site.connection()
    connection.request("GET", f"{site.prefix}api/live", headers=site.headers)
    return connection.getresponse()


def event(stream: http.client.HTTPResponse) -> Any:
    while not (line := stream.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return json.loads(line.removeprefix(b"data: "))


def test_stream_begins_with_an_overview_and_goes_on(
    bench: Bench, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "STREAM_PAUSE", 0.01)
    monkeypatch.setattr(live, "FRESH", 0.0)
    bench.add.send(1, 2)

    with closing(open_stream(site)) as stream:
        assert stream.headers["Content-Type"] == "text/event-stream"
        assert event(stream)["queues"][0]["waiting"] == 1
        bench.add.send(1, 2)
        wait_until(lambda: event(stream)["queues"][0]["waiting"] == 2)


def test_stream_ends_after_a_while_so_that_its_reader_asks_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "STREAM_LIFE", 0.2)
    monkeypatch.setattr(live, "STREAM_PAUSE", 0.05)

    with closing(open_stream(site)) as stream:
        assert stream.read().startswith(b"retry: 1000\ndata: {")


def test_readers_share_one_look_at_the_stores(
    bench: Bench, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "FRESH", HANG)
    streams = [open_stream(site) for _ in range(5)]
    seen = set()
    for one in streams:
        seen |= {event(one)["at"], site.get("overview")["at"]}
        bench.harness.clock.advance(1.0)
        one.close()

    assert len(seen) == 1


def test_too_many_streams_are_refused_until_one_is_closed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "STREAM_PAUSE", 0.01)
    streams = [open_stream(site) for _ in range(live.MOST_STREAMS)]
    assert [one.status for one in streams] == [200] * live.MOST_STREAMS
    assert site.request("GET", "api/live").status == 503
    assert site.request("HEAD", "api/live").status == 200

    for one in streams:
        one.close()

    def answers() -> bool:
        with closing(open_stream(site)) as stream:
            return stream.status == 200

    wait_until(answers)


def test_end_of_the_server_ends_open_streams(bench: Bench) -> None:
    before = set(threading.enumerate())
    with serve(bench.server.dashboard.wsgi(), "127.0.0.1", 0) as address:
        streams = [open_stream(Site(address)) for _ in range(3)]
        for one in streams:
            event(one)
        begun = time.monotonic()

    assert [one.read() for one in streams] == [b"\n", b"\n", b"\n"]
    assert time.monotonic() - begun < live.STREAM_LIFE / 2
    wait_until(lambda: set(threading.enumerate()) <= before)


# Stores that do not answer


def test_missing_store_is_told_and_its_return_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "FRESH", 0.0)
    with RedisServer(appendonly=True) as redis:
        server = Server(Config(broker=redis.url))
        server.register_task("add", lambda a, b: a + b).send(1, 2)
        with site_of(server) as site:
            before = site.get("overview")
            redis.kill()
            begun = time.monotonic()
            during = site.get("overview")
            refused = site.request("GET", "api/tasks")
            undone = site.try_post("queues/pause", queue="mail")
            took = time.monotonic() - begun
            redis.start()
            wait_until(lambda: site.get("overview")["trouble"] == "")

            assert [one["waiting"] for one in site.get("queues")] == [1]
        server.close()

    assert before["trouble"] == "" and before["queues"][0]["waiting"] == 1
    assert "refused" in during["trouble"].lower()
    assert during["queues"] == before["queues"] and during["at"] == before["at"]
    assert (refused.status, undone.status) == (503, 503)
    assert str(redis.port) in refused.error
    assert took < HANG / 2


def test_store_that_hangs_holds_up_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "PATIENCE", 0.5)
    monkeypatch.setattr(live, "SHORT_PATIENCE", 0.3)
    with RedisServer() as redis:
        server = Server(Config(broker=redis.url))
        with site_of(server) as site:
            site.get("overview")
            redis.freeze()
            replies: list[Any] = []

            def ask() -> None:
                replies.append(site.request("GET", "api/workers"))

            threads = [threading.Thread(target=ask) for _ in range(40)]
            for one in threads:
                one.start()
            page = site.request("GET", "")
            for one in threads:
                one.join(HANG)
            undone = site.try_post("queues/pause", queue="mail")
            wait_until(lambda: site.get("overview")["trouble"])
            trouble = site.get("overview")["trouble"]
            redis.thaw()
            wait_until(lambda: not site.get("overview")["trouble"])
        server.close()

    assert page.status == 200
    assert {reply.status for reply in replies} == {503}
    assert "has not answered in 0.5 s" in replies[0].error
    assert "has not answered in 0.3 s" in trouble
    assert undone.status == 503 and "0.5 s (the change may still be made)" in undone.error

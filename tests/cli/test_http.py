"""The HTTP server of the command line: slow, hostile and too many clients keep nobody out."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machinery_py import Config, Server
from machinery_py.cli import http
from machinery_py.cli.http import MOST_CONNECTIONS, Pages, serve
from machinery_py.testing.waiting import HANG, wait_until

CROWD = 200
LARGE = b"x" * 20_000_000  # more than the kernel keeps for a client that does not read

Address = tuple[str, int]


def address_of(url: str) -> Address:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 0)


def status_of(address: Address, path: str = "/live") -> int:
    with contextlib.closing(HTTPConnection(*address, timeout=HANG)) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def probes() -> Pages:
    return Pages(lambda: True, lambda _: (200, "text/plain", LARGE))


@contextlib.contextmanager
def probes_served() -> Iterator[Address]:
    with serve(probes(), "127.0.0.1", 0) as url:
        yield address_of(url)


@contextlib.contextmanager
def dashboard_served() -> Iterator[Address]:
    server = Server(Config(broker="memory://"))
    with serve(server.dashboard.wsgi(auth="ada:secret"), "127.0.0.1", 0) as url:
        yield address_of(url)
    server.close()


Served = Callable[[], contextlib.AbstractContextManager[Address]]

REFUSED = b"POST /api/queues/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
STALLED = {
    "nothing": b"",
    "within the first line": b"GET /li",
    "within the head": b"GET /live HTTP/1.1\r\nX: ",
    "behind a refused request": REFUSED,
    "behind an answer": b"GET /live HTTP/1.1\r\n\r\n",
    "unread answer": b"GET /metrics HTTP/1.1\r\n\r\n",
}


class Crowd:
    """Clients that have sent a start, and then send one byte after another, and read nothing."""

    def __init__(self, address: Address, start: bytes, count: int = CROWD) -> None:
        self.clients = [socket.create_connection(address, HANG) for _ in range(count)]
        self._over = threading.Event()
        for one in self.clients:
            with contextlib.suppress(OSError):  # another one has its place already
                one.sendall(start)
            one.setblocking(False)
        self._thread = threading.Thread(target=self._dribble)

    def __enter__(self) -> Crowd:
        self._thread.start()
        return self

    def _dribble(self) -> None:
        while not self._over.wait(0.02):
            for one in self.clients:
                with contextlib.suppress(OSError):
                    one.send(b"a")

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for one in self.clients:
            one.close()


@pytest.mark.parametrize("served", [probes_served, dashboard_served])
@pytest.mark.parametrize("start", STALLED.values(), ids=STALLED)
def test_crowd_that_dribbles_keeps_no_probe_out(served: Served, start: bytes) -> None:
    with served() as address, Crowd(address, start):
        for _ in range(20):
            assert status_of(address) in (200, 401)


def body_reader(environ: dict[str, object], start_response: Callable[..., object]) -> list[bytes]:
    body = environ["wsgi.input"]
    assert isinstance(body, io.BufferedReader)
    try:
        body.read(int(str(environ.get("CONTENT_LENGTH") or 0)))
        status = "200 OK"
    except OSError:
        status = "400 Bad Request"
    start_response(status, [])
    return [b""]


class Application:
    """A WSGI application of one function."""

    def __init__(self, answer: Callable[..., Iterable[bytes]]) -> None:
        self.answer = answer

    def __call__(
        self, environ: dict[str, object], start_response: Callable[..., object]
    ) -> Iterable[bytes]:
        return self.answer(environ, start_response)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("start", [b"GET /live HTTP/1.1\r\nX: ", REFUSED])
def test_client_that_dribbles_has_its_time_once(
    start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "TIMEOUT", 1.0)
    monkeypatch.setattr(http, "REST_TIMEOUT", 0.5)
    with serve(Application(body_reader), "127.0.0.1", 0) as url:
        names = {one.name for one in threading.enumerate()}
        with Crowd(address_of(url), start, count=1):

            def is_cut_off() -> bool:
                return not [
                    one
                    for one in threading.enumerate()
                    if one.name not in names and "process_request" in one.name
                ]

            wait_until(lambda: not is_cut_off(), what="a thread for the client")
            wait_until(is_cut_off)


def test_crowd_of_one_address_takes_no_place_of_another() -> None:
    places = http._Places(4)
    pairs = [socket.socketpair() for _ in range(6)]
    with contextlib.ExitStack() as stack:
        for pair in pairs:
            for one in pair:
                stack.enter_context(one)
        probe, *crowd = [one for one, _ in pairs]
        assert places.take(probe, "10.0.0.1")
        assert all(places.take(one, "10.0.0.9") for one in crowd)

        with places.waiting(probe):
            pass
        for late in crowd[:2]:  # the oldest ones
            with pytest.raises(ConnectionAbortedError), places.waiting(late):
                pass


def test_connections_that_are_worked_for_keep_their_places() -> None:
    free = threading.Semaphore(0)
    begun: list[object] = []

    def work(_: object, start_response: Callable[..., object]) -> list[bytes]:
        begun.append(_)
        free.acquire()
        start_response("200 OK", [])
        return [b""]

    def is_refused(address: Address) -> bool:
        with contextlib.closing(HTTPConnection(*address, timeout=HANG)) as connection:
            try:
                connection.request("GET", "/")
                connection.getresponse()
            except ConnectionError:
                return True
        return False

    with serve(Application(work), "127.0.0.1", 0) as url:
        address = address_of(url)
        held = []
        for number in range(MOST_CONNECTIONS):
            held.append(HTTPConnection(*address, timeout=HANG))
            held[-1].request("GET", "/")
            wait_until(lambda number=number: len(begun) > number)  # type: ignore[misc]  # bound now
        assert is_refused(address)
        free.release(2 * MOST_CONNECTIONS)
        assert [one.getresponse().status for one in held] == [200] * len(held)
        wait_until(lambda: not is_refused(address))
        for one in held:
            one.close()


def test_slow_scrapes_keep_no_probe_out() -> None:
    gate = threading.Event()
    begun: list[str] = []

    def metrics(accepted: str) -> http.Page:
        begun.append(accepted)
        gate.wait(HANG)
        return 200, "text/plain", b""

    with serve(Pages(lambda: True, metrics), "127.0.0.1", 0) as url:
        address = address_of(url)
        crowd = [socket.create_connection(address, HANG) for _ in range(CROWD)]
        for one in crowd:
            one.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        wait_until(lambda: len(begun) == http.MOST_SCRAPES)
        assert status_of(address) == 200
        assert status_of(address, "/metrics") == 503
        gate.set()
        for one in crowd:
            one.close()


# Hostile requests

METHODS = st.sampled_from(["GET", "HEAD", "POST", "HEADHEAD", "OPTIONS", "\x00", "gET", "G" * 300])
PATHS = st.one_of(
    st.sampled_from(
        [
            *("", "*", "?", "/" + "a" * 300, "/api/" + "a" * 300, "/%00", "/a%00.js", "/%", "/%zz"),
            *(
                "http://localhost/api/queues",
                "//x/y",
                "/../../etc/passwd",
                "/%2e%2e/%2e%2e/a",
                "/;",
            ),
            *("/api/tasks?limit=" + "9" * 400, "/api/tasks?cursor=%ff%00", "/api/task?uuid=%00"),
            *(
                "/api/task?uuid=" + "u" * 3000,
                "/index.html/",
                "/pages",
                "/\udcff",
                "/" + "a/" * 200,
            ),
            *("/api/queues/pause", "/api/live", "/live", "/ready", "/metrics"),
        ]
    ),
    st.text(max_size=40).map("/".__add__),
)
NAMES = st.sampled_from(
    [
        *("Host", "Authorization", "Content-Length", "Content-Type", "Cookie", "Origin", "Expect"),
        *("X-CSRF-Token", "Transfer-Encoding", "If-None-Match", "Accept", "Connection", "X\x00"),
    ]
)
VALUES = st.one_of(
    st.sampled_from(
        [
            *(
                "localhost",
                "",
                "-1",
                "1e9",
                "99999999999999999999",
                "5, 5",
                "application/json",
                "[::",
            ),
            *(
                "Basic YWRhOnNlY3JldA==",
                "Basic ////",
                "Basic \xff",
                "machinery_csrf=\xff",
                "chunked",
            ),
            *("multipart/form-data", "100-continue", "http://[", "text/plain; q=x", "a" * 70_000),
        ]
    ),
    st.text(max_size=30),
)
LINES = st.tuples(NAMES, VALUES).map(": ".join)
VERSIONS = st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/9.9", "HTTP/1.1.1", "HTTP/x", "", "a b"])
WHOLE = st.builds(
    lambda method, path, version, lines, body: (
        "\r\n".join([f"{method} {path} {version}", *lines, "", ""]).encode("utf-8", "replace")
        + body
    ),
    *(METHODS, PATHS, VERSIONS, st.lists(LINES, max_size=8), st.binary(max_size=60)),
)
REQUESTS = st.one_of(WHOLE, st.binary(max_size=200), WHOLE.map(lambda one: one[: len(one) // 2]))


def answer_to(address: Address, request: bytes) -> bytes:
    with contextlib.closing(socket.create_connection(address, HANG)) as client:
        with contextlib.suppress(OSError):
            client.sendall(request)
            client.shutdown(socket.SHUT_WR)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while len(answer) < 16 and (more := client.recv(16 - len(answer))):
                answer += more
        return answer


def check_answer(address: Address, caplog: pytest.LogCaptureFixture, request: bytes) -> None:
    answer = answer_to(address, request)
    status = int(answer.split()[1]) if answer.startswith(b"HTTP/") else 0  # HTTP 0.9 has none
    assert status < 500 or status in (503, 505), (request, answer)
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR], request


@pytest.fixture(scope="module")
def open_dashboard() -> Iterator[Address]:
    server = Server(Config(broker="memory://"))
    with serve(server.dashboard.wsgi(), "127.0.0.1", 0) as url:
        yield address_of(url)
    server.close()


@pytest.fixture(scope="module")
def open_probes() -> Iterator[Address]:
    with serve(Pages(lambda: True, lambda _: (200, "text/plain", b"")), "127.0.0.1", 0) as url:
        yield address_of(url)


@settings(max_examples=200, deadline=None)
@given(request=REQUESTS)
def check_dashboard(address: Address, caplog: pytest.LogCaptureFixture, request: bytes) -> None:
    check_answer(address, caplog, request)


def test_hostile_requests_of_the_dashboard_are_refused(
    open_dashboard: Address, caplog: pytest.LogCaptureFixture
) -> None:
    check_dashboard(open_dashboard, caplog)


def test_hostile_requests_of_the_probes_are_refused(
    open_probes: Address, caplog: pytest.LogCaptureFixture
) -> None:
    check_dashboard(open_probes, caplog)


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (b"GET /" + b"a" * 300 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + (b"X: " + b"a" * 60_000 + b"\r\n") * 40 + b"\r\n", 431),
        (b"GET ?a HTTP/1.1\r\nHost: localhost\r\n\r\n", 308),
        (b"HEADHEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n", 403),
    ],
)
def test_request_is_refused_with_its_own_status(
    open_dashboard: Address, request_text: bytes, status: int
) -> None:
    assert answer_to(open_dashboard, request_text).split()[1] == b"%d" % status


def test_request_that_ends_in_its_head_is_not_run(open_dashboard: Address) -> None:
    assert answer_to(open_dashboard, b"GET /api/queues HTTP/1.1\r\nHost: localhost\r\nX: ") == b""

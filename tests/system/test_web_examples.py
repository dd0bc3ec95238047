"""The web applications of examples/web, each with its real server, and one worker for all."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from machinery_py import Server, Signature
from machinery_py.testing.waiting import wait_until
from tests.docs.pages import ROOT, blocks, environment
from tests.support.private import free_port

PLACE = ROOT / "examples" / "web"
HANG = 30.0  # seconds; a guard

UVICORN = ("uvicorn", "--no-access-log")
SERVERS = {
    "fastapi": UVICORN,
    "starlette": UVICORN,
    "litestar": UVICORN,
    # Four threads: what a client that is gone would hold is missed at once.
    "flask": ("gunicorn", "--threads", "4"),
}


class Site:
    """One application with its server."""

    def __init__(self, framework: str, folder: Path, env: dict[str, str]) -> None:
        self.port = free_port()
        module, *words = SERVERS[framework]
        where = (
            ["--bind", f"127.0.0.1:{self.port}"]
            if module == "gunicorn"
            else ["--host", "127.0.0.1", "--port", str(self.port)]
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *words, *where, f"{framework}_app:app"],
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # gunicorn's workers too
        )

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()[0]
        with contextlib.suppress(ConnectionRefusedError):
            self.ask("GET", "/health")
            return True
        return False

    def stop(self) -> str:
        self.process.send_signal(signal.SIGTERM)
        return self.process.communicate(timeout=HANG)[0]

    def open(self, method: str, path: str, body: bytes | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, body, headers)
        return connection.getresponse()

    def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        with self.open(method, path, body) as answer:
            text = answer.read()
        return answer.status, json.loads(text)

    def order(self, rows: int) -> str:
        status, answer = self.ask("POST", "/reports", json.dumps({"rows": rows}).encode())
        assert status == 202, answer
        return str(answer["id"])

    def events(self, uuid: str) -> Generator[dict[str, Any], None, None]:
        """The events of a report; closing the iterator closes the connection."""
        with self.open("GET", f"/reports/{uuid}/events") as answer:
            assert (answer.status, answer.headers["Content-Type"].split(";")[0]) == (
                200,
                "text/event-stream",
            )
            for line in answer:
                if line.startswith(b"data: "):
                    yield json.loads(line.removeprefix(b"data: "))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("web")


@pytest.fixture(scope="module")
def env(folder: Path) -> dict[str, str]:
    return environment(folder, PYTHONPATH=str(PLACE), XDG_RUNTIME_DIR=str(folder))


@pytest.fixture(scope="module")
def worker(folder: Path, env: dict[str, str]) -> Iterator[None]:
    words = ["-m", "machinery_py", "worker", "reports", "--no-banner", "-c", "8"]
    process = subprocess.Popen([sys.executable, *words], cwd=folder, env=env)
    try:
        yield
    finally:
        process.terminate()
        process.wait(HANG)


@contextlib.contextmanager
def serving(framework: str, folder: Path, env: dict[str, str]) -> Iterator[Site]:
    pytest.importorskip(framework)
    pytest.importorskip(SERVERS[framework][0])
    site = Site(framework, folder, env)
    try:
        wait_until(site.is_up, timeout=HANG)
        yield site
    finally:
        if site.process.poll() is None:
            os.killpg(site.process.pid, signal.SIGKILL)
            site.process.communicate()


@pytest.fixture(scope="module", params=list(SERVERS))
def site(
    request: pytest.FixtureRequest, folder: Path, env: dict[str, str], worker: None
) -> Iterator[Site]:
    with serving(str(request.param), folder, env) as site:
        yield site


def test_report_is_ordered_followed_and_read(site: Site) -> None:
    uuid = site.order(60)

    events = list(site.events(uuid))

    done = {"id": uuid, "state": "SUCCESS", "progress": [60, 60], "result": "a report of 60 rows"}
    assert events[-1] == done
    assert any(one["state"] == "STARTED" and one["progress"] for one in events), events
    assert [one["state"] for one in events].count("SUCCESS") == 1
    assert site.ask("GET", f"/reports/{uuid}") == (200, done)
    assert list(site.events(uuid)) == [done]


def test_health_counts_the_workers(site: Site) -> None:
    wait_until(lambda: site.ask("GET", "/health") == (200, {"workers": 1}), timeout=HANG)


def test_what_is_no_report_is_not_found(site: Site, folder: Path) -> None:
    server = Server(f"sqlite:///{folder}/machinery.db")
    other = server.register_task("other", print).options(delay=600).send()

    for uuid in ("task_1", "%00", "%ff", "%F0%9F%90%8D", "x" * 3000, other.uuid):
        for path in (f"/reports/{uuid}", f"/reports/{uuid}/events"):
            assert site.ask("GET", path)[0] == 404, path


BAD = [
    b"",
    b"nonsense",
    b"null",
    b"[]",
    b"{}",
    b'{"rows": 0}',
    b'{"rows": 1001}',
    b'{"rows": "ten"}',
    b'{"rows": 1.5}',
    b'{"rows": true}',
    b'{"rows": 1e999}',
    b'{"rows": -1e999}',
    b'{"rows": NaN}',
    b'{"rows": Infinity}',
    b'{"rows": [1e999, NaN]}',
    b'{"rows": 18446744073709551616}',
    b'{"rows": ' + b"9" * 10_000 + b"}",
    b'{"rows": ' + b"[" * 500 + b"]" * 500 + b"}",
    b"[" * 200_000,
    b'{"more": ' * 200_000,
    b'{"rows": 5, "more": ' + b"[" * 200_000,
    b'{"rows": "\xff"}',
    b'{"rows": "\\ud800"}',
    b'\xff\xfe{"rows": 5}',
]


def test_bad_input_is_refused_with_400(site: Site) -> None:
    for body in BAD:
        status, answer = site.ask("POST", "/reports", body)
        assert (status, list(answer)) == (400, ["detail"]), body[:40]


def test_client_that_goes_away_holds_nothing(site: Site, folder: Path) -> None:
    tomorrow = dt.datetime.now(dt.timezone.utc) + dt.timedelta(days=1)
    waiting = Signature.of("report", 5).replace(eta=tomorrow)  # nothing of it changes
    uuid = Server(f"sqlite:///{folder}/machinery.db").send_task(waiting).uuid
    streams = [site.events(uuid) for _ in range(4)]
    for stream in streams[:3]:
        assert next(stream)["state"] == "PENDING"
    assert site.ask("GET", f"/reports/{uuid}")[0] == 200  # streams do not keep others waiting
    next(streams[3])

    for stream in streams:
        stream.close()

    assert [site.ask("GET", "/health")[0] for _ in range(4)] == [200] * 4
    assert "Traceback" not in site.stop()  # uvicorn waits for streams that go on


@pytest.mark.parametrize("framework", list(SERVERS))
def test_store_that_is_away_is_told_with_503(
    framework: str, folder: Path, env: dict[str, str]
) -> None:
    away = {"MACHINERY_URL": f"redis://127.0.0.1:{free_port()}", "MACHINERY_PUBLISH_TIMEOUT": "0.1"}

    with serving(framework, folder, {**env, **away}) as site:
        asked = [
            site.ask("POST", "/reports", b'{"rows": 5}'),
            site.ask("GET", "/reports/task_1"),
            site.ask("GET", "/reports/task_1/events"),
            site.ask("GET", "/health"),
        ]

    assert asked == [(503, {"detail": "come back later"})] * 4


def test_page_shows_the_files_as_they_are() -> None:
    shown = {one.file: one.text for one in blocks("docs/how-to/frameworks.md") if one.file}

    assert list(shown) == ["reports.py", "streams.py", "fastapi_app.py"]
    assert shown == {name: (PLACE / name).read_text() for name in shown}

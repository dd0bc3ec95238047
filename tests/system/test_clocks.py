"""Workers and senders whose machine's clock is an hour off: moments are the store's."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from machinery_py.testing.waiting import HANG, wait_until

ROOT = Path(__file__).parents[2]
STORES = ["sqlite", "postgresql", "redis", "cluster", "mongodb", "amqp and redis"]


@pytest.fixture(params=STORES)
def app(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ModuleType]:
    """Return the app over a store, in this process, whose clock is right."""
    backend = ""
    match request.param:
        case "sqlite":
            url = f"sqlite:///{tmp_path}/store.db?synchronous=normal"
        case "postgresql":
            url = request.getfixturevalue("postgres_url")
        case "cluster":
            url = request.getfixturevalue("empty_cluster").url
        case "amqp and redis":
            url = request.getfixturevalue("amqp_url")
            backend = request.getfixturevalue("redis_url")
        case name:
            url = request.getfixturevalue(f"{name}_url")
    monkeypatch.setenv("CLOCK_BROKER", url)
    monkeypatch.setenv("CLOCK_BACKEND", backend)
    monkeypatch.delitem(sys.modules, "tests.system.clock_app", raising=False)
    module = importlib.import_module("tests.system.clock_app")
    yield module
    module.server.close()


def child(ahead: int, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.system.clock_app", *arguments],
        cwd=ROOT,
        env={**os.environ, "AHEAD": str(ahead)},
    )


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_worker_with_a_wrong_clock_keeps_the_moments(app: ModuleType, ahead: int) -> None:
    results = [
        app.echo.options(expires=60.0).send("in time"),
        app.echo.options(delay=0.2, expires=60.0).send("delayed"),
        app.shaky.send("by retries"),
        app.later.send("by RetryTaskLater"),
        app.sender.send("task_by_a_task"),
    ]
    over = app.echo.options(expires=-1.0).send("too late")
    worker = child(ahead, "work")
    try:
        assert [one.get(timeout=HANG) for one in results[:4]] == [
            "in time",
            "delayed",
            "by retries",
            "by RetryTaskLater",
        ]
        results[4].get(timeout=HANG)
        wait_until(lambda: app.server.backend.get_states(["task_by_a_task"]))
        assert app.server.result("task_by_a_task").get(timeout=HANG) == "sent by a task"
        wait_until(over.is_finished)
        assert over.get_state().error_type == "Expired"
        state = results[0].get_state()
        assert abs((app.server.now() - state.finished_at).total_seconds()) < HANG
        wait_until(lambda: [one.sent for one in app.server.schedules.list()] > [1])
    finally:
        worker.terminate()
        assert worker.wait(HANG) == 0


@pytest.mark.parametrize("ahead", [3600, -3600])
def test_first_send_of_a_wrong_clock_keeps_the_moments(app: ModuleType, ahead: int) -> None:
    assert child(ahead, "send", "task_from_afar").wait(HANG) == 0
    with app.server.new_worker(concurrency=1, scheduler=False):
        assert app.server.result("task_from_afar").get(timeout=HANG) == "sent by a process"

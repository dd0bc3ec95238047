"""Tasks that hold the interpreter for two leases: they run once, and their worker is alive.

`make chaos` (MACHINERY_TEST_FULL=1) does it over each store; otherwise over Redis only: it takes a
processor for those leases, and each store sees the same silence.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import time

import pytest

from machinery_py import Config, Server
from machinery_py.testing.waiting import wait_until
from tests.cli.app import HANG, TASKS, App, app_in_a_folder, is_alive
from tests.support.fixtures import url_of
from tests.support.servers import RedisServer

app = app_in_a_folder

LEASE = 3.0  # seconds
STUCK = 2.5 * LEASE  # seconds
HOLDING = (
    TASKS
    + f"""
import ctypes, math, re

def match(length: int) -> float:
    begun = time.monotonic()
    re.match("(a+)+$", "a" * length + "b")
    return time.monotonic() - begun

@server.task
def hold_the_interpreter(how: str) -> None:
    with open(HERE / "notes.txt", "a") as file:
        file.write(f"{{how}} {{os.getpid()}}\\n")
    if how == "call":
        ctypes.PyDLL(None).sleep(math.ceil({STUCK}))
    else:
        match(18 + math.ceil(math.log2({STUCK} / match(18))))  # each letter doubles the time
"""
)


HOLDING += """
@server.task
def hold_until_told(fifo: str) -> None:
    descriptor = os.open(fifo, os.O_RDONLY)
    with open(HERE / "notes.txt", "a") as file:
        file.write(f"told {os.getpid()}\\n")
    ctypes.PyDLL(None).read(descriptor, ctypes.create_string_buffer(1), 1)
    os.close(descriptor)
"""


FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
STORES = ["redis", "postgresql", *["cluster", "mongodb"] * FULL]
HELD = list(itertools.product(STORES, ("call", "expression")))


@pytest.fixture
def url(request: pytest.FixtureRequest) -> str:
    return url_of(request.param, "", request)


@pytest.mark.parametrize(("url", "how"), HELD, indirect=["url"])
def test_task_that_holds_the_interpreter_runs_once(app: App, url: str, how: str) -> None:
    app.env |= {"MACHINERY_URL": url, "MACHINERY_LEASE": str(LEASE)}
    app.write("tasks.py", HOLDING)
    workers = [app.worker("-c", "1"), app.worker("-c", "1")]

    uuid = app.send("hold_the_interpreter", how)
    wait_until(lambda: app.notes, HANG)
    app.run("health", "tasks")
    wait_until(lambda: app.state(uuid) == "SUCCESS", HANG)

    assert len(app.notes) == 1
    assert [one["stalled"] for one in app.json("workers", "tasks")] == [False, False]
    assert [one.stop() for one in workers] == [0, 0]
    assert not any("lost its lease" in one.err or "is gone" in one.err for one in workers)


@pytest.mark.parametrize("store", ["redis", "mongodb"])
def test_keeper_answers_for_a_worker_that_cannot(
    app: App, store: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    found = request.getfixturevalue("mongodb_url" if store == "mongodb" else "empty_redis")
    url = found if isinstance(found, str) else found.url
    app.env |= {"MACHINERY_URL": url, "MACHINERY_LEASE": str(LEASE)}
    app.write("tasks.py", HOLDING)
    os.mkfifo(tmp_path / "fifo")
    fifo = os.open(tmp_path / "fifo", os.O_RDWR)
    worker = app.worker("-c", "1", "-n", "ada")
    pid = worker.worker
    with contextlib.closing(Server(config=Config(broker=url, lease=LEASE))) as asking:
        ada = asking.control.workers("ada", timeout=HANG)
        before = ada.stats()["ada"]
        uuid = app.send("hold_until_told", str(tmp_path / "fifo"))
        wait_until(lambda: app.notes, HANG)

        # An order that it took in the moment before has no answer.
        quick = asking.control.workers("ada", timeout=LEASE)
        wait_until(lambda: "ada" in quick.ping(), HANG)
        assert ada.ping()["ada"].seconds > 0
        stats, active, stacks = ada.stats()["ada"], ada.active()["ada"], ada.stack()["ada"]
        assert asking.control.workers("ada", timeout=0.7).queues().missing == ("ada",)

        os.write(fifo, b"!")
        wait_until(lambda: app.state(uuid) == "SUCCESS", HANG)
        assert set(ada.queues()) == {"ada"}
    os.close(fifo)

    assert (stats.pid, stats.started_at) == (pid, before.started_at)
    assert stats.uptime - before.uptime >= LEASE / 3
    assert [one.uuid for one in active] in ([], [uuid])  # it may have begun after the last sign
    assert any("in hold_until_told" in one.stack for one in stacks)
    assert len(app.notes) == 1
    assert worker.stop() == 0


def test_supervisor_that_is_stopped_changes_nothing(app: App) -> None:
    app.env |= {"MACHINERY_LEASE": str(LEASE)}
    worker = app.worker("-c", "1")
    (child,) = (worker.worker,)
    os.kill(worker.pid, signal.SIGSTOP)
    begun = time.monotonic()
    uuid = app.send("hold", "slow")
    wait_until(lambda: app.notes and time.monotonic() - begun > STUCK, HANG)

    os.kill(worker.pid, signal.SIGCONT)
    app.go("slow")

    wait_until(lambda: app.state(uuid) == "SUCCESS", HANG)
    assert app.notes == [("slow", child)]
    assert "killing it" not in worker.err
    assert worker.stop() == 0


def test_worker_whose_supervisor_is_killed_ends_in_order(app: App) -> None:
    worker = app.worker("-c", "1")
    child = worker.worker
    uuid = app.send("hold", "slow")
    wait_until(lambda: app.notes, HANG)

    os.kill(worker.pid, signal.SIGSTOP)  # so that it dies with signs unread
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > 1.5, HANG)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    app.go("slow")

    wait_until(lambda: app.state(uuid) == "SUCCESS", HANG)
    wait_until(lambda: not pathlib.Path(f"/proc/{child}/exe").exists(), HANG)
    assert app.notes == [("slow", child)]


def test_task_that_outlives_supervisor_and_lease_completes_once(
    app: App, empty_redis: RedisServer
) -> None:
    app.env |= {"MACHINERY_URL": empty_redis.url, "MACHINERY_LEASE": "1"}
    app.write(
        "tasks.py",
        TASKS
        + """
@server.task
def hold_once() -> None:
    import ctypes
    note("run")
    if (HERE / "notes.txt").read_text().count("run") == 1:
        ctypes.PyDLL(None).sleep(4)
""",
    )
    first = app.worker("-c", "1")
    worker = first.worker
    uuid = app.send("hold_once")
    wait_until(lambda: app.notes, HANG)

    os.kill(first.pid, signal.SIGKILL)
    second = app.worker("-c", "1")

    wait_until(lambda: app.state(uuid) == "SUCCESS", HANG)
    wait_until(lambda: not is_alive(worker), HANG)
    assert app.notes == [("run", worker), ("run", second.worker)]
    assert second.stop() == 0

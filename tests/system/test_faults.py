"""Faults of Redis and its network while tasks run: nothing is lost or doubled, and work goes on.

Each task's completion sends a callback: a second completion would send a second callback.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from machinery_py import AsyncResult, Config, Server, State, current_task
from machinery_py.errors import MachineryError, PublishUnknown
from machinery_py.testing.waiting import wait_until
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer, require

HANG = 60.0  # seconds; a guard, nothing is measured with it
ROOT = Path(__file__).parents[2]
# Tasks that somebody tries to send during the fault; few where each try takes its whole time.
DURING, FEW = 40, 2
ALWAYS = {"appendfsync": "always"}

Window = Callable[["Scene"], contextlib.AbstractContextManager[None]]


class Scene:
    """A Redis, a proxy before it, a worker behind that, and what its tasks have done."""

    def __init__(self, redis: RedisServer, proxy: Proxy) -> None:
        self.redis = redis
        self.proxy = proxy
        self.server = Server(
            Config(broker=proxy.through(redis.url), lease=1.0, publish_timeout=0.5)
        )
        self.runs: Counter[int] = Counter()
        self.callbacks: dict[int, set[str]] = {}
        self.gate = threading.Event()
        self.task = self.server.register_task("work", self.work)
        self.callback = self.server.register_task("after", self.after)
        self.accepted: dict[int, AsyncResult[int]] = {}
        self.unknown: set[int] = set()

    def work(self, number: int) -> int:
        if number < 2:
            self.gate.wait(HANG)
        self.runs[number] += 1
        return number

    def after(self, number: int) -> None:
        self.callbacks.setdefault(number, set()).add(current_task().uuid)

    def send(self, number: int) -> None:
        try:
            self.accepted[number] = self.task.signature(number).then(self.callback.partial()).send()
        except PublishUnknown:
            self.unknown.add(number)
        except MachineryError:
            pass  # nothing was stored

    def runs_two(self) -> bool:
        states = self.server.backend.get_states([self.accepted[0].uuid, self.accepted[1].uuid])
        return len(states) == 2 and all(state.state is State.STARTED for state in states.values())

    def is_empty(self) -> bool:
        return not any(
            one.waiting or one.running or one.delayed for one in self.server.broker.stats()
        )


@pytest.fixture
def scene() -> Iterator[Scene]:
    require(RedisServer)
    with RedisServer(appendonly=True, config=ALWAYS) as redis, Proxy(redis.port, seed=7) as proxy:
        scene = Scene(redis, proxy)
        yield scene
        proxy.heal()
        scene.server.close()


# What lasts from the `with` to its end


@contextlib.contextmanager
def killed(scene: Scene) -> Iterator[None]:
    scene.redis.kill()
    yield
    scene.redis.start()


@contextlib.contextmanager
def frozen(scene: Scene) -> Iterator[None]:
    scene.redis.freeze()
    yield
    scene.redis.thaw()


@contextlib.contextmanager
def full(scene: Scene) -> Iterator[None]:
    scene.redis.cli("CONFIG", "SET", "maxmemory", "1mb")
    yield
    scene.redis.cli("CONFIG", "SET", "maxmemory", "0")


@contextlib.contextmanager
def disk_trouble(scene: Scene) -> Iterator[None]:
    """MISCONF: it cannot write its snapshot, for there is a folder in the way."""
    redis = scene.redis
    obstacle = redis.folder / "dump.rdb"
    (obstacle / "full").mkdir(parents=True)
    redis.cli("CONFIG", "SET", "save", "3600 1")
    redis.cli("BGSAVE")
    wait_until(
        lambda: "rdb_last_bgsave_status:err" in str(redis.cli("INFO", "persistence")),
        HANG,
        "a snapshot that fails",
    )
    yield
    (obstacle / "full").rmdir()
    obstacle.rmdir()
    redis.cli("BGSAVE")
    wait_until(
        lambda: "rdb_last_bgsave_status:ok" in str(redis.cli("INFO", "persistence")),
        HANG,
        "a snapshot",
    )


@contextlib.contextmanager
def demoted(scene: Scene) -> Iterator[None]:
    """READONLY, and UNBLOCKED for who sleeps."""
    scene.redis.cli("REPLICAOF", "127.0.0.1", "1")
    yield
    scene.redis.cli("REPLICAOF", "NO", "ONE")


@contextlib.contextmanager
def locked(scene: Scene) -> Iterator[None]:
    """NOAUTH: a password that nobody was told of."""
    scene.redis.cli("CONFIG", "SET", "requirepass", "changed")
    scene.redis.password = "changed"
    scene.redis.cli("CLIENT", "KILL", "TYPE", "normal")
    yield
    scene.redis.cli("CONFIG", "SET", "requirepass", "")
    scene.redis.password = ""


@contextlib.contextmanager
def black_hole(scene: Scene) -> Iterator[None]:
    scene.proxy.black_hole()
    yield
    scene.proxy.heal()


@contextlib.contextmanager
def refused(scene: Scene) -> Iterator[None]:
    scene.proxy.refuse()
    scene.proxy.reset()
    yield
    scene.proxy.heal()


@contextlib.contextmanager
def replies_dropped(scene: Scene) -> Iterator[None]:
    scene.proxy.drop_replies(0.4)
    yield
    scene.proxy.heal()


@contextlib.contextmanager
def again_and_again(scene: Scene, *words: str) -> Iterator[None]:
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(0.05):
            scene.redis.cli(*words)

    thread = threading.Thread(target=disturb)
    thread.start()
    yield
    over.set()
    thread.join(HANG)


def clients_killed(scene: Scene) -> contextlib.AbstractContextManager[None]:
    return again_and_again(scene, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def scripts_forgotten(scene: Scene) -> contextlib.AbstractContextManager[None]:
    return again_and_again(scene, "SCRIPT", "FLUSH")


WINDOWS: list[Window] = [
    killed,
    frozen,
    full,
    disk_trouble,
    demoted,
    locked,
    black_hole,
    refused,
    replies_dropped,
    clients_killed,
    scripts_forgotten,
]
PASSING = (clients_killed, scripts_forgotten, replies_dropped)  # some get through


@pytest.mark.timeout(3 * HANG)
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: window.__name__)
def test_a_fault_loses_nothing_and_doubles_nothing(window: Window, scene: Scene) -> None:
    with scene.server.new_worker("worker", concurrency=2) as worker:
        for number in range(10):
            scene.send(number)
        assert len(scene.accepted) == 10
        wait_until(scene.runs_two, HANG, "two tasks that run, and eight that wait")

        with window(scene):
            scene.gate.set()  # the two end now, and want to be settled
            end = time.monotonic() + (0.0 if window in PASSING else 1.2 * scene.server.config.lease)
            for number in range(10, 10 + (DURING if window in PASSING else FEW)):
                scene.send(number)
            wait_until(
                lambda: time.monotonic() > end, HANG, "the fault lasts for longer than a lease"
            )

        wait_until(lambda: worker.ready, HANG, "a worker that is ready again")
        scene.send(1000)
        assert 1000 in scene.accepted
        assert {number: result.get(timeout=HANG) for number, result in scene.accepted.items()} == {
            n: n for n in scene.accepted
        }
        wait_until(scene.is_empty, HANG, "queues that are empty")
        wait_until(lambda: set(scene.accepted) <= set(scene.callbacks), HANG, "all callbacks")

    assert all(len(uuids) == 1 for uuids in scene.callbacks.values()), "a task completed twice"
    assert set(scene.runs) <= set(scene.accepted) | scene.unknown, "a task ran that was refused"
    assert set(scene.callbacks) == set(scene.runs)
    assert not scene.server.inspect.dead()
    assert sum(scene.runs.values()) - len(scene.runs) <= 10, "more ran again than the worker held"


def test_a_message_that_comes_twice_completes_once(scene: Scene) -> None:
    scene.gate.set()
    for number in range(10):
        scene.send(number)
    bodies = scene.redis.cli("LRANGE", "machinery_tasks", 0, -1)
    assert isinstance(bodies, list)
    scene.redis.cli("RPUSH", "machinery_tasks", *map(str, bodies))

    with scene.server.new_worker("worker", concurrency=2):
        wait_until(scene.is_empty, HANG, "queues that are empty")

    assert set(scene.callbacks) == set(range(10))
    assert all(len(uuids) == 1 for uuids in scene.callbacks.values())
    assert not scene.server.inspect.dead()


#: A sitecustomize.py: of the supervisor and of its worker process.
WRONG_CLOCK = """
import datetime as dt, os
from machinery_py import clock
right = clock.SystemClock.now
wrong = dt.timedelta(seconds=float(os.environ["AHEAD"]))
clock.SystemClock.now = staticmethod(lambda: right() + wrong)
"""
WORKER = ("-m", "machinery_py", "worker", "tests.system.killing", "-c", "2")


def test_workers_with_clocks_an_hour_off_take_nothing_over(scene: Scene, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    ledger.touch()
    environment = {
        **os.environ,
        "KILL_URL": scene.redis.url,
        "KILL_LEDGER": str(ledger),
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "MACHINERY_LEASE": "1",
    }
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK)
    work = scene.server.register_task("nap", float)
    polite = scene.server.register_task("polite", int)
    workers: list[subprocess.Popen[bytes]] = []
    for name, ahead in (("early", "3600"), ("late", "-3600"), ("right", "0")):
        with (tmp_path / name).open("wb") as log:
            workers.append(
                subprocess.Popen(
                    [sys.executable, *WORKER, "-n", name],
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    env={**environment, "AHEAD": ahead},
                )
            )
    try:
        wait_until(lambda: len(scene.server.broker.workers()) == 3, HANG, "three workers")
        soon = scene.server.now()
        results = [work.send(1.5) for _ in range(6)]  # each longer than the lease
        assert [result.get(timeout=HANG) for result in results] == ["rested"] * 6
        # Those that wait come back when it is their turn, whatever their worker's clock says.
        waited = [polite.send(number) for number in range(12)]
        assert [result.get(timeout=HANG) for result in waited] == list(range(12))
        by = {result.get_state().worker for result in results}
        assert len(scene.server.broker.workers()) == 3
    finally:
        for one in workers:
            one.terminate()
        codes = [one.wait(HANG) for one in workers]

    assert codes == [0, 0, 0]
    assert by == {"early", "late", "right"}
    assert ledger.read_text().count("nap ") == 6
    logs = [(tmp_path / name).read_text() for name in ("early", "late", "right")]
    assert re.search(
        r"this host's clock is 3[56]\d\d s ahead: "
        r"ours goes by the server's",
        logs[0],
    )
    assert re.search(r"this host's clock is 3[56]\d\d s behind", logs[1])
    assert "clock" not in logs[2]
    assert (scene.server.now() - soon).total_seconds() < HANG


def test_slots_of_a_killed_worker_are_free_after_its_lease(scene: Scene, tmp_path: Path) -> None:
    ledger, gate = tmp_path / "ledger", tmp_path / "gate"
    ledger.touch()
    environment = {
        **os.environ,
        "KILL_URL": scene.redis.url,
        "KILL_LEDGER": str(ledger),
        "MACHINERY_LEASE": "1",
    }
    hold_two = scene.server.register_task("hold_two", str)

    def started() -> int:
        return ledger.read_text().count("hold_two ")

    def running() -> int:
        return sum(one.running for of in scene.server.inspect.limits() for one in of.usage)

    def worker() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *WORKER],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    results = [hold_two.send(str(gate)) for _ in range(5)]
    first = worker()
    wait_until(lambda: started() == 2, HANG, "two that run")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait(HANG)
    assert running() == 2
    gate.touch()
    second = worker()
    try:
        assert [result.get(timeout=HANG) for result in results] == ["let go"] * 5
        wait_until(lambda: running() == 0, HANG, "no slot that is held")
    finally:
        os.killpg(second.pid, signal.SIGTERM)
        second.wait(HANG)

"""Workers are killed with `kill -9`, again and again, while thousands of tasks run on one store."""

from __future__ import annotations

import collections
import functools
import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from machinery_py import Config, Server, State
from machinery_py.errors import BrokerUnavailable
from machinery_py.testing.waiting import wait_until
from tests.support import private_mongo
from tests.support.freezing import can_be_written, freeze, stands_still
from tests.support.supervised import children, kill_all

ROOT = pathlib.Path(__file__).parents[2]
KILLS = int(os.environ.get("CHAOS_KILLS", "20"))  # `make chaos` asks for more
EACH = 1000  # tasks for a kill
WHOLE = re.compile(r"^\w+ (task_[0-9a-f-]{36}) \d+$", re.MULTILINE)  # lines of the ledger
HANG = max(150.0, 10.0 * KILLS)  # seconds; a guard, nothing is measured with it


class Fleet:
    """Worker processes over one store."""

    def __init__(self, folder: pathlib.Path, url: str, backend: str = "") -> None:
        self.url = url
        self.backend = backend
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self.environment = {
            **os.environ,
            "KILL_URL": self.url,
            "KILL_BACKEND": self.backend,
            "KILL_LEDGER": str(self.ledger),
            "PYTHONPATH": str(ROOT),
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "machinery_py",
                "worker",
                "tests.system.killing",
                "-c",
                "2",
                *options,
            ],
            env=self.environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.processes.append(process)
        return process

    def runs(self) -> collections.Counter[str]:
        return collections.Counter(WHOLE.findall(self.ledger.read_text()))

    def stop(self) -> None:
        for process in self.processes:
            kill_all(process)


FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
STORES = [
    "sqlite",
    "postgresql",
    "redis",
    "amqp",
    *(["amqp and redis", "amqp and mongodb"] if FULL else []),
]


@pytest.fixture(params=STORES)
def fleet(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Fleet]:
    if request.param == "amqp":
        fleet = Fleet(
            tmp_path, request.getfixturevalue("amqp_url"), f"sqlite:///{tmp_path}/states.db"
        )
    elif request.param == "amqp and redis":
        fleet = Fleet(
            tmp_path,
            request.getfixturevalue("amqp_url"),
            request.getfixturevalue("empty_redis").url,
        )
    elif request.param == "postgresql":
        fleet = Fleet(tmp_path, request.getfixturevalue("postgres_url"))
    elif request.param == "mongodb":
        fleet = Fleet(tmp_path, _mongodb(request))
    elif request.param == "amqp and mongodb":
        fleet = Fleet(tmp_path, request.getfixturevalue("amqp_url"), _mongodb(request))
    else:
        sqlite = f"sqlite:///{tmp_path}/kills.db"
        fleet = Fleet(
            tmp_path,
            sqlite if request.param == "sqlite" else request.getfixturevalue("empty_redis").url,
        )
    yield fleet
    fleet.stop()


def _mongodb(request: pytest.FixtureRequest) -> str:
    server = private_mongo.KINDS[private_mongo.best_kind()]()
    request.addfinalizer(server.close)
    return f"{server.start().url}kills"


@pytest.fixture
def server(fleet: Fleet) -> Iterator[Server]:
    server = Server(fleet.url, result_backend=fleet.backend)
    yield server
    server.close()


@pytest.mark.timeout(2 * HANG)
def test_kills_during_thousands_of_tasks_lose_and_double_nothing(
    fleet: Fleet, server: Server
) -> None:
    # RabbitMQ hands out a third of what others do in a second.
    kills = KILLS if FULL or not fleet.url.startswith("amqp") else KILLS // 4
    tasks = EACH * kills
    work = server.register_task("work", int)
    sent: set[str] = set()
    for start in range(0, tasks, EACH):
        batch = [work.signature(number).with_uuid() for number in range(start, start + EACH)]  # type: ignore[attr-defined]
        server.app.submit(batch)
        sent.update(one.uuid for one in batch)
    workers = [fleet.start(), fleet.start()]

    for number in range(kills):
        # Each kill hits a fleet that is at work: a few hundred tasks after the one before.
        goal = (number + 1) * tasks // (kills + 2)
        at_work = functools.partial(has_run, fleet, server, goal)
        wait_until(at_work, timeout=HANG, what=f"{goal} runs")
        victim = workers[number % 2]
        kill_all(victim)
        workers[number % 2] = fleet.start()

    wait_until(lambda: done(server), timeout=HANG, what="the queue is empty")
    # RabbitMQ does not tell what a worker held whose end it has not noticed yet.
    wait_until(
        lambda: (
            not server.inspect.tasks(state=State.RECEIVED)
            and not server.inspect.tasks(state=State.STARTED)
            and not server.inspect.tasks(state=State.PENDING)
        ),
        timeout=HANG,
        what="all tasks are finished",
    )
    runs = fleet.runs()
    states = server.inspect.tasks(limit=10 * tasks)
    assert collections.Counter(state.state for state in states) == {State.SUCCESS: tasks}
    assert {state.task_uuid for state in states} == sent == set(runs)
    assert not server.inspect.dead()
    # Runs repeat only where a kill cut them off: bounded by what the killed workers held.
    repeated = sum(runs.values()) - tasks
    assert repeated <= kills * (2 + server.config.prefetch)


def has_run(fleet: Fleet, server: Server, goal: int) -> bool:
    return fleet.ledger.stat().st_size // 50 >= goal or done(server)


def done(server: Server) -> bool:
    return not any(one.waiting or one.running or one.delayed for one in server.broker.stats())


def test_task_that_kills_workers_is_given_up_after_three_deaths(
    fleet: Fleet, server: Server
) -> None:
    deadly = server.register_task("deadly", lambda: None)
    work = server.register_task("work", int)
    poison = deadly.send()
    others = [work.send(number) for number in range(20)]

    fleet.start("-p", "2")

    wait_until(
        lambda: poison.get_state().is_finished, timeout=HANG, what="the poison task is given up"
    )
    for other in others:
        assert isinstance(other.get(timeout=HANG), int)
    wait_until(
        server.inspect.dead, timeout=HANG, what="the dead letter"
    )  # with two stores it comes after the state
    [letter] = server.inspect.dead()
    assert (letter.reason, letter.uuid, letter.strikes) == ("poison", poison.uuid, 3)
    assert poison.get_state().state is State.FAILURE
    assert fleet.runs()[poison.uuid] == 3


def test_the_tasks_of_a_killed_worker_run_again_at_once(fleet: Fleet, server: Server) -> None:
    nap = server.register_task("nap", float)
    results = [nap.send(0.5) for _ in range(2)]
    victim = fleet.start()
    wait_until(lambda: len(fleet.runs()) == 2, timeout=HANG, what="both tasks run")

    kill_all(victim)
    fleet.start()

    assert [result.get(timeout=HANG) for result in results] == ["rested", "rested"]
    assert all(count == 2 for count in fleet.runs().values())


def test_a_frozen_worker_that_comes_back_writes_nothing(fleet: Fleet, server: Server) -> None:
    hold = server.register_task("hold", str)
    gate = fleet.ledger.with_name("gate")
    result = hold.send(str(gate))
    fleet.environment["MACHINERY_LEASE"] = "3"
    frozen = fleet.start()
    wait_until(
        lambda: result.get_state().state is State.STARTED, timeout=HANG, what="the task has started"
    )

    (pid,) = children(frozen.pid)
    freeze(pid, fleet.url)
    gate.touch()
    fleet.start()
    value = result.get(timeout=HANG)
    by = result.get_state().worker
    os.kill(pid, signal.SIGCONT)
    frozen.send_signal(signal.SIGTERM)
    frozen.wait(timeout=HANG)

    assert value == "let go"
    assert sum(fleet.runs().values()) == 2
    again = server.result(result.uuid).get_state()
    assert (again.worker, again.state) == (by, State.SUCCESS)


@pytest.mark.parametrize(
    "fleet", ["sqlite", "postgresql", "redis", "amqp and redis", "mongodb"], indirect=True
)
def test_worker_stopped_beyond_its_lease_begins_nothing_of_others(
    fleet: Fleet, server: Server
) -> None:
    if fleet.url.startswith("amqp"):
        fleet.environment["KILL_URL"] = f"{fleet.url}?heartbeat=2"  # RabbitMQ's lease
    fleet.environment["MACHINERY_LEASE"] = "3"  # a busy machine holds up the other, too
    halt = server.register_task("halt", lambda: None)
    work = server.register_task("work", int)
    # The short ones in front let it claim ahead.
    results = [*(work.send(number) for number in range(50)), halt.send()]
    behind = [work.send(number) for number in range(20)]
    results += behind
    stopped = fleet.start("-c", "1")
    wait_until(lambda: children(stopped.pid), HANG, "a worker process")
    (pid,) = children(stopped.pid)
    wait_until(lambda: stands_still(pid), HANG, "a process that stands still")
    # Behind the task that has stopped it.
    assert server.broker.stats()[0].running > 1 or fleet.url.startswith("amqp")

    # On SQLite the stopped process keeps the locks on its session and perhaps on the file: nothing
    # is taken from it. Elsewhere another worker runs it all.
    if not fleet.url.startswith("sqlite:"):
        fleet.start()
        for result in results:
            result.get(timeout=HANG)
    os.kill(pid, signal.SIGCONT)
    for result in results:
        result.get(timeout=HANG)
    stopped.send_signal(signal.SIGTERM)
    stopped.wait(timeout=HANG)

    counts = fleet.runs()
    assert {counts[result.uuid] for result in behind} == {1}


INSIDE = """
import os, signal, sys
from machinery_py.connections.sqlite.database import SQLiteDriver
with SQLiteDriver(sys.argv[1]).transaction():
    os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_process_stopped_in_a_sqlite_transaction_blocks_writers(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "kills.db"
    server = Server(Config(broker=f"sqlite:///{path}?busy_timeout=0.2", publish_timeout=0.5))
    work = server.register_task("work", int)
    work.send(1)
    with subprocess.Popen([sys.executable, "-c", INSIDE, str(path)], cwd=ROOT) as stopped:
        wait_until(
            lambda: stands_still(stopped.pid), timeout=HANG, what="a process that stands still"
        )
        assert not can_be_written(str(path))
        with pytest.raises(BrokerUnavailable, match="busy"):
            work.send(2)
        assert [stats.waiting for stats in server.broker.stats()] == [1]  # reading goes on

        stopped.send_signal(signal.SIGCONT)
        stopped.wait(timeout=HANG)

    work.send(3)
    assert [stats.waiting for stats in server.broker.stats()] == [2]
    server.close()

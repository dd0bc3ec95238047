"""Limits of a fleet whose workers are killed, whose clocks are wrong and whose store forgets."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from pymongo import MongoClient
from redis import Redis

from machinery_py import Config, Server, State
from machinery_py.testing.waiting import HANG as ONE
from machinery_py.testing.waiting import wait_until
from tests.support.fixtures import url_of
from tests.support.servers import RedisServer
from tests.support.supervised import children, kill_all
from tests.system import limited_app
from tests.system.limited_app import MOST

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
ROOT = pathlib.Path(__file__).parents[2]
HANG = 3 * ONE
LEASE = 4.0  # seconds; a worker that stands still for longer may lose its slots
KEYS = 1000
#: Tasks of a key, kills. The stand-in for MongoDB runs some thirty limited tasks a second.
SIZES = {"redis": (30, 60), "sqlite": (30, 60), "mongodb": (1, 5)} if FULL else {"redis": (2, 5)}


class Fleet:
    """Worker processes, and a Server over the same stores."""

    def __init__(self, folder: pathlib.Path, broker: str, lock: str = "") -> None:
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self.asked = folder / "ledger-asked"
        self.gate = folder / "gate"
        self.log = folder / "workers.log"
        self.environment = {
            **os.environ,
            "LIMITED_BROKER": broker,
            "LIMITED_LOCK": lock,
            "LIMITED_LEDGER": str(self.ledger),
            "LIMITED_LEASE": str(LEASE),
            "PYTHONPATH": str(ROOT),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.server = Server(Config(broker=broker, lock=lock, lease=LEASE))
        self.gated = self.server.register_task("gated", limited_app.gated.function)
        self.visit = self.server.register_task("visit", limited_app.visit.function)
        self.in_turn = {
            "exclusive": self.server.task("exclusive", exclusive="wait", exclusive_key="key"),
            "running": self.server.task("running", max_running=1, running_key="key"),
        }
        self.metered = self.server.register_task("metered", limited_app.metered.function)

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        command = ["-m", "machinery_py", "worker", "tests.system.limited_app", "-c", "4"]
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**self.environment, **environment},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a worker; in the ledger first: what runs then may be run again from now on."""
        with self.ledger.open("a") as ledger:
            ledger.writelines(f"killed - - {pid}\n" for pid in children(process.pid))
        kill_all(process)

    def rows(self, word: str) -> list[list[str]]:
        rows = map(str.split, self.ledger.read_text().splitlines())
        return [row for row in rows if row[0] == word]

    def most_at_once(self) -> int:
        """Return how many runs of one key overlapped at most."""
        running: dict[str, set[tuple[str, str]]] = defaultdict(set)
        dead: set[str] = set()
        most = 0
        for line in self.ledger.read_text().splitlines():
            word, key, uuid, pid = line.split()
            if word == "killed":
                dead.add(pid)
                for runs in running.values():
                    runs -= {one for one in runs if one[1] == pid}
            elif word == "end":
                running[key].discard((uuid, pid))
            elif pid not in dead:
                running[key].add((uuid, pid))
                most = max(most, len(running[key]))
        return most

    def usage(self) -> tuple[int, int]:
        """Return how many run and wait, as the limits count them."""
        reports = [one for scope in self.server.inspect.limits() for one in scope.usage]
        return sum(one.running for one in reports), sum(one.waiting for one in reports)

    def is_drained(self) -> bool:
        return not any(
            one.waiting or one.running or one.delayed for one in self.server.broker.stats()
        )

    def drain(self) -> None:
        wait_until(self.is_drained, HANG, what="all tasks are over")
        wait_until(lambda: self.usage() == (0, 0), HANG, what="no slot and no place is left")

    def close(self) -> None:
        print("queues:", self.server.broker.stats())
        print("limits:", self.usage(), "exits:", [process.poll() for process in self.processes])
        print(self.log.read_text(errors="replace") if self.log.exists() else "no worker")
        for process in self.processes:
            kill_all(process)
        self.server.close()


@pytest.fixture(params=["redis"])
def fleet(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path, url_of(request.param, tmp_path / "tasks.db", request))
    yield fleet
    fleet.close()


@pytest.mark.parametrize(
    ("fleet", "each", "kills"),
    [(kind, *sizes) for kind, sizes in SIZES.items()],
    indirect=["fleet"],
)
@pytest.mark.timeout(2 * HANG if not FULL else 20 * HANG)
def test_thousand_keys_come_through_a_kill_each_second(fleet: Fleet, each: int, kills: int) -> None:
    calls = [
        fleet.visit.signature(f"key{number}").with_uuid()  # type: ignore[attr-defined]
        for _ in range(each)
        for number in range(KEYS)
    ]
    for start in range(0, len(calls), KEYS):
        fleet.server.app.submit(calls[start : start + KEYS])
    workers = [fleet.start(), fleet.start()]

    def has_run(goal: int) -> bool:
        return fleet.ledger.stat().st_size // 65 >= 2 * goal or fleet.is_drained()

    for number in range(kills):
        goal = (number + 1) * len(calls) // (kills + 2)
        wait_until(functools.partial(has_run, goal), HANG, what=f"{goal} runs")
        fleet.kill(workers[number % 2])
        workers[number % 2] = fleet.start()
    fleet.drain()

    states = Counter(one.state for one in fleet.server.inspect.tasks(limit=2 * len(calls)))
    assert states == {State.SUCCESS: len(calls)}
    assert {row[2] for row in fleet.rows("begin")} == {one.uuid for one in calls}
    assert fleet.most_at_once() == 1
    repeated = len(fleet.rows("begin")) - len(calls)
    assert repeated <= kills * (4 + fleet.server.config.prefetch)


@pytest.mark.parametrize("option", ["exclusive", "running"])
@pytest.mark.parametrize("fleet", ["redis", "sqlite"] if FULL else ["redis"], indirect=True)
@pytest.mark.timeout(2 * HANG)
def test_calls_of_two_workers_wait_in_the_order_of_their_sending(fleet: Fleet, option: str) -> None:
    # A thread of each worker stays free, whoever claims those that hold the keys.
    keys, each = ["key0", "key1", "key2"], 13
    task = fleet.in_turn[option](limited_app.in_turn)
    gate = str(fleet.gate)
    for _ in range(2):
        fleet.start()
    for key in keys:
        task.send(key, 0, gate)
    wait_until(lambda: fleet.usage() == (len(keys), 0), HANG, what="the first of each key runs")

    calls = [
        task.signature(key, number, gate).with_uuid() for number in range(1, each) for key in keys
    ]
    fleet.server.app.submit(calls)
    wait_until(lambda: fleet.usage()[1] == len(calls), HANG, what="all others wait")
    fleet.gate.touch()
    fleet.drain()

    began = [row[1] for row in fleet.rows("begin")]
    assert {key: [one for one in began if one.startswith(key)] for key in keys} == {
        key: [f"{key}:{number}" for number in range(each)] for key in keys
    }


def hold(fleet: Fleet, count: int) -> None:
    """Let so many calls of `gated` be there: MOST of them run, the others wait."""
    for _ in range(count):
        fleet.gated.send(str(fleet.gate))
    for _ in range(2):
        fleet.start()
    wait_until(lambda: fleet.usage() == (MOST, count - MOST), HANG, what="some run, others wait")


def let_go(fleet: Fleet, count: int) -> None:
    """Open the gate; all calls end, each after one run."""
    fleet.gate.touch()
    fleet.drain()
    for word in ("begin", "end"):
        assert len({row[2] for row in fleet.rows(word)}) == len(fleet.rows(word)) == count


def forget_limits(url: str) -> int:
    """Delete all that the store keeps of limits; return how many records that were."""
    if url.startswith("sqlite"):
        file = sqlite3.connect(url.removeprefix("sqlite:///"))
        with contextlib.closing(file), file:
            return file.execute("DELETE FROM rows WHERE kind = 'limit'").rowcount
    if url.startswith("mongodb"):
        with MongoClient[Any](url) as client:
            return client.get_default_database().machinery_limits.delete_many({}).deleted_count
    with Redis.from_url(url) as redis:
        return int(redis.delete(*redis.keys("mpy:limit*")))


@pytest.mark.parametrize("fleet", SIZES, indirect=True)
@pytest.mark.timeout(2 * HANG)
def test_deleted_keys_let_tasks_run_and_wait_on(fleet: Fleet) -> None:
    hold(fleet, 8)

    assert forget_limits(fleet.server.config.broker) >= 2
    # Others may begin until those that run are counted again.
    wait_until(lambda: fleet.usage()[0] >= MOST, HANG, what="the runs are counted again")

    let_go(fleet, 8)
    assert fleet.most_at_once() <= 2 * MOST


@pytest.mark.timeout(2 * HANG)
def test_limits_start_anew_in_a_store_that_restarts_empty(
    empty_redis: RedisServer, tmp_path: pathlib.Path
) -> None:
    fleet = Fleet(tmp_path, f"sqlite:///{tmp_path}/tasks.db", empty_redis.url)
    try:
        hold(fleet, 8)
        empty_redis.stop()
        empty_redis.start()
        wait_until(lambda: fleet.usage()[0] >= MOST, ONE / 2, what="the runs are counted again")

        let_go(fleet, 8)
        assert fleet.most_at_once() <= 2 * MOST
    finally:
        fleet.close()


@pytest.mark.timeout(2 * HANG)
def test_workers_whose_clocks_are_an_hour_off_keep_limits(fleet: Fleet) -> None:
    for _ in range(20):
        fleet.metered.send()
    for off in ("3600", "-3600"):
        fleet.start(LIMITED_OFF=off)
    fleet.drain()

    assert len(fleet.rows("end")) == 20
    assert fleet.most_at_once() <= 2
    # Each came back at its turn: earlier it would have asked again and again.
    assert fleet.asked.stat().st_size <= 2000

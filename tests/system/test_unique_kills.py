"""Processes that send and run unique and exclusive tasks, and are killed or stopped at it."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import IO, Any

import pytest

from machinery_py import Config, Server, State
from machinery_py.testing.waiting import HANG as ONE
from machinery_py.testing.waiting import wait_until
from tests.support.fixtures import url_of
from tests.support.freezing import freeze
from tests.support.supervised import children, kill_all
from tests.system.unique_app import LEASE

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
ROOT = pathlib.Path(__file__).parents[2]
HANG = 3 * ONE
SENDERS, EACH = 4, 50


class Site:
    """Processes over one pair of stores."""

    def __init__(self, folder: pathlib.Path, broker: str, backend: str = "") -> None:
        self.folder = folder
        self.broker = broker
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self.environment = {
            **os.environ,
            "SAME_BROKER": broker,
            "SAME_BACKEND": backend,
            "SAME_LEDGER": str(self.ledger),
            "PYTHONPATH": str(ROOT),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        self.server = Server(Config(broker=broker, result_backend=backend, lease=LEASE))
        self.alone = self.server.task("alone", unique=True)(_named)
        self.feed = self.server.task("feed", exclusive="wait", exclusive_key="feed")(_named)
        self.metered = self.server.task("metered", rate="50/s", max_running=3)(_named)
        self.gather = self.server.task("gather", batch=4)(_gathered)

    def run(
        self, *command: str, output: int | IO[Any] = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=self.environment,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.DEVNULL,
        )
        self.processes.append(process)
        return process

    def worker(self) -> subprocess.Popen[bytes]:
        return self.run("machinery_py", "worker", "tests.system.unique_app", "-c", "2")

    def lines(self, word: str) -> list[str]:
        return [line for line in self.ledger.read_text().splitlines() if line.startswith(word)]

    def gate(self, name: str) -> str:
        return str(self.folder / name)

    def close(self) -> None:
        for process in self.processes:
            kill_all(process)
        self.server.close()


def _named(name: str) -> str:
    return name


def _gathered(rows: list[str]) -> list[str]:
    return rows


@pytest.fixture(params=["sqlite", "redis"])
def site(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Site]:
    site = Site(tmp_path, url_of(request.param, tmp_path / "same.db", request))
    yield site
    site.close()


@pytest.fixture(params=["sqlite", "redis", *["mongodb", "cluster"] * FULL])
def anywhere(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Site]:
    site = Site(tmp_path, url_of(request.param, tmp_path / "same.db", request))
    yield site
    site.close()


@pytest.mark.timeout(2 * HANG)
def test_two_hundred_sends_of_racing_processes_let_one_in(
    anywhere: Site, tmp_path: pathlib.Path
) -> None:
    gate = anywhere.gate("start")
    outputs = [(tmp_path / f"out{number}").open("w+b") for number in range(SENDERS)]
    senders = [
        anywhere.run("tests.system.unique_app", str(EACH), gate, output=output)
        for output in outputs
    ]
    wait_until(
        lambda: len(anywhere.lines("ready")) == SENDERS, timeout=HANG, what="senders at the start"
    )
    pathlib.Path(gate).touch()

    assert [sender.wait(HANG) for sender in senders] == [0] * SENDERS

    rows: list[list[str]] = []
    for output in outputs:
        output.seek(0)
        rows += [line.split() for line in output.read().decode().splitlines()]
        output.close()
    assert len(rows) == SENDERS * EACH
    assert [duplicate for _, duplicate in rows].count("False") == 1
    assert len({uuid for uuid, _ in rows}) == 1
    assert [one.waiting for one in anywhere.server.inspect.queues() if one.waiting] == [1]


@pytest.mark.timeout(3 * HANG)
def test_a_killed_worker_neither_frees_nor_blocks_a_key(anywhere: Site) -> None:
    gate = anywhere.gate("gate")
    first = anywhere.alone.send(gate)
    victim = anywhere.worker()
    wait_until(lambda: anywhere.lines("begin"), timeout=HANG, what="the first run")

    kill_all(victim)
    assert anywhere.alone.send(gate).uuid == first.uuid
    anywhere.worker()
    wait_until(lambda: len(anywhere.lines("begin")) == 2, timeout=HANG, what="the second run")
    assert anywhere.alone.send(gate).uuid == first.uuid
    pathlib.Path(gate).touch()

    assert first.get(timeout=HANG) == gate
    assert not anywhere.alone.send(gate).duplicate


@pytest.mark.timeout(3 * HANG)
def test_a_killed_worker_blocks_a_lock_for_one_lease(site: Site) -> None:
    first, second = site.feed.send(site.gate("a")), site.feed.send(site.gate("b"))
    victim = site.worker()
    wait_until(lambda: site.lines("begin"), timeout=HANG, what="the first run")
    site.worker()

    kill_all(victim)
    for name in "ab":
        pathlib.Path(site.gate(name)).touch()

    assert first.get(timeout=HANG) == site.gate("a")
    assert second.get(timeout=HANG) == site.gate("b")
    assert len(site.lines("end")) == 2


@pytest.mark.timeout(3 * HANG)
def test_worker_suspended_past_its_lease_is_refused(
    site: Site,
) -> None:
    first = site.feed.send(site.gate("a"))
    frozen = site.worker()
    wait_until(lambda: first.get_state().state is State.STARTED, timeout=HANG, what="the first run")

    (pid,) = children(frozen.pid)
    freeze(pid, site.broker)
    site.worker()
    wait_until(lambda: len(site.lines("begin")) == 2, timeout=HANG, what="a second run")
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: site.lines("cancelled"), timeout=HANG, what="the stopped one is told")
    assert site.lines("cancelled")[0].endswith(f" {pid}")
    assert not site.server.lock("feed").acquire(
        blocking=False
    )  # what the stopped one gave back was not its own any more
    pathlib.Path(site.gate("a")).touch()

    assert first.get(timeout=HANG) == site.gate("a")
    assert len(site.lines("end")) == 1
    assert frozen.pid != int(site.lines("end")[0].split()[-1])


# Limits, of workers that are killed


@pytest.mark.timeout(3 * HANG)
def test_killed_workers_keep_no_slot_and_their_waiting_tasks_run(site: Site) -> None:
    gate = site.gate("gate")
    results = [site.metered.send(gate) for _ in range(12)]
    victims = [site.worker(), site.worker()]
    wait_until(lambda: len(site.lines("begin")) == 3, timeout=HANG, what="three runs")
    wait_until(
        lambda: sum(one.delayed for one in site.server.inspect.queues()) == 9,
        timeout=HANG,
        what="the others wait in line",
    )

    for victim in victims:
        kill_all(victim)
    assert len(site.lines("begin")) == 3
    pathlib.Path(gate).touch()
    site.worker()

    assert [one.get(timeout=HANG) for one in results] == [gate] * 12
    assert len(site.lines("end")) == 12
    wait_until(
        lambda: (
            not any(
                one.running or one.waiting
                for all in site.server.inspect.limits()
                for one in all.usage
            )
        ),
        timeout=HANG,
        what="no slot and no place is left",
    )


# Batches, of workers that are killed


@pytest.mark.timeout(2 * HANG)
def test_calls_of_a_killed_batch_come_back_each_by_itself(anywhere: Site) -> None:
    results = [anywhere.gather.send(row) for row in ("a", "b", "c")]
    first = anywhere.worker()
    wait_until(
        lambda: all(one.get_state().state is State.RECEIVED for one in results), timeout=HANG
    )
    kill_all(first)  # while it gathers: nothing has begun

    results.append(anywhere.gather.send("d"))
    second = anywhere.worker()
    wait_until(lambda: len(anywhere.lines("begin")) == 4, timeout=HANG)
    wait_until(lambda: all(one.get_state().state is State.STARTED for one in results), timeout=HANG)
    kill_all(second)  # in the middle of the run

    pathlib.Path(f"{anywhere.ledger}-gate").touch()
    anywhere.worker()
    assert [one.get(timeout=HANG) for one in results] == ["a", "b", "c", "d"]
    rows = [line.split()[1] for line in anywhere.lines("begin")]
    assert sorted(rows) == ["a", "a", "b", "b", "c", "c", "d", "d"]
    # Each was a suspect of the kill, so it ran alone.
    ran = [line.split()[:2] for line in anywhere.ledger.read_text().splitlines()[4:]]
    assert [word for word, _ in ran] == ["begin", "end"] * 4

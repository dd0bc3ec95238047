"""Ten schedulers, killed at random and at the worst moments, send each tick once and lose none."""

from __future__ import annotations

import collections
import datetime as dt
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from machinery_py.schedules.definition import decode_entry
from machinery_py.testing.waiting import wait_until
from tests.support.fixtures import url_of
from tests.system.scheduling import make_server

ROOT = pathlib.Path(__file__).parents[2]
SECONDS = float(os.environ.get("CHAOS_SCHEDULE_SECONDS", "3"))  # `make chaos` asks for five minutes
SCHEDULERS = 10
DEADLINESS = 0.02  # at each side of each step that matters
KILL_EVERY = 0.5  # seconds
UTC = dt.timezone.utc


class Fleet:
    """Workers over one pair of stores; those that die are started again."""

    def __init__(self, broker: str, backend: str, ledger: pathlib.Path) -> None:
        self.arguments = [broker, backend, str(ledger)]
        self.ledger = ledger
        ledger.touch()
        self.server = make_server(*self.arguments)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.deaths = 0

    def start(self, deadliness: float) -> None:
        self.processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.system.scheduling", *self.arguments, str(deadliness)],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )

    def keep_up(self, deadliness: float) -> None:
        gone = [process for process in self.processes if process.poll() is not None]
        self.deaths += len(gone)
        for process in gone:
            self.processes.remove(process)
            self.start(deadliness)

    def runs(self) -> dict[str, set[str]]:
        """Tick → UUIDs of its tasks."""
        found: dict[str, set[str]] = collections.defaultdict(set)
        for line in self.ledger.read_text().splitlines():
            tick, uuid = line.split()
            found[tick].add(uuid)
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.server.close()


LONG = [
    "cluster",
    "postgresql+sqlite",
    "sqlite+redis",
    "mongodb",
]


@pytest.fixture(
    params=["sqlite", "postgresql", "redis", "redis+sqlite", *(LONG if SECONDS > 3 else ())]
)
def fleet(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Fleet]:
    kinds = request.param.split("+")
    urls = [
        url_of(kind, f"{tmp_path}/{place}.db?synchronous=normal", request)
        for place, kind in enumerate(kinds)
    ]
    fleet = Fleet(urls[0], urls[-1], tmp_path / "ledger")
    yield fleet
    fleet.close()


def test_ten_schedulers_send_each_tick_once(fleet: Fleet) -> None:
    rng = random.Random(6)
    schedules = fleet.server.schedules
    # A machine under load may be late by more than the moment that "skip" allows.
    schedules.add(
        "* * * * * *", "pulse", fleet.server.get_registered_task("tick").signature(), catch_up="all"
    )
    last = decode_entry((fleet.server.backend.records().bodies or {})["pulse"]).last
    first = last.replace(microsecond=0) + dt.timedelta(seconds=1)
    for _ in range(SCHEDULERS):
        fleet.start(DEADLINESS)
    wait_until(fleet.runs, 60, "the first tick")

    ended = threading.Event()
    killed = 0
    until = dt.datetime.now(UTC) + dt.timedelta(seconds=SECONDS)
    while dt.datetime.now(UTC) < until:
        ended.wait(KILL_EVERY)
        victim = rng.choice(fleet.processes)
        if rng.random() < 0.2:
            victim.send_signal(signal.SIGSTOP)
            ended.wait(KILL_EVERY)
            victim.send_signal(signal.SIGCONT)
        else:
            victim.kill()
            killed += 1
        fleet.keep_up(DEADLINESS)
    for _ in range(2):
        fleet.start(0.0)
    wait_until(
        lambda: (schedules.get("pulse").last_run or first) > until,
        60,
        "a tick behind the last kill",
    )
    schedules.pause("pulse")
    report = schedules.get("pulse")
    assert report.last_run is not None

    count = round((report.last_run - first).total_seconds()) + 1
    expected = {(first + dt.timedelta(seconds=number)).isoformat() for number in range(count)}
    wait_until(lambda: fleet.runs().keys() >= expected, 60, f"{count} ticks that have run")
    runs = fleet.runs()

    assert runs.keys() == expected
    assert [tick for tick, uuids in runs.items() if len(uuids) != 1] == []
    assert report.sent == count
    assert killed >= SECONDS / KILL_EVERY / 4
    assert count >= SECONDS

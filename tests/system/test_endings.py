"""Each ending of a task under each setting, on worker processes over each kind of store.

The rows of a place that can share a worker are played together, by the first test that needs one.
`make chaos` (MACHINERY_TEST_FULL=1) plays all settings in both pools; otherwise settings that
change nothing are left out, and so are task processes over a cluster and MongoDB.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from machinery_py import AsyncResult, Server, Signature
from machinery_py.testing.waiting import wait_until
from tests.system import ending_app
from tests.system.endings import ENDINGS, NUMBERS, SETTINGS, STRIKES, Ending, differing

ROOT = pathlib.Path(__file__).parents[2]
APP = "tests.system.ending_app"
POOLS = ["thread", "process"]
STORES = ["sqlite", "postgresql", "redis", "cluster", "mongodb", "amqp and redis"]
FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
#: How a process ends is told to the worker's own code, which every store shares.
PLACES = [
    (store, pool)
    for store in STORES
    for pool in POOLS
    if FULL or pool == "thread" or store in ("sqlite", "redis", "amqp and redis")
]
ROWS = list(itertools.product(ENDINGS, SETTINGS)) if FULL else differing()
TOGETHER = ["-c", str(len(SETTINGS) if FULL else 3)]  # all "stop" at a time
ALONE = ["-c", "1", "-p", "2"]  # for threads whose tasks kill their worker
KINDS = ("stop", "die")  # rows that are played by themselves
KILLED = ("ignore", "terminate")  # a thread cannot be
HANG = 60.0  # seconds; a guard, nothing is measured with it


class Place:
    """A store, worker processes over it, and a Server that sends; `played` holds what it sent."""

    def __init__(self, folder: pathlib.Path, url: str, backend: str, pool: str) -> None:
        self.pool = pool
        self.server = Server(url, result_backend=backend)
        self.foreign = Server(url, result_backend=backend)  # knows no task, and checks no arguments
        for setting, options in SETTINGS.items():
            self.server.task(f"act_{setting}", backoff=[0.0], **options)(ending_app.act)
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self.environment = {
            **os.environ,
            "ENDING_URL": url,
            "ENDING_BACKEND": backend,
            "ENDING_LEDGER": str(self.ledger),
            "MACHINERY_UNREGISTERED_TIMEOUT": "1",
            "MACHINERY_MAX_STRIKES": str(STRIKES),
            "PYTHONPATH": str(ROOT),
        }
        self.played: dict[str, dict[tuple[str, str], AsyncResult[object]]] = {}
        self.options: list[str] = []
        self.worker: subprocess.Popen[bytes] | None = None

    def run(self, options: list[str]) -> None:
        """Let a worker with these options run; the one before it is stopped."""
        if options != self.options or self.worker is None:
            self.finish()
            self.stop()
            command = [sys.executable, "-m", "machinery_py", "worker", APP, "--pool", self.pool]
            self.worker, self.options = (
                subprocess.Popen(
                    [*command, "--shutdown-timeout", "0", *options],
                    env=self.environment,
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                ),
                options,
            )

    def finish(self) -> None:
        """Wait for the ends: a stop between a state and its dead letter would leave the one."""
        for ending, setting in ROWS:
            result = self.played.get(kind_of(ending), {}).get((ending.play, setting))
            if result is not None and ending.letter_with(setting):
                wait_until(lambda: self.letters(result.uuid), HANG, what="its dead letter")  # noqa: B023

    def stop(self) -> None:
        if self.worker is not None:
            self.worker.send_signal(signal.SIGTERM)
            self.worker.wait(HANG)
            self.worker = None

    def result_of(self, ending: Ending, setting: str) -> AsyncResult[object]:
        """Return the result of this row; all rows that are played with it have been sent."""
        kind = kind_of(ending)
        if kind not in self.played:
            self.run(ALONE if kind == "die" and self.pool == "thread" else TOGETHER)
            self.played[kind] = {
                (one.play, with_setting): sent(self, one, with_setting)
                for one, with_setting in ROWS
                if kind_of(one) == kind and (one.play not in KILLED or self.pool == "process")
            }
            for (play, _), result in self.played[kind].items():
                if play == "terminate":
                    wait_until(lambda: self.terminates(result.uuid), HANG)  # noqa: B023
            if kind == "stop":
                results = self.played[kind].values()
                wait_until(lambda: all(self.calls(one.uuid) for one in results), HANG, what="runs")
                self.stop()
                self.run(ALONE if self.pool == "thread" else TOGETHER)
        return self.played[kind][ending.play, setting]

    def terminates(self, uuid: str) -> bool:
        if not self.calls(uuid):
            return False
        return any(self.server.control.revoke(uuid, terminate=True).values())

    def calls(self, uuid: str) -> int:
        return self.ledger.read_text().split().count(uuid)

    def letters(self, uuid: str) -> list[str]:
        return [one.reason for one in self.server.inspect.dead() if one.uuid == uuid]

    def close(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()
        self.server.close()
        self.foreign.close()


@pytest.fixture(scope="module", params=[f"{store}-{pool}" for store, pool in PLACES])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    store, _, pool = request.param.rpartition("-")
    folder, backend = tmp_path_factory.mktemp("endings"), ""
    match store:
        case "sqlite":
            url = f"sqlite:///{folder}/endings.db"
        case "cluster":
            cluster = request.getfixturevalue("redis_cluster")
            for node in cluster.masters:
                node.cli("FLUSHALL")
            url = cluster.url
        case "postgresql":
            postgresql = request.getfixturevalue("postgresql_server")
            url = postgresql.new_database(folder.name)
        case "mongodb":
            url = f"{request.getfixturevalue('mongodb_server').rstrip('/')}/endings_{os.getpid()}"
        case "redis":
            url = _emptied(request)
        case _:
            url, backend = str(request.getfixturevalue("vhosts")()), _emptied(request)
    place = Place(folder, url, backend, pool)
    yield place
    place.close()


def _emptied(request: pytest.FixtureRequest) -> str:
    server = request.getfixturevalue("redis_server")
    server.cli("FLUSHALL")
    return str(server.url)


def kind_of(ending: Ending) -> str:
    """Return the rows that this one is played with."""
    word = ending.play.split()[0]
    return word if word in KINDS else ""


def sent(place: Place, ending: Ending, setting: str) -> AsyncResult[object]:
    """Send the task of this row."""
    task = place.server.get_registered_task(f"act_{setting}")
    match ending.play:
        case "unknown":
            return place.foreign.send_task(Signature.of(f"unknown_{setting}"))
        case "misfit":
            misfit = Signature.of(f"act_{setting}", 1, 2, 3).replace(retry_count=3)
            return place.foreign.send_task(misfit)
        case "revoke":
            waits = task.options(delay=3600.0).send(ending.play)
            waits.revoke()
            return waits
    return task.options(**ending.options).send(ending.play)


@pytest.mark.parametrize(
    ("ending", "setting"),
    ROWS,
    ids=lambda one: (
        NUMBERS.get(one, one) if isinstance(one, str) else f"{one.numbers} {one.play}".strip()
    ),
)
def test_each_ending_under_each_setting(place: Place, ending: Ending, setting: str) -> None:
    if ending.play in KILLED and place.pool == "thread":
        pytest.skip("a thread cannot be killed")
    result = place.result_of(ending, setting)

    wait_until(lambda: result.get_state().is_finished, HANG, what="its end")
    letter = ending.letter_with(setting)
    if letter:  # with two stores it comes after the state
        wait_until(lambda: place.letters(result.uuid), HANG, what="its dead letter")

    state = result.get_state()
    found = (state.state, state.error_type, place.calls(result.uuid))
    assert found == ending.state_with(setting)
    assert place.letters(result.uuid) == ([letter] if letter else [])

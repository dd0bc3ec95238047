"""Each ending of a task under each setting, on worker processes over each kind of store.

`make chaos` (MACHINERY_TEST_FULL=1) plays all of them; otherwise the settings that change nothing
are left out.
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
from tests.system.endings import ENDINGS, SETTINGS, STRIKES, Ending, differing

ROOT = pathlib.Path(__file__).parents[2]
APP = "tests.system.ending_app"
POOLS = ["thread", "process"]
STORES = ["sqlite", "redis", "cluster", "mongodb", "amqp and redis"]
NUMBERS = {"letter": "F68-M68 letter", "early": "F64 early", "late": "F65 late"}
FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
HANG = 60.0  # seconds; a guard, nothing is measured with it


class Place:
    """A store, a worker process over it, and a Server that sends."""

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
        self.options = ["-c", "2", "--shutdown-timeout", "0"]
        if pool != "thread":
            self.options += ["--pool", pool]
        self.worker = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "machinery_py", "worker", APP, *self.options],
            env=self.environment,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def keep(self) -> None:
        """Start another worker if it has ended."""
        if self.worker.poll() is not None:
            self.worker = self.start()

    def stop(self) -> None:
        self.worker.send_signal(signal.SIGTERM)
        self.worker.wait(HANG)

    def calls(self, uuid: str) -> int:
        return self.ledger.read_text().split().count(uuid)

    def letters(self, uuid: str) -> list[str]:
        return [one.reason for one in self.server.inspect.dead() if one.uuid == uuid]

    def close(self) -> None:
        self.worker.kill()
        self.worker.wait()
        self.server.close()
        self.foreign.close()


@pytest.fixture(scope="module", params=[f"{store}-{pool}" for store in STORES for pool in POOLS])
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


def played(place: Place, ending: Ending, setting: str) -> AsyncResult[object]:
    """Send the task, and do what the test has to do."""
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
    result = task.options(**ending.options).send(ending.play)
    if ending.play == "stop":
        wait_until(lambda: place.calls(result.uuid) == 1, HANG, what="a run")
        place.stop()
    return result


@pytest.mark.parametrize(
    ("ending", "setting"),
    list(itertools.product(ENDINGS, SETTINGS)) if FULL else differing(),
    ids=lambda one: (
        NUMBERS.get(one, one) if isinstance(one, str) else f"{one.numbers} {one.play}".strip()
    ),
)
def test_each_ending_under_each_setting(place: Place, ending: Ending, setting: str) -> None:
    if ending.play == "ignore" and place.pool == "thread":
        pytest.skip("a thread cannot be killed")
    result = played(place, ending, setting)

    def has_ended() -> bool:
        place.keep()
        return result.get_state().is_finished

    wait_until(has_ended, HANG, what="its end")
    letter = ending.letter_with(setting)
    if letter:  # with two stores it comes after the state
        wait_until(lambda: place.letters(result.uuid), HANG, what="its dead letter")

    state = result.get_state()
    found = (state.state, state.error_type, place.calls(result.uuid))
    assert found == ending.state_with(setting)
    assert place.letters(result.uuid) == ([letter] if letter else [])

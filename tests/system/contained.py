"""A worker with task processes that harm each other, for test_contained.py and the chaos runs."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from machinery_py import AsyncResult, Server, Signature
from machinery_py.testing.waiting import wait_until
from tests.support.supervised import kill_all

ROOT = pathlib.Path(__file__).parents[2]
HANG = 60.0  # seconds; a guard, nothing is measured with it
APP = "tests.system.contained_app"
IN_TIME = "just_in_time"


class Contained:
    """A worker with task processes, and the ledger of what ran there."""

    def __init__(self, folder: pathlib.Path, broker: str, backend: str, *options: str) -> None:
        self.server = Server(broker, result_backend=backend)
        self.ledger = folder / "ledger"
        self.ledger.touch()
        self.log = folder / "log"
        self._options = options
        self._environment = {
            **os.environ,
            "CONTAINED_URL": broker,
            "CONTAINED_BACKEND": backend,
            "CONTAINED_LEDGER": str(self.ledger),
            "MACHINERY_LEASE": "2",
            "PYTHONPATH": str(ROOT),
        }
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.supervisor = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "machinery_py",
                    "worker",
                    APP,
                    "--pool",
                    "process",
                    *self._options,
                ],
                env=self._environment,
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def send(self, *hows: str) -> list[AsyncResult[int]]:
        """Send one task for each word, with its place as the result; see contained_app.py."""
        return [
            self.server.send(
                Signature.of(how, number) if how == IN_TIME else Signature.of("act", how, number)
            )
            for number, how in enumerate(hows)
        ]

    def runs(self, result: AsyncResult[int]) -> list[tuple[int, int]]:
        """Return the task process and the worker process of each call."""
        return [(pid, worker) for pid, worker, _ in self._lines(result)]

    def strikes(self, result: AsyncResult[int]) -> list[int]:
        """Return how many task processes had been lost before each call."""
        return [strikes for _, _, strikes in self._lines(result)]

    def _lines(self, result: AsyncResult[int]) -> list[list[int]]:
        lines = map(str.split, self.ledger.read_text().splitlines())
        return [[*map(int, numbers)] for uuid, *numbers in lines if uuid == result.uuid]

    def count(self) -> int:
        """Return the number of calls so far."""
        return len(self.ledger.read_text().splitlines())

    def held(self, result: AsyncResult[int]) -> tuple[int, int]:
        """Wait until the task runs; return as `runs`."""
        wait_until(lambda: self.runs(result), HANG, "its start")
        return self.runs(result)[0]

    def close(self) -> None:
        kill_all(self.supervisor)
        self.server.close()

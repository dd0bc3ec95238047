"""Other processes on the same SQLite file: short scripts that answer in lines of text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PREAMBLE = """
import os, sys
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.brokers.base import Delivery, Disposal, Fate, Message
from machinery_py.brokers.sqlite.broker import SQLiteBroker
from machinery_py.backends.base import Change
from machinery_py.backends.sqlite.backend import SQLiteBackend
from machinery_py.tasks.states import State, TaskState
driver = SQLiteDriver(sys.argv[1])
broker = SQLiteBroker(driver)
def say(*words): print(*words, flush=True)
def heard(): return sys.stdin.readline().strip()
"""


class Other:
    """A Python process that runs a script after PREAMBLE. `with`: it does not outlive the block."""

    def __init__(self, path: Path, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + script, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Other:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def line(self) -> str:
        """What it says next; "" when it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass

    def end(self) -> int:
        """Wait for its own end; its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(60)

"""Processes of a system: started in their environment, observed from outside, ended.

Linux only: it reads /proc.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.children import ROOT
from benchmarks.peers.environments import python_of
from benchmarks.peers.systems import System

HANG = 180.0  # seconds that a script has
READY = 30.0  # seconds until a worker process is imported
TICKS = os.sysconf("SC_CLK_TCK")


class RoundFailed(Exception):
    """A system did not do what it should; its speed means nothing."""


Servers = Mapping[str, str]  # variables that tell the scripts where the servers are


def environment(servers: Servers, *, latency: bool) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MACHINERY_", "PYTHON", "PEERS_"))
    }
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "1",
        "PEERS_LATENCY": str(int(latency)),
        **servers,
    }


def ask(system: System, servers: Servers, action: str, count: int, file: Path) -> dict[str, Any]:
    """Run its send.py; what that printed."""
    command = [
        str(python_of(system)),
        "-m",
        f"benchmarks.peers.{system.folder}.send",
        action,
        str(count),
        str(file),
    ]
    environ = environment(servers, latency=action == "latency")
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=HANG, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RoundFailed(
            f"{system.name}: {action} of {count:,} not done after {HANG:g} s"
        ) from error
    if done.returncode or not done.stdout:
        raise RoundFailed(
            f"{system.name}: {action}: {done.stderr.strip()[-2000:] or done.returncode}"
        )
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


class Workers:
    """Worker processes that stand ready; each command and its children have their own session."""

    def __init__(
        self, system: System, servers: Servers, processes: int, *, latency: bool = False
    ) -> None:
        self.system = system
        # Output goes to a file: nobody reads a pipe while the clock runs.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._children: list[subprocess.Popen[str]] = []
        commands, each = (processes, 1) if system.copies else (1, processes)
        command = [
            str(python_of(system)),
            "-m",
            f"benchmarks.peers.{system.folder}.drain",
            str(each),
        ]
        for _ in range(commands):
            self._children.append(
                subprocess.Popen(
                    command,
                    env=environment(servers, latency=latency),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    text=True,
                    start_new_session=True,
                )
            )

    def wait_ready(self) -> None:
        for child in self._children:
            assert child.stdout is not None
            guard = threading.Timer(READY, child.kill)
            guard.start()
            line = child.stdout.readline().strip()
            guard.cancel()
            if line != "ready":
                raise RoundFailed(f"{self.system.name}: a worker said {line!r}: {self.log_tail()}")

    def go(self) -> None:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()

    def check_alive(self) -> None:
        for child in self._children:
            if child.poll() is not None:
                raise RoundFailed(
                    f"{self.system.name}: a worker ended with {child.returncode}: {self.log_tail()}"
                )

    def cpu(self) -> float:
        """Seconds of CPU of all its processes; those that have ended count with their parent."""
        ticks = 0
        for _pid, fields in self._processes():
            ticks += sum(
                int(field) for field in fields[11:15]
            )  # utime, stime, and those of children that were waited for
        return ticks / TICKS

    def log_tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:].strip()

    def end(self) -> None:
        """Kill them at once: their work was checked, and an orderly end would take seconds."""
        while pids := [pid for pid, fields in self._processes() if fields[0] != "Z"]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for child in self._children:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(0.05)
        for child in self._children:
            child.wait(READY)
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        self._log.close()

    def _processes(self) -> Iterator[tuple[int, list[str]]]:
        """Each process of our sessions, and the fields of its stat from the third on."""
        sessions = {str(child.pid) for child in self._children}
        for path in Path("/proc").iterdir():
            if not path.name.isdecimal():
                continue
            try:
                fields = (path / "stat").read_text().rpartition(") ")[2].split()
            except OSError:
                continue
            if fields[3] in sessions:
                yield int(path.name), fields


@contextlib.contextmanager
def workers(
    system: System, servers: Servers, processes: int, *, latency: bool = False
) -> Iterator[Workers]:
    """Worker processes that run from here to the end."""
    started = Workers(system, servers, processes, latency=latency)
    try:
        started.wait_ready()
        started.go()
        yield started
    finally:
        started.end()

"""`machinery worker` as processes: the supervisor that a test has started, and those below it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
from typing import Any


def children(pid: int) -> list[int]:
    """Return the direct children of a process, zombies too."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in pathlib.Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return sorted(found)


def kill_all(process: subprocess.Popen[Any]) -> None:
    """Kill the supervisor and its worker processes, as the end of a machine does, and reap it."""
    if process.poll() is None:
        # First the supervisor: it would replace the others.
        for pid in (process.pid, *children(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    process.wait()

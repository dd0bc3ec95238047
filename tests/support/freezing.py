"""Stop a worker process as a suspended machine would, at a moment when it holds no shared lock."""

from __future__ import annotations

import os
import pathlib
import signal
import sqlite3

from machinery_py.testing.waiting import HANG, wait_until

LOCK_WAIT = 1.0  # seconds that a live writer may take


def freeze(pid: int, url: str) -> None:
    """SIGSTOP, and return when the process stands still without a lock on the URL's SQLite file.

    A process stopped inside a transaction keeps SQLite's lock, and nobody writes until it goes on.
    No lease can end that, so it goes on and is stopped again.
    """

    def stands_still_outside() -> bool:
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: stands_still(pid), HANG, f"process {pid} to stand still")
        if not url.startswith("sqlite:") or can_be_written(url.removeprefix("sqlite:///")):
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    wait_until(stands_still_outside, HANG, f"process {pid} stopped outside of its transactions")


def stands_still(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def can_be_written(path: str) -> bool:
    """Whether nobody holds the file's write lock for longer than a live process would."""
    connection = sqlite3.connect(path, timeout=LOCK_WAIT, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.OperationalError as error:
        if "locked" not in str(error):
            raise
        return False
    finally:
        connection.close()
    return True

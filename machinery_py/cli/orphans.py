"""Orphans: the processes that tasks started end with the worker that ran the tasks.

    the worker ends in order    it ends all processes below it that are younger than its first task
                                (Linux)
    it is killed                the supervisor ends its process group, which it leads unless it is
                                the only one of a terminal
    all are killed              the kernel kills forked children, as the lifeline is cut (Linux)

Process 1 of a container inherits those whose parent has ended. There the supervisor reaps them when
they end, or each would keep its number as a zombie.

Limits: a process that has left on purpose is not found: one in a session or group of its own
(`setsid`) when the worker is killed; without a group, or when all are killed, one whose parent has
ended (a double fork), and what was executed (subprocess, spawn, forkserver). A service manager ends
those with the service.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress

from machinery_py.connections import descriptors, proc

GRACE = 2.0  # seconds between SIGTERM and SIGKILL
SET_SIGNAL = 10  # F_SETSIG, which Python does not name
INTERVAL = 0.02  # seconds between two checks whether they have ended


def end_below(spared: frozenset[int] = frozenset()) -> None:
    """End all processes below this one, and theirs: SIGTERM, and SIGKILL after GRACE.

    `spared`: the result of `below` before any task ran. A program that runs the command line in its
    own process may have children.
    """
    left = _signal(below(spared), signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    while left and time.monotonic() < deadline:
        time.sleep(INTERVAL)
        left &= below(spared)
    if found := below(spared):  # none on Windows, which has no SIGKILL
        _signal(found, signal.SIGKILL)


def _signal(pids: frozenset[int], number: signal.Signals) -> frozenset[int]:
    for pid in pids:
        with suppress(OSError):  # it has ended
            os.kill(pid, number)
    return pids


def below(spared: frozenset[int] = frozenset()) -> frozenset[int]:
    """Return the processes below this one that run, without the spared ones and those below them.

    Never multiprocessing's own tracker: it tidies up behind the others, and ends then. Empty where
    there is no /proc.
    """
    if not os.path.isdir("/proc/self"):
        return frozenset()
    parents = {int(name): proc.parent(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    spared |= {getattr(getattr(tracker, "_resource_tracker", None), "_pid", 0)}
    found, last = frozenset[int](), frozenset({os.getpid()})
    while last:
        last = frozenset(
            pid for pid, parent in parents.items() if parent in last and pid not in spared
        )
        found |= last
    return found


def reap_inherited(own: Collection[int]) -> None:
    """Reap what process 1 has inherited and has ended, if this is process 1 (Linux).

    Args:
        own: what it has started itself; those that had ended before have been reaped.
    """
    if sys.platform != "linux" or os.getpid() != 1:
        return
    with suppress(ChildProcessError):  # there are none
        while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if found.si_pid in own:
                return  # it has ended just now, and SIGCHLD says so: the next look gets past it
            os.waitpid(found.si_pid, os.WNOHANG)


def hold_lifeline() -> None:
    """Have forked children killed when this process dies, however that happens. Linux only.

    In each child the kernel sends SIGKILL when a pipe is closed that only this process writes to.
    PR_SET_PDEATHSIG would send it when the thread that forks ends, and a task may fork in any
    thread.
    """
    if sys.platform != "linux":
        return
    import fcntl

    read, write = os.pipe()
    descriptors.keep(write)

    def watch_parent() -> None:
        with suppress(OSError):  # it was closed, or there is no /proc: nothing kills this child
            # Opened anew: the owner and the flags of this end are the child's own.
            end = os.open(f"/proc/self/fd/{read}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            fcntl.fcntl(end, fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(end, SET_SIGNAL, signal.SIGKILL)
            fcntl.fcntl(end, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
            with suppress(BlockingIOError):
                if os.read(end, 1) == b"":  # it died in between
                    os._exit(1)

    os.register_at_fork(after_in_child=watch_parent)


class ProcessGroup:
    """The process group of an ended worker, and the orphans in it. Belongs to one thread."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._kill_at = time.monotonic() + GRACE
        self.is_over: bool = not self._signal(signal.SIGTERM)

    def check(self) -> None:
        """Check whether the group is empty; when its time is up, kill what is in it."""
        is_late = time.monotonic() >= self._kill_at
        self.is_over = not self._signal(signal.SIGKILL if is_late else 0) or is_late

    def _signal(self, number: int) -> bool:
        try:
            os.killpg(self._pid, number)
        except OSError:
            return False  # nobody, or nobody who may be signalled
        return True

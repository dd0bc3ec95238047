"""Facts about processes, most of them from /proc (Linux)."""

from __future__ import annotations

import functools
import os
import signal

_STATE, _PARENT, _STARTED = 0, 1, 19  # fields of `stat`


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; [] if it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()  # the name may hold spaces
    except OSError:
        return []


def started_at(pid: int) -> str:
    """Return when a process began, in ticks since the boot; "" if it has ended or is unknown."""
    fields = stat(pid)
    return fields[_STARTED] if fields and fields[_STATE] not in "ZX" else ""


def parent(pid: int) -> int:
    """Return the parent of a process; 0 if it runs no more."""
    fields = stat(pid)
    return int(fields[_PARENT]) if fields and fields[_STATE] not in "ZX" else 0


def memory() -> int:
    """Return the bytes that this process has in memory; at its peak where there is no /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


def load() -> tuple[float, float, float] | None:
    """Return the load averages of the host; None where they cannot be had."""
    try:
        return os.getloadavg()
    except (AttributeError, OSError):
        return None


def how_it_ended(code: int) -> str:
    """Return the rest of a sentence, as `ended with exit code 3`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def hostname() -> str:
    """Return this machine's name."""
    from socket import gethostname  # 2 ms that only workers pay

    return gethostname()


@functools.cache
def place() -> str:
    """Name the boot and the PID namespace, within which a PID means one process; "" if unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def is_suspended(pid: int, pid_place: str) -> bool:
    """Return whether that process is stopped (SIGSTOP, a debugger); False if unknown."""
    return pid_place == place() and stat(pid)[:1] in (["T"], ["t"])

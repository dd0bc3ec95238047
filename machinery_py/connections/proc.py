"""Facts about processes from /proc (Linux)."""

from __future__ import annotations

import os

#: Fields of `stat`. Times are in ticks, the start since the boot.
STATE, PARENT, USER_TIME, SYSTEM_TIME, STARTED = 0, 1, 11, 12, 19


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; [] if it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()  # the name may hold spaces
    except OSError:
        return []


def memory() -> int:
    """Return the bytes that this process has in memory; at its peak where there is no /proc."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS

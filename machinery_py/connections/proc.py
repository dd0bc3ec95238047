"""Facts about other processes from /proc (Linux)."""

from __future__ import annotations

#: Fields of `stat`. Times are in ticks, the start since the boot.
STATE, PARENT, USER_TIME, SYSTEM_TIME, STARTED = 0, 1, 11, 12, 19


def stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; [] if it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()  # the name may hold spaces
    except OSError:
        return []

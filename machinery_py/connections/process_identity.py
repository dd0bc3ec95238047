"""Identity of a process: boot, PID namespace, PID and start time, by which a dead session of this host is certain."""

from __future__ import annotations

import functools
import os

import msgspec


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Identity with which a consumer registers. `started_at`: microseconds since 1970."""

    name: str
    host: str
    place: str
    pid: int
    pid_started: str
    queues: tuple[str, ...]
    started_at: int


encode_info = msgspec.json.Encoder().encode
decode_info = msgspec.json.Decoder(SessionInfo).decode


@functools.cache
def place() -> str:
    """Names the set of processes whose numbers mean the same: this boot, this PID namespace; "" where that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def started(pid: int) -> str:
    """When the process began, in ticks since the boot; "" if there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]


def is_dead(info: SessionInfo) -> bool:
    """Whether its process has ended, as far as that can be seen from here."""
    return bool(info.place) and info.place == place() and started(info.pid) != info.pid_started

"""Dead consumers of a server: how they identify themselves, and how other workers find them.

    its process has ended    seen on its own host, in its own PID namespace: dead at the first look
    its heartbeat stopped    seen from anywhere: dead if it stays the same (`HeartbeatJudge`)

Which tasks a dead consumer was running stands in its file: connections/session_files.py.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec

from machinery_py.brokers.base import WorkerInfo
from machinery_py.clock import Clock, micros, moment_of
from machinery_py.connections import proc
from machinery_py.connections.proc import place
from machinery_py.texts import get_logger
from machinery_py.values.malformed import MALFORMED

logger = get_logger(__name__)

#: Leases. After a longer pause we may have been suspended ourselves: declare nobody dead.
STALE_LOOK = 1.5

SessionKey = TypeVar("SessionKey", bound=Hashable)


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """Identity with which a consumer registers. `started_at`: microseconds since 1970.

    Attributes:
        left: queues that it served before, and may hold something of.
        stalled: as in WorkerInfo; another process writes it, at the end of the record.
    """

    name: str
    host: str
    place: str
    pid: int
    pid_started: str
    queues: tuple[str, ...]
    started_at: int
    left: tuple[str, ...] = ()
    stalled: bool = False

    def worker(
        self, session: str, *, beat_at: int, holding: int, stalled: bool = False
    ) -> WorkerInfo:
        """Return the consumer as listings show it. `beat_at`: microseconds since 1970."""
        return WorkerInfo(
            session=session,
            name=self.name,
            host=self.host,
            pid=self.pid,
            queues=self.queues,
            started_at=moment_of(self.started_at),
            beat_at=moment_of(beat_at),
            holding=holding,
            stalled=stalled or self.stalled,
        )


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(SessionInfo).decode


def own_record(worker: str, queues: Sequence[str], clock: Clock) -> bytes:
    """Return the encoded identity of a new consumer of this process."""
    return _encode(
        SessionInfo(
            name=worker,
            host=socket.gethostname(),
            place=place(),
            pid=os.getpid(),
            pid_started=proc.started_at(os.getpid()),
            queues=tuple(queues),
            started_at=micros(clock.now()),
        )
    )


def with_queues(record: bytes, queues: Sequence[str], left: Sequence[str] = ()) -> bytes:
    """Return the record of our own consumer when it serves these queues, and has left others."""
    served: dict[str, object] = {"queues": tuple(queues), "left": tuple(left)}
    return _encode(msgspec.structs.replace(_decode(record), **served))


def read_record(record: bytes | None) -> SessionInfo | None:
    """Decode a consumer's identity; None if there is none, or if a later version wrote it."""
    try:
        return _decode(record) if record else None
    except MALFORMED:
        return None


def has_ended(info: SessionInfo) -> bool:
    """Return whether the consumer's process has ended; False where that cannot be seen."""
    is_here = bool(info.place) and info.place == place()
    return is_here and proc.started_at(info.pid) != info.pid_started


def log_loss(info: SessionInfo | None, *, has_ended: bool) -> None:
    """Log that a consumer was given up, and why."""
    if info is not None:
        logger.warning(
            "worker %s (pid %d on %s) %s: what it held goes back to its queues",
            info.name,
            info.pid,
            info.host,
            "is gone, its process has ended" if has_ended else "has lost its lease",
        )


class HeartbeatJudge(Generic[SessionKey]):
    """Finds sessions whose heartbeat does not change. No clocks of two hosts are compared.

    Args:
        patience: seconds for which the same heartbeat must have been seen.
        lease: seconds; a look later than STALE_LOOK leases after the last one starts anew.
    """

    def __init__(self, *, patience: float, lease: float) -> None:
        self._patience = patience
        self._stale = lease * STALE_LOOK
        #: heartbeat, and when (monotonic) it was seen first and last
        self._seen: dict[SessionKey, tuple[object, float, float]] = {}

    def __bool__(self) -> bool:
        """Return whether sessions are watched, which another look may find dead."""
        return bool(self._seen)

    def dead(self, beats: Mapping[SessionKey, object], now: float) -> list[SessionKey]:
        """Take a look: return the sessions that are dead by now, which are watched no more.

        Args:
            beats: the heartbeats of all sessions in question; those missing are forgotten.
            now: monotonic seconds.
        """
        dead: list[SessionKey] = []
        seen: dict[SessionKey, tuple[object, float, float]] = {}
        for session, beat in beats.items():
            known, first, last = self._seen.get(session, (None, now, now))
            if known != beat or now - last > self._stale:
                seen[session] = (beat, now, now)
            elif now - first < self._patience:
                seen[session] = (beat, first, now)
            else:
                dead.append(session)
        self._seen = seen
        return dead

"""Keeper: beats for worker processes that live and cannot beat: no user code starves a lease.

A process gives its keeper a sign of life each lease / 10: a list of its sessions, each with its
lease and how its broker is opened (`worker/control/signs.py`). What the keeper does for these
sessions:

    silent for lease / 3        opens the broker (not before: it is large), beats each lease / 4,
                                and answers orders in its place, as far as it can (deputy.py)
    silent for a lease          the same; its beats say that the worker is stalled
    silent for stall_timeout    nothing more: the lease lapses, unless the process is killed before
    gives a sign                closes the broker; the sessions are those of the sign
    stopped (SIGSTOP, ptrace)   nothing: the lease lapses
    ended                       forgets them

The worker itself beats as if there were no keeper. So a keeper that dies, or is stopped, changes
nothing for a worker that can beat. `Broker.beat_for` starts no session: one that was closed or
given up is left alone until a sign names it again. Silence counts while the keeper itself runs, at
most LONGEST_STEP between two checks: after it was stopped, the signs in the pipe are read first.

It is a thread of the supervisor of `machinery worker`. A process that has workers and no supervisor
starts it as a process of its own, by `python -m machinery_py.worker.control.keeper`, which ends
with its pipe.

Limits: a store that does not answer delays the beats for another store of the same process. Without
/proc (macOS) a stopped process is not told from a silent one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from machinery_py.connections import proc
from machinery_py.connections.lines import LineReader
from machinery_py.errors import MachineryError
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread

if TYPE_CHECKING:
    from machinery_py.stores.open import Family
    from machinery_py.worker.control.deputy import Deputy

logger = get_logger(__name__)

LONGEST_STEP = 2.0  # seconds; a longer time between two checks means that we were stopped ourselves
LONGEST_PAUSE = 0.5  # seconds between two checks
DOUBTFUL = 5.0  # seconds of silence; a worker that can gives a sign each second
PARENT_CHECK = 1.0  # seconds between two looks whether the parent is the same


class ToldSession:
    """A session that a process has told of, and when the next beat for it is due."""

    def __init__(self, told: dict[str, Any], patience: float | None) -> None:
        self.name: str = str(told["session"])
        self.queues: list[str] = told["queues"]
        self.lease: float = float(told["lease"])
        self.stall_timeout: float = float(told["stall_timeout"]) if patience is None else patience
        self.config: dict[str, Any] = told["config"]
        self.key: str = json.dumps(self.config, sort_keys=True)  # of the broker
        self.answers: dict[str, Any] = told.get("answers", {})
        self.beat_at: float = self.lease / 3  # seconds of silence

    def is_due(self, silence: float) -> bool:
        """Return whether a beat is due, and plan the next."""
        if silence < self.lease / 3:  # it begins anew, for instance after a stop
            self.beat_at = self.lease / 3
        is_due = self.beat_at <= silence < self.stall_timeout
        if is_due:
            self.beat_at = silence + self.lease / 4
        return is_due


class ToldProcess:
    """A process that gives signs of life, and its sessions."""

    def __init__(self, pid: int, patience: float | None = None) -> None:
        self.pid = pid
        self._patience = patience
        self.sessions: list[ToldSession] = []
        self.silence: float = 0.0  # seconds

    def hear(self, sign: str) -> None:
        """Take a sign: its sessions as they are now."""
        try:
            self.sessions = [ToldSession(one, self._patience) for one in json.loads(sign)]
            self.silence = 0.0
        except (ValueError, TypeError, KeyError):  # user code has written into the pipe
            logger.debug("process %d has told what is no sign", self.pid)

    def due(self, passed: float) -> list[ToldSession]:
        """Return the sessions to beat for, when so many seconds have passed without a sign."""
        self.silence += passed
        is_doubtful = self.is_kept or self.silence >= DOUBTFUL
        if is_doubtful and proc.stat(self.pid)[:1] in (["T"], ["t"]):
            self.silence = 0.0
        return [one for one in self.sessions if one.is_due(self.silence)]

    @property
    def is_kept(self) -> bool:
        """Whether it is silent and has sessions that the keeper beats for."""
        return any(one.lease / 3 <= self.silence < one.stall_timeout for one in self.sessions)


class Keeper:
    """Thread that beats for the processes it hears of. Its methods may be called from any thread.

    Args:
        patience: seconds, in place of the `stall_timeout` of each session.
        stacks_of: see deputy.StacksOf.
    """

    def __init__(
        self, *, patience: float | None = None, stacks_of: Callable[[int], str] = lambda _: ""
    ) -> None:
        self._patience = patience
        self._stacks_of = stacks_of
        self._lock = threading.Lock()
        self._processes: dict[int, ToldProcess] = {}
        self._families: dict[str, Family] = {}  # by configuration; of the thread alone
        self._deputies: dict[str, Deputy] = {}  # the same
        self.loop: Final = LoopThread("machinery-keeper", self._work, inside=True)

    def hear(self, pid: int, sign: str) -> None:
        """Take a sign of a process."""
        with self._lock:
            self._processes.setdefault(pid, ToldProcess(pid, self._patience)).hear(sign)

    def know(self, pid: int) -> None:
        """Expect signs of a process from now on: its silence counts, also before the first one."""
        with self._lock:
            self._processes.setdefault(pid, ToldProcess(pid, self._patience))

    def forget(self, pid: int) -> None:
        """Beat no more for a process: it has ended."""
        with self._lock:
            self._processes.pop(pid, None)

    def silence(self, pid: int) -> float:
        """Return the seconds since the last sign of a process; 0 if it is stopped, or unknown."""
        with self._lock:
            process = self._processes.get(pid)
            return process.silence if process is not None else 0.0

    def sessions(self) -> list[ToldSession]:
        """Return the sessions of all processes."""
        with self._lock:
            return [one for each in self._processes.values() for one in each.sessions]

    def _work(self) -> None:
        checked_at = time.monotonic()
        while not self.loop.pause(min([LONGEST_PAUSE, *(s.lease / 20 for s in self.sessions())])):
            now = time.monotonic()
            passed, checked_at = min(now - checked_at, LONGEST_STEP), now
            self.check(passed)
        self.close()

    def check(self, passed: float) -> None:
        """Do what is due, when so many seconds have passed since the last check."""
        with self._lock:
            processes = list(self._processes.values())
            due = [(one, session) for one in processes for session in one.due(passed)]
            has_silent = any(one.is_kept for one in processes)
        for process, session in due:
            if not self._beat(process, session):
                with self._lock, suppress(ValueError):  # a sign has come meanwhile
                    process.sessions.remove(session)
        if has_silent:
            self._answer([(one, s) for one in processes if one.is_kept for s in one.sessions])
        else:
            self.close()

    def _answer(self, deaf: Sequence[tuple[ToldProcess, ToldSession]]) -> None:
        """Answer orders to deaf workers whose broker is open, which it is after the first beat."""
        from machinery_py.worker.control.deputy import (  # not for one that has none
            DeafWorker,
            Deputy,
        )

        for key, family in self._families.items():
            mine = [
                DeafWorker(one.pid, one.silence, session.answers)
                for one, session in deaf
                if session.key == key and session.answers
            ]
            if not mine:
                continue
            try:
                if key not in self._deputies:
                    silence = max(one.silence for one in mine)
                    self._deputies[key] = Deputy(family.broker(), self._stacks_of, silence=silence)
                self._deputies[key].answer(mine)
            except MachineryError as error:
                logger.debug("orders to silent worker processes cannot be answered: %s", error)
            except Exception:  # the loop must live on: it beats
                logger.exception("an order to a silent worker process could not be answered")

    def _beat(self, process: ToldProcess, session: ToldSession) -> bool:
        """Beat for a session; return whether it is to be kept on."""
        key, stalled = session.key, process.silence >= session.lease
        try:
            if key not in self._families:
                self._families[key] = _open_family(session.config)
            broker = self._families[key].broker()
            return broker.beat_for(session.name, session.queues, stalled=stalled)
        except MachineryError as error:
            logger.warning("no beat for the silent worker process %d: %s", process.pid, error)
        except Exception:  # the loop must live on, whatever a client does
            logger.exception("no beat for the silent worker process %d", process.pid)
        return True

    def close(self) -> None:
        """Close the brokers, when its thread has ended, or in it."""
        for deputy in self._deputies.values():
            deputy.close()
        self._deputies.clear()
        families, self._families = self._families, {}
        for family in families.values():
            try:
                family.close()
            except Exception:  # the loop must live on, whatever a client does
                logger.exception("the broker of silent worker processes cannot be closed")


def _open_family(settings: dict[str, Any]) -> Family:
    from machinery_py.clock import SYSTEM_CLOCK
    from machinery_py.config.config import Config
    from machinery_py.stores.open import open_broker_family

    return open_broker_family(Config.from_mapping(settings), SYSTEM_CLOCK)


def main(arguments: Iterable[str]) -> None:
    """Keep the sessions of the process with this pid, told on stdin, until that ends."""
    (pid,) = map(int, arguments)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # to a whole service; the parent decides
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    keeper = Keeper()
    reader = LineReader(sys.stdin.fileno())
    keeper.loop.start()
    while not reader.is_at_end and os.getppid() == pid:
        select.select([reader.descriptor], [], [], PARENT_CHECK)
        for line in reader.read():
            keeper.hear(pid, line.partition(" ")[2])
    os._exit(0)  # the thread may wait for a store


if __name__ == "__main__":
    main(sys.argv[1:])

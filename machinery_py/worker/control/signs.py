"""Signs of life: what this process tells its keeper (keeper.py) each lease / 10.

A sign is a line with all sessions of the process's workers. It repeats everything, so one that is
lost does no harm, and a keeper that was started anew knows all with the first.

The workers of a process share the interpreter, and so one keeper. Below the supervisor of
`machinery worker` that is the supervisor (`use`). Else the first sign starts a keeper process.

    keeper is killed          the next sign starts another one, at most one each RESTART_PAUSE
    keeper is stopped         a sign is left out while one waits to be read
    keeper cannot be started  one warning; the workers go on without
    this process is killed    the keeper ends at the end of its pipe
    this process forks        the child has no keeper until it starts a worker of its own
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from machinery_py.brokers.base import Broker, Consumer
from machinery_py.config.config import OPTIONS, Config
from machinery_py.config.urls import redact
from machinery_py.connections import descriptors, proc
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.lines import LineWriter
from machinery_py.stores.open import is_built_in
from machinery_py.texts import get_logger

logger = get_logger(__name__)

SIGN = "sign"  # the first word of the line
LONGEST_INTERVAL = 1.0  # seconds between two signs
RESTART_PAUSE = 10.0  # seconds, at least, between two starts of a keeper
NOTABLE = 1.0  # seconds that no thread ran, at least, until the log says so

_PYTHON = re.compile(r"python|pypy|graalpy", re.IGNORECASE)  # how the program is called


class Signs:
    """Thread that gives the signs. Its methods may be called from any thread.

    Args:
        tell: sends a line to the keeper; returns False when there will never be one again.
    """

    def __init__(self, tell: Callable[[str], bool]) -> None:
        self.pid: int = os.getpid()
        self._tell = tell
        self._kept: dict[Consumer, dict[str, object]] = {}
        self._answers: dict[Consumer, Callable[[], Mapping[str, Any]]] = {}
        self._interval = LONGEST_INTERVAL
        self._lock = ForkLock()
        self._woken = threading.Event()
        threading.Thread(target=self._work, name="machinery-signs", daemon=True).start()

    def keep(
        self,
        consumer: Consumer,
        queues: Sequence[str],
        config: Config,
        answers: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """Have the keeper beat for a consumer when this process is silent; it knows at once.

        Args:
            answers: called for each sign: what the keeper answers with (deputy.py), as JSON.
        """
        with self._lock:
            self._answers[consumer] = answers
            self._kept[consumer] = {
                "queues": list(queues),
                "config": nested(config),
                "lease": config.lease,
                "stall_timeout": config.stall_timeout,
            }
            self._interval = min(self._interval, config.lease / 10)
        self.give()
        self._woken.set()

    def drop(self, consumer: Consumer) -> None:
        """End that: the consumer is closed."""
        with self._lock:
            self._kept.pop(consumer, None)
            self._answers.pop(consumer, None)
        self.give()

    def give(self) -> bool:
        """Give a sign now, with the names that the sessions have now. False: nobody wants any.

        Called after each beat, too, which may have given a session another name.
        """
        if self.pid != os.getpid():
            return False  # a forked child has the worker of its parent
        with self._lock:
            sessions = [
                facts | {"session": one.session, "answers": self._answers[one]()}
                for one, facts in self._kept.items()
            ]
            return self._tell(f"{SIGN} {json.dumps(sessions)}")

    def _work(self) -> None:
        goes_on = True
        while goes_on:
            begun, interval = time.monotonic(), self._interval
            self._woken.wait(interval)
            self._woken.clear()
            late = time.monotonic() - begun - interval
            if late > NOTABLE:
                logger.warning(
                    "no thread of this process ran for %.1f s: a task held the interpreter, or "
                    "the process was stopped",
                    late,
                )
            try:
                goes_on = self.give()
            except Exception:  # no memory: a thread that ends here would look like a stalled worker
                logger.exception("no sign of life could be given")


def nested(config: Config) -> dict[str, Any]:
    """Return what the keeper needs of a configuration, as `Config.from_mapping` reads it.

    The keeper opens the broker alone: other stores may be objects, or code that it must not import.
    """
    found: dict[str, Any] = {}
    for key, value in config.values():
        if value != OPTIONS[key].default and key not in ("result_backend", "lock", "stores"):
            section, dot, name = key.rpartition(".")
            (found.setdefault(section, {}) if dot else found)[name] = value
    return found


class KeeperProcess:
    """The keeper of a process without a supervisor. Belongs to the `Signs` that call `tell`."""

    def __init__(self) -> None:
        self._pid = 0
        self._socket: socket.socket | None = None
        self._writer: LineWriter | None = None
        self._start_at = 0.0
        self._has_warned = False

    def tell(self, line: str) -> bool:
        """Send it a line; start it if there is none, unless that was tried a moment ago."""
        if not self._write(line) and time.monotonic() >= self._start_at:
            self._start_at = time.monotonic() + RESTART_PAUSE
            problem = self._buried() if self._pid else ""
            try:
                self._start()
            except (OSError, ValueError) as error:
                problem = f"this process has no keeper: {error}"
            if problem and not self._has_warned:
                self._has_warned = True
                logger.warning("%s; a task that holds the interpreter may lose its lease", problem)
            self._write(line)
        return True

    def _write(self, line: str) -> bool:
        return self._writer is not None and self._writer.write(line, can_be_dropped=True)

    def _start(self) -> None:
        ours, theirs = socket.socketpair()  # not inherited by what user code executes
        with theirs:
            try:
                self._pid = _start(theirs)
            except (OSError, ValueError):
                ours.close()
                raise
        ours.setblocking(False)
        descriptors.keep(ours)
        flags = getattr(socket, "MSG_NOSIGNAL", 0)  # user code may want to die of SIGPIPE
        self._socket, self._writer = ours, LineWriter(lambda data: ours.send(data, flags))

    def _buried(self) -> str:
        """Reap the one that has ended, and say how."""
        how, pid, self._pid, self._writer = "has ended", self._pid, 0, None
        if self._socket is not None:
            with suppress(OSError):  # user code has closed it
                self._socket.close()
        with suppress(ChildProcessError):  # user code has reaped it
            how = proc.how_it_ended(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return f"the keeper of this process {how}"


def _start(stdin: socket.socket) -> int:
    """Start a keeper, which finds this package where we have found it; return its pid.

    Raises:
        OSError, ValueError: it cannot be started.
    """
    # In a frozen app, or one that embeds Python (uWSGI), this is the app: it would run once more.
    is_python = _PYTHON.match(os.path.basename(sys.executable or ""))
    if getattr(sys, "frozen", False) or not is_python:
        raise OSError(
            f"no Python interpreter can be started (sys.executable is {sys.executable!r})"
        )
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path if isinstance(folder, str))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "machinery_py.worker.control.keeper", str(os.getpid())],
        stdin=stdin.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        process_group=0,
    )
    process.returncode = 0  # it ends with its pipe: no ResourceWarning that it still runs
    return process.pid


class _Own:
    """The signs of this process; a forked child has none of its own."""

    signs: Signs | None = None
    lock = ForkLock()


def use(tell: Callable[[str], bool]) -> None:
    """Give signs to this keeper from now on, before a worker is started: the supervisor's."""
    with _Own.lock:
        _Own.signs = Signs(tell)


def signs_for(broker: Broker, config: Config) -> Signs | None:
    """Return the signs of this process, if the consumers of the broker live by beats; else None."""
    if not broker.features.beats or os.name != "posix":
        return None
    if not is_built_in(config.broker):
        logger.warning(
            "broker %r is opened by code of your own (add_family), which the keeper does not "
            "import: a task that holds the interpreter for longer than the lease (%g s) loses it "
            '(run such tasks with pool="process")',
            redact(config.broker),
            config.lease,
        )
        return None
    with _Own.lock:
        if _Own.signs is None or _Own.signs.pid != os.getpid():
            _Own.signs = Signs(KeeperProcess().tell)
        return _Own.signs

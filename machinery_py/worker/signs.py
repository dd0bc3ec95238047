"""Signs of life: what this process tells its keeper (keeper.py) of its workers' sessions.

All workers of a process share the interpreter, and so one keeper and one thread that gives the
signs. Below the supervisor of `machinery worker` that is the keeper (`use`). Else the thread starts
a keeper process with the first session, and another when that one has ended. No worker waits for
it.

    keeper is killed          the next sign finds its pipe broken; a new one is told of all sessions
    keeper is stopped         lines wait in the pipe; a sign is left out while one waits
    keeper cannot be started  one warning; the workers go on without
    this process is killed    the keeper ends at the end of its pipe
    this process forks        the child has no keeper until it starts a worker of its own

A thread that comes late with a sign says so in the log: no thread of this process ran.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

from machinery_py.config.config import OPTIONS, Config
from machinery_py.connections import descriptors
from machinery_py.connections.forks import ForkLock
from machinery_py.connections.lines import LineWriter
from machinery_py.stores.base import Session, Store
from machinery_py.texts import get_logger

logger = get_logger(__name__)

LONGEST_INTERVAL = 1.0  # seconds between two signs
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds until a keeper that has ended is started again
NOTABLE = 1.0  # seconds that no thread ran, at least, until the log says so
HEALTHY = 60.0  # seconds of life after which the pause is the first one again

_PYTHON = re.compile(r"python|pypy|graalpy", re.IGNORECASE)  # how the program is called


class Link(Protocol):
    """A way to a keeper."""

    def tell(self, line: str, *, can_be_dropped: bool = False) -> bool:
        """Send a line; False: nobody reads."""
        ...

    def renew(self) -> bool:
        """Find another keeper, if there is none; False: none can be had."""
        ...


class Signs:
    """Thread that gives the signs, and the sessions that the keeper knows."""

    def __init__(self, link: Link, *, is_open: bool = False) -> None:
        """`is_open`: the keeper is there, and wants signs also without a session."""
        self._link = link
        self._always = is_open
        self._is_open = is_open
        self._sessions: dict[str, tuple[str, float]] = {}  # its line, its lease
        self._lock = ForkLock()
        self._woken = threading.Event()
        self._thread = threading.Thread(target=self._work, name="machinery-signs", daemon=True)
        self._thread.start()

    def keep(self, session: str, queues: Sequence[str], config: Config) -> None:
        """Have the keeper beat for a session when this process is silent."""
        facts: dict[str, object] = {
            "session": session,
            "queues": list(queues),
            "config": nested(config),
            "lease": config.lease,
            "stall_timeout": config.stall_timeout,
        }
        line = f"keep {json.dumps(facts)}"
        with self._lock:
            self._sessions[session] = line, config.lease
            if self._is_open:
                self._link.tell(line)
        self._woken.set()

    def drop(self, session: str) -> None:
        """End that: the session is closed, or has another name."""
        with self._lock:
            if self._sessions.pop(session, None) is not None and self._is_open:
                self._link.tell(f"drop {session}")

    def _interval(self) -> float | None:
        """Return the seconds until the next sign; None if nobody wants one."""
        with self._lock:
            leases = [lease for _, lease in self._sessions.values()]
        if not leases and not self._always:
            return None
        return min([LONGEST_INTERVAL, *(lease / 10 for lease in leases)])

    def _work(self) -> None:
        opened_at, pause = 0.0, 0.0
        while True:
            self._wait()
            if self._interval() is None or (self._is_open and self._sign()):
                continue
            if self._always:
                return  # the supervisor is gone
            if opened_at:
                lived_long = time.monotonic() - opened_at > HEALTHY
                pause = FIRST_PAUSE if lived_long else min(LONGEST_PAUSE, pause * 2 or FIRST_PAUSE)
                self._woken.wait(pause)
            opened_at = time.monotonic()
            self._open()

    def _wait(self) -> None:
        """Wait until the next sign is due; say so if no thread ran for much longer than that."""
        interval, begun = self._interval(), time.monotonic()
        self._woken.wait(interval)
        self._woken.clear()
        passed = time.monotonic() - begun
        if interval is not None and passed > max(NOTABLE, interval * (1 + 10 / 3)):
            logger.warning(
                "no thread of this process ran for %.1f s: a task held the interpreter, or the "
                "process was stopped",
                passed,
            )

    def _sign(self) -> bool:
        return self._link.tell("beat", can_be_dropped=True)

    def _open(self) -> None:
        is_open = self._link.renew()
        with self._lock:
            self._is_open = is_open
            for line, _ in self._sessions.values() if is_open else ():
                self._link.tell(line)


def nested(config: Config) -> dict[str, Any]:
    """Return what was chosen in a configuration, as `Config.from_mapping` reads it."""
    found: dict[str, Any] = {}
    for key, value in config.values():
        if value != OPTIONS[key].default:
            section, dot, name = key.rpartition(".")
            (found.setdefault(section, {}) if dot else found)[name] = value
    return found


class KeeperProcess:
    """The keeper of a process without a supervisor. Belongs to the thread that gives the signs."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: LineWriter | None = None
        self._socket: socket.socket | None = None
        self._owner = os.getpid()
        self._has_warned = False
        self._is_over = False

    def tell(self, line: str, *, can_be_dropped: bool = False) -> bool:
        writer = self._writer
        return writer is not None and writer.write(line, can_be_dropped=can_be_dropped)

    def renew(self) -> bool:
        """Start a process, in place of one that has ended."""
        how = ""
        if self._process is not None:
            self._end(self._process)
            how = f"the keeper of this process has ended: exit code {self._process.returncode}"
        if self._is_over:
            return False
        # Not inherited by what user code executes; a forked child gets the null device for it.
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            self._process = _start(theirs)
        except (OSError, ValueError) as error:
            ours.close()
            how = f"this process has no keeper: {error}"
        else:
            descriptors.keep(ours)
            flags = getattr(socket, "MSG_NOSIGNAL", 0)  # user code may want to die of SIGPIPE
            self._socket, self._writer = ours, LineWriter(lambda data: ours.send(data, flags))
        finally:
            theirs.close()
        if how and not self._has_warned:
            self._has_warned = True
            logger.warning("%s; a task that holds the interpreter may lose its lease", how)
        return self._writer is not None

    def close(self) -> None:
        """End it at the end of this process; it has nothing to lose."""
        self._is_over = True
        if self._process is not None and self._owner == os.getpid():
            self._end(self._process)
        elif self._process is not None:
            self._process.returncode = 0  # of the parent, in a forked child: no concern of ours

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        self._writer = None
        if self._socket is not None:
            self._socket.close()


def _start(stdin: socket.socket) -> subprocess.Popen[bytes]:
    """Start a keeper, which finds this package where we have found it.

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
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "machinery_py.worker.keeper", str(os.getpid())],
        stdin=stdin.fileno(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        process_group=0,
    )


class _Own:
    """The signs of this process."""

    signs: Signs | None = None
    pid = 0
    lock = ForkLock()


def use(link: Link) -> None:
    """Give signs to this keeper from now on, before a worker is started: the supervisor's."""
    with _Own.lock:
        _Own.signs, _Own.pid = Signs(link, is_open=True), os.getpid()


def own_signs() -> Signs:
    """Return the signs of this process."""
    with _Own.lock:
        if _Own.signs is None or _Own.pid != os.getpid():
            process = KeeperProcess()
            atexit.register(process.close)
            _Own.signs, _Own.pid = Signs(process), os.getpid()
        return _Own.signs


class KeptSession:
    """The session of one worker, as the keeper of this process knows it.

    Args:
        session: of a store whose consumers live by beats; for others it does nothing.
    """

    def __init__(
        self, store: Store, session: Session, queues: Sequence[str], config: Config
    ) -> None:
        self._is_wanted = store.broker.features.beats and os.name == "posix"
        self._session = session
        self._queues = queues
        self._config = config
        self._name = ""
        self.renew()

    def renew(self) -> None:
        """Tell the keeper if the session has another name now; called after each beat."""
        name = self._session.consumer.session
        if self._is_wanted and name != self._name:
            self._tell(name)

    def end(self) -> None:
        """Tell it that the session is closed."""
        if self._name:
            self._tell("")

    def _tell(self, name: str) -> None:
        signs, before, self._name = own_signs(), self._name, name
        if name:
            signs.keep(name, self._queues, self._config)
        if before:
            signs.drop(before)

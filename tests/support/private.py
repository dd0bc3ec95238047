"""The life of a private server process: it is started for a test, and always ends with it.

A server ends with its `with`, else when Python exits, and on Linux also when Python is killed. Only
processes started here are ever signalled. The servers themselves are in `servers`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import ClassVar, Self

from machinery_py.errors import MachineryError
from machinery_py.testing.waiting import HANG, wait_until

HOST = "127.0.0.1"
PORTS = range(
    11_000, 21_000
)  # below every system's ephemeral ports: a stopped server's port stays free for its restart
STOP = 10.0  # seconds a server has to end by itself before it is killed
PR_SET_PDEATHSIG = 1


class ServerMissing(MachineryError, FileNotFoundError):
    """A program that a test needs is not installed."""

    def __init__(self, program: str, package: str) -> None:
        self.program = program
        self.package = package
        super().__init__(
            f"program {program!r} is not installed "
            f"(Debian package {package!r}; scripts/get-servers gets it)"
        )


class ServerBroken(MachineryError, RuntimeError):
    """A private server did not start, or ended by itself."""


class NotYet(MachineryError):
    """A server answered, but not as one that is ready does."""


def require(kind: type[Private]) -> None:
    """Skip the test, or the importing module, if a needed program is missing; with CI set, fail."""
    import pytest

    try:
        kind.check_installed()
    except ServerMissing as missing:
        if os.environ.get("CI"):
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing), allow_module_level=True)


# Processes


class Private(ABC):
    """One server or several, and their life."""

    PROGRAMS: ClassVar[Mapping[str, str]] = {}  # each program that is needed → its Debian package

    @classmethod
    def check_installed(cls) -> None:
        """Raises ServerMissing for the first program that is not there."""
        for program in cls.PROGRAMS:
            cls.find(program)

    @classmethod
    def find(cls, program: str) -> str:
        """Its path; also from the folders that only root has in its PATH.

        Raises:
            ServerMissing: it is not installed.
        """
        # RabbitMQ's own script first: Debian's in /usr/sbin changes the user and the folder.
        path = shutil.which(
            program,
            path=f"/usr/lib/rabbitmq/bin:{os.environ.get('PATH', os.defpath)}:"
            "/usr/local/sbin:/usr/sbin",
        )
        if path is None:
            raise ServerMissing(program, cls.PROGRAMS.get(program, program))
        return path

    @abstractmethod
    def start(self) -> Self:
        """Return when it answers; what runs already is left alone.

        Raises:
            ServerMissing: a program is not installed.
            ServerBroken: a process ended or never answered; the text has the end of its log.
        """

    @abstractmethod
    def close(self) -> None:
        """End the processes and remove their folders. May be called twice, in any state."""

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()


class PrivateServer(Private):
    """One process that listens on one port.

    Attributes:
        port: stays the same over restarts.
        folder: everything that the server writes; gone after `close`.
        log: the file with its output.
    """

    def __init__(self, *, port: int | None = None) -> None:
        self.port = free_port() if port is None else port
        self.folder = Path(tempfile.mkdtemp(prefix=f"{type(self).__name__.lower()}-"))
        self.log = self.folder / "log"
        self._process: subprocess.Popen[bytes] | None = None
        _alive.add(self)

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerBroken(f"{self} is not running (call start() first)")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process exists; a frozen one does."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> Self:
        if not self.is_running:
            self.check_installed()
            self._before()
            self._process = _starter.start(self)
            try:
                wait_until(self._is_ready, 2 * HANG)
            except AssertionError:
                raise ServerBroken(
                    f"{self} gave no answer in {2 * HANG:g} s; "
                    f"the end of its log:\n{self.log_tail()}"
                ) from None
        return self

    def stop(self) -> None:
        """Ask the process to end, as the system would at shutdown, and return when it has ended."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL: what it had not written is lost. Returns when it has ended."""
        self._end(signal.SIGKILL)

    def restart(self) -> Self:
        """Stop it if it runs, and start it on the same port with the same data."""
        self.stop()
        return self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing answers. Returns when it stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """SIGCONT: go on after `freeze`."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        _alive.discard(self)
        _taken.discard(self.port)

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of its output."""
        return (
            "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
            if self.log.exists()
            else ""
        )

    def __str__(self) -> str:
        return f"{type(self).__name__} on {HOST}:{self.port}"

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)  # a frozen one hears nothing else
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(HANG)

    def _is_ready(self) -> bool:
        if not self.is_running:
            raise ServerBroken(
                f"{self} ended while starting; the end of its log:\n{self.log_tail()}"
            )
        try:
            return self._answers()
        except (OSError, NotYet):
            return False

    def _before(self) -> None:
        """Made ready before each start, for instance another process."""

    def environment(self) -> dict[str, str]:
        return {
            name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ
        } | {"HOME": str(self.folder)}

    @abstractmethod
    def command(self) -> Sequence[str | Path]: ...

    @abstractmethod
    def _answers(self) -> bool:
        """Whether this process answers a round trip; OSError and NotYet mean: not yet."""


_alive: set[PrivateServer] = set()
_taken: set[int] = set()  # ports given to servers that may not listen yet
_owner = os.getpid()


@atexit.register
def _close_all() -> None:
    if os.getpid() == _owner:  # a forked child inherits the list, and owns nothing on it
        for server in list(_alive):
            server.close()


def free_port(*, besides: int = 0) -> int:
    """A port that nobody listens on; with `besides`, the port that much higher is free too."""
    generator = (
        random.SystemRandom()
    )  # a test that seeds `random` must not get the ports of another
    for _ in PORTS:
        port = generator.choice(PORTS)
        if port in _taken:
            continue
        try:
            for wanted in {port, port + besides}:
                with socket.socket() as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((HOST, wanted))
        except OSError:
            continue
        _taken.add(port)
        return port
    raise ServerBroken(f"no free port on {HOST} between {PORTS.start} and {PORTS.stop}")


class _Starter:
    """Starts every process from one thread that never ends.

    PR_SET_PDEATHSIG watches the thread, not the process.
    """

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[tuple[Future[subprocess.Popen[bytes]], PrivateServer]] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self, server: PrivateServer) -> subprocess.Popen[bytes]:
        future: Future[subprocess.Popen[bytes]] = Future()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # a forked child has no threads
                self._thread = threading.Thread(
                    target=self._run, name="private servers", daemon=True
                )
                self._thread.start()
        self._orders.put((future, server))
        return future.result(HANG)

    def _run(self) -> None:
        while True:
            future, server = self._orders.get()
            try:
                future.set_result(_spawn(server.command(), server.environment(), server.log))
            except BaseException as error:  # belongs to the thread that asked
                future.set_exception(error)


_starter = _Starter()


def _spawn(
    command: Sequence[str | Path], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
    parent = os.getpid()

    def die_with_parent() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:  # it died before the call
                os._exit(1)

    with log.open("ab") as output:
        # A session of its own: Ctrl-C reaches pytest only, which then stops its servers.
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=log.parent,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 – it takes no lock and imports nothing
        )

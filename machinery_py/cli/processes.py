"""Worker processes, and the sockets between them and their supervisor.

    supervisor → process    a byte: 1, end when the running tasks are done; 2, end now;
                            3: read the settings again; end of file: the supervisor is gone, as 1
    process → supervisor    lines:
        ready 30.0 600.0    shutdown and stall timeout, before its first claim
        sign …              for the keeper (worker/control/keeper.py)
        answering 1         or 0: whether its broker does
        file PATH           with --reload: a module that it has loaded
        over                it ends by itself, and the exit code is its own; without this line a
                            task has ended it
        worn                the same, to be renewed
        retired             it is going to end by an order, and is not to be replaced

Signals count in the supervisor alone: the first is 1, the second 2. In a worker process any
number of them is one 1, because Ctrl+C goes to all processes of a terminal, and service managers
signal all of a service, beside what the supervisor passes on.
"""

from __future__ import annotations

import argparse
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Final

from machinery_py.connections import descriptors, forks
from machinery_py.connections.lines import LineReader, LineWriter
from machinery_py.texts import get_logger

logger = get_logger(__name__)

RUN, STOP, STOP_NOW = 0, 1, 2
READ_AGAIN = 3  # not a level of RUN to STOP_NOW: the settings

SIGNALS = (signal.SIGINT, signal.SIGTERM)
HANGUP = getattr(signal, "SIGHUP", None)
STACKS = getattr(signal, "SIGUSR1", signal.SIGTERM)  # a worker writes the stacks of its threads
STACKS_TIME = 1.0  # seconds that it has for them
STACKS_STEP = 0.02  # seconds without another line: it has written all


class Child:
    """A worker process, the socket to it, and what it has reported. Belongs to one thread.

    Attributes:
        is_ready: it claims tasks.
        is_over: it ends by itself.
        is_worn: it is to be renewed.
        must_read_again: the settings, as soon as it is ready.
        answered_at: of its broker; a process that is stopped says nothing.
        kill_at: it has been given until then to end.
    """

    def __init__(self, words: Sequence[str], *, label: str, is_at_terminal: bool) -> None:
        """Start `machinery worker` with these words behind it.

        Args:
            is_at_terminal: it has our stdin, and stays in our process group; else it leads one.
        """
        self.started_at: float = time.monotonic()
        self.is_ready = self.is_over = self.is_worn = False
        self.is_killed: bool = False
        self.answered_at: float = -math.inf
        self.kill_at: float = math.inf
        self.stop_now_at: float = math.inf
        self.must_read_again: bool = False
        self.stacks_at: float | None = None  # they have been asked for, because it is silent
        self.beat_at: float = 0.0  # of the next heartbeat that is written for it
        self._socket, theirs = socket.socketpair()
        self._stacks = _file_for_stacks()
        self._asking = threading.Lock()
        link = f"{label}:{theirs.fileno()}:{self._stacks.fileno()}"
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-m", "machinery_py", "worker", "--child", link, *words],
                pass_fds=[theirs.fileno(), self._stacks.fileno()],
                stdin=None if is_at_terminal else subprocess.DEVNULL,
                process_group=None if is_at_terminal else 0,
            )
        except OSError:
            self.close()
            raise
        finally:
            theirs.close()
        self.news: Final = LineReader(self._socket.fileno())
        self.pid: int = self.process.pid
        self._told = RUN

    def order(self, level: int) -> None:
        """Tell it to stop; a level that is not higher than the last changes nothing."""
        if level > self._told:
            self._told = level
            with suppress(OSError):  # it has ended
                self._socket.send(bytes([level]))

    def read_again(self) -> None:
        """Tell it to read its settings again."""
        self.must_read_again = False
        with suppress(OSError):
            self._socket.send(bytes([READ_AGAIN]))

    def stacks(self) -> str:
        """Return the stacks of its threads, also if a task holds the interpreter; "": none came."""
        with self._asking, suppress(OSError, ValueError):  # it has ended
            file = self._stacks.fileno()
            os.lseek(file, 0, os.SEEK_SET)  # for the process, too
            os.ftruncate(file, 0)
            self.process.send_signal(STACKS)
            deadline, size = time.monotonic() + STACKS_TIME, 0
            while (found := os.fstat(file).st_size) != size or not size:
                size = found
                if time.monotonic() >= deadline:
                    break
                time.sleep(STACKS_STEP)
            return os.pread(file, size, 0).decode(errors="replace")
        return ""

    def kill(self) -> None:
        self.is_killed = True
        self.process.kill()

    def close(self) -> None:
        """Close what there is between us, when it has ended."""
        self._socket.close()
        with self._asking:
            self._stacks.close()


def _file_for_stacks() -> IO[bytes]:
    """Return a file without a name, if possible in memory: a full disk stops no worker."""
    try:
        if hasattr(os, "memfd_create"):
            return open(os.memfd_create("machinery-stacks"), "w+b")
        return tempfile.TemporaryFile()
    except OSError:
        return open(os.devnull, "w+b")  # there will be none


def readable(descriptors: Sequence[int], timeout: float | None = None) -> set[int]:
    """Return the descriptors that can be read or are at their end; any number, unlike `select`.

    Raises:
        OSError: one of them is closed.
    """
    with selectors.DefaultSelector() as selector:
        for one in descriptors:
            selector.register(one, selectors.EVENT_READ)
        return {key.fd for key, _ in selector.select(timeout)}


def label_of(args: argparse.Namespace, number: str) -> str:
    """Return what tells this worker process from others of its command; "" if it is the only."""
    return number if args.processes > 1 else ""


class ParentLink:
    """A worker process's end of the socket, and the file for its stacks.

    From its option `--child LABEL:FD:FD`; "": no parent.
    """

    def __init__(self, option: str) -> None:
        label, *numbers = option.split(":")
        self.label: str = label
        descriptor, stacks = map(int, numbers or (-1, -1))
        self.descriptor: int = descriptor
        self.stacks: int = stacks
        if self.is_child:
            for one in (self.descriptor, self.stacks):
                os.set_inheritable(one, False)
                descriptors.keep(one)
            os.set_blocking(self.descriptor, False)
        self._writer = LineWriter(lambda data: os.write(self.descriptor, data))

    @property
    def is_child(self) -> bool:
        """Whether this is a worker process, below a supervisor."""
        return self.descriptor >= 0

    def tell(self, line: str, *, can_be_dropped: bool = False) -> bool:
        """Send the parent a line. False: it is gone, and the order to stop comes."""
        return self.is_child and self._writer.write(line, can_be_dropped=can_be_dropped)


class StopAsked(KeyboardInterrupt):
    """A signal arrived during the import of the app, or in `until_stopped`.

    A class of its own: after a bare KeyboardInterrupt in an exec() of text (a dataclass is made by
    one) CPython ends with SIGINT, even if the exception was caught.
    """


@contextmanager
def until_stopped() -> Iterator[None]:
    """Run the block until SIGTERM or Ctrl+C, which leave it; for the main thread."""

    def stop(*_: object) -> None:
        raise StopAsked  # no Event: the main thread may hold its lock, while it begins to wait

    for number in SIGNALS:
        signal.signal(number, stop)
    with suppress(StopAsked):
        yield


class Orders:
    """The order to stop, by signals and from the parent, as a level that only rises.

    A signal handler only writes a byte; a thread does the rest, since a handler must take no lock
    that its thread may hold. Made in the main thread. Until `follow`, the order to stop is a
    KeyboardInterrupt in the main thread.
    """

    def __init__(self, link: ParentLink) -> None:
        self.level: int = RUN
        self.grace = ""  # how long tasks may run on, for the log
        self._link = link
        self._changed: Callable[[int], object] | None = None
        self._on_hangup: Callable[[], object] = lambda: None
        self._read, self._write = os.pipe()
        if hasattr(os, "set_blocking"):  # not on Windows before Python 3.12
            os.set_blocking(self._write, False)
        for end in (self._read, self._write):
            descriptors.keep(end)
        self._lock = threading.Lock()
        for number in SIGNALS:
            forks.handle(number, self._on_signal)
        # Under nohup it stays ignored; closing the terminal ends a worker that has one.
        if HANGUP is not None and signal.getsignal(HANGUP) is signal.SIG_DFL:
            if link.is_child:
                forks.handle(HANGUP, lambda *_: None)  # to a whole service; the parent decides
            elif not _has_terminal():
                forks.handle(HANGUP, self._on_signal)
        if link.is_child:
            die_with_parent(os.getppid(), signal.SIGTERM)
        threading.Thread(target=self._listen, name="machinery-orders", daemon=True).start()

    def follow(self, changed: Callable[[int], object], on_hangup: Callable[[], object]) -> None:
        """Call the first with each new level from now on, in another thread.

        Args:
            on_hangup: called there when the settings are to be read again; raises nothing.
        """
        with self._lock:
            self._changed, self._on_hangup = changed, on_hangup
            level = self.level
        if level:
            changed(level)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._changed is None and number != HANGUP:
            self.level = max(self.level, STOP)
            raise StopAsked
        with suppress(OSError):  # thousands are waiting already
            os.write(self._write, bytes([number]))

    def _listen(self) -> None:
        sources = [self._read, self._link.descriptor] if self._link.is_child else [self._read]
        while True:
            for source in readable(sources):
                if source == self._read:
                    self._on_number(os.read(source, 1)[0])
                    continue
                found = b""
                with suppress(ConnectionResetError):  # it died with lines of ours unread
                    found = os.read(source, 64)
                if found:
                    if READ_AGAIN in found:
                        self._on_hangup()
                    self._rise(max(level for level in (RUN, *found) if level != READ_AGAIN))
                else:
                    sources.remove(source)
                    logger.warning("the parent process is gone: stopping")
                    self._rise(STOP)

    def _on_number(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == HANGUP:
            self._on_hangup()
        elif self._link.is_child:
            self._rise(STOP)
        elif self.level < STOP:
            logger.info("%s: stopping when the running tasks are done%s", name, self.grace)
            self._rise(STOP)
        elif self.level < STOP_NOW:
            logger.warning("second %s: stopping now", name)
            self._rise(STOP_NOW)

    def _rise(self, level: int) -> None:
        with self._lock:
            if level <= self.level:
                return
            self.level = level
            changed = self._changed
        if changed is not None:
            changed(level)
        else:
            # The app is being imported: interrupt that.
            os.kill(os.getpid(), signal.SIGTERM)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def die_with_parent(parent: int, number: int) -> None:
    """Get this signal when the parent's thread that has started us ends (Linux).

    A socket does not tell that for sure: another process may hold the parent's end.
    """
    if sys.platform != "linux":
        return
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, number, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), number)

"""A process of ours and the pipe through which it is told to stop.

    parent → child    "q": end when the running tasks are done; "a": end now; end of file: the parent is gone, so "q"
    child → parent    a line for each piece of news: "ready 30.0" (its shutdown timeout), before its first claim; "over": it ends
                      by itself, and the exit code is its own. Without that word a task has ended it; "beat": every BEAT between

Signals count in the outermost process alone: the first is "q", the second "a". In a child any number of them is one "q", because
Ctrl+C goes to all processes of a terminal, and service managers signal all of a service, beside what the parent passes on.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from machinery_py.connections import descriptors, forks
from machinery_py.texts import get_logger

logger = get_logger(__name__)

RUN, STOP, STOP_NOW = 0, 1, 2

BEAT = 2.5  # seconds between two beats

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ORDERS = {STOP: b"q", STOP_NOW: b"a"}
_LEVELS = {ord("q"): STOP, ord("a"): STOP_NOW}


class Child:
    """A child process of this one, on its pipes. Belongs to one thread."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        label: str,
        pass_on: Sequence[int] = (),
        is_at_terminal: bool = False,
    ) -> None:
        """Start `machinery worker` with these words behind it.

        Args:
            pass_on: further descriptors that it inherits.
            is_at_terminal: it has our stdin, and stays in our process group; else it leads one.
        """
        if "--child" in words:  # this process is a child itself
            at = words.index("--child")
            words = [*words[:at], *words[at + 2 :]]
        orders_in, self._orders = os.pipe()
        self.news, news_out = os.pipe()
        os.set_blocking(self.news, False)
        command = [
            sys.executable,
            "-m",
            "machinery_py",
            "worker",
            "--child",
            f"{label}:{orders_in}:{news_out}",
            *words,
        ]
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=(orders_in, news_out, *pass_on),
                stdin=None if is_at_terminal else subprocess.DEVNULL,
                process_group=None if is_at_terminal else 0,
            )
        finally:
            os.close(orders_in)
            os.close(news_out)
        self.pid = self.process.pid
        self.is_cut = (
            False  # nothing more will be heard: it has ended, or a task has closed its end
        )
        self._unread = b""
        self._told = RUN

    def order(self, level: int) -> None:
        """Tell it to stop. The same or less once more is nothing."""
        if level > self._told:
            self._told = level
            try:
                os.write(self._orders, _ORDERS[level])
            except OSError:
                pass  # it has ended

    def read_news(self) -> list[str]:
        """Return its lines since the last call."""
        try:
            while chunk := os.read(self.news, 65536):
                self._unread += chunk
            self.is_cut = True
        except OSError:
            pass  # nothing more for now
        *lines, self._unread = self._unread.split(b"\n")
        return [line.decode("utf-8", "surrogateescape") for line in lines]

    def ended(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    def used(self) -> float | None:
        """Seconds of processor that it has used; None if that is unknown, or it is stopped (SIGSTOP, a debugger)."""
        try:
            with open(f"/proc/{self.pid}/stat", encoding="utf-8", errors="replace") as file:
                parts = file.read().rpartition(")")[2].split()
        except OSError:
            return None
        return (
            None
            if parts[0] in "Tt"
            else (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Give the pipes back, when it has ended."""
        os.close(self._orders)
        os.close(self.news)


def readable(descriptors: Sequence[int], timeout: float | None = None) -> set[int]:
    """Return the descriptors that can be read or are at their end; also those over 1023, unlike `select.select`.

    Raises:
        OSError: one of them is closed.
    """
    with selectors.DefaultSelector() as selector:
        for one in descriptors:
            selector.register(one, selectors.EVENT_READ)
        return {key.fd for key, _ in selector.select(timeout)}


def how_it_ended(code: int) -> str:
    """`exit code 3`, `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class ParentPipe:
    """The child's end of the pipes, as its option `--child LABEL:FD:FD` says; for a process without a parent it is empty."""

    def __init__(self, option: str) -> None:
        self.label, orders, news = option.split(":") if option else ("", "-1", "-1")
        self.orders, self._news = int(orders), int(news)
        for descriptor in (self.orders, self._news):
            if descriptor >= 0:
                os.set_inheritable(descriptor, False)
                descriptors.keep(descriptor)

    @property
    def is_child(self) -> bool:
        return self.orders >= 0

    @property
    def is_numbered(self) -> bool:
        """Whether it is one of several workers, below a supervisor."""
        return self.label.isdigit()

    def tell(self, line: str) -> None:
        """Give the parent a piece of news."""
        if self._news >= 0:
            try:
                os.write(self._news, f"{line}\n".encode("utf-8", "surrogateescape"))
            except OSError:
                pass  # it is gone: the order to stop comes by the other pipe


class StopAsked(KeyboardInterrupt):
    """Raised where a signal meets the import of the app.

    Of a class of its own: after a bare KeyboardInterrupt in an exec() of text (a dataclass is made by one) CPython ends with
    SIGINT, even if that was caught.
    """


class Orders:
    """When this process is to stop: signals and the parent's pipe, as a level that only rises.

    A signal handler only writes a byte; a thread does the rest, since a handler must take no lock that its thread may hold.
    Made in the main thread. Until `follow`, the order to stop is a KeyboardInterrupt in the main thread.
    """

    def __init__(self, link: ParentPipe, *, grace: str = "") -> None:
        self.level = RUN
        self._link = link
        self._grace = grace
        self._changed: Callable[[int], object] | None = None
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for end in (self._read, self._write):
            descriptors.keep(end)
        self._lock = threading.Lock()
        for number in SIGNALS:
            forks.handle(number, self._on_signal)
        if link.is_child:
            die_with_parent()
        threading.Thread(target=self._listen, name="machinery-orders", daemon=True).start()

    def follow(self, changed: Callable[[int], object], *, grace: str = "") -> None:
        """Call this with each new level from now on, in a thread of its own. `grace`: for the log, how long tasks may run on."""
        with self._lock:
            self._grace = grace
            self._changed = changed
            level = self.level
        if level:
            changed(level)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._changed is None:
            self.level = max(self.level, STOP)
            raise StopAsked
        try:
            os.write(self._write, bytes([number]))
        except OSError:
            pass  # thousands are waiting already

    def _listen(self) -> None:
        sources = [self._read] + ([self._link.orders] if self._link.is_child else [])
        while True:
            for source in readable(sources):
                found = os.read(source, 1 if source == self._read else 64)
                if source == self._read:
                    self._on_number(found[0])
                elif found:
                    self._rise(max(_LEVELS.get(byte, RUN) for byte in found))
                else:
                    sources.remove(source)
                    logger.warning("the parent process is gone: stopping")
                    self._rise(STOP)

    def _on_number(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._link.is_child:
            self._rise(STOP)
        elif self.level < STOP:
            logger.info("%s: stopping when the running tasks are done%s", name, self._grace)
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


def die_with_parent() -> None:
    """On Linux: get SIGTERM when the parent dies, should its end of the pipe have been inherited by somebody else."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    try:
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:  # it died before the call
        os.kill(os.getpid(), signal.SIGTERM)

"""Child processes, and the pipes that tell them to stop.

    parent → child    "q": end when the running tasks are done; "a": end now;
                      end of file: the parent is gone, so "q"
    child → parent    lines: "ready 30.0 600.0" (shutdown and stall timeout), before its first
                      claim; "sign …", for the keeper (worker/keeper.py);
                      "answering 1" or 0: whether its broker does; "over": it ends by itself, and
                      the exit code is its own; "worn": the same, to be renewed. Without one of
                      these a task has ended it

Signals count in the outermost process alone: the first is "q", the second "a". In a child any
number of them is one "q", because Ctrl+C goes to all processes of a terminal, and service managers
signal all of a service, beside what the parent passes on.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType

from machinery_py.connections import descriptors, forks
from machinery_py.connections.lines import LineReader, LineWriter
from machinery_py.texts import get_logger

logger = get_logger(__name__)

RUN, STOP, STOP_NOW = 0, 1, 2

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STACKS = getattr(signal, "SIGUSR1", signal.SIGTERM)  # a worker writes the stacks of its threads
_ORDERS = {STOP: b"q", STOP_NOW: b"a"}
_LEVELS = {ord("q"): STOP, ord("a"): STOP_NOW}


class Child:
    """A child process of this one, and the pipes to it. Belongs to one thread."""

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
        ends: list[int] = []
        try:
            for _ in range(2):
                ends += os.pipe()
        except OSError:
            _close(ends)
            raise
        orders_in, self._orders, news_in, news_out = ends
        self.news = LineReader(news_in)
        link = f"{label}:{orders_in}:{news_out}"
        command = [sys.executable, "-m", "machinery_py", "worker", "--child", link, *words]
        try:
            self.process = subprocess.Popen(
                command,
                pass_fds=(orders_in, news_out, *pass_on),
                stdin=None if is_at_terminal else subprocess.DEVNULL,
                process_group=None if is_at_terminal else 0,
            )
        except OSError:
            self.close()
            raise
        finally:
            _close((orders_in, news_out))
        self.pid = self.process.pid
        self._told = RUN

    def order(self, level: int) -> None:
        """Tell it to stop; a level that is not higher than the last changes nothing."""
        if level > self._told:
            self._told = level
            with suppress(OSError):  # it has ended
                os.write(self._orders, _ORDERS[level])

    def read_news(self) -> list[str]:
        """Return its lines since the last call."""
        return [line.decode("utf-8", "surrogateescape") for line in self.news.read()]

    def ended(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return self.process.poll()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Give the pipes back, when it has ended."""
        _close((self._orders, self.news.descriptor))


def _close(descriptors: Sequence[int]) -> None:
    for one in descriptors:
        os.close(one)


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


def how_it_ended(code: int) -> str:
    """Return `exit code 3` or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


class ParentPipe:
    """The child's ends of the pipes, from its option `--child LABEL:FD:FD`; "" is no parent."""

    def __init__(self, option: str) -> None:
        self.label, orders, news = option.split(":") if option else ("", "-1", "-1")
        self.orders, self._news = int(orders), int(news)
        for descriptor in (self.orders, self._news):
            if descriptor >= 0:
                os.set_inheritable(descriptor, False)
                descriptors.keep(descriptor)
        if self._news >= 0:
            os.set_blocking(self._news, False)
        self._writer = LineWriter(lambda data: os.write(self._news, data))

    @property
    def is_child(self) -> bool:
        return self.orders >= 0

    @property
    def is_numbered(self) -> bool:
        """Whether it is a worker process, below a supervisor."""
        return self.label.isdigit()

    def tell(self, line: str, *, can_be_dropped: bool = False) -> bool:
        """Send the parent a line. False: it is gone, and the order to stop comes."""
        return self._news >= 0 and self._writer.write(line, can_be_dropped=can_be_dropped)


class StopAsked(KeyboardInterrupt):
    """A signal arrived during the import of the app.

    A class of its own: after a bare KeyboardInterrupt in an exec() of text (a dataclass is made by
    one) CPython ends with SIGINT, even if the exception was caught.
    """


class Orders:
    """The order to stop, by signals and the parent's pipe, as a level that only rises.

    A signal handler only writes a byte; a thread does the rest, since a handler must take no lock
    that its thread may hold. Made in the main thread. Until `follow`, the order to stop is a
    KeyboardInterrupt in the main thread.
    """

    def __init__(self, pipe: ParentPipe) -> None:
        self.level = RUN
        self._pipe = pipe
        self._grace = ""
        self._changed: Callable[[int], object] | None = None
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for end in (self._read, self._write):
            descriptors.keep(end)
        self._lock = threading.Lock()
        for number in SIGNALS:
            forks.handle(number, self._on_signal)
        if pipe.is_child:
            die_with_parent(os.getppid(), signal.SIGTERM)
        threading.Thread(target=self._listen, name="machinery-orders", daemon=True).start()

    def follow(self, changed: Callable[[int], object], *, grace: str = "") -> None:
        """Call this with each new level from now on, in another thread.

        `grace`: how long tasks may run on, for the log.
        """
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
        with suppress(OSError):  # thousands are waiting already
            os.write(self._write, bytes([number]))

    def _listen(self) -> None:
        sources = [self._read] + ([self._pipe.orders] if self._pipe.is_child else [])
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
        if self._pipe.is_child:
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


def die_with_parent(parent: int, number: int) -> None:
    """Get this signal when the parent's thread that has started us ends (Linux).

    A pipe does not tell that for sure: another process may hold the parent's end.
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

"""Wake-up across processes without polling: named pipes in a folder.

    <folder>/q-<pid>-<n>-<random>    a named pipe; its owner sleeps until something comes

Only a thread that sleeps has its pipe in the folder, so that in a busy system `notify` is one look
at an empty folder. This order loses no wake-up: the sleeper makes its pipe, looks for work once
more, and sleeps; the other side commits first and notifies then.

What is written are topics, each with END behind it: a sleeper that is not meant sleeps on. A pipe
that is full is removed; its owner makes another one, and takes all topics for told.

Limits: `notify` wakes all sleepers of a kind for a moment. Where no named pipe can be made (on
Windows, some mounts, a folder without rights), a sleeper polls every 50 ms instead. If the folder
is deleted during a sleep, the sleeper notices within a second.
"""

from __future__ import annotations

import itertools
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from machinery_py.connections import descriptors

FALLBACK = 0.05  # seconds between two looks where there are no named pipes
RECHECK = 1.0  # seconds after which a waiting thread makes sure that its pipe still exists
STALE = 10.0  # seconds; a pipe that nobody has open may be one that is being made

ATOMIC: int = getattr(select, "PIPE_BUF", 512)  # bytes that are written to a pipe as one
MOST = 8192  # bytes of topics
ANY = "!"  # all topics, perhaps
END = "\0"  # of a topic

Kind = Literal["q", "r", "t"]  # waiting: consumers of queues, waiters for results, subscriptions

_numbers = itertools.count(1)


def notify(folder: str, told: Mapping[str, Collection[str]]) -> None:
    """Wake all threads that wait for these kinds, in all processes; tell them of what."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if name[:1] in told:
            _write(os.path.join(folder, name), _messages(told[name[:1]]))


def _messages(topics: Collection[str]) -> list[bytes]:
    """Return the topics as writes that no other one comes between."""
    whole = END.join((*topics, "")).encode("utf-8", "surrogatepass")
    if ANY in topics or len(whole) > MOST or whole.count(b"\0") > len(topics):
        return [(ANY + END).encode()]
    found, start = [], 0
    while start < len(whole):
        end = whole.rfind(b"\0", start, start + ATOMIC) + 1 or len(whole)
        found.append(whole[start:end])
        start = end
    return found


def _write(path: str, messages: Sequence[bytes]) -> None:
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        _remove_stale(path)  # nobody has it open (ENXIO), or it has just been removed
        return
    try:
        for message in messages:
            os.write(pipe, message)
    except OSError:
        _remove(path)  # full: its owner makes another one, and looks for itself
    finally:
        os.close(pipe)


def _remove_stale(path: str) -> None:
    try:
        if time.time() - os.stat(path).st_mtime > STALE:
            os.unlink(path)
    except OSError:
        pass


class Notifier:
    """A named pipe on which one thread waits, inside `with notifier:`. `wake` is thread-safe.

    Attributes:
        heard: what the last `wait` was told of; ANY: of all, perhaps.
    """

    def __init__(self, folder: str, kind: Kind) -> None:
        self._folder = folder
        self.kind = kind
        self.heard: set[str] = set()
        self._inside = False
        self._path = ""
        self._pipe = -1
        self._wake_read = self._wake_write = -1
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._open_pipe()
        _notifiers.add(self)

    def _open_pipe(self) -> None:
        if _CAN_POLL:
            self._wake_read, self._wake_write = os.pipe()
            os.set_blocking(self._wake_read, False)
            os.set_blocking(self._wake_write, False)
            for end in (self._wake_read, self._wake_write):
                descriptors.keep(end)

    def __enter__(self) -> Notifier:
        self._inside = True
        self._make_pipe()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._inside = False
        self._remove_pipe()

    def _make_pipe(self) -> None:
        if not _CAN_POLL:
            return
        for _ in range(2):
            path = os.path.join(
                self._folder, f"{self.kind}-{os.getpid()}-{next(_numbers)}-{os.urandom(3).hex()}"
            )
            try:
                os.mkfifo(path, 0o600)
            except FileNotFoundError:
                _make_folder(self._folder)
                continue
            except OSError:
                return
            self._path = path
            try:
                # For writing as well: a writer that closes its end must leave no end of file.
                self._pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                _remove(path)
            return

    def _remove_pipe(self) -> None:
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            _remove(self._path)
            os.close(pipe)

    def wait(self, timeout: float) -> bool:
        """Wait until `notify`, `wake` or `timeout`; return True if it was `wake`.

        Outside of `with notifier:` nothing is told. May return early: look, and wait again.
        """
        pipe = self._pipe
        is_deaf = self._inside and pipe < 0
        timeout = max(0.0, min(timeout, FALLBACK if is_deaf else RECHECK))
        if not _CAN_POLL:
            self.heard = {ANY} if is_deaf else set()
            self._woken.wait(timeout)
            return self.woken()
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if pipe >= 0:
            poll.register(pipe, select.POLLIN)
        ready = poll.poll(math.ceil(timeout * 1000))  # 0.4 ms must not become a busy loop
        told = {fd: _drain(fd) for fd, _ in ready}.get(pipe, b"")
        self.heard = set(told.decode("utf-8", "surrogatepass").split(END)) if told else set()
        if pipe >= 0 and not os.path.exists(self._path):
            self._remove_pipe()
            self._make_pipe()
            self.heard.add(ANY)
        if is_deaf:
            self.heard.add(ANY)
        return self.woken()

    def woken(self) -> bool:
        """Return whether `wake` was called since the last call of this method."""
        if not self._woken.is_set():
            return False
        self._woken.clear()
        return True

    def wake(self) -> None:
        """End the wait that is going on, or the next one."""
        with self._lock:
            self._woken.set()  # before the byte: who finds the byte must find this
            if self._wake_write >= 0:
                try:
                    os.write(self._wake_write, b"!")
                except BlockingIOError:
                    pass  # it has been woken often enough

    def close(self) -> None:
        """Remove the pipe; nobody may wait any more. May be called twice."""
        with self._lock:
            self._remove_pipe()
            # Forgotten first: a child forked in between must not close other files by number.
            ends = self._wake_read, self._wake_write
            self._wake_read = self._wake_write = -1
            for end in ends:
                if end >= 0:
                    descriptors.drop(end)
                    os.close(end)

    def __del__(self) -> None:
        self.close()

    def after_fork(self) -> None:
        """Close the inherited end of the parent's pipe in a child, or the pipe would look alive."""
        self._lock = threading.Lock()
        self._woken = threading.Event()
        pipe, self._pipe = self._pipe, -1
        if pipe >= 0:
            os.close(pipe)
        if self._wake_write >= 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._open_pipe()


def _make_folder(folder: str) -> None:
    try:
        os.mkdir(folder, 0o700)
    except OSError:
        pass  # another process was faster, or there will be no pipes


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _drain(fd: int) -> bytes:
    told = b""
    try:
        while some := os.read(fd, 65536):
            told += some
            if len(some) < 65536:
                break
    except OSError:
        pass  # empty
    return told


_CAN_POLL = hasattr(select, "poll") and hasattr(os, "mkfifo")  # not on Windows
_notifiers: weakref.WeakSet[Notifier] = weakref.WeakSet()


def _after_fork() -> None:
    for notifier in list(_notifiers):
        notifier.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

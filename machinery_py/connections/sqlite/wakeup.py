"""Wake-up across processes without polling: named pipes in a folder, and a byte for each that sleeps.

    <folder>/q-<pid>-<n>-<random>    a named pipe; its owner sleeps until a byte comes

Only a thread that sleeps has its bell in the folder, so that ringing costs a busy system one look at an empty folder.
The order that loses no ring: hang up the bell, look for work once more, sleep. The ringer commits first and rings then.

Limits: all bells of a kind ring; each owner looks for itself whether it was meant. Where no named pipe can be made
(Windows, some mounts, a folder without rights) a sleeper looks every 50 ms instead; a folder deleted during a sleep is
noticed within a second.
"""

from __future__ import annotations

import itertools
import math
import os
import select
import threading
import time
import weakref
from collections.abc import Collection
from types import TracebackType
from typing import Literal

from machinery_py.connections import descriptors

FALLBACK = 0.05  # seconds between two looks where there are no named pipes
NAP = 1.0  # seconds after which a sleeper makes sure that its bell still hangs
STALE = 10.0  # seconds; a bell without an owner may be one that is being hung up, so it is taken down later

Kind = Literal["q", "r"]  # who sleeps: consumers of queues, or waiters for results

_numbers = itertools.count(1)


def ring(folder: str, kinds: Collection[str]) -> None:
    """Wake everybody, in all processes, who sleeps with a bell of these kinds."""
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        if name[:1] in kinds:
            _strike(os.path.join(folder, name))


def _strike(path: str) -> None:
    try:
        bell = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        _take_down_stale(path)  # nobody has it open (ENXIO), or it has just been taken down
        return
    try:
        os.write(bell, b"!")
    except OSError:
        pass  # full: its owner has been rung many times
    finally:
        os.close(bell)


def _take_down_stale(path: str) -> None:
    try:
        if time.time() - os.stat(path).st_mtime > STALE:
            os.unlink(path)
    except OSError:
        pass


class Doorbell:
    """The bell of one waiting thread. `with bell:` hangs it up; `wake` may be called from any thread."""

    def __init__(self, folder: str, kind: Kind) -> None:
        self._folder = folder
        self._kind = kind
        self._path = ""
        self._bell = -1
        self._wake_read = self._wake_write = -1
        self._woken = threading.Event()
        self._lock = threading.Lock()
        self._open_pipe()
        _bells.add(self)

    def _open_pipe(self) -> None:
        if _CAN_POLL:
            self._wake_read, self._wake_write = os.pipe()
            os.set_blocking(self._wake_read, False)
            os.set_blocking(self._wake_write, False)
            for end in (self._wake_read, self._wake_write):
                descriptors.keep(end)

    def __enter__(self) -> Doorbell:
        self._hang()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._take_down()

    def _hang(self) -> None:
        if not _CAN_POLL:
            return
        for _ in range(2):
            path = os.path.join(
                self._folder, f"{self._kind}-{os.getpid()}-{next(_numbers)}-{os.urandom(3).hex()}"
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
                # For writing as well, so that a ringer that closes its end leaves no end of file behind.
                self._bell = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                _remove(path)
            return

    def _take_down(self) -> None:
        bell, self._bell = self._bell, -1
        if bell >= 0:
            _remove(self._path)
            os.close(bell)

    def wait(self, timeout: float) -> bool:
        """Sleep until the bell rings, `wake`, or `timeout`; True if it was `wake`.

        Called inside `with bell:`. May return early: look, and wait again.
        """
        bell = self._bell
        timeout = max(0.0, min(timeout, FALLBACK if bell < 0 else NAP))
        if not _CAN_POLL:
            self._woken.wait(timeout)
            return self.woken()
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        if bell >= 0:
            poll.register(bell, select.POLLIN)
        ready = poll.poll(
            math.ceil(timeout * 1000)
        )  # rounded up: 0.4 ms must not become a busy loop
        for fd, _ in ready:
            _drain(fd)
        if not ready and bell >= 0 and not os.path.exists(self._path):
            self._take_down()
            self._hang()
        return self.woken()

    def woken(self) -> bool:
        """Whether `wake` was called since the last time this was asked."""
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
        """Take the bell down; nobody may wait any more. May be called twice."""
        with self._lock:
            self._take_down()
            # Forgotten first: a child that is forked in between must not close another file under these numbers.
            ends = self._wake_read, self._wake_write
            self._wake_read = self._wake_write = -1
            for end in ends:
                if end >= 0:
                    descriptors.drop(end)
                    os.close(end)

    def __del__(self) -> None:
        self.close()

    def after_fork(self) -> None:
        """In a forked child: the parent's bell is not ours, and must not look alive because of us."""
        self._lock = threading.Lock()
        self._woken = threading.Event()
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)
        if self._wake_write >= 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._open_pipe()


def _make_folder(folder: str) -> None:
    try:
        os.mkdir(folder, 0o700)
    except OSError:
        pass  # another process was faster, or there will be no bells


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _drain(fd: int) -> None:
    try:
        while len(os.read(fd, 4096)) == 4096:
            pass
    except OSError:
        pass  # empty


_CAN_POLL = hasattr(select, "poll") and hasattr(os, "mkfifo")  # not on Windows
_bells: weakref.WeakSet[Doorbell] = weakref.WeakSet()


def _after_fork() -> None:
    for bell in list(_bells):
        bell.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

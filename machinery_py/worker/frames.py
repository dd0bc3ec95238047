"""Frames: what a worker and a task process say to each other, through three pipes.

    tasks      worker → process   Setup once, then one Job after the other
    control    worker → process   Order, at any time; end of file: the worker is gone
    replies    process → worker   Ready or Broken once; for a job Progress, any number, then Done

A frame is four bytes of length and one record in MessagePack. A partial frame is an end of file.
"""

from __future__ import annotations

import array
import os
import select
import time
from typing import Any, Generic, TypeVar

import msgspec

from machinery_py.connections import descriptors
from machinery_py.registry.outcomes import Outcome

M = TypeVar("M")

LENGTH = 4  # bytes
CHUNK = 65_536  # bytes of one read; a pipe holds as many
LONGEST_WAIT = 86_400.0  # seconds of one call of poll(), which takes at most 24 days

CANCEL, TIME_IS_UP = 1, 2  # orders


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The app that a task process imports, and how it is to behave.

    Attributes:
        app: `module` or `module:object`, as on the command line.
        folder: to import it from.
        path: sys.path of the worker.
        log_level, log_format: as on the command line; empty: logging is left to the app.
        tells_memory: whether Done says how much memory the process has.
    """

    app: str
    folder: str
    path: list[str]
    log_level: str = ""
    log_format: str = ""
    tells_memory: bool = False


class Job(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One call. `number` is the process's own count; the rest is of the execution."""

    number: int
    body: bytes
    uuid: str
    queue: str
    fence: int
    epoch: int
    worker: str
    time_limit: float | None


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """CANCEL or TIME_IS_UP, for the job of this number if that still runs."""

    number: int
    what: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The app is imported."""


class Broken(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The app cannot be imported."""

    error: str


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Progress and notes of the job so far: see Context.progress and Context.noted."""

    number: int
    progress: tuple[float, float] | None
    noted: dict[str, str]


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The call has ended. `memory`: bytes that the process has in memory; 0: not asked for."""

    number: int
    outcome: Outcome
    memory: int = 0


Reply = Ready | Broken | Progress | Done

_encoder = msgspec.msgpack.Encoder()


class PipeEnd(Exception):
    """The other side has closed the pipe, or is gone."""


class FrameWriter:
    """The writing end of a pipe. Belongs to one thread at a time."""

    def __init__(self, number: int) -> None:
        self.number = number
        os.set_blocking(number, False)
        descriptors.keep(number)
        self._poll = select.poll()
        self._poll.register(number, select.POLLOUT)
        self._is_broken = False

    def write(self, record: msgspec.Struct, deadline: float | None = None) -> bool:
        """Write one frame. False: the pipe was full until the monotonic `deadline`.

        Raises:
            PipeEnd: nobody reads it any more.
        """
        body = _encoder.encode(record)
        left = memoryview(len(body).to_bytes(LENGTH, "big") + body)
        try:
            while left:
                try:
                    left = left[os.write(self.number, left) :]
                except BlockingIOError:
                    if not _wait(self._poll, deadline):
                        return False
        except OSError as error:
            self._is_broken = True
            raise PipeEnd from error
        return True

    def is_unread(self) -> bool:
        """Return whether something of what was written has not been read, or never will be."""
        import fcntl  # Windows, which has neither, has no task processes
        import termios

        left = array.array("i", [0])
        try:
            fcntl.ioctl(self.number, termios.FIONREAD, left)
        except OSError:
            return False
        return left[0] > 0 or self._is_broken

    def close(self) -> None:
        """May be called twice."""
        self.number = _close(self.number)


class FrameReader(Generic[M]):
    """The reading end of a pipe; `kind`: of what comes. Belongs to one thread at a time."""

    def __init__(self, number: int, kind: Any) -> None:
        self.number = number
        descriptors.keep(number)
        self._unread = bytearray()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)
        self._poll = select.poll()
        self._poll.register(number, select.POLLIN)

    def read(self, deadline: float | None = None) -> M | None:
        """Return the next record. None: it did not come until the monotonic `deadline`.

        Raises:
            PipeEnd: nothing comes any more, or what came is no frame.
        """
        try:
            while (record := self._next()) is None:
                if deadline is not None and not _wait(self._poll, deadline):
                    return None
                chunk = os.read(self.number, CHUNK)
                if not chunk:
                    raise PipeEnd
                self._unread += chunk
        except (OSError, msgspec.MsgspecError) as error:
            raise PipeEnd from error
        return record

    def has_some(self) -> bool:
        """Return whether `read` need not wait, unless for the rest of a frame."""
        return bool(self._unread) or bool(self._poll.poll(0))

    def _next(self) -> M | None:
        unread = self._unread
        end = LENGTH + int.from_bytes(unread[:LENGTH], "big")
        if len(unread) < LENGTH or len(unread) < end:
            return None
        record = self._decoder.decode(unread[LENGTH:end])
        del unread[:end]
        return record

    def close(self) -> None:
        """May be called twice."""
        self.number = _close(self.number)


def _close(number: int) -> int:
    """Close a descriptor that was kept, unless it is -1; return -1."""
    if number >= 0:
        descriptors.drop(number)
        os.close(number)
    return -1


def _wait(poll: select.poll, deadline: float | None) -> bool:
    """Wait for the pipe. False: the deadline has come."""
    if deadline is None:
        return bool(poll.poll())
    while True:
        left = max(0.0, deadline - time.monotonic())
        if poll.poll(min(left, LONGEST_WAIT) * 1000.0):
            return True
        if left <= LONGEST_WAIT:
            return False

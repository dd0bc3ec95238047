"""Frames: what a worker and a task process say to each other, through three pipes.

    tasks      worker → process   Setup once, then one Job after the other
    control    worker → process   Order, at any time, and KeepReply; end of file: the worker is gone
    replies    process → worker   Ready once; of a job Progress, Waits, Keep, any number, then Done

A frame is four bytes of length and one record in MessagePack. A partial frame is an end of file.
"""

from __future__ import annotations

import array
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from machinery_py.connections import descriptors
from machinery_py.errors import ConfigError
from machinery_py.fences import Fence
from machinery_py.registry.outcomes import Outcome
from machinery_py.tasks.checkpoints import Checkpoint
from machinery_py.tasks.mailboxes import Received, Wanted

M = TypeVar("M")

LENGTH = 4  # bytes
CHUNK = 65_536  # bytes of one read; a pipe holds as many
CHECK = 1.0  # seconds between two checks whether the process of a silent pipe has ended
LONGEST_WAIT = 86_400.0  # seconds of one call of poll(), which takes at most 24 days

CANCEL, TIME_IS_UP = 1, 2  # orders


class Setup(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The app that a task process imports, and how it is to behave.

    Attributes:
        app: `module` or `module:object`, as on the command line.
        folder: to import it from.
        log_level, log_format: as on the command line; empty: logging is left to the app.
        path: sys.path of the worker.
        tells_memory: whether Done says how much memory the process has.
        counts: whether it counts what it does for /metrics of its worker.
    """

    app: str
    folder: str
    log_level: str = ""
    log_format: str = ""
    path: Sequence[str] = ()
    tells_memory: bool = False
    counts: bool = False


class JobCall(msgspec.Struct, frozen=True, array_like=True):
    """One delivery."""

    body: bytes
    uuid: str
    queue: str
    count: int
    fence: Fence


class Job(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """One run. `number` is the process's own count; the rest is of the execution.

    `calls`: one, or those of a batch. `clock`: the logical one of the run; 0: events are off.
    """

    number: int
    calls: Sequence[JobCall]
    is_batch: bool
    worker: str
    time_limit: float | None
    clock: int = 0


class Order(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """CANCEL or TIME_IS_UP, for the job of this number if that still runs."""

    number: int
    what: int


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The app is imported, or cannot be, which `error` says."""

    error: str = ""


class Progress(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Progress and notes of the job so far: see Context.progress and Context.noted."""

    number: int
    progress: tuple[float, float] | None
    noted: dict[str, str]


class Waits(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The job begins to wait for the result of another task, or it has ended to."""

    number: int
    begins: bool


class Keep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The job wants checkpoints to be kept, a signal, or to know which checkpoints there are.

    KeepReply answers it.

    Attributes:
        question: its number in the process.
    """

    number: int
    question: int
    new: dict[str, Checkpoint] | None
    wanted: Wanted | None = None


class KeepReply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Answer to a Keep: what StepKeeper returns, or the class and the text of what it raises."""

    question: int
    rows: dict[str, Checkpoint] = {}
    received: Received | None = None
    error_type: str = ""
    error: str = ""


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The call has ended.

    Attributes:
        memory: bytes that the process has in memory; 0: not asked for.
        handed_on: see Context.hand_on.
    """

    number: int
    outcome: Outcome
    memory: int = 0
    clock: int = 0
    handed_on: Mapping[str, str] = {}


Reply = Ready | Progress | Waits | Keep | Done

_encoder = msgspec.msgpack.Encoder()


class PipeEnd(Exception):
    """The other side has closed the pipe, or is gone."""


class _FramePipe:
    """One end of a pipe. Belongs to one thread at a time.

    Args:
        is_over: whether the process at the other end has ended. What it has started may still hold
            its end open, and keep the end of file away.
    """

    def __init__(self, number: int, event: int, is_over: Callable[[], bool] | None) -> None:
        self.number: int = number
        self._is_over = is_over
        descriptors.keep(number)
        self._poll = select.poll()
        self._poll.register(number, event)

    def _wait(self, deadline: float | None) -> bool:
        """Wait until it is ready. False: the monotonic `deadline` has come.

        Raises:
            PipeEnd: the process at the other end has ended, and left nothing.
        """
        longest, is_over = CHECK if self._is_over else LONGEST_WAIT, False
        while True:
            left = longest if deadline is None else max(0.0, deadline - time.monotonic())
            if self._poll.poll(0.0 if is_over else min(left, longest) * 1000.0):
                return True
            if is_over:
                raise PipeEnd
            if deadline is not None and left <= longest:
                return False
            is_over = self._is_over is not None and self._is_over()

    def close(self) -> None:
        """May be called twice."""
        if self.number >= 0:
            descriptors.drop(self.number)
            os.close(self.number)
            self.number = -1


class FrameWriter(_FramePipe):
    """The writing end of a pipe."""

    def __init__(self, number: int, is_over: Callable[[], bool] | None = None) -> None:
        super().__init__(number, select.POLLOUT, is_over)
        os.set_blocking(number, False)
        self._written = 0  # bytes of the last frame

    def write(self, record: msgspec.Struct, deadline: float | None = None) -> bool:
        """Write one frame. False: the pipe was full until the monotonic `deadline`.

        Raises:
            PipeEnd: nobody reads it any more.
            Exception: the record cannot be encoded; nothing was written.
        """
        body = _encoder.encode(record)
        frame = memoryview(len(body).to_bytes(LENGTH, "big") + body)
        self._written = 0
        try:
            while self._written < len(frame):
                try:
                    self._written += os.write(self.number, frame[self._written :])
                except BlockingIOError:
                    if not self._wait(deadline):
                        return False
        except OSError as error:
            raise PipeEnd from error
        return True

    def was_read(self) -> bool:
        """Return whether anything of the last frame has been read, or may have been."""
        import fcntl  # Windows, which has neither, has no task processes
        import termios

        left = array.array("i", [0])
        try:
            fcntl.ioctl(self.number, termios.FIONREAD, left)
        except OSError:
            return True
        return left[0] < self._written


class FrameReader(_FramePipe, Generic[M]):
    """The reading end of a pipe; `kind`: of what comes."""

    def __init__(self, number: int, kind: Any, is_over: Callable[[], bool] | None = None) -> None:
        super().__init__(number, select.POLLIN, is_over)
        self._unread = bytearray()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)

    def read(self, deadline: float | None = None) -> M | None:
        """Return the next record. None: it did not come until the monotonic `deadline`.

        Raises:
            PipeEnd: nothing comes any more, or what came is no frame.
        """
        try:
            while (record := self._next()) is None:
                if not self._wait(deadline):
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


def setup_of(server: object) -> Setup:
    """Return where task processes import this Server from: the module that has it.

    Raises:
        ConfigError: none has it.
    """
    for name, module in list(sys.modules.items()):
        for key, value in list(getattr(module, "__dict__", {}).items()):
            if value is server and name not in ("__main__", "__mp_main__"):
                return Setup(app=f"{name}:{key}", folder=sys.path[0])
    raise ConfigError(
        "task processes cannot import this Server: no module has it as a global "
        "(make it in a module of its own, and import that where the worker is started)"
    )

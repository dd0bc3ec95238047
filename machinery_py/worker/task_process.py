"""One task process, seen from its worker: its start, its pipes, its jobs and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from machinery_py.connections import proc
from machinery_py.errors import MachineryError
from machinery_py.worker.execution import Execution
from machinery_py.worker.frames import (
    CANCEL,
    TIME_IS_UP,
    Broken,
    Done,
    FrameReader,
    FrameWriter,
    Job,
    Order,
    PipeEnd,
    Progress,
    Ready,
    Reply,
    Setup,
)

START_TIMEOUT = 120.0  # seconds for a process to import the app
END_TIMEOUT = 2.0  # seconds for an idle process to end by itself
DEATH_TIMEOUT = 2.0  # seconds from the end of a pipe, or from SIGKILL, to the end of the process
INTERVAL = 0.002  # seconds between two checks whether it has ended

MAIN = "machinery_py.cli.child"  # what a process runs

Report = Callable[[Execution], None]


class CannotStart(MachineryError):
    """A task process cannot be started, or cannot import the app."""


class ProcessLost(Exception):
    """The process ended, or was killed, before it replied. Its text says how.

    Attributes:
        has_begun: it had read the job.
    """

    def __init__(self, text: str, *, has_begun: bool) -> None:
        self.has_begun = has_begun
        super().__init__(text)


class TaskProcess:
    """A task process, seen from its worker.

    `wait_ready`, `run` and `end` belong to the thread that has taken it; `cancel` may be called
    from any.

    Attributes:
        started: number of jobs that it was given.
        memory: bytes that it had in memory after the last one; 0 if that is not asked for.
        is_killed: it is not to be used again.
        is_late: it was killed because the time of its task was up.
    """

    def __init__(self, setup: Setup) -> None:
        """Start it. The thread must outlive it: the kernel kills it when that thread ends."""
        ends: list[int] = []
        try:
            for _ in range(3):
                ends += os.pipe()
            tasks, tasks_out, control, control_out, replies_in, replies = ends
            self._process = subprocess.Popen(
                [sys.executable, "-m", MAIN, f"{tasks}:{control}:{replies}:{os.getpid()}"],
                pass_fds=(tasks, control, replies),
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError as error:
            for end in ends:
                os.close(end)
            raise CannotStart(f"a task process cannot be started: {error}") from error
        for end in (tasks, control, replies):
            os.close(end)
        self._tasks = FrameWriter(tasks_out)
        self._control = FrameWriter(control_out)
        self._replies: FrameReader[Reply] = FrameReader(replies_in, Reply)
        self.pid = self._process.pid
        self.started = self.memory = 0
        self.is_killed = self.is_late = self._is_ready = self._has_ended = False
        self._running = 0  # the number of the job that runs
        self._lock = threading.Lock()
        with suppress(PipeEnd):  # found out by `wait_ready`
            self._tasks.write(setup, time.monotonic() + START_TIMEOUT)

    def wait_ready(self) -> None:
        """Return when it has imported the app.

        Raises:
            CannotStart: it could not; it has been ended.
        """
        if self._is_ready:
            return
        try:
            reply = self._replies.read(time.monotonic() + START_TIMEOUT)
        except PipeEnd:
            raise CannotStart(f"a task process could not start: it {self.end()}") from None
        if not isinstance(reply, Ready):
            self._kill()
            self.end()
            why = (
                reply.error
                if isinstance(reply, Broken)
                else f"the app was not imported within {START_TIMEOUT:g} s"
            )
            raise CannotStart(f"a task process could not start: {why}")
        self._is_ready = True

    @property
    def is_warm(self) -> bool:
        """Whether `wait_ready` returns at once."""
        return self._is_ready or self._replies.has_some()

    def run(self, execution: Execution, report: Report) -> Done | None:
        """Give it the task, and return what it replies; None if the task was over before.

        Raises:
            ProcessLost: it ended before it replied.
        """
        self.started += 1
        number, limit = self.started, execution.time_limit
        delivery = execution.delivery
        job = Job(
            number,
            delivery.body,
            execution.signature.uuid,
            delivery.queue,
            delivery.fence,
            delivery.epoch,
            execution.worker,
            limit,
        )
        self._set_running(number)
        # From here on `cancel` finds the job; what came before, while it was starting, counts too.
        if execution.is_over:
            self._set_running(0)
            return None
        if execution.context is not None and execution.context.cancelled:
            self._order(Order(number, CANCEL))
        deadline = None if limit is None else time.monotonic() + limit
        try:
            if not self._tasks.write(job, deadline):  # it does not even read
                self.is_late = True
                self._kill()
            return self._wait(number, deadline, execution, report)
        except PipeEnd:
            has_begun = not self._tasks.is_unread()
            raise ProcessLost(self.end(), has_begun=has_begun) from None
        except BaseException:  # out of memory: the task must not run on behind its failure
            self._kill()
            self.end()
            raise
        finally:
            self._set_running(0)

    def _wait(
        self, number: int, deadline: float | None, execution: Execution, report: Report
    ) -> Done:
        is_asked = False
        while True:
            match self._replies.read(deadline):
                case Done() as done if done.number == number:
                    self.memory = done.memory
                    return done
                case Progress() as progress if progress.number == number:
                    execution.progress = progress.progress
                    if execution.context is not None:
                        execution.context.noted = progress.noted
                    report(execution)
                case None if not is_asked:
                    is_asked = True
                    self._order(Order(number, TIME_IS_UP))
                    deadline = time.monotonic() + execution.kill_after
                case None if not self.is_late:
                    self.is_late = True
                    self._kill()
                    deadline = time.monotonic() + DEATH_TIMEOUT
                case None:  # something that it has started holds the pipe
                    raise PipeEnd
                case _:
                    pass  # late progress of an earlier job

    def cancel(self, number: int, *, kill: bool) -> None:
        """Ask the job of this number to stop, or kill the process, if the job still runs."""
        with self._lock:
            if self._running != number:
                return
            if kill:
                self._signal_all()
        if not kill:
            self._order(Order(number, CANCEL))

    def _set_running(self, number: int) -> None:
        with self._lock:
            self._running = number

    def _order(self, order: Order) -> None:
        with self._lock, suppress(PipeEnd, ValueError):
            if not self._has_ended:
                # A full pipe: it obeys nothing, and the order would change nothing.
                self._control.write(order, 0.0)

    def _kill(self) -> None:
        with self._lock:
            self._signal_all()

    def _signal_all(self) -> None:
        """Kill it and what its task has started. The caller holds `_lock`."""
        self.is_killed = True
        if not self._has_ended:  # then its number may be another's
            for kill in (os.killpg, os.kill):  # a task may have left the group
                with suppress(OSError):
                    kill(self.pid, signal.SIGKILL)

    def dismiss(self) -> None:
        """Let it end when it has nothing more to do; `end` must follow."""
        self._tasks.close()

    def end(self, deadline: float | None = None) -> str:
        """Wait for its end until the monotonic `deadline`, kill what is left, and say how it ended.

        It must have closed its pipe, or have been killed or dismissed before.
        """
        if deadline is None:
            deadline = time.monotonic() + DEATH_TIMEOUT
        was_killed = self.is_killed
        has_ended = self._has_ended_by(deadline)
        with self._lock:
            self._signal_all()  # not reaped yet, so the group is its own
        self._has_ended_by(time.monotonic() + DEATH_TIMEOUT)
        with self._lock:
            self._has_ended = True
            code = self._process.wait()
            for pipe in (self._tasks, self._control, self._replies):
                pipe.close()
        if not has_ended and not was_killed:
            return "closed its pipes, and was killed"
        return proc.how_it_ended(code)

    def _has_ended_by(self, deadline: float) -> bool:
        """Wait for its end without reaping it. False: it did not end."""
        try:
            while not self._is_over():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(INTERVAL)
        except ChildProcessError:
            pass  # a task has waited for it
        return True

    def _is_over(self) -> bool:
        if hasattr(os, "waitid"):
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        return self._process.poll() is not None  # macOS before Python 3.13; it is reaped here

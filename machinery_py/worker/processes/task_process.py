"""One task process, seen from its worker: its start, its pipes, its jobs and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

from machinery_py.connections import proc
from machinery_py.errors import MachineryError, TimeLimitExceeded
from machinery_py.registry.outcomes import Lost, Outcome
from machinery_py.worker.processes.frames import (
    CANCEL,
    TIME_IS_UP,
    Done,
    FrameReader,
    FrameWriter,
    Job,
    JobCall,
    Keep,
    KeepReply,
    Order,
    PipeEnd,
    Progress,
    Ready,
    Reply,
    Setup,
    Waits,
)
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.keeping import StoreKeeper
from machinery_py.worker.running.runner import Report, Run, over_limit

KILL_AFTER = 5.0  # seconds from the time limit until it is killed, by default
START_TIMEOUT = 120.0  # seconds for a process to import the app
END_TIMEOUT = 2.0  # seconds for an idle process to end by itself
ANSWER_TIMEOUT = 30.0  # seconds for it to read an answer about its checkpoints
DEATH_TIMEOUT = 2.0  # seconds from the end of a pipe, or from SIGKILL, to the end of the process
INTERVAL = 0.002  # seconds between two checks whether it has ended

MAIN = "machinery_py.cli.child"  # what a process runs


class CannotStart(MachineryError):
    """A task process cannot be started, or ended before it was ready."""


class AppNotImported(CannotStart):
    """A task process cannot import the app; another one will not either."""


class Unread(Exception):
    """The process has ended before it read the job. The text says how."""


class TaskProcess:
    """A task process, seen from its worker.

    `wait_ready`, `run` and `end` belong to the thread that has taken it; `cancel` may be called
    from any.

    Attributes:
        started: number of jobs that it was given.
        memory: bytes that it had in memory after the last one; 0 if that is not asked for.
        is_killed: it is not to be used again.
        successor: the process that is to take its place.
        generation: of its pool, when it was started.
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
        self.pid: int = self._process.pid
        self._tasks = FrameWriter(tasks_out, self._is_over)
        self._control = FrameWriter(control_out)
        self._replies: FrameReader[Reply] = FrameReader(replies_in, Reply, self._is_over)
        self.started: int = 0
        self.memory: int = 0
        self.generation: int = 0
        self.is_killed: bool = False
        self._is_ready = False
        self.successor: TaskProcess | None = None
        self._run: Run | None = None
        self._lock = threading.RLock()  # never held while waiting
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
        if not isinstance(reply, Ready) or reply.error:
            self._kill()
            self.end()
            late = f"the app was not imported within {START_TIMEOUT:g} s"
            why = reply.error if isinstance(reply, Ready) else late
            raise AppNotImported(f"a task process could not start: {why}")
        self._is_ready = True

    @property
    def is_warm(self) -> bool:
        """Whether `wait_ready` returns at once."""
        return self._is_ready or self._replies.has_some()

    def run(self, run: Run, report: Report) -> Outcome | None:
        """Let it make the call, and return what became of that; None if the task was over before.

        Raises:
            Unread: it has ended, and the task was not begun.
        """
        self.started += 1
        self._run = run
        # From here on `cancel` finds the job; what came before, while it was starting, counts too.
        try:
            if run.is_over:
                return None
            if run.context is not None and run.context.cancelled:
                self._order(CANCEL)
            run.note_begun()
            done = self._call(run, report)
            self.memory = done.memory
            if done.handed_on and run.context is not None:
                run.context.hand_on(done.handed_on)
            return run.judged(done.outcome)
        except PipeEnd:
            was_read = self._tasks.was_read()
            text = f"its process {self.end()}"
            if not was_read:
                run.note_over()  # until another process has it
                raise Unread(text) from None
            lost = Lost(error=text)  # if it is over, it was killed on purpose
            return lost if run.is_over else run.judged(lost)
        except TimeLimitExceeded as error:
            self.end()
            return run.failed(error)
        except BaseException:  # out of memory: the task must not run on behind its failure
            self._kill()
            self.end()
            raise
        finally:
            with self._lock:
                self._run = None

    def _call(self, run: Run, report: Report) -> Done:
        """Send the job, and return the reply.

        Raises:
            PipeEnd: it has ended before it replied.
            TimeLimitExceeded: it was killed because the time of the task was up.
        """
        first, limit = run.first, run.settings.time_limit
        deadline = None if limit is None else time.monotonic() + limit
        job = Job(
            self.started,
            [_job_call(one) for one in run.placed],
            run.is_batch,
            first.worker,
            limit,
            first.app.publisher.clock_to_send(),
        )
        if not self._tasks.write(job, deadline):  # it does not even read
            return self._last_reply(run, 0.0)
        is_asked = False
        while True:
            match self._replies.read(deadline):
                case Done() as done if done.number == job.number:
                    if done.clock:
                        first.app.lamport.adjust(done.clock)
                    return done
                case Progress() as progress if progress.number == job.number:
                    for one in run.calls:
                        one.progress = progress.progress
                    first.noted.update(progress.noted)
                    report(run)
                case Keep() as keep if keep.number == job.number:
                    self._keep(run, keep)
                case Waits() as waits if waits.number == job.number:
                    if waits.begins:
                        run.wait_begins()
                    else:
                        run.wait_ends(at_once=True)  # the process goes on already
                case None if not is_asked:
                    is_asked = True
                    self._order(TIME_IS_UP)
                    deadline = time.monotonic() + _kill_after(run)
                case None:
                    return self._last_reply(run, _kill_after(run))
                case _:
                    pass  # late progress of an earlier job

    def _keep(self, run: Run, keep: Keep) -> None:
        """Keep checkpoints of the job, read them, or get it a signal, and answer."""
        try:
            keeper = StoreKeeper(run.first)
            if keep.wanted is not None:
                answer = KeepReply(keep.question, received=keeper.receive(keep.wanted))
            else:
                rows = keeper.read() if keep.new is None else keeper.keep(keep.new)
                answer = KeepReply(keep.question, dict(rows))
        except MachineryError as error:
            answer = KeepReply(keep.question, error_type=type(error).__name__, error=str(error))
        with self._lock, suppress(PipeEnd):  # found out by the next read
            self._control.write(answer, time.monotonic() + ANSWER_TIMEOUT)

    def _last_reply(self, run: Run, late: float) -> Done:
        """Kill it, so many seconds after the time limit, and return what it had replied before."""
        self._kill()
        with suppress(PipeEnd):
            while (reply := self._replies.read(time.monotonic() + DEATH_TIMEOUT)) is not None:
                if isinstance(reply, Done) and reply.number == self.started:
                    return reply
        raise TimeLimitExceeded(
            f"{over_limit(run.settings.time_limit)}, and was killed {late:g} s later"
        )

    def cancel(self, run: Run, *, kill: bool) -> None:
        """Ask the task to stop, or kill the process, if the task still runs here."""
        with self._lock:
            if self._run is not run:
                return
            if kill:
                self._kill()
            else:
                self._order(CANCEL)

    def _order(self, what: int) -> None:
        with self._lock, suppress(PipeEnd):
            # A full pipe: it obeys nothing, and the order would change nothing.
            self._control.write(Order(self.started, what), 0.0)

    def _kill(self) -> None:
        """Kill it and what its task has started."""
        with self._lock:
            self.is_killed = True
            if self._process.returncode is None:  # else its number may be another's
                for kill in (os.killpg, os.kill):  # a task may have left the group
                    with suppress(OSError):
                        kill(self.pid, signal.SIGKILL)

    def dismiss(self) -> None:
        """Let it end when it has nothing more to do; `end` must follow."""
        self._tasks.close()

    def end(self, deadline: float | None = None) -> str:
        """Wait for its end until the monotonic `deadline`, kill what is left, and say how it ended.

        It must have closed its pipe, or have been killed or dismissed before. May be called twice.
        """
        was_killed = self.is_killed
        has_ended = self._ends_by(deadline or time.monotonic() + DEATH_TIMEOUT)
        self._kill()  # it is not reaped yet, so the group is its own
        is_gone = self._ends_by(time.monotonic() + DEATH_TIMEOUT)
        with self._lock:
            for pipe in (self._tasks, self._control, self._replies):
                pipe.close()
            if not is_gone:  # held by a debugger, or by the kernel; reaped by the next Popen
                return "was killed, and has not ended"
            code = self._process.wait()
        return (
            proc.how_it_ended(code)
            if has_ended or was_killed
            else "closed its pipes, and was killed"
        )

    def _ends_by(self, deadline: float) -> bool:
        """Wait for its end without reaping it. False: it did not end."""
        while not self._is_over():
            if time.monotonic() >= deadline:
                return False
            time.sleep(INTERVAL)
        return True

    def _is_over(self) -> bool:
        try:
            if hasattr(os, "waitid"):
                how = os.WEXITED | os.WNOWAIT | os.WNOHANG
                return os.waitid(os.P_PID, self.pid, how) is not None
            return self._process.poll() is not None  # macOS before Python 3.13; it is reaped here
        except ChildProcessError:
            return True  # a task has waited for it, or it is reaped


def _kill_after(run: Run) -> float:
    """Return the seconds from its time limit until its process is killed."""
    given = run.settings.kill_after
    return KILL_AFTER if given is None else given


def _job_call(execution: Execution) -> JobCall:
    delivery, uuid = execution.delivery, execution.signature.uuid
    return JobCall(delivery.body, uuid, delivery.queue, delivery.count, delivery.fence)

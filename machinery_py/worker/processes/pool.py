"""Task processes: calls of tasks in processes of their own, which can be killed.

A process runs one task at a time. It is started by exec when it is needed, and kept. The worker
keeps session, guards, marks and settlement: a slot's thread hands the message to the process, waits
for the outcome, and goes on as if it had made the call itself.

    starting ──Ready──→ idle ⇄ running ──→ dismissed: its tasks pipe is closed, it ends by itself
        │                        │
        └── Broken, no answer    └── lost: it died, or was killed because its time was up

The slot's thread alone decides how a run ended: by the first Done that it reads, or by the end of
the pipe. A Done that was written before the process was killed counts.

| point | what dies | the task |
|---|---|---|
| before the job was read | the process, idle | another process gets it; no strike |
| job read, no Done yet | the process | RETRY at once, one strike (registry/outcomes.Lost) |
| Done written, not read | the process | ended as Done says |
| any | the worker | its processes die with it; redelivered, as a thread's task |

Why not another library: a `concurrent.futures.ProcessPoolExecutor` is broken by one dead process,
fails all that run, and cannot kill one task. pebble can, but it is LGPL, and both send pickles,
where ours is the message as it came.
"""

from __future__ import annotations

import datetime as dt
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from machinery_py.brokers.base import WAITING, Fate
from machinery_py.errors import ConfigError, MachineryError
from machinery_py.registry.outcomes import Outcome
from machinery_py.registry.task import Task
from machinery_py.texts import get_logger
from machinery_py.worker.processes.frames import Setup
from machinery_py.worker.processes.task_process import (
    END_TIMEOUT,
    INTERVAL,
    AppNotImported,
    CannotStart,
    TaskProcess,
    Unread,
)
from machinery_py.worker.running.runner import Report, Run

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

logger = get_logger(__name__)

TRIES = 3  # new processes that may end before they have read the task
NEARLY = 0.8  # of the most memory: the next process is started then
START_PAUSE = 5.0  # seconds until a task is tried again whose process could not start


class ProcessPool:
    """The task processes of one worker. It starts none before one is needed.

    Args:
        setup: what they import. Raises ConfigError if that cannot be told.
        by_default: whether tasks that do not say where run in processes.
        max_tasks: jobs after which a process is renewed; 0: any number.
        max_memory: bytes in memory with which it gets no other task; 0: any.

    Attributes:
        calls: number of calls so far.
        is_closed: it has ended; a worker that starts again makes another one.
    """

    def __init__(
        self,
        name: str,
        *,
        setup: Callable[[], Setup] | None = None,
        by_default: bool = False,
        max_tasks: int = 0,
        max_memory: int = 0,
    ) -> None:
        self._name = name
        self._setup = setup
        self.by_default = by_default
        self._max_tasks = max_tasks
        self._max_memory = max_memory
        self._idle: list[TaskProcess] = []  # the last used is the last; new ones are the first
        self._running: dict[Run, TaskProcess] = {}
        self._generation = 0  # of the processes that are to stay
        self._lock = threading.Lock()
        self._starter: ThreadPoolExecutor | None = None  # one thread: see TaskProcess
        self._ender: ThreadPoolExecutor | None = None
        self.is_closed: bool = False
        self.calls: int = 0

    def start(self, tasks: Iterable[Task[..., Any]]) -> None:
        """Start the first process if any of the tasks needs one, and wait until it is ready.

        Raises:
            ConfigError: what the processes are to import cannot be told.
            CannotStart: the process could not start, or several died of something else.
        """
        needed = False
        for task in tasks:
            if task.settings.pool == "process" or (self.by_default and not task.settings.pool):
                needed = True
            elif task.settings.kill_after is not None:
                logger.warning(
                    "task %s runs in a thread here: its kill_after has no effect "
                    '(pool="process" gives it a process)',
                    task.name,
                )
        tries = 0
        while needed and not self._idle:  # else an earlier attempt has started it
            process, tries = self._start(), tries + 1
            try:
                process.wait_ready()
            except CannotStart as error:
                if isinstance(error, AppNotImported) or tries == TRIES:
                    raise
                logger.warning("%s; starting another one", error)
            else:
                self._idle.append(process)

    def pid_of(self, run: Run) -> int:
        """Return the process that runs it; 0 if none does."""
        process = self._running.get(run)
        return process.pid if process is not None else 0

    def call(self, run: Run, report: Report) -> Outcome | None:
        """Make the call in a process, in the slot's thread.

        Returns None if it was over before it began, or if no process could be started: then it is
        put back, to be tried again.
        """
        with self._lock:
            self.calls += 1
        tries, text = 0, ""
        while tries < TRIES:
            try:
                process = self._take()
            except MachineryError as error:
                self._put_back(run, error)
                return None
            self._running[run] = process
            try:
                outcome = process.run(run, report)
                self._give_back(process)
                return outcome
            except Unread as unread:
                tries, text = tries + (process.started == 1), str(unread)
            finally:
                del self._running[run]
        self._put_back(run, CannotStart(f"{text} before it began, {TRIES} times"))
        return None

    def cancel(self, run: Run) -> None:
        """Ask the task to stop, if it runs in a process. If it is over, kill its process."""
        process = self._running.get(run)
        if process is not None:
            process.cancel(run, kill=run.is_over)

    def renew(self) -> None:
        """Let new processes take the place of all that there are, as soon as these run no task.

        The first of them is started before: an app that cannot be imported any more ends nothing.

        Raises:
            MachineryError: it could not be started, or there are no task processes.
        """
        if self._starter is None:
            raise MachineryError(
                'no task of this worker runs in a process (threads are renewed by "shutdown")'
            )
        process = self._start()
        process.wait_ready()
        with self._lock:
            if not self.is_closed:
                self._generation += 1
                process.generation = self._generation
                self._end_soon(*self._idle)
                self._idle = [process]
                return
        _end(process)

    def shrink(self, count: int) -> None:
        """End idle processes, as long as there are more than so many."""
        with self._lock:
            extra = len(self._idle) + len(self._running) - count
            while self._idle and extra > 0:
                extra -= 1
                self._end_soon(self._idle.pop(0))

    def close(self) -> None:
        """End all processes: those that are idle by themselves, the others by SIGKILL."""
        with self._lock:
            self.is_closed = True
            idle, self._idle = self._idle, []
        for run, process in list(self._running.items()):
            process.cancel(run, kill=True)
        _end(*idle)
        deadline = time.monotonic() + END_TIMEOUT
        while self._running and time.monotonic() < deadline:  # the slots' threads end them
            time.sleep(INTERVAL)
        for pool in (self._ender, self._starter):
            if pool is not None:
                pool.shutdown(wait=pool is self._ender)

    # Inside

    def _put_back(self, run: Run, error: MachineryError) -> None:
        for one in run.calls:
            eta = one.app.now() + dt.timedelta(seconds=START_PAUSE)
            if one.runs_once:  # its start may be stored
                one.lose(str(error))
            elif one.settle(one.end_of_delivery(Fate.LATER, eta=eta, reason=WAITING)):
                logger.error(
                    "task %s is put back for %g s: %s",
                    one.signature.uuid,
                    START_PAUSE,
                    error,
                    extra={"task_uuid": one.signature.uuid},
                )

    def _take(self) -> TaskProcess:
        """Return a process that is ready; a new one if none is idle."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None:
            process = self._start()
        process.wait_ready()
        if 0 < self._max_tasks <= process.started + 1 and process.successor is None:
            self._warm_up(process)
        return process

    def _give_back(self, process: TaskProcess) -> None:
        """Make it idle, or end it if it was killed or is to be renewed."""
        if 0 < NEARLY * self._max_memory < process.memory and process.successor is None:
            self._warm_up(process)
        if 0 < self._max_memory < process.memory and process.started == 1:
            logger.warning(
                "a task process has %d MB after its first task: it is renewed for each one "
                "(max_memory_per_child is %d MB)",
                process.memory // 2**20,
                self._max_memory // 2**20,
            )
        with self._lock:
            if not (self.is_closed or process.is_killed or self._is_worn(process)):
                self._idle.append(process)
                return
            if not self.is_closed:
                self._end_soon(process)
                return
        _end(process)

    def _is_worn(self, process: TaskProcess) -> bool:
        """Return whether it is to be renewed.

        Its pool is, it has run enough, it is too large, or nearly so and the next one is warm.
        """
        if self._max_tasks and process.started >= self._max_tasks:
            return True
        if 0 < self._max_memory < process.memory:
            return True
        if process.generation < self._generation:
            return True
        successor = process.successor
        return successor is not None and (successor not in self._idle or successor.is_warm)

    def _end_soon(self, *processes: TaskProcess) -> None:
        """End them in another thread: no result must wait for that. The caller holds `_lock`."""
        assert self._ender is not None
        self._ender.submit(_end, *processes)

    def _warm_up(self, process: TaskProcess) -> None:
        """Start the process that is to take the place of this one."""
        try:
            process.successor = successor = self._start()
        except MachineryError as error:
            logger.error("%s", error)
            return
        with self._lock:
            if not self.is_closed:
                self._idle.insert(0, successor)
                return
        _end(successor)

    def _start(self) -> TaskProcess:
        """Start a process in the starter's thread, without waiting until it is ready."""
        if sys.platform == "win32":
            raise ConfigError('pool="process" is not possible on Windows (use pool="thread")')
        if self._setup is None:
            raise ConfigError('pool="process": this worker has no app to start processes with')
        setup = msgspec.structs.replace(
            self._setup(),
            path=[os.path.abspath(folder) for folder in sys.path],
            tells_memory=self._max_memory > 0,
        )
        with self._lock:
            if self.is_closed:
                raise CannotStart("this worker is stopping")
            if self._starter is None:
                self._starter = _one_thread(f"{self._name}-starter")
                self._ender = _one_thread(f"{self._name}-ender")
            future, generation = self._starter.submit(TaskProcess, setup), self._generation
        process = future.result()
        process.generation = generation
        return process


def _end(*processes: TaskProcess) -> None:
    """Let them end by themselves, all at the same time, and kill those that do not."""
    for process in processes:
        process.dismiss()
    deadline = time.monotonic() + END_TIMEOUT
    for process in processes:
        process.end(deadline)


def _one_thread(name: str) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # only workers with processes pay

    return ThreadPoolExecutor(1, name)

"""Executors of user code: threads for functions, one event loop for coroutine functions.

Threads and coroutines share `concurrency` slots (worker/running/slots.py). Threads are made when
they are needed, the loop with the first coroutine. A process task has a thread, too, which waits
for its process. For a task that waits for others, and lends its slot, there may be one thread more.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from machinery_py.brokers.base import Fate
from machinery_py.errors import TimeLimitExceeded
from machinery_py.events import TaskStarted
from machinery_py.stores.base import Session
from machinery_py.tasks.states import State
from machinery_py.texts import get_logger
from machinery_py.worker.lease import WorkerLease
from machinery_py.worker.loops.timer import Timer, TimerEntry
from machinery_py.worker.processes.pool import ProcessPool
from machinery_py.worker.running.event_loop import EventLoopThread
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.interrupts import interrupt, is_boundary
from machinery_py.worker.running.runner import Run, run_async, run_elsewhere, run_here
from machinery_py.worker.running.slots import Slots

logger = get_logger(__name__)

RETRY = 0.02  # seconds to the next try when a thread must not be interrupted
END_TIMEOUT = 2.0  # seconds for an idle thread to end


def _fail(error: BaseException) -> None:
    raise error  # ends the timer, and so the worker: no time limit is left undone in silence


class Executors:
    """Executors of one worker: make at most `concurrency` runs at a time, in order.

    Attributes:
        limits: the timer of their time limits.
        on_room: called in a task's thread when it lends its slot, so that one more may be claimed.

    Args:
        on_done: called in the executor's thread when an execution has been settled by its task.
        on_mark: called when their states are worth a mark: started, and progress.
        processes: makes the calls of process tasks; closed with the executors.
        loop: of the coroutines, closed by its owner; by default one of their own.
    """

    def __init__(
        self,
        concurrency: int,
        session: Session,
        *,
        name: str,
        lease: WorkerLease,
        on_done: Callable[[Execution], object],
        on_mark: Callable[[Sequence[Execution]], None],
        processes: ProcessPool | None = None,
        loop: EventLoopThread | None = None,
    ) -> None:
        self._consumer = session.consumer
        self._lease = lease
        self._name = name
        self._on_done = on_done
        self._on_mark = on_mark
        self._processes = processes or ProcessPool(name)
        self.limits: Timer = Timer(f"{name}-limits", on_error=_fail)
        self.limits.start()
        self._retry: TimerEntry | None = None
        self._queue: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._slots = Slots(concurrency, self._lend)
        self.on_room: Callable[[], None] | None = None
        # A token for each idle thread, as long as more threads may be made. It has the generation
        # of its time: while no more may be made, idle threads take executions without a token.
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._generation = 0  # grows when more threads may be made again
        self._most = concurrency  # threads
        self._extra = 0  # of them, for tasks that have lent their slots
        # Without the threads that are stuck in a task whose time was up.
        self._threads: list[threading.Thread] = []
        self._stuck: set[int] = set()  # threads of such tasks, to be interrupted
        self._made = 0
        self._lock = threading.Lock()
        self._running: dict[int, Run] = {}
        # Run no more, and are not reported yet; by run and thread.
        self._ending: dict[tuple[int, int], Run] = {}
        self._loop, self._owns_loop = loop or EventLoopThread(name), loop is None
        self._tasks: dict[int, Any] = {}
        self._closed = False

    def submit(self, run: Run) -> None:
        """Make the call as soon as a slot is free. Called by the receiver's thread only.

        As long as more threads may be made, each run in the queue has a thread of its own: one that
        gave its token, or a new one. To count threads that look idle is not enough: one may have
        taken a run and not be marked busy yet.
        """
        pool = run.settings.pool
        run.in_process = pool == "process" if pool else self._processes.by_default
        run.slots = self._slots
        generation = self._generation
        if not self._is_full() and not self._has_idle_thread():
            self._add_thread()
        self._queue.put(run)
        if generation != self._generation:  # more may be made since we looked
            self._add_thread()

    def _has_idle_thread(self) -> bool:
        """Take the token of an idle thread; False: there is none."""
        try:
            while self._idle.get(block=False) != self._generation:
                pass
        except queue.Empty:
            return False
        return True

    def _add_thread(self) -> None:
        """Start a thread, unless all have been made; without it if the system allows no more.

        Raises:
            RuntimeError: not even the first one could be started.
        """
        with self._lock:
            if self._is_full():
                return
            try:
                self._start_thread()
            except RuntimeError as error:
                self._most = len(self._threads)
                if not self._threads:
                    raise
                logger.warning("no more than %d tasks run at a time: %s", self._most, error)

    @property
    def concurrency(self) -> int:
        """Return how many slots there are."""
        return self._slots.concurrency

    @property
    def room(self) -> int:
        """Return how many may have begun: one for each slot, and those that have lent theirs."""
        return self._slots.concurrency + len(self._slots.lent)

    def resize(self, concurrency: int) -> None:
        """Run so many at a time from now on; what runs goes on.

        Threads are made when there is work for them, and are kept when there are fewer slots.
        """
        with self._lock:
            queued = self._allow(concurrency + self._extra)
            self._slots.resize(concurrency)
        for _ in range(queued):
            self._add_thread()
        self._processes.shrink(concurrency)

    def _allow(self, threads: int) -> int:
        """Let there be so many threads; return how many are needed now. The caller holds `_lock`.

        Those that were queued while no more threads could be made have none of their own.
        """
        was_full, self._most = self._is_full(), threads
        if not was_full or self._is_full():
            return 0
        self._generation += 1
        return min(self._queue.qsize(), threads - len(self._threads))

    def _lend(self, run: Run) -> None:
        """Let there be a thread for the task that gets the slot of this one."""
        queued = 0
        if run.in_process or not run.is_async:
            with self._lock:
                if len(self._slots.lent) > self._extra:
                    self._extra += 1
                    queued = self._allow(self.concurrency + self._extra)
        for _ in range(queued):
            self._add_thread()
        if self.on_room is not None:
            self.on_room()

    def _give_slot(self, run: Run) -> None:
        slots = self._slots
        if run.waits or slots.surplus or slots.returning:
            slots.give_back(run)
        else:
            slots.free.put(None)

    def running(self) -> list[Run]:
        """Return what runs now."""
        return list(self._running.values())

    def waits(self, execution: Execution) -> bool:
        """Return whether its run waits for other tasks."""
        return any(run.waits and execution in run.calls for run in self.running())

    def busy(self) -> list[Run]:
        """Return what runs, and what has ended and is not with the settler yet.

        The settler must not be closed before it has all of them.
        """
        return [*self._running.values(), *self._ending.values()]

    def place_of(self, run: Run) -> str:
        """Return where it runs, unless that is the thread of its slot."""
        if id(run) in self._tasks:
            return "event loop"
        pid = self._processes.pid_of(run)
        return f"process {pid}" if pid else ""

    def are_ending(self, unfinished: Sequence[Execution]) -> bool:
        """Return whether others than these have ended, and are not with the settler yet."""
        return any(
            one.is_over
            and one.settlement is not None
            and one.settlement.fate is not Fate.BACK
            and one not in unfinished
            for run in self.busy()
            for one in run.calls
        )

    def _is_full(self) -> bool:
        """Return whether all threads have been made; from then on all of them wait at the queue."""
        return len(self._threads) >= self._most

    def _start_thread(self, instead_of: int | None = None) -> None:
        """Start a thread, perhaps in the place of a stuck one. The caller holds `_lock`.

        The list changes in one step: `submit` must not find it short when all threads are there.
        """
        self._made += 1
        thread = threading.Thread(target=self._work, name=f"{self._name}-{self._made}", daemon=True)
        thread.start()
        self._threads = [
            *(one for one in self._threads if instead_of is None or one.ident != instead_of),
            thread,
        ]

    def _work(self) -> None:
        while True:
            run = self._queue.get()
            if run is None or not self._work_off(run):
                return
            generation = self._generation
            if not self._is_full():
                self._idle.put(generation)

    def _work_off(self, run: Run) -> bool:
        """Make the call, or start its coroutine. False: this thread was replaced."""
        self._slots.free.get()
        run.thread_id = threading.get_ident()
        has_begun = False
        for one in run.calls:
            is_ours = self._lease.holds(one.claimed_at)
            if (not is_ours or self._consumer.is_lost(one.delivery)) and one.hand_back():
                self._on_done(one)  # its new owner runs it
            has_begun = one.begin() or has_begun
        if not has_begun:  # handed back while it waited
            self._give_slot(run)
            return True
        if len(run.calls) > 1:
            run.leave_out_unbegun()
        self._running[id(run)] = run
        run.consumer = self._consumer
        if run.begins_at_once:
            run.note_begun()
        if run.is_async and not run.in_process:
            self._start_coroutine(run)
            return True
        try:
            self._run(run)
            return self._finish(run)
        except TimeLimitExceeded:  # raised when the task was over: this thread has been replaced
            return False

    @is_boundary
    def _run(self, run: Run) -> None:
        try:
            if run.in_process:
                run_elsewhere(run, self._report, self._processes.call)
            else:
                run_here(run, self._report)
        except TimeLimitExceeded:
            raise
        except BaseException as error:  # user code around the task; the thread must live on
            run.break_off(error)

    def _report(self, run: Run) -> None:
        """Note that it has started, or how far it is."""
        first = run.first
        if first.progress is None and not first.noted:
            limit = run.settings.time_limit
            if limit is not None and not run.in_process:
                run.alarm = self.limits.after(limit, functools.partial(self._time_out, run, limit))
            events = first.app.events
            if TaskStarted in events.wanted:
                for one in run.calls:
                    if one.phase is State.STARTED:
                        events.emit(TaskStarted(signature=one.signature, worker=one.worker))
        if run.is_batch or not first.queued:
            self._on_mark(run.calls)

    def _finish(self, run: Run) -> bool:
        """Free the slot after the run. False: this thread was replaced while it was stuck."""
        run.note_over()
        if not self._leave(run):
            logger.warning("task %s came back after its time was up", run.signature.uuid)
            with self._lock:  # do not interrupt it now: another thread may get its number
                self._stuck.discard(threading.get_ident())
            return False
        self._give_slot(run)
        self._report_done(run)
        if self._extra and run.in_process:
            self._processes.shrink(self.room)
        return True

    def _leave(self, run: Run) -> bool:
        """Move it from running to ending; `_report_done` follows. False: it was moved before."""
        if run.alarm is not None:
            run.alarm.cancel()
        place = id(run), threading.get_ident()
        self._ending[place] = run  # first, so that `busy` cannot miss it
        if self._running.pop(id(run), None) is None:
            del self._ending[place]
            return False
        return True

    def _report_done(self, run: Run) -> None:
        for one in run.calls:
            self._on_done(one)
        del self._ending[id(run), threading.get_ident()]

    def _time_out(self, run: Run, limit: float) -> None:
        if run.time_out(limit):
            self.abandon(run)
            self._interrupt_stuck()

    def _interrupt_stuck(self) -> None:
        """Interrupt what can be, in the thread of the limits; again later if some cannot."""
        if self._retry is not None:
            self._retry.cancel()  # one retry, however many are stuck
        self._retry = None if self.interrupt() else self.limits.after(RETRY, self._interrupt_stuck)

    def abandon(self, run: Run) -> None:
        """Stop waiting for it: its time is up, it is settled, and its own end counts no more."""
        with self._lock:
            if not self._leave(run):
                return  # it has just ended
            if not run.is_async:
                self._stuck.add(run.thread_id)
                # The thread may be stuck for long: another one takes its slot and its token.
                self._start_thread(instead_of=run.thread_id)
                transaction = run.first.transaction or run.first.step_transaction
                if transaction is not None:
                    abandon = transaction.own.abandon
                    threading.Thread(target=abandon, name="machinery-abandon", daemon=True).start()
        if run.is_async:
            self.cancel(run)
        else:
            self._give_slot(run)
            self._idle.put(self._generation)
        self._report_done(run)

    def interrupt(self) -> bool:
        """Raise TimeLimitExceeded in the threads that run abandoned tasks.

        False: some must not be interrupted just now; call again.
        """
        with self._lock:
            for thread_id in list(self._stuck):
                if interrupt(thread_id):
                    self._stuck.discard(thread_id)
            return not self._stuck

    def cancel(self, run: Run) -> None:
        """Ask a running task to stop: cancel a coroutine, set a function's `Context.cancelled`.

        The process of a task that was handed back is killed.
        """
        run.cancel()
        self._processes.cancel(run)
        task = self._tasks.get(id(run))
        if task is not None:
            self._loop.loop.call_soon_threadsafe(task.cancel)

    def restart_pool(self) -> None:
        """Renew the task processes, each between two tasks. Raises as `ProcessPool.renew`."""
        self._processes.renew()

    def terminate(self, run: Run) -> bool:
        """End the run of a revoked task: kill its process. Else ask it to stop, and return False.

        The slot's thread notices the end of the process, and settles it.
        """
        is_killed = run.terminate()
        self.cancel(run)
        return is_killed

    # Coroutines

    def _start_coroutine(self, run: Run) -> None:
        import asyncio

        async def work() -> None:
            self._tasks[id(run)] = asyncio.current_task()
            try:
                await run_async(run, self._report)
            except BaseException as error:  # as in `_run`; the loop would end with SystemExit
                run.break_off(error)
            finally:
                self._tasks.pop(id(run), None)
                run.note_over()
                self._give_slot(run)
                if self._leave(run):
                    self._report_done(run)

        asyncio.run_coroutine_threadsafe(work(), self._loop.loop)

    def close(self) -> None:
        """End idle threads and the loop. Threads stuck in tasks are left: they are daemons."""
        if self._closed:
            return
        self._closed = True
        self.limits.stop()  # without waiting for it: it may be interrupting a task
        self._processes.close()
        for _ in self._threads:
            self._queue.put(None)
        if self._owns_loop:
            self._loop.close()
        stuck = len(self._running)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=0.0 if stuck else END_TIMEOUT)

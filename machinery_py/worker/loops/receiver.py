"""Receiver: one thread that claims as many deliveries as there is room for, for the executors.

Room is the free slots and a prefetch, so that short tasks never wait for a round trip: what is done
in PREFETCH_WINDOW at the pace of the last tasks, at most PREFETCH_BYTES. A worker whose tasks are
long holds none in advance.
"""

from __future__ import annotations

import heapq
import math
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Final

from machinery_py.app import Application
from machinery_py.brokers.base import Delivery, Fate
from machinery_py.errors import MachineryError
from machinery_py.events import TaskReceived, TaskStarted
from machinery_py.queues import QueueOrder
from machinery_py.revocation import revoked_among
from machinery_py.stores.base import Session
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread
from machinery_py.worker.admission.batches import Batches, demand, run_of
from machinery_py.worker.admission.guards import ExecutionGuard
from machinery_py.worker.admission.intake import accept, peek
from machinery_py.worker.autoscale import Autoscaler
from machinery_py.worker.lease import WorkerLease
from machinery_py.worker.loops import task_log
from machinery_py.worker.loops.settler import Settler
from machinery_py.worker.reconnect import Reconnect
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.executors import Executors
from machinery_py.worker.running.hooks import WorkerHooks
from machinery_py.worker.running.runner import Run

logger = get_logger(__name__)

PREFETCH_WINDOW = 0.1  # seconds of work that is held in advance
# Tasks of one claim, at most. The store looks for the next ones while those before run: with claims
# of hundreds it waits for the worker, and the worker for it.
CLAIM = 192
# Bytes of bodies claimed in advance; 500 of 300 KB at once made Redis stand still for 6 s.
PREFETCH_BYTES = 2**22
RECEIVE_TIMEOUT = 1.0  # seconds of one waiting claim
BURST_TIMEOUT = 0.05  # seconds; the same for a worker that ends when nothing is left
SMOOTHING = 0.1  # weight of the newest run in the average
CHANGE_TIMEOUT = 5.0  # seconds that a change waits for the end of a claim
REPORT_TIMEOUT = 5.0  # seconds; longer than handlers of events take
PROBATION = 2.0  # seconds that nothing begins beside a suspect: a task that kills does so soon
PATIENCE = 0.2  # seconds that suspects wait for the one in front, before other workers get them
BACKOFF = 0.25  # seconds without a claim after an unknown task was redelivered
BACKOFF_MARGIN = 0.05  # seconds without a claim before and after the moment at which it is due
BACKOFF_SHARE = 4  # at most one second in so many is without a claim, however much is redelivered
BACKOFF_QUEUE = 1000  # redeliveries that are remembered


class UnknownTaskBackoff:
    """Moments not to claim, because a task unknown to this worker is about to be redelivered.

    A worker that waits at the queue gets what comes first, every time, and the worker that knows
    the task may never get it. So stop claiming before the task is due; when it is due, tend the
    store, which puts it on its queue; then leave it to other workers for BACKOFF. Times are seconds
    of one monotonic clock. Belongs to one thread.
    """

    def __init__(self) -> None:
        self._due: list[float] = []
        self._earliest = -math.inf

    def expect(self, due: float) -> None:
        """Remember that an unknown task is redelivered at this moment."""
        if len(self._due) < BACKOFF_QUEUE:
            heapq.heappush(self._due, due)

    def starts_in(self, now: float) -> float:
        """Return the seconds until claims are to stop; infinite if no redelivery is expected."""
        while self._due and self._due[0] - BACKOFF_MARGIN < self._earliest:
            heapq.heappop(self._due)  # too soon after the last one
        return max(0.0, self._due[0] - BACKOFF_MARGIN - now) if self._due else math.inf

    def start(self, now: float) -> float:
        """Begin, after `starts_in` was 0: return the seconds until the store is to be tended."""
        due = max(now, heapq.heappop(self._due))
        length = 2 * BACKOFF_MARGIN + BACKOFF
        self._earliest = due + BACKOFF_MARGIN + BACKOFF + (BACKOFF_SHARE - 1) * length
        return due + BACKOFF_MARGIN - now


class Receiver:
    """Receiver of one worker.

    Attributes:
        loop: its thread.
        order: the queues that it claims from; `serve` changes them.
        connected: the last claim worked.
        received_at: monotonic second of the last claim that worked.
        idle_since: nothing to claim and nothing held since then; None: there is.
    """

    def __init__(
        self,
        app: Application,
        hooks: WorkerHooks,
        session: Session,
        executors: Executors,
        settler: Settler,
        *,
        order: QueueOrder,
        reconnect: Reconnect,
        lease: WorkerLease,
        name: str,
        burst: bool = False,
        autoscaler: Autoscaler | None = None,
    ) -> None:
        self._app = app
        self._hooks = hooks
        self._session = session
        self._lease = lease
        self._executors = executors
        self._settler = settler
        self.order = order
        self._changes: queue.SimpleQueue[tuple[Callable[[], None], Future[None]]] = (
            queue.SimpleQueue()
        )
        self._random = random.Random()
        self._worker = name
        self._timeout = BURST_TIMEOUT if burst else RECEIVE_TIMEOUT
        self.loop: Final = LoopThread(f"{name}-receiver", self._work, wake=self._wake, inside=True)
        self._room = threading.Condition()
        self._has_started = False
        self._mean = 0.0  # seconds of a run, averaged
        self._size = 0.0  # bytes of a body, averaged
        self._held: dict[int, Execution] = {}
        self._reporting: Sequence[Execution] = ()
        self._suspects: list[Execution] = []  # held, and not submitted yet
        self._batches: Batches | None = None  # since the first call of a batch task
        self._backoff = UnknownTaskBackoff()
        self._autoscaler = autoscaler
        self._reconnect = reconnect
        self.connected: bool = False
        self.received_at: float = time.monotonic()
        self.idle_since: float | None = None

    def _wake(self) -> None:
        self._session.consumer.wake()
        with self._room:
            self._room.notify_all()

    def start(self) -> None:
        """Start claiming. Changes before that are made at once."""
        with self._room:
            self._has_started = True
            self.loop.start()

    def stop(self) -> None:
        """Stop claiming, and return when the thread has ended."""
        self.loop.stop()
        self.loop.join(RECEIVE_TIMEOUT + 10.0)

    def held(self) -> list[Execution]:
        """Return what is claimed and not settled yet."""
        return list(self._held.values())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is claimed, and the last claim found nothing."""
        return self.idle_since is not None and not self._held

    def resize(self, concurrency: int) -> None:
        """Run so many tasks at a time from now on; what runs goes on. Raises as `serve`."""
        self._between_claims(lambda: self._executors.resize(concurrency))

    def serve(self, order: QueueOrder) -> None:
        """Claim from these queues from now on. What is held of another one ends as before.

        Any thread but the receiver's may call it.

        Raises:
            MachineryError: the store refuses it, no claim has ended in time, or it is stopping.
        """

        def change() -> None:
            self._session.consumer.serve(order.names)
            self.order = order

        self._between_claims(change)

    def _between_claims(self, change: Callable[[], None]) -> None:
        if self.loop.is_stopping():
            raise MachineryError("this worker is stopping")
        with self._room:
            if not self._has_started:
                change()
                return
        future: Future[None] = Future()
        self._changes.put((change, future))
        self._wake()
        wait([future], CHANGE_TIMEOUT)
        if future.cancel():
            raise MachineryError(
                f"the worker did not come to it in {CHANGE_TIMEOUT:g} s; nothing was changed"
            )
        if wait([future], CHANGE_TIMEOUT).not_done:  # it is being made
            raise MachineryError(f"not done after {2 * CHANGE_TIMEOUT:g} s; it may be done later")
        future.result()

    def _make_changes(self) -> None:
        while not self._changes.empty():
            change, future = self._changes.get()
            if future.set_running_or_notify_cancel():
                try:
                    change()
                except Exception as error:  # raised where the change was asked for
                    future.set_exception(error)
                else:
                    future.set_result(None)

    def hand_back(self, *, started: bool = False) -> list[Execution]:
        """Give back what is held and not begun, and return it.

        Args:
            started: also what has begun.
        """
        given = [execution for execution in self.held() if execution.hand_back(started=started)]
        for execution in given:
            self._settler.put(execution)
        return given

    def settled(self, executions: Sequence[Execution]) -> None:
        """Make room: these are over. Called in the settler's thread; `reported` follows."""
        self._reporting = executions
        for execution in executions:
            self._held.pop(id(execution), None)
            if execution.runtime:
                self._mean += SMOOTHING * (execution.runtime - self._mean)
        # Once a commit: each wake-up takes the interpreter from the threads that run tasks.
        self.has_room()

    def has_room(self) -> None:
        """Look again how many may be claimed."""
        with self._room:
            self._room.notify()

    def reported(self) -> None:
        """Note that the events of the executions last settled were emitted."""
        self._reporting = ()

    def _limit(self) -> int:
        """Return how many executions may be held."""
        concurrency = self._executors.room
        mean = self._mean
        if mean <= 0.0:
            return concurrency
        running = self._executors.running()
        if len(running) >= concurrency:
            # All slots are busy: the next one is not free sooner than the youngest run is old.
            mean = max(mean, time.perf_counter() - max(run.first.call_started for run in running))
        ahead = int(
            min(concurrency * PREFETCH_WINDOW / mean, PREFETCH_BYTES / max(self._size, 1.0))
        )
        return concurrency + min(ahead, self._app.config.prefetch)

    def _free(self) -> int:
        """Return how many to claim: none until half of the prefetch is gone, or a whole claim."""
        limit = self._limit()
        free = limit - len(self._held)
        if self._batches is not None:
            free += self._batches.surplus(self._held)
        spare = limit - self._executors.room
        if free <= min(spare // 2, CLAIM):
            return 0
        if self._batches is None:
            return min(free, CLAIM)
        return min(
            self._batches.wanted(free), max(free, int(PREFETCH_BYTES / max(self._size, 1.0)))
        )

    def _work(self) -> None:
        has_log, consumer = task_log.is_on(self._app), self._session.consumer
        while not self.loop.is_stopping():
            self._make_changes()
            if self._suspects:
                self._run_suspects()
            self._run_batches(time.monotonic())
            if self._autoscaler is not None:
                self._scale(self._autoscaler)
            free = self._free() if self._settler.healthy and not self._suspects else 0
            if free <= 0 or not self._may_consume():
                self._wait_for_room()
                continue
            try:
                self._back_off()
                # The first claim does not wait: the worker is ready when it has returned.
                timeout = self._patience() if self.connected else 0.0
                order = self.order.draw(self._random) if self.order.weights else ()
                consumer.is_timed = has_log or TaskReceived in self._app.events.wanted
                asked_at = self._lease.now()
                deliveries = self._session.receive(free, timeout, order)
                if self._autoscaler is not None:
                    self._autoscaler.claimed(time.monotonic(), is_full=len(deliveries) >= free)
                self._accept_all(deliveries, asked_at)
                if not self._reconnect.is_there:
                    self._reconnect.succeeded()
                self.connected, self.received_at = True, time.monotonic()
            except MachineryError as error:
                self.connected = False
                self.loop.pause(self._reconnect.failed(error))

    def _scale(self, autoscaler: Autoscaler) -> None:
        current = self._executors.concurrency
        held, oldest = demand(dict(self._held), self._batches)
        now = time.monotonic()
        wanted = autoscaler.wanted(now, current=current, held=held, oldest=oldest)
        if wanted != current:
            logger.info("from %d to %d tasks at a time", current, wanted)
            self._executors.resize(wanted)

    def _may_consume(self) -> bool:
        if self._hooks.is_behind is not None and self._hooks.is_behind():
            return False
        if self._hooks.pre_consume is None:
            return True
        try:
            return self._hooks.pre_consume()
        except Exception:  # user code
            logger.exception("the pre-consume handler failed; nothing is taken")
            return False

    def _back_off(self) -> None:
        """Leave an unknown task that is due now to other workers."""
        if self._backoff.starts_in(time.monotonic()) == 0.0:
            self.loop.pause(self._backoff.start(time.monotonic()))
            self._app.store.tend()
            self.loop.pause(BACKOFF)

    def _patience(self) -> float:
        """Return the seconds that a claim may wait."""
        patience = min(self._timeout, self._backoff.starts_in(time.monotonic()))
        return min(patience, self._batch_is_due_in())

    def _batch_is_due_in(self) -> float:
        return math.inf if self._batches is None else self._batches.due_in(time.monotonic())

    def _run_batches(self, now: float) -> None:
        if self._batches is not None:
            for batch in self._batches.due(now):
                self._executors.submit(batch)

    def _gather(self, execution: Execution) -> None:
        if self._batches is None:
            self._batches = Batches()
        batch = self._batches.add(execution, time.monotonic())
        if batch is not None:
            self._executors.submit(batch)

    def _wait_for_room(self) -> None:
        with self._room:
            if not self.loop.is_stopping():
                # Woken by a commit; the timeout is for the hook, and for a store that has returned.
                patience = 0.05 if not self._held else 0.25
                self._room.wait(min(patience, self._batch_is_due_in()))

    def _accept_all(self, deliveries: list[Delivery], asked_at: float) -> None:
        if not deliveries:
            if not self._held and self.idle_since is None:
                self.idle_since = time.monotonic()
            if self._timeout == BURST_TIMEOUT:
                self._run_batches(math.inf)  # nobody comes any more
            return
        self.idle_since = None
        size = sum([len(delivery.body) for delivery in deliveries]) / len(deliveries)
        # Up at once, down slowly.
        self._size = max(size, self._size + SMOOTHING * (size - self._size))
        executions = [
            Execution(self._app, self._hooks, delivery, self._worker, session=self._session)
            for delivery in deliveries
        ]
        now = time.monotonic()
        for execution in executions:
            execution.received_at, execution.claimed_at = now, asked_at
            self._held[id(execution)] = execution
        revoked = self._revoked(executions)
        if TaskStarted in self._app.events.wanted:
            self._await_reports(executions)
        tell_received = TaskReceived in self._app.events.wanted
        accepted: list[Execution] = []
        for execution in executions:
            if not accept(execution, revoked):
                self._settler.put(execution)
                self._note_return(execution)
                continue
            if tell_received:
                self._tell_received(execution)
            if execution.delivery.strikes:
                self._suspects.append(execution)
            else:
                accepted.append(execution)
        for execution in accepted:
            execution.queued = True  # its mark follows: first what runs it is woken
            if execution.settings.batch:
                self._gather(execution)
            else:
                if execution.is_guarded:
                    execution.guard = ExecutionGuard(execution)
                self._executors.submit(Run(execution))
        self._settler.put_marks(accepted)
        if self._batches is not None:
            self._batches.claimed(len(executions))

    def _tell_received(self, execution: Execution) -> None:
        wait = execution.waited(self._app.now())
        signature = execution.signature
        self._app.events.emit(TaskReceived(signature=signature, worker=self._worker, wait=wait))

    def _await_reports(self, executions: Sequence[Execution]) -> None:
        """Wait for TaskRetried of earlier runs: TaskStarted of the next must not come before it."""
        retried = {execution.signature.uuid for execution in executions if execution.signature.run}
        deadline = time.monotonic() + REPORT_TIMEOUT
        while retried and time.monotonic() < deadline:
            ended = [one for one in self.held() if one.is_over]
            if not any(one.signature.uuid in retried for one in (*ended, *self._reporting)):
                return
            self.loop.pause(0.005)

    def _note_return(self, execution: Execution) -> None:
        """Remember when a task is redelivered that this worker does not know."""
        settlement = execution.settlement
        if settlement is not None and settlement.fate is Fate.LATER and settlement.eta is not None:
            self._backoff.expect(
                time.monotonic() + (settlement.eta - self._app.now()).total_seconds()
            )

    def _revoked(self, executions: list[Execution]) -> dict[str, bool]:
        signatures = [one.signature for one in executions if peek(one)]
        try:
            if not signatures or self._session.none_revoked:
                return {}
            return revoked_among(self._app, signatures)
        except MachineryError as error:
            # Claimed tasks must be run; maintenance reads the revocations again while they run.
            logger.warning("revocations cannot be read: %s", error)
            return {}

    def _run_suspects(self) -> None:
        """Run suspects one at a time, each when nothing runs beside it; the others wait."""
        self._run_batches(math.inf)  # what is gathered would wait for them, and they for it
        since = time.perf_counter()
        while self._suspects and not self.loop.is_stopping():
            self._make_changes()
            # Maintenance may have handed some back.
            self._suspects = [one for one in self._suspects if not one.is_over]
            if not self._suspects:
                return
            suspect = self._suspects[0]
            if not self._is_alone(suspect):
                if time.perf_counter() - since > PATIENCE:
                    self._leave_to_others(1)
                self._wait_for_room()
                continue
            del self._suspects[0]
            logger.warning(
                "task %s runs alone: its worker was lost %s while it ran",
                suspect.signature.uuid,
                "once" if suspect.strikes == 1 else f"{suspect.strikes} times",
            )
            self._settler.mark((suspect,))
            self._executors.submit(run_of(suspect))
            self._watch(suspect)

    def _probation(self, suspect: Execution) -> float:
        """Return the seconds alone: until it ends, if its next strike is its last."""
        is_last = suspect.delivery.strikes >= self._app.config.max_strikes - 1
        return math.inf if is_last else PROBATION

    def _is_alone(self, suspect: Execution) -> bool:
        """Return whether all else that is held began longer ago than its probation."""
        long_ago = time.perf_counter() - self._probation(suspect)
        waiting = {id(one) for one in self._suspects}
        return all(
            0.0 < one.call_started < long_ago or self._executors.waits(one)
            for one in self.held()
            if id(one) not in waiting
        )

    def _watch(self, suspect: Execution) -> None:
        """Wait until it is over, or has run for so long that others may begin beside it."""
        begun, probation = time.perf_counter(), self._probation(suspect)
        while id(suspect) in self._held and not self.loop.is_stopping():
            self._make_changes()
            passed = time.perf_counter() - begun
            if passed > probation or self._executors.waits(
                suspect
            ):  # for what must begin beside it
                return
            if passed > PATIENCE:
                self._leave_to_others(0)
            with self._room:
                if id(suspect) in self._held and not self.loop.is_stopping():
                    self._room.wait(PATIENCE)

    def _leave_to_others(self, kept: int) -> None:
        """Give suspects back that must wait here, all but the first `kept`."""
        for suspect in self._suspects[kept:]:
            if suspect.hand_back():
                self._settler.put(suspect)
        del self._suspects[kept:]

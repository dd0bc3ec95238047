"""The receiver: one thread that claims as many deliveries as there is room for, and hands them to the executors.

Room is the free slots and a little more, so that short tasks never wait for a round trip: as much as is worked off in
PREFETCH_WINDOW at the pace of the last tasks. A worker whose tasks are long holds none in advance.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Sequence

from machinery_py.brokers.base import Delivery, Fate
from machinery_py.endings import revoked_among
from machinery_py.engine import Engine
from machinery_py.errors import MachineryError
from machinery_py.events import TaskStarted
from machinery_py.queues import QueueOrder
from machinery_py.settlement.base import Session
from machinery_py.worker.acceptance import accept, peek
from machinery_py.worker.courtesy import ASIDE, Courtesy
from machinery_py.worker.execution import Execution
from machinery_py.worker.executors import Executors
from machinery_py.worker.outage import Outage
from machinery_py.worker.settler import Settler
from machinery_py.worker.usercode import Hooks

logger = logging.getLogger(__name__)

PREFETCH_WINDOW = 0.1  # seconds of work that is held in advance
RECEIVE_TIMEOUT = 1.0  # seconds of one waiting claim
BURST_TIMEOUT = 0.05  # seconds; a worker that ends when nothing is left need not wait for more
SMOOTHING = 0.1  # weight of the newest run in the average
TELLING = 5.0  # seconds; longer than handlers of events take
LONELY_STRIKES = 2  # a task that this many dying workers ran is run with nothing beside it


class Receiver:
    """Claims, decodes and hands over. `outstanding` counts what is held and not settled yet."""

    def __init__(
        self, engine: Engine, hooks: Hooks, session: Session, executors: Executors, settler: Settler, *,
        order: QueueOrder, outage: Outage, name: str, worker: str, may_consume: Callable[[], bool], burst: bool = False,
    ) -> None:
        self._engine = engine
        self._hooks = hooks
        self._session = session
        self._executors = executors
        self._settler = settler
        self._order = order
        self._random = random.Random()
        self._worker = worker
        self._may_consume = may_consume
        self._timeout = BURST_TIMEOUT if burst else RECEIVE_TIMEOUT
        self._thread = threading.Thread(target=self._work, name=f"{name}-receiver", daemon=True)
        self._room = threading.Condition()
        self._stop = threading.Event()
        self._mean = 0.0  # seconds a run takes, of late
        self._held: dict[int, Execution] = {}
        self._telling: Sequence[Execution] = ()
        self._lonely: list[Execution] = []
        self._courtesy = Courtesy()
        self._cautious = False  # the last claim brought suspects; see _hold_back
        self._outage = outage
        self.connected = False
        self.received_at = time.monotonic()  # of the last round trip that worked
        self.idle_since: float | None = None  # since when there was nothing to claim and nothing held
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Claim no more. Returns when the thread has ended."""
        self._stop.set()
        self._session.wake()
        with self._room:
            self._room.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=RECEIVE_TIMEOUT + 10.0)

    @property
    def outstanding(self) -> int:
        return len(self._held)

    def held(self) -> list[Execution]:
        return list(self._held.values())

    def settled(self, executions: Sequence[Execution]) -> None:
        """They are over: there is room for others. Called in the settler's thread, and `told` after it."""
        self._telling = executions
        for execution in executions:
            self._held.pop(id(execution), None)
            if execution.runtime:
                self._mean += SMOOTHING * (execution.runtime - self._mean)
        # Once for all of a commit: each wake-up costs the threads that run tasks a turn of the interpreter.
        with self._room:
            self._room.notify()

    def told(self) -> None:
        """All that goes with their end was told."""
        self._telling = ()

    def _limit(self) -> int:
        """How many may be held."""
        concurrency = self._executors.concurrency
        mean = self._mean
        if mean <= 0.0:
            return concurrency
        running = self._executors.running()
        if len(running) >= concurrency:
            # All slots are busy: the next one is not free sooner than the youngest run is old.
            mean = max(mean, time.perf_counter() - max(execution.call_started for execution in running))
        ahead = int(concurrency * PREFETCH_WINDOW / mean)
        return concurrency + min(ahead, self._engine.config.prefetch)

    def _free(self) -> int:
        """How many to claim now: none until half of what may be held in advance is gone, so that claims stay large."""
        if self._cautious:
            return self._executors.concurrency - len(self._held)
        limit = self._limit()
        free = limit - len(self._held)
        spare = limit - self._executors.concurrency
        return free if free > spare // 2 else 0

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                self._run_lonely()
                free = self._free() if self._settler.healthy and not self._lonely else 0
                if free <= 0 or not self._may_consume():
                    self._wait_for_room()
                    continue
                try:
                    self._step_aside()
                    # The first one does not wait: that it comes back is what makes the worker ready.
                    timeout = self._patience() if self.connected else 0.0
                    deliveries = self._session.receive(free, timeout, self._order.draw(self._random))
                    self._accept_all(deliveries)
                    self._came_back()
                except MachineryError as error:
                    self.connected = False
                    self._stop.wait(self._outage.failed(error))
        except BaseException as error:  # a receiver that dies in silence would stop everything: the worker looks at this
            self.failure = error
            logger.exception("the receiver has died")

    def _step_aside(self) -> None:
        """Let other programs have what comes back now: on their queue, and not claimed here for a moment."""
        if self._courtesy.starts_in(time.monotonic()) == 0.0:
            self._stop.wait(self._courtesy.step(time.monotonic()))
            self._engine.store.tend()
            self._stop.wait(ASIDE)

    def _patience(self) -> float:
        """Seconds that a claim may wait."""
        return min(self._timeout, self._courtesy.starts_in(time.monotonic()))

    def _wait_for_room(self) -> None:
        with self._room:
            if not self._stop.is_set():
                # Woken when something is settled; the timeout is for the hook, and for a store that has come back.
                self._room.wait(0.05 if not self._held else 0.25)

    def _came_back(self) -> None:
        self._outage.over()
        self.connected = True
        self.received_at = time.monotonic()

    def _accept_all(self, deliveries: list[Delivery]) -> None:
        if not deliveries:
            if not self._held and self.idle_since is None:
                self.idle_since = time.monotonic()
            return
        self.idle_since = None
        executions = [Execution(self._engine, self._hooks, delivery, self._worker) for delivery in deliveries]
        for execution in executions:
            self._held[id(execution)] = execution
        revoked = self._revoked(executions)
        self._hold_back(executions)
        if self._engine.events.wants(TaskStarted):
            self._let_tell(executions)
        for execution in executions:
            if accept(execution, revoked):
                if execution.delivery.strikes >= LONELY_STRIKES:
                    self._lonely.append(execution)
                    continue
                self._settler.mark(execution)
                self._executors.submit(execution)
            else:
                self._settler.put(execution)
                self._note_return(execution)

    def _let_tell(self, executions: Sequence[Execution]) -> None:
        """Let TaskRetried of a run be told before TaskStarted of the next, whose message may be here before that."""
        retried = {execution.signature.uuid for execution in executions if execution.signature.run}
        deadline = time.monotonic() + TELLING
        while retried and time.monotonic() < deadline:
            ended = [one for one in self.held() if one.is_over]
            if not any(one.signature.uuid in retried for one in (*ended, *self._telling)):
                return
            self._stop.wait(0.005)

    def _note_return(self, execution: Execution) -> None:
        """Remember when a task comes back that is not known here."""
        settlement = execution.settlement
        if settlement is not None and settlement.fate is Fate.LATER and settlement.eta is not None:
            self._courtesy.promise(time.monotonic() + (settlement.eta - self._engine.clock.now()).total_seconds())

    def _hold_back(self, executions: list[Execution]) -> None:
        """Hold no more suspects than can run, where the broker cannot see what ran.

        There all that a dying worker held gets a strike. Without this a few deaths in a row would make poison of tasks that
        only waited in it: claimed together, given back together, and claimed together again.
        """
        if self._engine.store.broker.features.sees_runs:
            return
        suspects = [execution for execution in executions if 0 < execution.delivery.strikes < LONELY_STRIKES]
        self._cautious = bool(suspects)
        for execution in suspects[self._executors.concurrency:]:
            if execution.hand_back():
                self._settler.put(execution)

    def _revoked(self, executions: list[Execution]) -> dict[str, bool]:
        uuids = [uuid for execution in executions if (uuid := peek(execution))]
        try:
            return revoked_among(self._engine, uuids) if uuids else {}
        except MachineryError as error:
            # They are claimed and must be run: a revocation that cannot be read now is seen by upkeep when they run.
            logger.warning("revocations cannot be read: %s", error)
            return {}

    def _run_lonely(self) -> None:
        """Run a suspect when nothing else is held: if it kills this process, no other task is blamed for it."""
        while self._lonely and not self._stop.is_set():
            # Upkeep may have handed some back.
            self._lonely = [execution for execution in self._lonely if not execution.is_over]
            if not self._lonely or len(self._held) != len(self._lonely):
                return
            execution = self._lonely.pop(0)
            # Held, and no longer among the lonely: nothing is claimed or run until it is settled.
            logger.warning("task %s runs alone: %d workers died while they ran it",
                           execution.signature.uuid, execution.delivery.strikes)
            self._settler.mark(execution)
            self._executors.submit(execution)
            with self._room:
                while id(execution) in self._held and not self._stop.is_set():
                    self._room.wait(0.25)

"""Running due tasks in the caller's thread, for the eager store and for tests."""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Sequence

from machinery_py.app import Application
from machinery_py.backends.base import CONFLICT
from machinery_py.revocation import end_if_revoked, revoked_among
from machinery_py.stores.base import Session
from machinery_py.tasks.context import RUNNING
from machinery_py.worker.admission.batches import Batches
from machinery_py.worker.admission.intake import accept, peek
from machinery_py.worker.lifespans import lifespans
from machinery_py.worker.loops import task_log
from machinery_py.worker.loops.chords import settle_ready_groups
from machinery_py.worker.loops.settler import release, report_end
from machinery_py.worker.running.end_hooks import call_end_handlers
from machinery_py.worker.running.event_loop import EventLoopThread
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.hooks import WorkerHooks
from machinery_py.worker.running.runner import Run, run_async, run_here
from machinery_py.worker.running.waiting import run_again


class Inline:
    """Worker without threads. Belongs to one thread at a time.

    Args:
        queues: that it serves; by default all, also those that tasks are sent to meanwhile.
    """

    def __init__(
        self, app: Application, queues: Sequence[str] = (), *, name: str = "inline"
    ) -> None:
        self._app = app
        self._served = tuple(queues)
        self._name = name
        self._hooks = WorkerHooks()
        self._hooks.ended = call_end_handlers
        self._lock = threading.Lock()
        self._owner = 0  # the thread that drains

    def drain(self) -> list[Execution]:
        """Run what is due, and what comes of it, until nothing is; return what was run.

        Inside a task it does nothing: the drain that runs the task runs what the task sends.
        """
        if self._owner == threading.get_ident() or (self._owner and RUNNING.get() is not None):
            return []  # the second: in a thread of a task, as of `send_async`
        with self._lock:
            self._owner = threading.get_ident()
            loop = EventLoopThread(self._name)
            self._hooks.run_coroutine = self._app.hooks.awaiting(loop.run)
            try:
                with lifespans(self._app.hooks.lifespans, loop.run) as self._hooks.state:
                    return self._drain()
            finally:
                loop.close()
                self._owner = 0

    def _drain(self) -> list[Execution]:
        done: list[Execution] = []
        queues: tuple[str, ...] = ()
        while (now := self._queues()) != queues:  # tasks may have been sent to new queues
            queues = now
            session = self._app.store.open_session(queues, worker=self._name)
            try:
                while self._round(session, done):
                    pass
            finally:
                session.close()
        return done

    def _queues(self) -> tuple[str, ...]:
        if self._served:
            return self._served
        names = {stats.queue for stats in self._app.store.broker.stats()}
        return tuple(sorted(names | {self._app.config.default_queue}))

    def _round(self, session: Session, done: list[Execution]) -> bool:
        """Run what is there now, and return whether there was anything."""
        deliveries, batches = session.receive(100, 0.0), Batches()
        for delivery in deliveries:
            execution = Execution(self._app, self._hooks, delivery, self._name, session=session)
            done.append(execution)
            self._accept(session, execution, batches)
        for batch in batches.due(math.inf):
            self._run(session, batch)
        return bool(settle_ready_groups(self._app)) or bool(deliveries)

    def _accept(self, session: Session, execution: Execution, batches: Batches) -> None:
        revoked = revoked_among(self._app, [execution.signature]) if peek(execution) else {}
        if not accept(execution, revoked):
            self._settle(session, execution)
            return
        mark = execution.mark()
        if mark is not None:
            session.settle([], [mark])
        if not execution.settings.batch:
            self._run(session, Run(execution))
        elif (batch := batches.add(execution, 0.0)) is not None:
            self._run(session, batch)

    def _run(self, session: Session, run: Run) -> None:
        def report(run: Run) -> None:
            session.settle([], [mark for one in run.calls if (mark := one.mark()) is not None])

        for one in run.calls:
            one.begin()
        if run.is_async:
            # On a loop of its own: the caller may be inside a running one.
            try:
                contextvars.Context().run(self._hooks.run_coroutine, run_async(run, report))
            except KeyboardInterrupt as error:  # it ended our waiting; the loop cancels the task
                run.finish(run.failed(error))
        else:
            run_here(run, report)
        for one in run.calls:
            self._settle(session, one)
        for one in run.calls:
            if one.interrupt is not None:  # Ctrl+C is for the caller, in whose thread it ran
                raise one.interrupt

    def _settle(self, session: Session, execution: Execution) -> None:
        if execution.settlement is not None:
            [verdict] = session.settle([execution.settlement])
            if verdict is CONFLICT:  # a signal has come meanwhile
                run_again(execution)
                [verdict] = session.settle([execution.settlement])
            if execution.settlement.riders:
                end_if_revoked(self._app, execution.signature)
            report_end(self._app, execution, verdict)
            task_log.write([*task_log.ends(self._app, [execution], [verdict])])
            release(self._app, [execution], [verdict])
            if execution.guard is not None:
                self._app.locks.flush()  # the next task may want the same lock, or slot
                self._app.slots.flush()

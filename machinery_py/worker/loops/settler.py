"""Settler: one thread that commits what has ended, all that is waiting in one round trip.

There is no timer: while one commit is on its way the next batch gathers, as much as bounds.py lets
one step carry; an idle worker commits at once. A commit that failed is repeated in halves, and then
in larger parts. RECEIVED and STARTED are written in the same commits, and left out when the task
has ended by then; alone they wait for MARK_DELAY, lest the end of a short task wait for their
commit. RECEIVED is left out of large commits as well: so much held in advance is short tasks, and
STARTED or the end follows within the prefetch window.

What somebody else's transaction has locked is put aside and repeated, one by one, while the others
go on; a mark that meets a lock is left out.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from machinery_py.app import Application
from machinery_py.backends.base import CONFLICT, FENCED, Verdict
from machinery_py.bounds import STEP_BYTES, pieces
from machinery_py.brokers.base import WAITING, Fate, Message
from machinery_py.errors import MachineryError
from machinery_py.events import (
    Event,
    MessageDead,
    TaskEnded,
    TaskFailed,
    TaskFenced,
    TaskRejected,
    TaskRetried,
    TaskRevoked,
    TaskSent,
    TaskSucceeded,
    TaskSuspended,
    kinds_of,
)
from machinery_py.registry.outcomes import REVOKED, Failed
from machinery_py.revocation import end_if_revoked, let_go
from machinery_py.stores.base import AWAY, Mark, Session, Settlement, in_place_of
from machinery_py.tasks.mailboxes import SILENT
from machinery_py.tasks.signature import HEADER_KEPT, HEADER_UNIQUE
from machinery_py.tasks.states import FAILURE, FINISHED, RECEIVED, RETRY, SUCCESS, SUSPENDED
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread
from machinery_py.unique import tidy
from machinery_py.values.json_values import shown
from machinery_py.worker.loops import task_log
from machinery_py.worker.loops.chords import settle_ready_groups
from machinery_py.worker.loops.go_groups import GoGroupPoller
from machinery_py.worker.reconnect import Reconnect
from machinery_py.worker.running.execution import SETTLED, Execution, settlement_of
from machinery_py.worker.running.hooks import text_of, type_name_of
from machinery_py.worker.running.keeping import end_checkpoints
from machinery_py.worker.running.waiting import run_again

logger = get_logger(__name__)

MAX_BATCH = 512  # executions in one commit; bounds.py has how many bytes
BUSY = 32  # executions in a commit from which RECEIVED is not written
REASON_UNSTORABLE = "unstorable"
MARK_DELAY = 0.002  # seconds; longer than a short task takes
ASIDE = 1.0, 16.0  # seconds until what met a lock is repeated, at first and at most


class Settler:
    """Settler of one worker: takes executions from any thread, and commits them in its own.

    Attributes:
        loop: its thread.
        healthy: False while the store is away; nothing is claimed then.
        processed: tasks that have ended here, `failed` of them in FAILURE.
    """

    def __init__(
        self,
        app: Application,
        session: Session,
        groups: GoGroupPoller,
        *,
        reconnect: Reconnect,
        name: str,
    ) -> None:
        self._app = app
        self._session = session
        self._groups = groups
        self._reconnect = reconnect
        self._on_settled: Callable[[Sequence[Execution]], None] = lambda _: None
        self._on_reported: Callable[[], None] = lambda: None
        self._queue: queue.SimpleQueue[Sequence[Execution] | None] = queue.SimpleQueue()
        self.loop: Final = LoopThread(f"{name}-settler", self._work, inside=True)
        self.healthy: bool = True
        self.processed: int = 0
        self.failed: int = 0
        self._aside: deque[Execution] = deque()  # what has met a lock
        self._aside_pause, self._aside_at = ASIDE[0], 0.0

    def start(
        self, on_settled: Callable[[Sequence[Execution]], None], on_reported: Callable[[], None]
    ) -> None:
        """Start the thread.

        Args:
            on_settled: called in it with the executions of each commit.
            on_reported: called in it when their events have been emitted.
        """
        self._on_settled, self._on_reported = on_settled, on_reported
        self.loop.start()

    def put(self, execution: Execution) -> None:
        """Commit its settlement, or a mark if it is not over."""
        if execution.stage is SETTLED and execution.settlement is not None:
            # Done here, during the commit before; in the settler's thread the store would wait.
            execution.pack(self._session.prepare(execution.settlement))
        self._queue.put((execution,))

    def mark(self, executions: Sequence[Execution]) -> None:
        """Commit a mark of each, unless one is waiting already."""
        if new := [one for one in executions if not one.queued]:
            for execution in new:
                execution.queued = True
            self._queue.put(new)

    def put_marks(self, executions: Sequence[Execution]) -> None:
        """Commit a mark of each; the caller has set `queued`."""
        if executions:
            self._queue.put(executions)

    def close(self, timeout: float) -> bool:
        """Commit what is there and end. False: the store was away, and some was given up."""
        self._queue.put(None)
        if self.loop.join(timeout):
            return True
        self.loop.stop()
        self.loop.join(1.0)
        return False

    def _work(self) -> None:
        late: list[Execution] = []  # executions whose mark has waited for one batch
        ended = False
        while not ended:
            batch, ended = self._gather(MARK_DELAY if late else self._until_aside())
            late = self._commit(batch, late)
            if self._until_aside() == 0.0:
                self._repeat_aside()
        while self._aside and not self.loop.pause(self._until_aside() or 0.0):
            self._repeat_aside()

    def _until_aside(self) -> float | None:
        """Return the seconds until what was put aside is to be repeated."""
        return max(0.0, self._aside_at - time.monotonic()) if self._aside else None

    def _put_aside(self, execution: Execution) -> None:
        uuid = execution.signature.uuid
        text = "the end of task %s waits: somebody else's transaction has locked what it changes"
        logger.warning(text, uuid, extra={"task_uuid": uuid})
        self._aside.append(execution)
        self._aside_at = time.monotonic() + self._aside_pause

    def _repeat_aside(self) -> None:
        """Settle the first of those that were put aside; while it waits, the pause grows."""
        self._aside_pause = min(ASIDE[1], 2 * self._aside_pause)
        execution = self._aside.popleft()
        self._aside_at = 0.0  # if it is settled now, the next one follows at once
        if self._finish([execution], self._settle([execution], ())):
            self._aside_pause = ASIDE[0]

    def _gather(self, pause: float | None) -> tuple[list[Execution], bool]:
        """Return what is queued, and whether the end has come.

        Waits for an execution, for `pause` at most.
        """
        batch: list[Execution] = []
        size = 0
        try:
            while len(batch) < MAX_BATCH and size < STEP_BYTES:
                some = self._queue.get(timeout=pause) if not batch else self._queue.get(block=False)
                if some is None:
                    return batch, True
                batch += some
                size += some[0].carried or 0  # only marks come together
        except queue.Empty:
            pass
        return batch, False

    def _commit(self, batch: Sequence[Execution], late: Sequence[Execution]) -> list[Execution]:
        """Commit the batch's settlements and the late marks; return the batch's own marks.

        So a short task has ended before its mark is due, and the mark is never written. When
        nothing else is to be done, the next batch is empty, and the marks are written soon.
        """
        over: list[Execution] = []
        marked: list[Execution] = []
        size = 0
        for execution in batch:
            if execution.stage < SETTLED:
                marked.append(execution)
            elif execution.stage is SETTLED and execution.commit():  # else its mark is late
                over.append(execution)
                size += execution.carried or 0
        for execution in late:
            execution.queued = False
        if late and self._has_lines():
            task_log.write(task_log.starts(late))
        marks = _marks(late, room=BUSY - len(over))
        if not over and not marks:
            return marked
        if size <= STEP_BYTES:
            verdicts = self._settle(over, marks)
        else:  # the last one gathered, and those that have ended since they were gathered as marks
            verdicts = self._settle_in_steps(over, marks)
        self._finish(over, verdicts)
        return marked

    def _finish(self, done: Sequence[Execution], found: Sequence[Verdict | None]) -> bool:
        """Do what follows a commit, for all that were not put aside. False: there are none."""
        if CONFLICT in found:
            found = [
                self._settle_anew(one) if verdict is CONFLICT else verdict
                for one, verdict in zip(done, found, strict=True)
            ]
        over = [one for one, verdict in zip(done, found, strict=True) if verdict is not None]
        verdicts = [verdict for verdict in found if verdict is not None]
        arrivals = [one for settlement in _settlements(over) for one in settlement.arrivals]
        if arrivals:
            self._groups.note(arrivals)
            # Before the end is reported: a worker that ends when idle must see the callback.
            self._settle_groups()
        for execution in over:
            if execution.settlement is not None and execution.settlement.riders:
                self._end_if_revoked(execution)
        if over:
            self._on_settled(over)
            try:
                self._report(over, verdicts)
            except Exception:  # what is committed must be released, and this loop live on
                logger.exception("ended tasks could not be reported")
            self._on_reported()
            release(self._app, over, verdicts)
        return bool(over)

    def _settle_in_steps(
        self, over: Sequence[Execution], marks: Sequence[Mark]
    ) -> Sequence[Verdict | None]:
        verdicts: list[Verdict | None] = []
        for some in pieces(over, lambda one: one.carried or 0, most=MAX_BATCH):
            verdicts += self._settle(some, marks)
            marks = ()
        return verdicts

    def _report(self, over: Sequence[Execution], verdicts: Sequence[Verdict]) -> None:
        """Count, log and emit what has become true, or has not."""
        has_lines, is_told = self._has_lines(), _is_told(self._app)
        for execution, verdict in zip(over, verdicts, strict=True):
            settlement = execution.settlement
            states = settlement.states if settlement is not None else ()
            state = states[0].state if states else None
            has_lines = has_lines or state is not SUCCESS
            if verdict is FENCED:
                _log_fenced(execution)
            else:
                self.processed += state in FINISHED
                self.failed += state is FAILURE
            if is_told:
                report_end(self._app, execution, verdict)
        if has_lines:
            task_log.write(task_log.ends(self._app, over, verdicts))

    def _has_lines(self) -> bool:
        """Return whether tasks that start and succeed have lines in the log."""
        return self._app.config.log_tasks and task_log.logger.isEnabledFor(task_log.INFO)

    def _settle_groups(self) -> None:
        try:
            with self._groups.settling:
                self._groups.forget(settle_ready_groups(self._app, self._groups.note))
        except AWAY as error:
            logger.warning("a group could not be settled: %s; it will be tried again", error)
        except Exception:  # maintenance tries again; this loop must live on
            logger.exception("a group could not be settled; it will be tried again")

    def _settle(self, over: Sequence[Execution], marks: Sequence[Mark]) -> Sequence[Verdict | None]:
        """Settle them; None: it was put aside."""
        try:
            return self._patiently(over, marks)
        except Exception as error:
            if isinstance(error, AWAY) and error.blocked:
                if len(over) == 1 and not marks:
                    self._put_aside(over[0])
                    return [None]
                return self._settle_apart(over, marks)
            # One of them is at fault, and must not keep the others from being settled.
            if len(over) > 1:
                text = "a batch of %d settlements failed (%s); trying its halves"
                logger.warning(text, len(over), error)
        if len(over) > 1:
            half = len(over) // 2
            return [*self._settle(over[:half], ()), *self._settle(over[half:], ())]
        return [self._settle_one(execution) for execution in over]

    def _settle_apart(
        self, over: Sequence[Execution], marks: Sequence[Mark]
    ) -> Sequence[Verdict | None]:
        """Settle each alone: one of them is locked, and each look at that takes a while."""
        for mark in marks if len(over) + len(marks) > 1 else ():
            try:
                self._patiently((), [mark])
            except Exception as error:
                logger.debug("no mark of task %s: %s", mark.state.task_uuid, error)
        return [self._settle_one(execution) for execution in over]

    def _patiently(
        self, over: Sequence[Execution], marks: Sequence[Mark] = ()
    ) -> Sequence[Verdict]:
        """Settle them as soon as the store can; raise errors that waiting does not cure.

        What fails is halved before it is tried again: it may have been too much for the store.
        """
        verdicts: list[Verdict] = []
        size = max(1, len(over))
        while marks or len(verdicts) < len(over):
            some = over[len(verdicts) : len(verdicts) + size]
            try:
                verdicts += self._session.settle(_settlements(some), marks)
            except AWAY as error:
                if error.permanent or error.blocked:
                    raise
                # Nothing is lost: the deliveries are ours, and what was written will be ALREADY.
                if self.healthy:
                    logger.error(
                        "results cannot be stored: %s; no new tasks are taken until they can", error
                    )
                self.healthy = False
                size = max(1, len(some) // 2)
                if self.loop.pause(self._reconnect.failed(error, is_told=True)):
                    return [*verdicts, *[FENCED] * (len(over) - len(verdicts))]
            else:
                if not self.healthy:
                    logger.warning("results can be stored again")
                    self._reconnect.succeeded()
                self.healthy = True
                marks, size = (), 2 * size
        return verdicts

    def _settle_one(self, execution: Execution) -> Verdict | None:
        """Settle an execution that the store may refuse for good, with as much as the store takes.

        Tried in turn: its end; its end with what it sends failed; a failure; its message as a dead
        letter. If even that is refused, the delivery stays held, and is redelivered when this
        worker ends.
        """
        uuid, settlement = execution.signature.uuid, execution.settlement
        try:
            return self._patiently([execution])[0]
        except Exception as error:
            if isinstance(error, AWAY) and error.blocked:
                self._put_aside(execution)
                return None
            refused = error
        sends = settlement.send if settlement is not None and not settlement.riders else ()
        if sends and isinstance(refused, MachineryError) and refused.permanent:
            try:
                _refuse_sends(execution, refused)
                [verdict] = self._patiently([execution])
                self._bury(execution, sends, refused)
                return verdict
            except Exception as error:
                logger.debug("it is not what follows task %s: %s", uuid, error)
        logger.error(
            "the end of task %s cannot be stored; its message goes to the dead letters: %s",
            uuid,
            refused,
            exc_info=None if isinstance(refused, MachineryError) else refused,
            extra={"task_uuid": uuid},
        )
        for give_up in (_fail_unstorable, _give_up):
            try:
                give_up(execution, refused)
                return self._patiently([execution])[0]
            except Exception as error:
                logger.error("nor can that be stored: %s", error, extra={"task_uuid": uuid})
        return FENCED

    def _settle_anew(self, execution: Execution) -> Verdict | None:
        """Settle a task that was to wait, and has got a signal meanwhile."""
        run_again(execution)
        return self._settle_one(execution)

    def _end_if_revoked(self, execution: Execution) -> None:
        """End a task that waits now, if it was revoked while it ran: no message of it will come."""
        while True:
            try:
                end_if_revoked(self._app, execution.signature)
                return
            except AWAY as error:
                if error.permanent or self.loop.pause(self._reconnect.failed(error)):
                    logger.error("task %s waits, revoked: %s", execution.signature.uuid, error)
                    return
            except Exception:  # a hook of what follows its end is user code; this loop must live on
                logger.exception("task %s waits, revoked", execution.signature.uuid)
                return

    def _bury(self, execution: Execution, messages: Sequence[Message], error: Exception) -> None:
        for message in messages:
            try:
                execution.app.store.give_up(message, error, execution.delivery.queue)
            except MachineryError as trouble:
                logger.error(
                    "there is no dead letter of task %s, only its state: %s", message.uuid, trouble
                )


# Another end, because the store refuses the first one


def _refuse_sends(execution: Execution, error: MachineryError) -> None:
    """Keep its end, and fail the tasks that it sends."""
    settlement = execution.settlement
    assert settlement is not None
    refused = [execution.app.refusal(message, error) for message in settlement.send]
    execution.amend(in_place_of(settlement, refused))


def _fail_unstorable(execution: Execution, error: Exception) -> None:
    """End it as failed instead, because the store does not take its result."""
    outcome = Failed(
        error=f"the result cannot be stored: {text_of(error)}",
        error_type=type_name_of(error),
        retryable=False,
    )
    execution.amend(*settlement_of(execution, outcome, fate=Fate.DEAD, reason=REASON_UNSTORABLE))


def _give_up(execution: Execution, error: Exception) -> None:
    """Make its message a dead letter, and leave its state as it is."""
    text = f"{type(error).__name__}: {error}"
    execution.amend(execution.end_of_delivery(Fate.DEAD, reason=REASON_UNSTORABLE, error=text))


def _marks(executions: Sequence[Execution], *, room: int) -> list[Mark]:
    """Return the marks of what is not over; RECEIVED only if there is room for all of them."""
    wanted = [one for one in executions if one.settlement is None]
    if len(wanted) >= room:
        wanted = [one for one in wanted if one.phase is not RECEIVED]
    return [mark for one in wanted if (mark := one.mark()) is not None]


def _settlements(over: Sequence[Execution]) -> list[Settlement]:
    return [execution.settlement for execution in over if execution.settlement is not None]


# What follows a commit: the log, locks and keys, events


def _log_fenced(execution: Execution) -> None:
    logger.warning(
        "a run of task %s came to nothing: its lease was lost, or it was finished before",
        execution.signature.uuid,
        extra={"task_uuid": execution.signature.uuid},
    )


def release(app: Application, executions: Sequence[Execution], verdicts: Sequence[Verdict]) -> None:
    """Release what others wait for: locks, and the unique keys of tasks that are over."""
    over, revoked = [], []
    for execution, verdict in zip(executions, verdicts, strict=True):
        if execution.guard is not None:
            execution.guard.leave()
        signature, settlement = execution.signature, execution.settlement
        if settlement is None:
            continue
        if HEADER_UNIQUE in signature.headers and verdict is not FENCED:
            over.append((signature, settlement))
        if execution.kept or execution.delivery.count > 1 or HEADER_KEPT in signature.headers:
            end_checkpoints(execution, verdict)
        if execution.revoked and settlement.fate is Fate.DONE:
            revoked.append(signature.uuid)
    if over:
        tidy(app, over)
    if revoked:
        let_go(app, revoked)


#: Events that `report_end` emits.
_TOLD = frozenset(
    {TaskSent, *kinds_of(TaskEnded), TaskRevoked, TaskRejected, TaskFenced, MessageDead}
)


def _is_told(app: Application) -> bool:
    """Return whether anybody wants to know of ends."""
    return bool(app.hooks.on_end) or not app.events.wanted.isdisjoint(_TOLD)


def report_end(app: Application, execution: Execution, verdict: Verdict) -> None:
    """Tell handlers and subscribers of a settled execution."""
    if app.hooks.on_end and verdict is not FENCED:
        execution.hooks.ended(execution)
    if not app.events.wanted.isdisjoint(_TOLD):
        if execution.sends and verdict is not FENCED:
            app.report_sent(execution.sends)
        for event in _events(execution, verdict):
            app.events.emit(event)


def _events(execution: Execution, verdict: Verdict) -> Iterator[Event]:
    settlement, signature, worker = execution.settlement, execution.signature, execution.worker
    if settlement is None:
        return
    if verdict is FENCED:
        yield TaskFenced(signature=signature, worker=worker)
        return
    if reason := _rejection(execution, settlement):
        yield TaskRejected(signature=signature, worker=worker, reason=reason)
    if settlement.fate is Fate.DEAD:
        yield MessageDead(
            uuid=settlement.uuid,
            name=settlement.name,
            queue=settlement.delivery.queue,
            reason=settlement.reason,
            error=settlement.error,
            worker=worker,
        )
    for state in settlement.states[:1]:
        if state.state is SUCCESS:
            yield TaskSucceeded(
                signature=signature,
                worker=worker,
                notes=state.notes,
                runtime=execution.runtime,
                result=", ".join([shown(one.value) for one in state.results]),
            )
        elif state.state is FAILURE:
            if state.error_type == REVOKED.error_type:
                yield TaskRevoked(signature=signature, worker=worker)
            yield TaskFailed(
                signature=signature,
                worker=worker,
                notes=state.notes,
                runtime=execution.runtime,
                error=state.error,
                error_type=state.error_type,
                traceback=state.traceback,
            )
        elif state.state is RETRY:
            delay = (state.eta - state.created_at).total_seconds() if state.eta else 0.0
            if state.error_type == SUSPENDED:
                yield TaskSuspended(
                    signature=signature,
                    worker=worker,
                    notes=state.notes,
                    runtime=execution.runtime,
                    reason=state.error,
                    delay=max(0.0, delay),
                )
                continue
            yield TaskRetried(
                signature=signature,
                worker=worker,
                notes=state.notes,
                runtime=execution.runtime,
                error=state.error,
                error_type=state.error_type,
                traceback=state.traceback,
                delay=max(0.0, delay),
            )


def _rejection(execution: Execution, settlement: Settlement) -> str:
    """Return why the worker did not run a task; "" if it did, or gives it back."""
    signature = execution.signature
    is_taken = (
        execution.phase is not None
        or not signature.name
        or signature.name in SILENT
        or execution.revoked
    )
    if is_taken or settlement.fate is Fate.BACK or settlement.reason == WAITING:
        return ""
    reason = settlement.states[0].error_type if settlement.states else "unregistered"
    return settlement.reason or reason

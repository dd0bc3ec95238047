"""Execution: one delivery that a worker holds, from its bytes to its settlement.

intake.accept       decode, find the task    → a settlement at once, if there is nothing to run
runner.run          convert, call            → an outcome
finish              follow_up                → the settlement; the first caller wins
"""

from __future__ import annotations

import datetime as dt
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from machinery_py.app import NOTHING, Application, Outgoing
from machinery_py.brokers.base import Delivery, Fate
from machinery_py.errors import (
    ArgumentError,
    Ignore,
    MachineryError,
    NameRefused,
    Reject,
    Replace,
    Retry,
    RetryTaskLater,
    TaskFailed,
    TimeLimitExceeded,
    WorkerLost,
)
from machinery_py.names import check_queue
from machinery_py.registry.options import TaskSettings, settings_of_call
from machinery_py.registry.outcomes import (
    IGNORED,
    NOT_ITS_FAILURE,
    POSTPONED,
    REJECTED,
    REVOKED,
    WORKER_LOST,
    Batched,
    Failed,
    FollowUp,
    Lost,
    Outcome,
    Postponed,
    Rejected,
    Replaced,
    Retried,
    Succeeded,
    broken,
    failing,
    follow_up,
    replaced_by,
)
from machinery_py.registry.task import Task
from machinery_py.stores.base import (
    REASON_FAILED,
    REASON_REJECTED,
    Mark,
    Session,
    Settlement,
    in_place_of,
)
from machinery_py.tasks.context import NO_STATE, Context, Report, notes_json, on_behalf_of
from machinery_py.tasks.signature import (
    HEADER_ATTEMPTS,
    HEADER_REST,
    HEADER_UNIQUE,
    HEADER_UNIQUE_START,
    Signature,
)
from machinery_py.tasks.states import FINISHED, Arrival, State, TaskState
from machinery_py.texts import get_logger
from machinery_py.worker.admission import ExecutionGuard
from machinery_py.worker.hooks import WorkerHooks, failure_by, text_of, type_name_of
from machinery_py.worker.timer import TimerEntry

logger = get_logger(__name__)

KILL_AFTER = 5.0  # seconds, by default
REASON_UNSTORABLE = "unstorable"
_PLAIN = TaskSettings()
_NAMELESS: Signature[Any] = Signature(name="")


class SlotLender(Protocol):
    """Lender of the slots of runs that wait for other tasks; see worker/slots.py."""

    def wait_begins(self, execution: Execution, /) -> None: ...
    def wait_ends(self, execution: Execution, /, *, at_once: bool) -> None: ...
    async def wait_ends_async(self, execution: Execution, /, *, at_once: bool) -> None: ...


@dataclass(slots=True, eq=False)
class Execution:
    """Delivery that this worker holds.

    `settlement` is set once, by the first that ends it: the task, its time limit, or the shutdown.
    """

    app: Application
    hooks: WorkerHooks
    delivery: Delivery
    worker: str
    signature: Signature[Any] = _NAMELESS
    task: Task[..., Any] | None = None
    settings: TaskSettings = _PLAIN  # of the task, or of this call
    session: Session | None = None  # that has the delivery
    calls: Sequence[Execution] = ()  # of a batch, which is one run of them (worker/batches.py)
    context: Context | None = None
    alarm: TimerEntry | None = None  # of its time limit
    guard: ExecutionGuard | None = None
    phase: State | None = None  # RECEIVED, STARTED: what a mark would say
    queued: bool = False  # a mark for it is on its way to the settler
    in_process: bool = False  # a task process makes the call
    progress: tuple[float, float] | None = None
    noted: dict[str, str] = field(default_factory=dict)  # as Context.noted, which it is
    settlement: Settlement | None = None
    sends: Sequence[Signature[Any]] = ()  # what the settlement publishes
    is_ready: bool = False  # its settlement, to be committed
    carried: int = 0  # bytes, about, of its settlement
    committed: bool = False  # the settler has it
    acked: bool = False  # its message is gone before its end
    revoked: bool = False  # as far as is known here
    start_is_logged: bool = False
    error_is_handled: bool = False  # by the error handler, in place of the log
    error: Exception | None = None
    interrupt: KeyboardInterrupt | None = None  # which the call raised
    received_at: float = 0.0  # monotonic second
    claimed_at: float = math.inf  # when the claim was asked for, by the clock of WorkerLease
    started_at: dt.datetime | None = None
    call_started: float = 0.0  # performance counter; 0: not begun
    runtime: float = 0.0  # seconds
    thread_id: int = 0
    slots: SlotLender | None = None
    waits: int = 0  # for results of other tasks: of a coroutine task, several at a time
    _done: bool = False

    @property
    def is_async(self) -> bool:
        return self.task is not None and self.task.call.is_async

    @property
    def is_guarded(self) -> bool:
        """Return whether it has to pass a guard before it is run: most need not."""
        if self.task is not None and self.task.is_guarded:
            return True
        headers = self.signature.headers
        return bool(headers) and bool(
            self.settings.exclusive
            or HEADER_REST in headers
            or (HEADER_UNIQUE_START in headers and headers.get(HEADER_UNIQUE))
        )

    @property
    def runs_once(self) -> bool:
        """Return whether a run that was cut off ends in FAILURE, instead of being repeated."""
        return self.settings.ack == "early" or self.settings.on_worker_lost == "fail"

    def take(self, task: Task[..., Any] | None) -> None:
        """Let it be a run of this task, with the settings of this call."""
        self.task = task
        headers, settings = self.signature.headers, _PLAIN if task is None else task.settings
        self.settings = settings_of_call(settings, headers) if headers else settings

    @property
    def kill_after(self) -> float:
        """Seconds after the time limit until the process of a process task is killed."""
        given = self.settings.kill_after
        return KILL_AFTER if given is None else given

    @property
    def strikes(self) -> int:
        """Workers and task processes that were lost while they ran it."""
        return self.delivery.strikes + self.signature.strikes

    def waited(self, until: dt.datetime) -> float | None:
        """Return the seconds since its ETA, or if it has none since it was sent; None: unknown."""
        since = self.signature.eta or self.delivery.sent_at
        return None if since is None else max(0.0, (until - since).total_seconds())

    @property
    def is_over(self) -> bool:
        return self._done

    @property
    def is_final(self) -> bool:
        """Return whether it has ended in SUCCESS or FAILURE."""
        states = self.settlement.states if self.settlement is not None else ()
        return bool(states) and states[0].state in FINISHED

    @property
    def is_collected(self) -> bool:
        """Return whether a chord's callback takes the result from the state."""
        callback = self.signature.chord_callback
        return callback is not None and not callback.immutable

    def cancel(self, *, time_is_up: bool = False) -> None:
        """Ask the function to stop; it has to check `Context.cancelled`."""
        if self.context is not None:
            self.context.cancel(time_is_up=time_is_up)

    def new_context(self, report: Report | None = None) -> Context:
        """Return a context of this run."""
        delivery = self.delivery
        return Context(
            self.signature,
            queue=delivery.queue,
            delivery=delivery.count,
            fence=delivery.fence,
            worker=self.worker,
            state=self.hooks.state,
            noted=self.noted,
            handed_on=NO_STATE if self.context is None else self.context.handed_on,
            report=report,
            run=self,
        )

    # Waiting for other tasks: see `tasks.context.Run`

    def wait_begins(self) -> bool:
        if self.slots is None or not (self.is_async or threading.get_ident() == self.thread_id):
            return False  # a thread of the task's own
        self.slots.wait_begins(self)
        return True

    def wait_ends(self, *, at_once: bool) -> None:
        if self.slots is not None:
            # A coroutine must not keep its loop waiting.
            self.slots.wait_ends(self, at_once=at_once or self.is_async)

    async def wait_ends_async(self, *, at_once: bool) -> None:
        if self.slots is not None:
            await self.slots.wait_ends_async(self, at_once=at_once)

    # Its end: the first one to settle it wins

    def begin(self) -> bool:
        """Begin the run. False: it has ended before, because it was handed back."""
        with self.hooks.settling:
            if self._done:
                return False
            self.call_started = time.perf_counter()
            return True

    def settle(self, settlement: Settlement, *, unbegun: bool = False) -> bool:
        """End it like this. False: it has ended, or begun though it should be `unbegun`."""
        with self.hooks.settling:
            if self._done or (unbegun and self.call_started):
                return False
            self._done = True
            self.settlement = settlement
            return True

    def finish(
        self, outcome: Outcome, *, fate: Fate = Fate.DONE, reason: str = "", unbegun: bool = False
    ) -> bool:
        """End it with this outcome, and all that follows from it. False: as `settle`."""
        return self.settle(self._ended(outcome, fate=fate, reason=reason), unbegun=unbegun)

    def hand_back(self, *, started: bool = False) -> bool:
        """Give the message back to its queue, for another worker. False: it has ended, or begun.

        Args:
            started: also if it has begun. A task that runs once has failed then.
        """
        if started and self.runs_once and self.phase is State.STARTED:
            return self.lose("its worker ended before it did")
        return self.settle(self.end_of_delivery(Fate.BACK), unbegun=not started)

    def lose(self, text: str) -> bool:
        """End it as cut off, for good. False: it has ended."""
        return self.finish(self._cut_off(text))

    def _cut_off(self, text: str) -> Failed:
        why = "ack='early'" if self.settings.ack == "early" else "on_worker_lost='fail'"
        error = f"{text} ({why}: it is not run again)"
        return Failed(error=error, error_type=WORKER_LOST, retryable=False)

    def withdraw(self, *, is_over: bool) -> bool:
        """End it as revoked. False: it has begun, or ended.

        Args:
            is_over: the task has ended already; only its message is left.
        """
        self.revoked = True
        if is_over:
            return self.settle(self.end_of_delivery(), unbegun=True)
        return self.finish(REVOKED, unbegun=True)

    def time_out(self, limit: float) -> bool:
        """End it because its time is up. False: it has ended."""
        self.error = TimeLimitExceeded(f"ran longer than its time limit of {limit:g} s")
        self.cancel(time_is_up=True)
        return self.finish(self.failed(self.error))

    def break_off(self, error: BaseException) -> None:
        """End it as failed, unless it has ended: something failed outside the call of the task."""
        logger.error(
            "task %s broke off",
            self.signature.uuid,
            exc_info=error,
            extra={"task_uuid": self.signature.uuid},
        )
        if not self._done:
            self.finish(self.failed(error))

    # Another end, because the store refuses this one. In the settler's thread

    def refuse_sends(self, error: MachineryError) -> None:
        """Keep its end, and fail the tasks that it sends."""
        settlement = self.settlement
        assert settlement is not None
        self.sends = ()
        self.settlement = in_place_of(
            settlement, [self.app.refusal(message, error) for message in settlement.send]
        )

    def fail_unstorable(self, error: Exception) -> None:
        """End it as failed instead, because the store does not take its result."""
        outcome = Failed(
            error=f"the result cannot be stored: {text_of(error)}",
            error_type=type_name_of(error),
            retryable=False,
        )
        self.settlement = self._ended(outcome, fate=Fate.DEAD, reason=REASON_UNSTORABLE)

    def give_up(self, error: Exception) -> None:
        """Make its message a dead letter, and leave its state as it is."""
        self.settlement = self.end_of_delivery(
            Fate.DEAD, reason=REASON_UNSTORABLE, error=f"{type(error).__name__}: {error}"
        )

    # From an exception to an outcome, and from an outcome to a settlement

    def failed(self, error: BaseException) -> Outcome:
        """Return the outcome of what the function raised."""
        if self.revoked and (
            isinstance(error, (Retry, RetryTaskLater, Reject, Replace))
            or type(error).__name__ == "CancelledError"
        ):
            return REVOKED
        if isinstance(error, RetryTaskLater):
            self.error = error
            return Postponed(error=text_of(error), delay=error.delay, limit=error.limit)
        if isinstance(error, Retry):
            return self._retried(error)
        if isinstance(error, Replace):
            return replaced_by(error.workflow)
        if isinstance(error, Ignore):
            return Failed(error=text_of(error), error_type=IGNORED, retryable=False)
        if isinstance(error, Reject):
            return self._rejected(error)
        if isinstance(error, KeyboardInterrupt):
            self.interrupt = error
        self.error = (
            error
            if isinstance(error, Exception)
            else MachineryError(f"{type(error).__name__}: {text_of(error)}")
        )
        return failure_by(error, retryable=not self.revoked and self.settings.may_retry(error))

    def _rejected(self, wanted: Reject) -> Outcome:
        self.error = wanted
        failed = failure_by(wanted, retryable=False)
        if wanted.requeue:
            return Rejected(error=failed.error)
        return msgspec.structs.replace(failed, error_type=REJECTED)

    def _retried(self, wanted: Retry) -> Outcome:
        """Return the outcome of `Retry`: of a failure, if it cannot be sent like this."""
        assert self.task is not None
        cause = wanted.__cause__ or wanted
        self.error = cause if isinstance(cause, Exception) else wanted
        args = None
        try:
            if wanted.queue:
                check_queue(wanted.queue)
            if wanted.args_of_task is not None or wanted.kwargs_of_task is not None:
                args = self.task.call.arguments(
                    wanted.args_of_task or (), wanted.kwargs_of_task or {}
                )
        except (ArgumentError, NameRefused) as error:
            self.error = error
            return failure_by(error, "the retry that it asked for: ", retryable=False)
        return Retried(
            failed=failure_by(cause),
            delay=wanted.delay,
            eta=wanted.eta,
            queue=wanted.queue,
            args=args,
            retries=wanted.retries,
        )

    def judged(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a call in another process, with what is known only here."""
        error_type = POSTPONED if isinstance(outcome, Postponed) else ""
        if isinstance(outcome, Rejected):
            error_type = REJECTED
        failed = outcome.failed if isinstance(outcome, Retried) else outcome
        if isinstance(failed, Failed):
            error_type = failed.error_type
        if self.revoked and (
            isinstance(outcome, (Postponed, Retried, Rejected, Replaced))
            or error_type.endswith("CancelledError")
        ):
            return REVOKED
        if isinstance(outcome, Lost):
            self.error = WorkerLost(outcome.error)
            if self.runs_once:
                return self._cut_off(outcome.error)
        elif not isinstance(failed, (Succeeded, Batched, Replaced)) and error_type != IGNORED:
            uuid, name = self.signature.uuid, self.signature.name
            self.error = TaskFailed(uuid, name, failed.error, error_type=error_type)
        if self.revoked and isinstance(outcome, Failed):
            return msgspec.structs.replace(outcome, retryable=False)
        return outcome

    def end_of_delivery(
        self,
        fate: Fate = Fate.DONE,
        *,
        eta: dt.datetime | None = None,
        reason: str = "",
        error: str = "",
    ) -> Settlement:
        """Return a settlement of the delivery alone; the task's state stays as it is."""
        return Settlement(
            delivery=self.delivery,
            uuid=self.signature.uuid,
            name=self.signature.name,
            fate=fate,
            eta=eta,
            reason=reason,
            error=error,
        )

    def _ended(self, outcome: Outcome, *, fate: Fate, reason: str) -> Settlement:
        """Return the settlement of this outcome; of a failure if its follow-up cannot be sent."""
        try:
            now = self.app.now()
            then = follow_up(
                self.signature,
                outcome,
                now=now,
                backoff=self.settings.backoff,
                started_at=self.started_at,
                worker=self.worker,
            )
            return self._settlement(then, now, fate=fate, reason=reason)
        except Exception as error:  # a back-off function, a callback or a pre-publish hook
            logger.exception("what follows task %s cannot be sent", self.signature.uuid)
            outcome = failure_by(error, "what follows the task cannot be sent: ", retryable=False)
            return self._ended_in_failure(outcome, fate=fate, reason=reason)

    def _ended_in_failure(self, outcome: Failed, *, fate: Fate, reason: str) -> Settlement:
        """Return the settlement of a failure, with as much of its follow-up as can be sent."""
        now = self.app.now()
        for signature in (self.signature, self.signature.replace(on_success=())):
            try:
                return self._settlement(
                    follow_up(signature, outcome, now=now), now, fate=fate, reason=reason
                )
            except Exception as error:
                logger.error(
                    "nor can its error callbacks: %s",
                    text_of(error),
                    extra={"task_uuid": self.signature.uuid},
                )
        bare = self.signature.replace(on_success=(), on_error=())
        return self._settlement(follow_up(bare, outcome, now=now), now, fate=fate, reason=reason)

    def _settlement(
        self, then: FollowUp, now: dt.datetime, *, fate: Fate, reason: str
    ) -> Settlement:
        signature = self.signature
        spared = self.settings.ignore_result and not self.is_collected
        if then.state is State.FAILURE and fate is Fate.DONE and self._is_kept_dead(then):
            is_rejected = then.error_type == REJECTED
            fate, reason = Fate.DEAD, REASON_REJECTED if is_rejected else REASON_FAILED
        state = TaskState(
            task_uuid=signature.uuid,
            task_name=signature.name,
            state=then.state,
            results=() if spared else then.results,
            error=then.error,
            error_type=then.error_type,
            traceback=then.traceback,
            created_at=now,
            run=signature.run,
            attempt=signature.attempt,
            queue=self.delivery.queue,
            worker=self.worker,
            started_at=self.started_at,
            finished_at=now if then.state in FINISHED else None,
            progress=self.progress,
            notes_json=notes_json(self.noted) if self.noted else "",
            eta=then.retry.eta if then.retry is not None else None,
            message=self._kept(then),
            keep_for=self.settings.result_expires,
            root=signature.root if signature.headers else "",
            parent=signature.parent if signature.headers else "",
        )
        out, arrivals = self._following(then)
        self.sends = out.signatures
        return Settlement(
            delivery=self.delivery,
            uuid=signature.uuid,
            name=signature.name,
            fate=fate,
            reason=reason,
            error=then.error,
            states=(state, *(broken(then, signature, now) if then.breaks else ()), *out.states),
            send=out.messages,
            groups=out.groups,
            arrivals=arrivals,
        )

    def _is_kept_dead(self, then: FollowUp) -> bool:
        """Return whether the message of the failed task becomes a dead letter."""
        wanted = (
            then.error_type == REJECTED
            or self.settings.on_failure == "dead_letter"
            or self.signature.stop_task_deletion_on_error
        )
        return wanted and not self.revoked and then.error_type not in NOT_ITS_FAILURE

    def _kept(self, then: FollowUp) -> bytes:
        if (again := then.retry or then.last) is not None:
            return failing(again)
        is_kept = then.state is State.FAILURE or HEADER_ATTEMPTS in self.signature.headers
        return self.delivery.body if is_kept else b""

    def _following(self, then: FollowUp) -> tuple[Outgoing, Sequence[Arrival]]:
        if not then.send and then.retry is None and not then.arrived:
            return NOTHING, ()
        handed_on = NO_STATE if self.context is None else self.context.handed_on
        with on_behalf_of(
            self.signature, queue=self.delivery.queue, worker=self.worker, handed_on=handed_on
        ):
            out, arrivals = (
                self.app.outgoing(then.send, then.groups, then.awaited),
                self.app.arrivals(then.arrived),
            )
            if then.retry is None:
                return out, arrivals
            # The retry has no PENDING state: RETRY stays visible until it runs (Go overwrites it).
            retry = self.app.message(self.app.stamped(self.app.completed(then.retry)))
        return Outgoing([retry, *out.messages], out.states, out.groups, out.signatures), arrivals

    def mark(self) -> Mark | None:
        """Return a mark of RECEIVED, STARTED or its progress; None if it is over."""
        if self._done or self.phase is None:
            return None
        signature = self.signature
        return Mark(
            delivery=self.delivery,
            state=TaskState(
                task_uuid=signature.uuid,
                task_name=signature.name,
                state=self.phase,
                run=signature.run,
                attempt=signature.attempt,
                queue=self.delivery.queue,
                worker=self.worker,
                created_at=self.app.now(),
                started_at=self.started_at,
                progress=self.progress,
                notes_json=notes_json(self.noted) if self.noted else "",
                root=signature.root if signature.headers else "",
                parent=signature.parent if signature.headers else "",
            ),
        )

"""One delivery, from its bytes to its settlement. It has an order of steps, and no rule of its own.

accept      decode, find the task        → a settlement at once, if there is nothing to run
run         convert, call                → an outcome
finish      follow_up                    → the settlement; the first caller wins
"""

from __future__ import annotations

import contextvars
import datetime as dt
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from machinery_py.brokers.base import Delivery, Fate
from machinery_py.calls import REFLECT
from machinery_py.context import Context, enter, leave, on_behalf_of
from machinery_py.engine import NOTHING, Engine, Outgoing, broken
from machinery_py.errors import (
    ArgumentError,
    DecodeError,
    MachineryError,
    NoRetry,
    RetryTaskLater,
    TimeLimitExceeded,
)
from machinery_py.outcomes import (
    REVOKED,
    Failed,
    FollowUp,
    Outcome,
    Postponed,
    Succeeded,
    failing,
    follow_up,
)
from machinery_py.settlement.base import Mark, Settlement, in_place_of
from machinery_py.signature import Signature
from machinery_py.states import Arrival, State, TaskState
from machinery_py.task import Task, TaskSettings
from machinery_py.texts import get_logger
from machinery_py.wire import decode_exact, encode_results
from machinery_py.worker.gate import Gate, in_thread, is_gated
from machinery_py.worker.usercode import (
    Hooks,
    await_around,
    call_around,
    text_of,
    traceback_of,
    type_name_of,
)

logger = get_logger(__name__)

REASON_UNSTORABLE = "unstorable"
_PLAIN = TaskSettings()


class Execution:
    """A delivery that this worker holds.

    `settlement` is set once, by whoever ends it first: the task itself, its time limit, or the worker's shutdown.
    """

    __slots__ = (
        "_done",
        "_lock",
        "call_started",
        "committed",
        "context",
        "delivery",
        "engine",
        "error",
        "gate",
        "hooks",
        "outcome",
        "phase",
        "progress",
        "queued",
        "revoked",
        "runtime",
        "sends",
        "settlement",
        "signature",
        "started_at",
        "task",
        "thread_id",
        "worker",
    )

    def __init__(self, engine: Engine, hooks: Hooks, delivery: Delivery, worker: str) -> None:
        self.engine = engine
        self.hooks = hooks
        self.delivery = delivery
        self.worker = worker
        self.signature: Signature[Any] = _NAMELESS
        self.task: Task[..., Any] | None = None
        self.context: Context | None = None
        self.gate: Gate | None = None
        self.phase: State | None = None  # RECEIVED, STARTED: what a mark would say
        self.queued = False  # a mark for it is on its way to the settler
        self.progress: tuple[float, float] | None = None
        self.settlement: Settlement | None = None
        self.sends: Sequence[Signature[Any]] = ()  # what the settlement publishes
        self.committed = False  # the settler has it
        self.revoked = False  # it is known here that it was
        self.outcome: Outcome | None = None
        self.error: Exception | None = None
        self.started_at: dt.datetime | None = None
        self.call_started = 0.0
        self.runtime = 0.0
        self.thread_id = 0
        self._lock = threading.Lock()
        self._done = False

    # Run

    @property
    def is_async(self) -> bool:
        return self.task is not None and self.task.call.is_async

    @property
    def time_limit(self) -> float | None:
        return self.task.settings.time_limit if self.task else None

    @property
    def is_over(self) -> bool:
        return self._done

    def pass_gate(self) -> bool:
        """Take its lock, start its key. False: it cannot run, and it is settled what becomes of it."""
        assert self.task is not None
        self.gate = Gate(self.engine, self.task, self.signature, self.delivery)
        stop = self.gate.enter(self._cancel)
        if stop is None and not self._done:
            return True
        self.gate.leave()
        if isinstance(stop, Settlement):
            self.settle(stop)
        elif stop is not None:
            self.finish(stop)
        return False

    def _stop(self, error: BaseException) -> None:
        self.finish(self.failed(error))

    def _cancel(self) -> None:
        if self.context is not None:
            self.context.cancel()

    def prepare(
        self, report: Callable[[Execution], None] | None
    ) -> tuple[list[Any], dict[str, Any]] | None:
        """Convert the arguments and make the context. None: they do not fit, and it is finished."""
        task, signature = self.task, self.signature
        assert task is not None
        try:
            args, kwargs = task.call.values(signature.args)
        except ArgumentError as error:
            # As Go: wrong arguments will not get better, so there is no retry.
            self.finish(
                Failed(error=self._as_go_says(error), error_type="ArgumentError", retryable=False)
            )
            return None
        self.context = Context(
            signature,
            queue=self.delivery.queue,
            delivery=self.delivery.fence,
            epoch=self.delivery.epoch,
            worker=self.worker,
            report=None if report is None else self._reporter(report),
        )
        self.phase = State.STARTED
        self.started_at = self.engine.clock.now()
        if task.call.takes_context:
            args.insert(0, self.context)
        return args, kwargs

    def _as_go_says(self, error: ArgumentError) -> str:
        """The text with numbers quoted as they stand in the message: other programs compare it."""
        assert self.task is not None
        if not str(error).startswith(REFLECT):
            return str(error)  # of one of our own types, which such a number may not fit
        try:
            self.task.call.values(decode_exact(self.delivery.body).args)
        except ArgumentError as exact:
            return str(exact)
        except DecodeError:
            pass
        return str(error)

    def _reporter(self, report: Callable[[Execution], None]) -> Callable[[float, float], None]:
        def tell(done: float, total: float) -> None:
            self.progress = (done, total)
            report(self)

        return tell

    def run(self, report: Callable[[Execution], None] | None = None) -> None:
        """Call the function in this thread, in a context of its own, and finish.

        Args:
            report: called when the state is worth a mark: started, and progress.
        """
        # What a task sets in ContextVars ends with it, as in a coroutine; the next one on this thread is another call.
        contextvars.copy_context().run(self._run, report)

    def _run(self, report: Callable[[Execution], None] | None) -> None:
        if is_gated(self.task, self.signature) and not self.pass_gate():
            return
        prepared = self.prepare(report)
        if prepared is None:
            return
        if report is not None:
            report(self)
        token = enter(self.context)  # type: ignore[arg-type]  # prepare has made it
        self.call_started = time.perf_counter()
        try:
            outcome = self._call(*prepared)
        finally:
            self.runtime = time.perf_counter() - self.call_started
            leave(token)
        self._finish_call(outcome)

    def _finish_call(self, outcome: Outcome) -> None:
        """Finish, and tell the user's hooks; they run in the task's thread, and what they raise is logged."""
        if not self.finish(outcome):
            return
        hooks = self.hooks
        if self.error is not None and isinstance(outcome, Failed) and self.is_final:
            self.tell_error(self.error)
        if hooks.post_task is not None:
            try:
                hooks.post_task(self.signature)
            except BaseException:  # user code; sys.exit() there must not end the thread
                logger.exception("the post-task handler failed after task %s", self.signature.uuid)

    @property
    def is_final(self) -> bool:
        """Whether it has ended in SUCCESS or FAILURE."""
        return self.settlement is not None and any(
            state.is_finished for state in self.settlement.states[:1]
        )

    def tell_error(self, error: Exception) -> None:
        """Hand a final failure to the error handler, or to the log."""
        if self.hooks.error is None:
            logger.error(
                "task %s (%s) failed for good: %s",
                self.signature.uuid,
                self.signature.name,
                text_of(error),
                extra={"task_uuid": self.signature.uuid, "task_name": self.signature.name},
            )
            return
        try:
            self.hooks.error(error)
        except BaseException:  # user code
            logger.exception("the error handler failed after task %s", self.signature.uuid)

    def _call(self, args: list[Any], kwargs: dict[str, Any]) -> Outcome:
        task = self.task
        assert task is not None
        try:
            if self.hooks.pre_task is not None:
                self.hooks.pre_task(self.signature)
            if self.engine.around:
                value = call_around(
                    self.engine.around, self.signature, lambda: task.function(*args, **kwargs)
                )
            else:
                value = task.function(*args, **kwargs)
            return self.succeeded(value)
        except (
            BaseException
        ) as error:  # user code may raise anything; SystemExit must not end the worker either
            return self.failed(error)

    async def run_async(self, report: Callable[[Execution], None] | None = None) -> None:
        """As `run`, for a coroutine function, on the running loop."""
        if is_gated(self.task, self.signature) and not await in_thread(self.pass_gate, self._stop):
            return
        prepared = self.prepare(report)
        if prepared is None:
            return
        if report is not None:
            report(self)
        enter(self.context)  # type: ignore[arg-type]  # in this coroutine's own context, which ends with it
        self.call_started = time.perf_counter()
        task = self.task
        assert task is not None
        args, kwargs = prepared
        outcome: Outcome
        try:
            if self.hooks.pre_task is not None:
                self.hooks.pre_task(self.signature)
            if self.engine.around:
                value = await await_around(
                    self.engine.around, self.signature, lambda: task.function(*args, **kwargs)
                )
            else:
                value = await task.function(*args, **kwargs)
            outcome = self.succeeded(value)
        except (
            BaseException
        ) as error:  # user code; a cancellation is the worker's own and means it is over already
            outcome = self.failed(error)
        self.runtime = time.perf_counter() - self.call_started
        self._finish_call(outcome)

    def succeeded(self, value: Any) -> Outcome:
        """What the function returned, as an outcome."""
        task = self.task
        assert task is not None
        if value is None or (task.settings.ignore_result and not self._passes_on):
            return Succeeded(())
        try:
            results = task.call.results(value)
        except ArgumentError as error:
            return Failed(error=str(error), error_type="ArgumentError", retryable=False)
        if type(value) is not int:
            limit = self.engine.config.max_result_size
            size = len(encode_results(results))
            if size > limit:
                return Failed(
                    error=f"the result has {size:,} bytes, more than max_result_size = {limit:,} "
                    "(store it elsewhere and return where)",
                    error_type="ArgumentError",
                    retryable=False,
                )
        return Succeeded(results)

    @property
    def _passes_on(self) -> bool:
        """Whether somebody gets the result from this run: a callback, the next step, a chord's callback."""
        signature = self.signature
        return (bool(signature.on_success) and not signature.immutable) or self._is_collected

    @property
    def _is_collected(self) -> bool:
        """Whether the result is read from the state, by whoever sends the chord's callback."""
        callback = self.signature.chord_callback
        return callback is not None and not callback.immutable

    def failed(self, error: BaseException) -> Outcome:
        """What the function raised, as an outcome."""
        if self.revoked and (
            isinstance(error, RetryTaskLater) or type(error).__name__ == "CancelledError"
        ):
            return REVOKED
        if isinstance(error, RetryTaskLater):
            return Postponed(error=text_of(error), delay=error.delay)
        settings = self.task.settings if self.task else _PLAIN
        self.error = (
            error
            if isinstance(error, Exception)
            else MachineryError(f"{type(error).__name__}: {text_of(error)}")
        )
        if isinstance(error, NoRetry) or self.revoked:
            retryable = False
        elif settings.retry_on is not None:
            retryable = isinstance(error, (*settings.retry_on, TimeLimitExceeded))
        else:
            retryable = True
        return Failed(
            error=text_of(error),
            error_type=type_name_of(error),
            traceback=traceback_of(error),
            retryable=retryable,
        )

    # Finish

    def finish(self, outcome: Outcome) -> bool:
        """End it with this outcome. False: something else has ended it before."""
        return self.end(outcome)

    def break_off(self, error: BaseException) -> None:
        """End it as failed, unless it has ended: something failed beside the call, and nobody else would end it."""
        logger.error(
            "task %s broke off",
            self.signature.uuid,
            exc_info=error,
            extra={"task_uuid": self.signature.uuid},
        )
        if not self._done:
            self.finish(self.failed(error))

    def begin(self) -> bool:
        """It is to be run now. False: it has ended before, because it was handed back."""
        with self._lock:
            if self._done:
                return False
            self.call_started = time.perf_counter()
            return True

    def hand_back(self, *, started: bool = False) -> bool:
        """Give the message back to its queue, to be run by another worker. False: it has ended, or begun.

        Args:
            started: also if it has begun.
        """
        with self._lock:
            if self._done or (self.call_started and not started):
                return False
            self._done = True
            self.settlement = Settlement(
                delivery=self.delivery,
                uuid=self.signature.uuid,
                name=self.signature.name,
                fate=Fate.BACK,
            )
            return True

    def time_out(self, limit: float) -> bool:
        """End it because its time is up. False: it has ended."""
        self.error = TimeLimitExceeded(f"ran longer than its time limit of {limit:g} s")
        if self.context is not None:
            self.context.cancel(time_is_up=True)
        return self.end(self.failed(self.error))

    def end(self, outcome: Outcome, *, fate: Fate = Fate.DONE, reason: str = "") -> bool:
        """As `finish`, and say what becomes of the message."""
        settlement, outcome = self._ended(outcome, fate=fate, reason=reason)
        if not self.settle(settlement):
            return False
        self.outcome = outcome
        return True

    def _ended(self, outcome: Outcome, *, fate: Fate, reason: str) -> tuple[Settlement, Outcome]:
        """What becomes true by this outcome; another one, if what follows from it cannot be sent."""
        try:
            backoff = self.task.settings.backoff if self.task else "fibonacci"
            now = self.engine.clock.now()
            then = follow_up(self.signature, outcome, now=now, backoff=backoff)
            return self._settlement(then, now, fate=fate, reason=reason), outcome
        except (
            Exception
        ) as error:  # a back-off function, a callback or a pre-publish hook of the user's
            logger.exception("what follows task %s cannot be sent", self.signature.uuid)
            outcome = Failed(
                error=f"what follows the task cannot be sent: {text_of(error)}",
                error_type=type_name_of(error),
                traceback=traceback_of(error),
                retryable=False,
            )
            return self._ended_in_failure(outcome, fate=fate, reason=reason), outcome

    def _ended_in_failure(self, outcome: Failed, *, fate: Fate, reason: str) -> Settlement:
        """With its error callbacks and the chords behind it, as far as they can be sent."""
        now = self.engine.clock.now()
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

    def fail_unstorable(self, error: Exception) -> None:
        """End it anew, as a failure: how it had ended cannot be stored. Called in the settler's thread, before anybody knows."""
        outcome = Failed(
            error=f"the result cannot be stored: {text_of(error)}",
            error_type=type_name_of(error),
            retryable=False,
        )
        self.settlement, self.outcome = self._ended(
            outcome, fate=Fate.DEAD, reason=REASON_UNSTORABLE
        )

    def refuse_sends(self, error: MachineryError) -> None:
        """End it anew: how it ended stands, and what it sends has failed. Called in the settler's thread."""
        settlement = self.settlement
        assert settlement is not None
        self.sends = ()
        self.settlement = in_place_of(
            settlement, [self.engine.refusal(message, error) for message in settlement.send]
        )

    def give_up(self, error: Exception) -> None:
        """End it anew, without a state: its message is a dead letter. Called in the settler's thread."""
        self.settlement = Settlement(
            delivery=self.delivery,
            uuid=self.signature.uuid,
            name=self.signature.name,
            fate=Fate.DEAD,
            reason=REASON_UNSTORABLE,
            error=f"{type(error).__name__}: {error}",
        )

    def _settlement(
        self, then: FollowUp, now: dt.datetime, *, fate: Fate, reason: str
    ) -> Settlement:
        signature = self.signature
        final = then.state is not State.RETRY
        spared = (
            self.task is not None and self.task.settings.ignore_result and not self._is_collected
        )
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
            finished_at=now if final else None,
            progress=self.progress,
            eta=then.retry.eta if then.retry is not None else None,
            message=self._kept(then),
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
            states=(state, *broken(then, signature, now), *out.states),
            send=out.messages,
            arrivals=arrivals,
        )

    def _kept(self, then: FollowUp) -> bytes:
        if then.retry is not None:
            return failing(then.retry)
        return self.delivery.body if then.state is State.FAILURE else b""

    def _following(self, then: FollowUp) -> tuple[Outgoing, Sequence[Arrival]]:
        if not then.send and then.retry is None and not then.arrived:
            return NOTHING, ()
        with on_behalf_of(self.signature, queue=self.delivery.queue, worker=self.worker):
            out, arrivals = self.engine.outgoing(then.send), self.engine.arrivals(then.arrived)
            if then.retry is None:
                return out, arrivals
            # The retry has no PENDING of its own: RETRY stays visible until it runs (Go overwrites it).
            retry = self.engine.message(self.engine.completed(then.retry))
        return Outgoing([retry, *out.messages], out.states, out.groups, out.signatures), arrivals

    def withdraw(self, *, is_over: bool) -> bool:
        """End it as revoked. False: it has begun, or ended.

        Args:
            is_over: the task has ended without its message, which is all that is left of it.
        """
        self.revoked = True
        if is_over:
            settlement, outcome = (
                Settlement(
                    delivery=self.delivery, uuid=self.signature.uuid, name=self.signature.name
                ),
                None,
            )
        else:
            settlement, outcome = self._ended(REVOKED, fate=Fate.DONE, reason="")
        if not self.settle(settlement, unbegun=True):
            return False
        self.outcome = outcome
        return True

    def settle(self, settlement: Settlement, *, unbegun: bool = False) -> bool:
        """End it like this. False: it has ended, or begun though it should be `unbegun`."""
        with self._lock:
            if self._done or (unbegun and self.call_started):
                return False
            self._done = True
            self.settlement = settlement
            return True

    def mark(self) -> Mark | None:
        """RECEIVED, STARTED or progress, if that is how it stands."""
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
                created_at=self.engine.clock.now(),
                started_at=self.started_at,
                progress=self.progress,
            ),
        )


_NAMELESS: Signature[Any] = Signature(name="")

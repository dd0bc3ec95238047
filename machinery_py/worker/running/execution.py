"""Execution: one delivery that a worker holds, from its bytes to its settlement.

    CLAIMED ──begin──→ BEGUN ──settle──→ SETTLED ──commit──→ COMMITTED
       └─────────────settle────────────────↑

intake.py       decodes it and finds its task, or settles it at once
runner.py       a Run calls the function for it, or for several of them (batches.py)
failures.py     what was raised        → an outcome
settlement_of   an outcome, follow_up  → a settlement
"""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import msgspec

from machinery_py.app import NOTHING, Application, Outgoing
from machinery_py.backends.base import Rider
from machinery_py.brokers.base import Delivery, Fate
from machinery_py.registry.options import TaskSettings, settings_of_call
from machinery_py.registry.outcomes import (
    NOT_ITS_FAILURE,
    REJECTED,
    REVOKED,
    WORKER_LOST,
    Failed,
    FollowUp,
    Outcome,
    broken,
    failing,
    follow_up,
)
from machinery_py.registry.task import Task
from machinery_py.stores.base import (
    REASON_FAILED,
    REASON_REJECTED,
    Mark,
    Session,
    Settlement,
    StoreTransaction,
)
from machinery_py.tasks.checkpoints import generation_of, kept_of, with_kept
from machinery_py.tasks.context import NO_STATE, Context, notes_json, on_behalf_of
from machinery_py.tasks.linking import link
from machinery_py.tasks.mailboxes import (
    Mailbox,
    Wanted,
    brings_result,
    encode,
    life_of,
    record_of,
    timer_of,
    waiting,
)
from machinery_py.tasks.signature import (
    HEADER_ATTEMPTS,
    HEADER_REST,
    HEADER_UNIQUE,
    HEADER_UNIQUE_START,
    Chain,
    Signature,
)
from machinery_py.tasks.states import (
    FAILURE,
    FINISHED,
    STARTED,
    Arrival,
    State,
    TaskState,
)
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import encode_signature
from machinery_py.wire.steps import unpack_step
from machinery_py.worker.running.hooks import WorkerHooks, failure_by, text_of

logger = get_logger(__name__)

_PLAIN = TaskSettings()
_NAMELESS: Signature[Any] = Signature(name="")
_NOTHING: tuple[Outgoing, Sequence[Arrival]] = (NOTHING, ())


class Stage(IntEnum):
    """How far an execution is. No stage is followed by an earlier one.

    CLAIMED: this worker holds its message. BEGUN: it has a slot. SETTLED: it is over, and what
    becomes of it is known. COMMITTED: the settler commits it, or has.
    """

    CLAIMED = 0
    BEGUN = 1
    SETTLED = 2
    COMMITTED = 3


#: The stages by their bare names: an attribute of an enum is slow in Python 3.11.
CLAIMED, BEGUN, SETTLED, COMMITTED = Stage


class Transition(NamedTuple):
    """Legal step: the verb of Execution that makes it, where from and where to, and by whom."""

    verb: str
    before: Sequence[Stage]
    after: Stage | None  # None: it stays where it is
    by: str


#: All steps. A verb at any other stage does nothing and returns False: somebody else was faster.
STEPS = (
    Transition("begin", (CLAIMED,), BEGUN, "the thread of a slot"),
    Transition(
        "settle",
        (CLAIMED, BEGUN),
        SETTLED,
        "the first that ends it: the receiver, its run, its time limit, a revocation, "
        "a lost lease, the end of the worker",
    ),
    Transition(
        "amend",
        (SETTLED, COMMITTED),
        None,
        "its transaction, which cannot be committed; the settler, which cannot store its end",
    ),
    Transition("pack", (SETTLED,), None, "whoever hands it to the settler"),
    Transition("commit", (SETTLED,), COMMITTED, "the settler, when it is packed"),
)


class Guard(Protocol):
    """Guard that lets an execution run, or settles it: see admission/guards.py."""

    def enter(self, one: Execution, on_lost: Callable[[], object], /) -> bool: ...

    def leave(self) -> None:
        """Give lock and slots back, without waiting for the store. Twice is fine, in any thread."""
        ...


class Suspension(NamedTuple):
    """How a task would wait: for what, and what its mailbox was when the signal was not there.

    `is_sent`: the task whose result it waits for is known already.
    """

    wanted: Wanted
    expected: bytes | None
    box: Mailbox
    is_sent: bool = False


@dataclass(slots=True, eq=False)
class Execution:
    """Delivery that this worker holds. Its stage changes by the verbs of STEPS alone."""

    app: Application
    hooks: WorkerHooks
    delivery: Delivery
    worker: str
    signature: Signature[Any] = _NAMELESS
    task: Task[..., Any] | None = None
    settings: TaskSettings = _PLAIN  # of the task, or of this call
    session: Session | None = None  # that has the delivery
    stage: Stage = CLAIMED
    transaction: StoreTransaction | None = None  # that it runs in
    step_transaction: StoreTransaction | None = None  # of its last step that had one
    context: Context | None = None  # of its run; None in a batch
    guard: Guard | None = None
    phase: State | None = None  # RECEIVED, STARTED: what a mark would say
    queued: bool = False  # a mark for it is on its way to the settler
    progress: tuple[float, float] | None = None
    noted: dict[str, str] = field(default_factory=dict)  # as Context.noted, which it is
    kept: int = 0  # checkpoints of its task, as far as known here
    kept_newly: bool = False  # it has kept one, and its settlement does not say so yet
    knows_kept: bool | None = None  # whether `kept` is all; None: no step of this run has asked
    has_mailbox: bool = False  # its task has asked for a signal
    suspension: Suspension | None = None  # how it would wait for one that has not come
    settlement: Settlement | None = None
    sends: Sequence[Signature[Any]] = ()  # what the settlement publishes
    carried: int | None = None  # bytes, about, of its settlement; None: it is not packed
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
    def may_have_kept(self) -> bool:
        """Whether there may be checkpoints of its task that it does not know of."""
        if self.knows_kept is not None:
            return not self.knows_kept
        headers = self.signature.headers
        if self.delivery.count > 1:
            return self.app.store.backend.features.checkpoints
        return bool(headers) and (
            kept_of(self.signature) is not None or generation_of(self.signature) > 0
        )

    @property
    def strikes(self) -> int:
        """Workers and task processes that were lost while they ran it."""
        return self.delivery.strikes + self.signature.strikes

    def waited(self, until: dt.datetime) -> float | None:
        """Return the seconds since its ETA, or if it has none since it was sent; None: unknown."""
        since = self.signature.eta or self.delivery.sent_at
        return None if since is None else max(0.0, (until - since).total_seconds())

    @property
    def kept_call(self) -> bytes:
        """The message, if its states are to keep it: it is small, and holds no secret."""
        body, limit = self.delivery.body, self.app.largest_call
        return body if len(body) <= limit and b'"secret"' not in body else b""

    @property
    def is_over(self) -> bool:
        return self.stage >= SETTLED

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

    # The verbs of STEPS. One lock for all executions of a worker: see WorkerHooks.settling

    def begin(self) -> bool:
        """Begin the run. False: it was handed back or revoked before."""
        with self.hooks.settling:
            if self.stage is not CLAIMED:
                return False
            self.stage, self.call_started = BEGUN, time.perf_counter()
            return True

    def settle(
        self,
        settlement: Settlement,
        sends: Sequence[Signature[Any]] = (),
        *,
        unbegun: bool = False,
    ) -> bool:
        """End it like this. False: it has ended, or begun though it should be `unbegun`."""
        with self.hooks.settling:
            if self.stage >= SETTLED or (unbegun and self.stage is BEGUN):
                return False
            self.stage, self.settlement, self.sends = SETTLED, settlement, sends
            return True

    def amend(self, settlement: Settlement, sends: Sequence[Signature[Any]] = ()) -> bool:
        """End it like this instead: only the one that settled it, or commits it, may."""
        if self.stage is not SETTLED and self.stage is not COMMITTED:
            return False
        self.settlement, self.sends = settlement, sends
        return True

    def pack(self, carried: int) -> bool:
        """Let it be committed: nothing changes its settlement any more, of about so many bytes."""
        if self.stage is not SETTLED:
            return False
        self.carried = carried
        return True

    def commit(self) -> bool:
        """Note that the settler commits it. For its thread alone. False: it is not packed yet."""
        if self.stage is not SETTLED or self.carried is None:
            return False
        self.stage = COMMITTED
        return True

    # Ways to settle it: each returns whether it was the first

    def finish(
        self, outcome: Outcome, *, fate: Fate = Fate.DONE, reason: str = "", unbegun: bool = False
    ) -> bool:
        """End it with this outcome, and all that follows from it."""
        settlement, sends = settlement_of(self, outcome, fate=fate, reason=reason)
        return self.settle(settlement, sends, unbegun=unbegun)

    def hand_back(self, *, started: bool = False) -> bool:
        """Give the message back to its queue, for another worker, unless it has begun.

        Args:
            started: also if it has begun. A task that runs once has failed then.
        """
        if started and self.runs_once and self.phase is STARTED:
            return self.lose("its worker ended before it did")
        return self.settle(self.end_of_delivery(Fate.BACK), unbegun=not started)

    def lose(self, text: str) -> bool:
        """End it as cut off, for good."""
        return self.finish(self.cut_off(text))

    def cut_off(self, text: str) -> Failed:
        """Return the outcome of a run that was lost, and may not be repeated."""
        why = "ack='early'" if self.settings.ack == "early" else "on_worker_lost='fail'"
        error = f"{text} ({why}: it is not run again)"
        return Failed(error=error, error_type=WORKER_LOST, retryable=False)

    def withdraw(self, *, is_over: bool) -> bool:
        """End it as revoked, unless it has begun.

        Args:
            is_over: the task has ended already; only its message is left.
        """
        self.revoked = True
        if is_over:
            return self.settle(self.end_of_delivery(), unbegun=True)
        return self.finish(REVOKED, unbegun=True)

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

    # What is written of it

    def mark(self) -> Mark | None:
        """Return a mark of RECEIVED, STARTED or its progress; None if there is none.

        There is none of what is over, or runs in a transaction: if that sees the database as it was
        at its begin (REPEATABLE READ), its last step would meet a state that is written since.
        """
        if self.stage >= SETTLED or self.phase is None or self.transaction is not None:
            return None
        keeps = self.app.publisher.is_on or self.app.config.keep_calls > 0  # most do not
        state = TaskState(
            task_uuid=self.signature.uuid,
            task_name=self.signature.name,
            state=self.phase,
            created_at=self.app.now(),
            queue=self.delivery.queue,
            worker=self.worker,
            started_at=self.started_at,
            message=self.kept_call if keeps else b"",
        )
        if self.signature.headers or self.progress or self.noted:
            state = _with_details(self, state)
        return Mark(delivery=self.delivery, state=state)


# From an outcome to a settlement, and the signatures that it publishes


Ending = tuple[Settlement, Sequence[Signature[Any]]]


def settlement_of(
    execution: Execution, outcome: Outcome, *, fate: Fate = Fate.DONE, reason: str = ""
) -> Ending:
    """Return the settlement of this outcome; of a failure if its follow-up cannot be sent."""
    try:
        if execution.kept or execution.may_have_kept:
            _note_checkpoints(execution)
        now = execution.app.now()
        then = follow_up(
            execution.signature,
            outcome,
            now=now,
            backoff=execution.settings.backoff,
            started_at=execution.started_at,
            worker=execution.worker,
        )
        return _settlement(execution, then, now, fate=fate, reason=reason)
    except Exception as error:  # a back-off function, a callback or a pre-publish hook
        logger.exception("what follows task %s cannot be sent", execution.signature.uuid)
        outcome = failure_by(error, "what follows the task cannot be sent: ", retryable=False)
        return _of_failure(execution, outcome, fate=fate, reason=reason)


def _note_checkpoints(execution: Execution) -> None:
    """Let what follows this run know of its checkpoints; after a new one tries begin anew."""
    newly, execution.kept_newly = execution.kept_newly, False
    header = kept_of(execution.signature)
    number = max(execution.kept, 0 if header is None else header.number)
    execution.signature = with_kept(execution.signature, number, newly=newly)


def _of_failure(execution: Execution, outcome: Failed, *, fate: Fate, reason: str) -> Ending:
    """Return the settlement of a failure, with as much of its follow-up as can be sent."""
    now = execution.app.now()
    for signature in (execution.signature, execution.signature.replace(on_success=())):
        try:
            return _settlement(
                execution, follow_up(signature, outcome, now=now), now, fate=fate, reason=reason
            )
        except Exception as error:
            logger.error(
                "nor can its error callbacks: %s",
                text_of(error),
                extra={"task_uuid": execution.signature.uuid},
            )
    bare = execution.signature.replace(on_success=(), on_error=())
    return _settlement(execution, follow_up(bare, outcome, now=now), now, fate=fate, reason=reason)


def _settlement(
    execution: Execution, then: FollowUp, now: dt.datetime, *, fate: Fate, reason: str
) -> Ending:
    signature = execution.signature
    spared = execution.settings.ignore_result and not execution.is_collected
    if then.state is FAILURE and fate is Fate.DONE and _is_kept_dead(execution, then):
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
        queue=execution.delivery.queue,
        worker=execution.worker,
        started_at=execution.started_at,
        finished_at=now if then.state in FINISHED else None,
        eta=then.retry.eta if then.retry is not None else None,
        message=_kept(execution, then),
        keep_for=execution.settings.result_expires,
    )
    out, arrivals = _NOTHING
    riders: Sequence[Rider] = ()
    if then.waits:
        out, riders = _waiting(execution, then)
    elif then.send or then.retry is not None or then.arrived:
        out, arrivals = _following(execution, then)
    if signature.headers or execution.progress or execution.noted:
        state = _with_details(execution, state)
    states: Sequence[TaskState] = (state,)
    if then.breaks or out.states:
        states = (*states, *broken(then, signature, now), *out.states)
    settlement = Settlement(
        delivery=execution.delivery,
        uuid=signature.uuid,
        name=signature.name,
        fate=fate,
        reason=reason,
        error=then.error,
        states=states,
        send=out.messages,
        groups=out.groups,
        arrivals=arrivals,
        riders=riders,
    )
    return settlement, out.signatures


def _is_kept_dead(execution: Execution, then: FollowUp) -> bool:
    """Return whether the message of the failed task becomes a dead letter."""
    wanted = (
        then.error_type == REJECTED
        or execution.settings.on_failure == "dead_letter"
        or execution.signature.stop_task_deletion_on_error
    )
    return wanted and not execution.revoked and then.error_type not in NOT_ITS_FAILURE


def _kept(execution: Execution, then: FollowUp) -> bytes:
    if (again := then.retry or then.last) is not None:
        return failing(again)
    is_kept = then.state is FAILURE or HEADER_ATTEMPTS in execution.signature.headers
    if is_kept and execution.kept:
        return encode_signature(execution.signature)
    if is_kept:
        return execution.delivery.body
    keeps = execution.app.publisher.is_on or execution.app.config.keep_calls > 0  # most do not
    return execution.kept_call if keeps else b""


def _on_behalf_of(execution: Execution) -> contextlib.AbstractContextManager[object]:
    return on_behalf_of(
        execution.signature,
        queue=execution.delivery.queue,
        worker=execution.worker,
        handed_on=NO_STATE if execution.context is None else execution.context.handed_on,
    )


def _following(execution: Execution, then: FollowUp) -> tuple[Outgoing, Sequence[Arrival]]:
    with _on_behalf_of(execution):
        out, arrivals = (
            execution.app.outgoing(then.send, then.groups, then.awaited),
            execution.app.arrivals(then.arrived),
        )
        if then.retry is None:
            return out, arrivals
        # The retry has no PENDING state: RETRY stays visible until it runs (Go overwrites it).
        retry = execution.app.message(execution.app.stamped(execution.app.completed(then.retry)))
    return Outgoing([retry, *out.messages], out.states, out.groups, out.signatures), arrivals


def _waiting(execution: Execution, then: FollowUp) -> tuple[Outgoing, Sequence[Rider]]:
    """Let the task wait: the message of its next run is in its mailbox.

    Sent are its timer, and the task whose result it waits for.
    """
    suspension, app, again = execution.suspension, execution.app, then.retry
    assert suspension is not None
    assert again is not None
    queue = again.routing_key or execution.delivery.queue
    with _on_behalf_of(execution):
        again = app.stamped(app.completed(again.replace(routing_key=queue, eta=None)))
    wanted, message = suspension.wanted, app.message(again)
    box = waiting(suspension.box, wanted, body=message.body, run=again.run, tenant=message.tenant)
    assert box.wait is not None
    rider = Rider(
        name=record_of(again.uuid),
        expected=suspension.expected,
        body=encode(box),
        life=life_of(box, app.now()),
    )
    out = NOTHING
    if wanted.workflow and not suspension.is_sent:
        out = _child(execution, wanted, queue)
    if wanted.until:
        timer = app.message(timer_of(again.uuid, box.wait, queue))
        out = msgspec.structs.replace(out, messages=[timer, *out.messages])
    return out, (rider,)


def _child(execution: Execution, wanted: Wanted, queue: str) -> Outgoing:
    """Return the workflow whose result the task waits for; its end tells the task."""
    uuid, app = execution.signature.uuid, execution.app
    success, failure = brings_result(uuid, wanted.name, queue)
    role = Signature[Any](name="", uuid=wanted.child, on_success=(success,), on_error=(failure,))
    *steps, last = Chain((unpack_step(wanted.workflow),)).steps
    if isinstance(last, Signature) and last.immutable and not last.on_success:
        last = last.replace(immutable=False)  # a worker of Go would pass on no result
    plan = link(Chain((*steps, last)).catch(failure), now=app.now(), role=role)
    with _on_behalf_of(execution):
        return app.outgoing(plan.first, plan.groups, plan.awaited)


def _with_details(execution: Execution, state: TaskState) -> TaskState:
    """Return the state with what most runs have not.

    A call with more than 15 keywords goes through a dict: one for all would cost 1 µs more.
    """
    signature = execution.signature
    return msgspec.structs.replace(
        state,
        run=signature.run,
        attempt=signature.attempt,
        progress=execution.progress,
        notes_json=notes_json(execution.noted) if execution.noted else "",
        root=signature.root,
        parent=signature.parent,
    )

"""The rules of what happens when a task has ended. Pure, and in this place alone.

`follow_up` returns the next state, what is to be sent, and which groups have an arrival.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from typing import Any, assert_never

import msgspec
from msgspec.structs import force_setattr

from machinery_py.clock import LONGEST
from machinery_py.errors import ArgumentError, NameRefused, WorkflowError
from machinery_py.names import check_uuid
from machinery_py.tasks.attempts import Attempt, with_attempt
from machinery_py.tasks.backoff import MAX_DELAY, Backoff, delay_for
from machinery_py.tasks.checkpoints import next_generation, tried
from machinery_py.tasks.lineage import Last, lasts_of
from machinery_py.tasks.linking import link
from machinery_py.tasks.mailboxes import RESULT
from machinery_py.tasks.signature import (
    COUNTED,
    FIRST_ATTEMPT,
    HEADER_ATTEMPT,
    HEADER_EXPIRES,
    HEADER_FAILED,
    HEADER_GENERATION,
    HEADER_KEPT,
    HEADER_LAST,
    HEADER_LOST,
    HEADER_LOST_HOW,
    HEADER_ORIGIN,
    HEADER_PARENT,
    HEADER_POSTPONED,
    HEADER_REJECTED,
    HEADER_ROOT,
    HEADER_RUN,
    HEADER_UNIQUE,
    HEADER_UNIQUE_START,
    UNLIMITED,
    Arg,
    AttemptNumber,
    Chain,
    Lazy,
    Signature,
    Step,
)
from machinery_py.tasks.states import (
    FAILURE,
    RETRY,
    SUCCESS,
    SUSPENDED,
    GroupMeta,
    State,
    TaskState,
)
from machinery_py.tasks.workflow import is_tolerant
from machinery_py.texts import MAX_ERROR, cut, get_logger, printable
from machinery_py.wire.signatures import decode_signature, encode_signature
from machinery_py.wire.steps import pack_step, task_names, unpack_step

logger = get_logger(__name__)

CHORD_FAILED = "ChordMemberFailed"  # the error type of a chord's callback that never ran
STEP_FAILED = "ChainStepFailed"  # the error type of a last task that never ran


class Succeeded(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The task returned. One result for each returned value."""

    results: Sequence[Arg] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """The task raised, ran out of time, or never could run.

    Attributes:
        error: cut to MAX_ERROR, so that whoever it is sent to can get it. In all three texts half a
            surrogate pair, which UTF-8 cannot encode, is written out.
        retryable: a counted retry may follow; False for bad arguments, NoRetry and the like.
        cause: name, UUID and error type of the task that it is due to; None: itself.
    """

    error: str
    error_type: str = ""
    traceback: str = ""
    retryable: bool = True
    cause: tuple[str, str, str] | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "error", cut(printable(self.error), MAX_ERROR))
        force_setattr(self, "error_type", cut(printable(self.error_type), MAX_ERROR))
        force_setattr(self, "traceback", printable(self.traceback))


class Postponed(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """The task asked to be run again later (Go's `ErrRetryTaskLater`): not counted as a try.

    Attributes:
        limit: how often it may be postponed; then it fails. None: without end.
    """

    error: str
    delay: float
    limit: int | None = None


class Retried(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """The task asked for its next try (`Retry`).

    Attributes:
        failed: its end if no try is left; RETRY shows the same error.
        delay, eta: of the next try; by the back-off if both are None.
        queue: of all further tries; empty: as before.
        args: of all further tries; None: as before.
        retries: tries after the first in all, in place of the call's own; None: those.
    """

    failed: Failed
    delay: float | None = None
    eta: dt.datetime | None = None
    queue: str = ""
    args: Sequence[Arg] | None = None
    retries: int | None = None


class Sleeping(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """The task sleeps, or waits for a signal: its next run begins then, and is no further try.

    Attributes:
        waits: for a signal, until then at the latest; None: without end.
    """

    error: str
    until: dt.datetime | None
    waits: bool = False


class Rejected(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """The task put its message back (`Reject` with requeue): again, and not counted as a try."""

    error: str


class Lost(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag=True):
    """The task's process ended before the task did: again at once, with a strike, not a try."""

    error: str


class Replaced(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The task asked to be replaced (`Replace`), by a workflow as `pack_step` has it."""

    workflow: bytes


def replaced_by(workflow: Step[Any]) -> Outcome:
    """Return the outcome of `Replace`: a failure, if the workflow cannot be sent."""
    try:
        return Replaced(bytes(pack_step(workflow)))
    except (ArgumentError, WorkflowError) as error:
        text = f"the workflow in its place: {error}"
        return Failed(error=text, error_type=type(error).__name__, retryable=False)


class Batched(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The calls of a batch have ended, each with an outcome of its own."""

    outcomes: Sequence[
        Succeeded | Failed | Postponed | Retried | Sleeping | Rejected | Lost | Replaced
    ]


# Tagged, since what a task process replies holds one of them (worker/processes/frames.py).
Outcome = Succeeded | Failed | Postponed | Retried | Sleeping | Rejected | Lost | Batched | Replaced

MAX_REPLACED = 1000  # bytes of the names in the state of a task that was replaced
WORKER_LOST = "WorkerLost"  # error type of a lost run; errors.WorkerLost
POSTPONED = "machinery_py.errors.RetryTaskLater"  # error type at its limit
REVOKED = Failed(error="revoked", error_type="Revoked", retryable=False)
REJECTED = "Rejected"  # error type of what ended in Reject; its message is a dead letter
IGNORED = "Ignored"  # error type of what ended in Ignore
#: Somebody ended it, or it ended as it was asked to, or asked that nobody looks.
NOT_ITS_FAILURE = ("Revoked", "Expired", IGNORED)
MAX_REJECTED_PAUSE = 60.0  # seconds


class Arrived(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A member of a chord's group that is over. `ok`: the chord goes on, if without its result."""

    member: Signature[Any]
    ok: bool


class FollowUp(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Changes that follow from an outcome, made together or not at all.

    Attributes:
        retry: the same task, to be run again.
        waits: not before a signal comes, or its ETA: it is not sent.
        send: callbacks; or the first tasks of the workflow that replaces it.
        groups, awaited: of that workflow, as in a Plan.
        last: its last task, which has the place of this one.
        arrived: members of groups that are over: this task, and those after it that never run now.
        breaks: the last task of the chain, and what that stands for, which will never run now;
            their states say why.
    """

    state: State
    results: Sequence[Arg] = ()
    error: str = ""
    error_type: str = ""
    traceback: str = ""
    retry: Signature[Any] | None = None
    send: Sequence[Signature[Any]] = ()
    arrived: Sequence[Arrived] = ()
    breaks: Sequence[Last] = ()
    groups: Sequence[GroupMeta] = ()
    awaited: Sequence[Signature[Any]] = ()
    last: Signature[Any] | None = None
    waits: bool = False


def follow_up(
    signature: Signature[Any],
    outcome: Outcome,
    *,
    now: dt.datetime,
    backoff: Backoff = "fibonacci",
    started_at: dt.datetime | None = None,
    worker: str = "",
) -> FollowUp:
    """Say what must happen now that the task has ended like this.

    Go Machinery's rules: results go to the end of a callback's arguments unless *this* task is
    immutable; the error text always goes in front of an error callback's arguments; error callbacks
    run once, after the last try.

    Args:
        started_at, worker: of this try, for those who look at the next.
    """
    then = _next(signature, outcome, now=now, backoff=backoff)
    if then.retry is None or type(outcome) is Sleeping:
        return then
    ended = Attempt(signature.attempt, started_at, now, worker, then.error_type, then.error)
    return msgspec.structs.replace(then, retry=with_attempt(then.retry, ended))


def _next(
    signature: Signature[Any], outcome: Outcome, *, now: dt.datetime, backoff: Backoff
) -> FollowUp:
    match outcome:
        case Succeeded(results):
            return FollowUp(
                state=SUCCESS,
                results=results,
                send=_success_callbacks(signature, results),
                arrived=(Arrived(member=signature, ok=True),)
                if signature.chord_callback is not None
                else (),
            )
        case Postponed(error=error, delay=delay, limit=limit):
            if limit is not None and signature.postponed >= limit:
                text = f"{error}; postponed {limit} times, which is its limit"
                return _failure(signature, Failed(error=text, error_type=POSTPONED))
            return FollowUp(
                state=RETRY, error=error, retry=_postponed(signature, now=now, delay=delay)
            )
        case Sleeping(error=error, until=until, waits=waits):
            again = _suspended(signature, now).replace(eta=until)
            return FollowUp(
                state=RETRY, error=error, error_type=SUSPENDED, retry=again, waits=waits
            )
        case Retried(failed=failed):
            if (left := tries_left(signature, outcome.retries)) <= 0:
                return _failure(signature, failed)
            return _retry(failed, _asked(signature, outcome, left, now=now, backoff=backoff))
        case Rejected(error=error):
            return FollowUp(
                state=RETRY,
                error=error,
                error_type=REJECTED,
                retry=_put_back(signature, now=now),
            )
        case Lost(error=error):
            return FollowUp(
                state=RETRY,
                error=error,
                error_type=WORKER_LOST,
                retry=_struck(signature, error, now),
            )
        case Failed(retryable=True) if signature.retry_count > 0:
            return _retry(
                outcome, _next_try(signature, signature.retry_count, now=now, backoff=backoff)
            )
        case Failed():
            return _failure(signature, outcome)
        case Replaced(workflow):
            return _replaced(signature, unpack_step(workflow), now)
        case Batched():
            raise TypeError("each call of a batch ends by itself")
        case _:
            assert_never(outcome)


def _retry(failed: Failed, retry: Signature[Any]) -> FollowUp:
    return FollowUp(
        state=RETRY,
        error=failed.error,
        error_type=failed.error_type,
        traceback=failed.traceback,
        retry=retry,
    )


#: Headers of a task that belong to its place, not to its call.
_OF_PLACE = (
    HEADER_LAST,
    HEADER_ORIGIN,
    HEADER_PARENT,
    HEADER_ROOT,
    HEADER_UNIQUE,
    HEADER_UNIQUE_START,
)


def _replaced(signature: Signature[Any], workflow: Step[Any], now: dt.datetime) -> FollowUp:
    """Let the last task of the workflow be the next run of this one."""
    headers = {key: value for key, value in signature.headers.items() if key in _OF_PLACE}
    if HEADER_KEPT in signature.headers or HEADER_GENERATION in signature.headers:
        headers[HEADER_GENERATION] = next_generation(signature)  # its steps are others
    role = signature.replace(headers={**headers, HEADER_RUN: str(signature.run + 1)})
    plan = link(Chain((workflow,)).catch(*signature.on_error), now=now, role=role)
    uuid, text = signature.uuid, f"replaced by {', '.join(task_names(workflow)) or 'nothing'}"
    known = {one.uuid: one for one in (*plan.first, *plan.awaited)}
    return FollowUp(
        state=RETRY,
        error=cut(text, MAX_REPLACED),
        error_type="Replaced",
        last=known[uuid],
        # It is sent as a retry is if it is the first as well: without a PENDING state.
        retry=next((one for one in plan.first if one.uuid == uuid), None),
        send=[one for one in plan.first if one.uuid != uuid],
        awaited=[one for one in plan.awaited if one.uuid != uuid],
        groups=plan.groups,
    )


def _failure(signature: Signature[Any], failed: Failed) -> FollowUp:
    return FollowUp(
        state=FAILURE,
        error=failed.error,
        error_type=failed.error_type,
        traceback=failed.traceback,
        send=_error_callbacks(signature, failed),
        arrived=tuple(_never_to_arrive(signature)),
        breaks=lasts_of(signature),
    )


def _success_callbacks(
    signature: Signature[Any], results: Sequence[Arg]
) -> Sequence[Signature[Any]]:
    callbacks = signature.on_success
    if not callbacks:
        return ()
    if not results:
        return tuple(callbacks)
    if signature.immutable:  # what waits for the result gets it all the same
        return tuple(
            one.with_args(after=results) if one.name == RESULT else one for one in callbacks
        )
    return tuple(one if one.is_fixed else one.with_args(after=results) for one in callbacks)


def _error_callbacks(signature: Signature[Any], failed: Failed) -> Sequence[Signature[Any]]:
    if not signature.on_error:
        return ()
    text = Arg(type="string", value=failed.error)
    cause = failed.cause or (signature.name, signature.uuid, failed.error_type)
    headers = {HEADER_FAILED: msgspec.json.encode(cause).decode()}
    if signature.root:  # they are no part of the workflow: if it is cancelled, they are run
        headers[HEADER_ROOT] = signature.uuid
    return tuple(
        (one if one.is_fixed else one.with_args(before=(text,))).with_headers(**headers)
        for one in signature.on_error
    )


def tries_left(signature: Signature[Any], retries: int | None) -> int:
    """Return how many tries may follow this one, if there may be so many after the first."""
    if retries is None or retries == UNLIMITED:
        return signature.retry_count if retries is None else UNLIMITED
    return retries - tried(signature) + 1


def _next_try(
    signature: Signature[Any], left: int, *, now: dt.datetime, backoff: Backoff
) -> Signature[Any]:
    """Return the task for its next try, after the back-off's pause."""
    delay = delay_for(backoff, tried(signature), signature.retry_timeout)
    if left == UNLIMITED:
        delay = min(delay, MAX_DELAY)  # else Fibonacci's pauses would soon be years
    # Go's field: the delay before this try, from which the next Fibonacci number is taken.
    signature = signature.replace(retry_timeout=max(int(min(LONGEST, delay)), 1))
    return _again(_counted_down(signature, left), now=now, delay=delay, tries=1)


def _asked(
    signature: Signature[Any], wanted: Retried, left: int, *, now: dt.datetime, backoff: Backoff
) -> Signature[Any]:
    """Return the task for the next try that it has asked for."""
    if wanted.args is not None:
        signature = signature.replace(args=wanted.args)
    if wanted.queue:
        signature = signature.replace(routing_key=wanted.queue)
    delay = wanted.delay if wanted.eta is None else (wanted.eta - now).total_seconds()
    if delay is None:
        return _next_try(signature, left, now=now, backoff=backoff)
    return _again(_counted_down(signature, left), now=now, delay=delay, tries=1)


def _counted_down(signature: Signature[Any], left: int) -> Signature[Any]:
    return signature.replace(retry_count=left if left == UNLIMITED else left - 1)


def _postponed(signature: Signature[Any], *, now: dt.datetime, delay: float) -> Signature[Any]:
    """Return the task for its next run, which is no further try."""
    again = _again(signature, now=now, delay=delay)
    return again.with_headers(**{HEADER_POSTPONED: str(signature.postponed + 1)})


def _suspended(signature: Signature[Any], now: dt.datetime) -> Signature[Any]:
    """Return the next run of a task that has begun: its expiry was for that."""
    again = _again(signature, now=now, delay=0.0)
    headers = {name: one for name, one in again.headers.items() if name != HEADER_EXPIRES}
    return again.replace(headers=headers)


def _put_back(signature: Signature[Any], *, now: dt.datetime) -> Signature[Any]:
    """Return the task for its next run: at once, and with pauses if that has not helped."""
    before = signature.rejected
    delay = min(MAX_REJECTED_PAUSE, 2.0 ** min(before - 1, 10)) if before else 0.0
    again = _again(signature, now=now, delay=delay)
    return again.with_headers(**{HEADER_REJECTED: str(before + 1)})


def _again(
    signature: Signature[Any], *, now: dt.datetime, delay: float, tries: int = 0
) -> Signature[Any]:
    """Return the same task for its next run; UUID, group and callbacks stay.

    Args:
        tries: by how many the next run is further; 0: it is no further try.
    """
    attempt = AttemptNumber(signature.attempt + tries)
    # Only a Go worker sends what is still to be counted; it is not counted from the retry.
    headers = {key: value for key, value in signature.headers.items() if key not in COUNTED}
    headers[HEADER_RUN] = str(signature.run + 1)
    if attempt > FIRST_ATTEMPT:
        headers[HEADER_ATTEMPT] = str(attempt)
    delay = min(LONGEST, max(0.0, delay))
    return signature.replace(headers=headers, eta=now + dt.timedelta(seconds=delay))


def _struck(signature: Signature[Any], how: str, now: dt.datetime) -> Signature[Any]:
    again = _again(signature, now=now, delay=0.0)
    return again.with_headers(**{HEADER_LOST: str(signature.strikes + 1), HEADER_LOST_HOW: how})


def _never_to_arrive(signature: Signature[Any]) -> Iterator[Arrived]:
    """Yield the chord members among this task and all that would have followed.

    They fail, too. A chord that goes on without a failed member does so if this task is the member,
    or in front of it inside the group, so that the member's state says why. (One in front of the
    group would have started all members.)
    """
    inside = {signature.uuid, *(uuid for uuid, _ in lasts_of(signature))}
    for one, callback in _members(signature, callbacks=False):
        yield Arrived(member=one, ok=one.uuid in inside and is_tolerant(callback))


def followers(signature: Signature[Any]) -> Iterator[tuple[Signature[Any], Signature[Any]]]:
    """Yield the chord members among this task and all that follow it, also behind chords.

    With each comes its chord's callback.
    """
    return _members(signature, callbacks=True)


def _members(
    signature: Signature[Any], *, callbacks: bool
) -> Iterator[tuple[Signature[Any], Signature[Any]]]:
    waiting = [signature]
    while waiting:
        member = waiting.pop()
        if (callback := member.chord_callback) is not None:
            yield member, callback
            if callbacks:
                waiting.append(callback)
        if _may_hold_members(member.on_success):
            waiting.extend(member.on_success)


def _may_hold_members(callbacks: Sequence[Signature[Any]]) -> bool:
    # A chain of thousands is not unpacked to find out that it has no group in it.
    return b'"ChordCallback":{' in callbacks.raw if isinstance(callbacks, Lazy) else bool(callbacks)


# What the failure of a waiting task takes along. Its state keeps that, since its message is with
# the broker, or in a step before it.

ALONE = b"-"  # nothing


def failing(signature: Signature[Any]) -> bytes:
    """Encode what is needed to fail the task without its message."""
    on_success: Sequence[Signature[Any]] = ()
    if signature.on_success and any(any(_never_to_arrive(one)) for one in signature.on_success):
        on_success = signature.on_success
    if not (on_success or signature.on_error or signature.chord_callback or lasts_of(signature)):
        return ALONE
    bare = signature.replace(uuid="", eta=None, args=(), on_success=on_success)
    # The members of a chord are sent together, and are mostly alike in this.
    last, kept = _encoded[0]
    if (
        bare.chord_callback is None
        or bare.chord_callback is not last.chord_callback
        or bare != last
    ):
        kept = encode_signature(bare)
        _encoded[0] = bare, kept
    return kept


_encoded: list[tuple[Signature[Any], bytes]] = [(Signature(name=""), b"")]  # the last one


def failing_of(kept: bytes, name: str, uuid: str) -> Signature[Any]:
    """The signature that `failing` was asked for, as far as its failure needs it."""
    return (Signature(name=name) if kept == ALONE else decode_signature(kept)).replace(uuid=uuid)


def broken(then: FollowUp, signature: Signature[Any], now: dt.datetime) -> Sequence[TaskState]:
    """The states of the tasks that fail with this step: see `lasts_of`."""
    states: list[TaskState] = []
    for uuid, run in then.breaks:
        try:
            check_uuid(uuid, signature.routing_key)  # a header says it
        except NameRefused as error:
            logger.error("the last task of the chain of %s cannot be: %s", signature.uuid, error)
            continue
        states.append(
            TaskState(
                task_uuid=uuid,
                state=FAILURE,
                error=f"step {signature.name} {signature.uuid} failed: {then.error}",
                error_type=STEP_FAILED,
                root=signature.root,
                created_at=now,
                finished_at=now,
                run=run,
            )
        )
    return states

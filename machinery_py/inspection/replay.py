"""Sending tasks again: those that failed, and dead letters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from machinery_py.app import Application
from machinery_py.bounds import CHECKPOINT_LIFE
from machinery_py.brokers.base import DeadLetter, Message
from machinery_py.errors import MachineryError, PublishRefused, PublishUnknown, StepRefused
from machinery_py.registry.outcomes import STEP_FAILED
from machinery_py.signals import forget_signals, keep_signals
from machinery_py.stores.base import REASON_FAILED, REASON_REJECTED, Submission
from machinery_py.tasks.checkpoints import (
    all_tries,
    from_its_start,
    generation_of,
    kept_of,
    of_generation,
    uncounted,
    with_kept,
)
from machinery_py.tasks.lineage import lasts_of
from machinery_py.tasks.signature import (
    HEADER_ATTEMPT,
    HEADER_ATTEMPTS,
    HEADER_LOST,
    HEADER_LOST_HOW,
    HEADER_POSTPONED,
    HEADER_REJECTED,
    HEADER_RUN,
    UNLIMITED,
    Signature,
    new_uuid,
)
from machinery_py.tasks.states import State, TaskState
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import encode_signature

logger = get_logger(__name__)

#: Headers of a task that has been tried.
_OF_TRIES = (
    HEADER_RUN,
    HEADER_ATTEMPT,
    HEADER_ATTEMPTS,
    HEADER_POSTPONED,
    HEADER_REJECTED,
    HEADER_LOST,
    HEADER_LOST_HOW,
)

Sent = tuple[Signature[object], bytes]
"""A task to be sent again, and its message."""


def replay(
    app: Application,
    pairs: Sequence[Sent],
    mended: Sequence[TaskState] = (),
    *,
    from_start: bool = False,
) -> list[str]:
    """Send these messages again; return the UUIDs, without those that were refused for good.

    Args:
        mended: further states, which replace finished ones in the same step as the first messages.
        from_start: make the steps of the tasks again that have checkpoints.

    Raises:
        StepRefused: checkpoints of each are gone; nothing was sent.
    """
    pairs = behind_steps(app, pairs, from_start=from_start)
    sent: list[str] = []
    for start in range(0, len(pairs), 1000):
        sent += _replay_batch(app, pairs[start : start + 1000], () if start else mended)
    return sent


def behind_steps(
    app: Application, pairs: Sequence[Sent], *, from_start: bool = False, whole: bool = False
) -> Sequence[Sent]:
    """Return those that can go on behind their checkpoints; the others are logged.

    Raises:
        StepRefused: none can; or, with `whole`, one cannot.
    """
    if not app.store.backend.features.checkpoints:
        return pairs
    keep_signals(app, [signature.uuid for signature, _ in pairs])
    found: list[Sent] = []
    refused: StepRefused | None = None
    for pair in pairs:
        try:
            found.append(_behind_steps(app, pair, from_start=from_start))
        except StepRefused as error:
            if whole:
                raise
            logger.error("%s", error, extra={"task_uuid": pair[0].uuid})
            refused = error
    if refused is not None and not found:
        raise refused
    return found


def _behind_steps(app: Application, pair: Sent, *, from_start: bool) -> Sent:
    """Return the task as it goes on behind its checkpoints, or makes its steps anew."""
    signature, body = pair
    backend = app.store.backend
    rows = backend.checkpoints(signature.uuid)
    kept, number = kept_of(signature), len(of_generation(rows, generation_of(signature)))
    if from_start:
        forget_signals(app, signature.uuid)
        backend.end_checkpoints(signature.uuid, 0)
        signature = from_its_start(signature)
    elif kept is not None and number < kept.number:
        raise StepRefused(
            f"task {signature.name} {signature.uuid} is not sent again: {number} of its "
            f"{kept.number} checkpoints are there, and it would make the steps of the others again "
            "(if that is wanted: from_start=True, machinery retry --from-start)"
        )
    elif not number:
        return signature, body
    else:
        backend.end_checkpoints(signature.uuid, CHECKPOINT_LIFE)  # until it has ended again
        signature = with_kept(signature, number, newly=False)
    return signature, encode_signature(signature)


def _replay_batch(
    app: Application, pairs: Sequence[Sent], mended: Sequence[TaskState] = ()
) -> list[str]:
    now = app.now()
    submission = Submission(
        token=new_uuid(""),
        messages=[
            Message(
                uuid=one.uuid,
                name=one.name,
                queue=one.routing_key,
                body=body,
                priority=one.priority,
                tenant=app.tenant_of(one),
            )
            for one, body in pairs
        ],
        states=[
            *(app.pending(one, now) for one, _ in pairs),
            *(mended or _mended(app, [one for one, _ in pairs])),
        ],
        replay=True,
    )
    try:
        app.store.submit(submission)
    except (PublishRefused, PublishUnknown) as error:
        if not error.permanent or len(pairs) == 1:
            raise
        refused: MachineryError = error
    else:
        return [one.uuid for one, _ in pairs]
    sent: list[str] = []
    for pair in pairs:
        try:
            sent += _replay_batch(app, [pair], mended)
        except (PublishRefused, PublishUnknown) as error:
            if not error.permanent:
                raise
            uuid = pair[0].uuid
            logger.error("task %s cannot be sent again: %s", uuid, error, extra={"task_uuid": uuid})
            refused = error
    if not sent:
        raise refused
    return sent


def _mended(app: Application, signatures: Sequence[Signature[object]]) -> list[TaskState]:
    """Return new states of the tasks that failed only because a step before them had failed."""
    lasts = {uuid for one in signatures for uuid, _ in lasts_of(one)}
    states = app.store.backend.get_states(sorted(lasts)).values() if lasts else ()
    return mend(
        one for one in states if one.state is State.FAILURE and one.error_type == STEP_FAILED
    )


def mend(states: Iterable[TaskState]) -> list[TaskState]:
    """Return the states as they were before the tasks could have run."""
    return [
        TaskState(
            task_uuid=one.task_uuid,
            task_name=one.task_name,
            created_at=one.created_at,
            queue=one.queue,
            keep_for=one.keep_for,
            root=one.root,
            parent=one.parent,
        )
        for one in states
    ]


def replayed(letter: DeadLetter, signature: Signature[object]) -> Sent:
    """Return what is sent in place of the letter."""
    if letter.reason in (REASON_FAILED, REASON_REJECTED) or signature.strikes:
        return anew(signature)
    return signature, letter.body


def anew(signature: Signature[object]) -> Sent:
    """Return the task as before its first try; each counted try took one from RetryCount."""
    tries = all_tries(signature)
    signature = signature.replace(
        headers={key: value for key, value in signature.headers.items() if key not in _OF_TRIES},
        retry_count=min(UNLIMITED, tries),  # a message may hold any number
        retry_timeout=0,
        eta=None,
    )
    signature = uncounted(signature)
    return signature, encode_signature(signature)

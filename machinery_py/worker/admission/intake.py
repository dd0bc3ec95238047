"""Intake of a delivery: decode it and find its task, or settle it without a run."""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Mapping
from typing import Any

from machinery_py.brokers.base import WAITING, Fate
from machinery_py.errors import ArgumentError, DecodeError, MachineryError, NameRefused
from machinery_py.names import REASON as REASON_NAME
from machinery_py.names import check_call, check_message, is_made
from machinery_py.registry.outcomes import Failed, Succeeded
from machinery_py.signals import bring_result, wake
from machinery_py.stores.base import AWAY, REASON_REFUSED
from machinery_py.tasks.mailboxes import SILENT, TIMER, brought_to, timed_by
from machinery_py.tasks.signature import (
    HEADER_COLLECT,
    HEADER_EXPIRES,
    HEADER_LOST_HOW,
    Arg,
    Signature,
)
from machinery_py.tasks.states import RECEIVED
from machinery_py.tasks.workflow import JOIN, chord_callback
from machinery_py.texts import cut, get_logger
from machinery_py.wire.signatures import decode_signature
from machinery_py.worker.admission.at_most_once import end_if_begun
from machinery_py.worker.running.execution import CLAIMED, Execution
from machinery_py.worker.running.keeping import has_kept, strikes_since

logger = get_logger(__name__)

FIRST_PAUSE = 1.0  # seconds a message waits for a worker that can take it; doubled each time
LONGEST_PAUSE = 60.0  # seconds
MEMORY_TIMEOUT = 300.0  # seconds a message waits for a process with memory to decode it
MAX_HOW = 200  # bytes of what a header says of a lost process

REASON_UNDECODABLE = "undecodable"
REASON_TOO_LARGE = "too-large"
REASON_UNREGISTERED = "unregistered"
REASON_POISON = "poison"


def peek(execution: Execution) -> str:
    """Decode the message, and return the task's UUID, or "" when it is no signature."""
    delivery, limit = execution.delivery, execution.app.config.max_message_size
    if len(delivery.body) > limit:
        _reject(
            execution,
            REASON_TOO_LARGE,
            f"{len(delivery.body):,} bytes, more than max_message_size = {limit:,}",
        )
        return ""
    try:
        signature = decode_signature(delivery.body)
    except MemoryError:
        return _put_off(execution)
    except Exception as error:  # foreign bytes: whatever they cause, they must not end the receiver
        _reject(execution, REASON_UNDECODABLE, _text_of(error))
        return ""
    if not signature.name:
        _reject(execution, REASON_UNDECODABLE, "the message names no task")
        return ""
    try:
        # Callbacks are decoded before the run: a task whose callbacks cannot be sent must not run.
        for callbacks in (signature.on_success, signature.on_error):
            if callbacks:
                callbacks[0]
    except IndexError:
        pass  # an empty list
    except MemoryError:
        return _put_off(execution)
    except Exception as error:
        _reject(execution, REASON_UNDECODABLE, f"in a callback: {_text_of(error)}")
        return ""
    # A foreign sender may leave the UUID out: the state needs a key, and the retry the same one.
    if not signature.uuid:
        signature = signature.with_uuid()
    try:
        group_uuid = signature.group_uuid
        if not is_made(signature.uuid) or (group_uuid and not is_made(group_uuid)):
            check_message(
                signature.routing_key,
                delivery.queue,
                execution.app.config.default_queue,
                name=signature.name,
                uuid=signature.uuid,
                group_uuid=group_uuid,
            )
        else:
            check_call(signature.name, signature.routing_key)
    except NameRefused as error:
        _reject(execution, REASON_NAME, str(error))
        return ""
    execution.signature = signature
    return signature.uuid


def accept(execution: Execution, revoked: Mapping[str, bool]) -> bool:
    """Find the task to run, after `peek`. False: nothing is to be run, and it is settled.

    Args:
        revoked: from `revoked_among`.
    """
    if execution.stage is not CLAIMED:
        return False
    signature, delivery = execution.signature, execution.delivery
    if signature.name in SILENT:
        _wake(execution)
        return False
    execution.take(execution.app.registry.find(signature.name))
    if delivery.count > 1 and execution.runs_once and end_if_begun(execution):
        return False
    headers, limit = signature.headers, execution.app.config.max_strikes
    is_struck = bool(headers or delivery.strikes) and execution.strikes >= limit
    is_late = bool(headers) and _is_expired(signature, execution.app.now())
    if is_struck or is_late:
        try:
            is_struck = is_struck and strikes_since(execution) >= limit
            is_late = is_late and not has_kept(execution)
        except MachineryError as error:
            _wait_for_store(execution, error)
            return False
    if is_struck:
        _poison(execution)
    elif signature.uuid in revoked:
        execution.withdraw(is_over=revoked[signature.uuid])
    elif is_late:
        execution.finish(
            Failed(error="expired before it was started", error_type="Expired", retryable=False)
        )
    elif signature.name == JOIN:
        # A Go worker ended the last member, or it stands for an empty group.
        execution.phase = RECEIVED
        _join(execution)
    elif execution.task is None:
        _unknown(execution)
    else:
        execution.phase = RECEIVED
        return True
    return False


def _wait_for_store(execution: Execution, error: MachineryError) -> None:
    """Give back a task of which nobody knows whether it has checkpoints."""
    logger.warning(
        "whether task %s has checkpoints is unknown: %s", execution.signature.uuid, error
    )
    eta = execution.app.now() + dt.timedelta(seconds=FIRST_PAUSE)
    execution.settle(execution.end_of_delivery(Fate.LATER, eta=eta, reason=WAITING))


def _wake(execution: Execution) -> None:
    """Let the task go on that waits for this timer, or result. Neither has a state."""
    message = execution.signature
    uuid = timed_by(message) if message.name == TIMER else brought_to(message)[0]
    if not uuid:
        _reject(execution, REASON_NAME, f"{message.name} is no task of yours, nor is this ours")
        return
    try:
        if message.name == TIMER:
            wake(execution.app, message)
        else:
            bring_result(execution.app, message)
    except AWAY as error:
        if not error.permanent:
            logger.warning("task %s cannot go on now: %s", uuid, error)
            eta = execution.app.now() + dt.timedelta(seconds=FIRST_PAUSE)
            execution.settle(execution.end_of_delivery(Fate.LATER, eta=eta, reason=WAITING))
            return
        _reject(execution, REASON_REFUSED, str(error))
    except MachineryError as error:
        _reject(execution, REASON_REFUSED, str(error))
    else:
        execution.settle(execution.end_of_delivery())


def _join(execution: Execution) -> None:
    """End a JOIN as worker/loops/chords.py does: what a Go worker sent has the bare results."""
    joined = execution.signature
    try:
        if HEADER_COLLECT in joined.headers and not joined.is_fixed:
            joined = chord_callback(joined.replace(args=()), [[one] for one in joined.args])
        elif any(HEADER_COLLECT in one.headers for one in joined.on_success):
            results = [[one] for one in joined.args]
            callbacks = [chord_callback(one, results) for one in joined.on_success]
            execution.signature = joined.replace(on_success=callbacks, immutable=True)
    except ArgumentError as error:
        execution.finish(Failed(error=str(error), error_type="ArgumentError", retryable=False))
        return
    execution.finish(Succeeded([Arg(type=one.type, value=one.value) for one in joined.args]))


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, DecodeError) else f"{type(error).__name__}: {error}"


def _reject(execution: Execution, reason: str, error: str) -> None:
    logger.error(
        "message on %r goes to the dead letters: %s: %s", execution.delivery.queue, reason, error
    )
    execution.settle(execution.end_of_delivery(Fate.DEAD, reason=reason, error=error))


def _put_off(execution: Execution) -> str:
    """Give back what this process has no room for: another may have, or this one later."""
    delivery = execution.delivery
    waited, pause = _parked_for(delivery.parks), _pause_after(delivery.parks)
    text = f"no memory to decode a message of {len(delivery.body):,} bytes"
    if waited >= MEMORY_TIMEOUT:
        _reject(execution, REASON_UNDECODABLE, f"{text}, tried for {waited:,.0f} s")
        return ""
    logger.warning("%s on %r; it waits %g s", text, delivery.queue, pause)
    eta = execution.app.now() + dt.timedelta(seconds=pause)
    execution.settle(execution.end_of_delivery(Fate.LATER, eta=eta))
    return ""


def _poison(execution: Execution) -> None:
    strikes = execution.strikes
    limit = execution.app.config.max_strikes
    # Of a task process its worker knows what became of it; of a worker nobody does.
    how = execution.signature.headers.get(HEADER_LOST_HOW)
    how = cut(how, MAX_HOW) if isinstance(how, str) else "its worker was lost"
    error = f"{how}, {strikes} times while it ran (max_strikes = {limit})"
    execution.finish(
        Failed(error=error, error_type="Poison", retryable=False),
        fate=Fate.DEAD,
        reason=REASON_POISON,
    )


def _unknown(execution: Execution) -> None:
    signature, delivery = execution.signature, execution.delivery
    if signature.ignore_when_task_not_registered:
        execution.settle(execution.end_of_delivery())
        return
    waited, pause = _parked_for(delivery.parks), _pause_after(delivery.parks)
    if waited >= execution.app.config.unregistered_timeout:
        names = ", ".join(execution.app.registry.names()) or "none"
        error = (
            f"task {signature.name!r} is not registered, and no worker that knows it came within "
            f"{waited:,.0f} s (registered here: {names})"
        )
        execution.finish(
            Failed(error=error, error_type="TaskNotRegistered", retryable=False),
            fate=Fate.DEAD,
            reason=REASON_UNREGISTERED,
        )
        return
    logger.log(
        logging.WARNING if delivery.parks == 0 else logging.DEBUG,
        "task %r is not registered here (is its module imported?); "
        "%s waits %g s for a worker that knows it",
        signature.name,
        signature.uuid,
        pause,
        extra={"task_uuid": signature.uuid},
    )
    eta = execution.app.now() + dt.timedelta(seconds=pause)
    execution.settle(execution.end_of_delivery(Fate.LATER, eta=eta))


def _pause_after(parks: int) -> float:
    """Return the seconds of the next pause of a message that had so many."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(parks, 10))


def _parked_for(parks: int) -> float:
    """Return the seconds that a message has waited after so many pauses."""
    return sum(map(_pause_after, range(min(parks, 100_000))))


def _is_expired(signature: Signature[Any], now: dt.datetime) -> bool:
    text = signature.headers.get(HEADER_EXPIRES)
    if not isinstance(text, str):
        return False
    try:
        return now.timestamp() > float(text)
    except ValueError:
        return False

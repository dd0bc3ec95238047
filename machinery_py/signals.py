"""Signals: what anybody tells a task that waits for it, or will wait; also results of tasks."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from machinery_py.app import Application
from machinery_py.backends.base import Backend, Rider, sending_key
from machinery_py.backends.listings import COMPLETE
from machinery_py.bounds import CHECKPOINT_LIFE, SIGNALS_BYTES, in_steps
from machinery_py.brokers.base import Message
from machinery_py.errors import DecodeError, SignalRefused, Unsupported
from machinery_py.names import check_signal, check_step
from machinery_py.registry.calls import Call
from machinery_py.rows.contract import Patience
from machinery_py.stores.base import Submission
from machinery_py.tasks.context import Context
from machinery_py.tasks.mailboxes import (
    FAILED,
    TIMER,
    UNREAD,
    WAIT,
    Mailbox,
    OpenWait,
    brought_to,
    decode,
    delivered,
    encode,
    life_of,
    read_among,
    record_of,
    stands,
    timed_by,
    unread_in,
    without_wait,
)
from machinery_py.tasks.signature import Signature, new_uuid
from machinery_py.tasks.states import SUSPENDED, TaskState
from machinery_py.tasks.workflow import result_value
from machinery_py.texts import MAX_ERROR, cut, get_logger, printable
from machinery_py.transactions import current
from machinery_py.wire.signatures import decode_signature
from machinery_py.wire.states import decode_results, encode_results

logger = get_logger(__name__)

TOO_LARGE = "machinery_py.errors.StepRefused"  # error type of a result that cannot be kept
NOTHING = b"[]"  # results of a task that returned None


def _any() -> Any: ...


_VALUE = Call("signal", _any)


def value_of(results: bytes) -> Any:
    """Return the value of a signal."""
    return _VALUE.result(result_value(decode_results(results)))


def check_signals(backend: Backend, name: str) -> None:
    """Raise Unsupported if no signals can be kept for tasks of this name."""
    features = backend.features
    if not (features.claims and features.riders and features.checkpoints):
        raise Unsupported(
            f"{name} gets no signals: the {features.name} backend cannot keep one in the same step "
            f"as what follows from it ({COMPLETE})"
        )


def signal(app: Application, uuid: str, name: str, value: Any, key: str) -> bool:
    """Give a task a signal; see `Server.signal`."""
    check_signal(name, key)
    check_step(f"{WAIT}{name}")
    if current(app) is not None:
        raise Unsupported("server.signal in server.transaction (send the signal behind the block)")
    check_signals(app.store.backend, f"task {uuid}")
    results, key = encode_results(_VALUE.results(value)), key or new_uuid()
    patience = Patience()
    while True:
        tries: list[str] = []  # of which no reply has come
        done = app.patiently(partial(_deliver, app, uuid, name, results, key, tries))
        if done is not None:
            return done
        patience.wait()


def _deliver(
    app: Application, uuid: str, name: str, results: bytes, key: str, tries: list[str]
) -> bool | None:
    """Add it to the mailbox; False: it was there before. None: another one has changed that."""
    body, box = _mailbox(app, uuid)
    if body is None:
        box = decode(None, read_among(app.store.backend.checkpoints(uuid)))
    if key in box.keys:
        return bool(tries)
    # Read behind the mailbox: while that does not change, this does not become another wait's.
    state = app.store.backend.get_states([uuid]).get(uuid)
    if state is None and box.wait is None:
        raise SignalRefused(f"signal {name!r}: task {uuid} is not known")
    if state is not None and state.is_finished:
        raise SignalRefused(f"signal {name!r}: task {uuid} has ended ({state.state})")
    if box.wait is not None and not stands(box.wait, state):
        box = without_wait(box)
    try:
        new, ended = delivered(box, name, results, key)
    except SignalRefused:
        box = unread_in(box, app.store.backend.checkpoints(uuid))
        new, ended = delivered(box, name, results, key)
    tries.append(key)
    return _change(app, uuid, body, new, ended) or None


def wake(app: Application, timer: Signature[Any]) -> None:
    """End the wait that this timer is of, unless it has ended."""
    uuid, patience = timed_by(timer), Patience()
    while uuid:
        body, box = _mailbox(app, uuid)
        if box.wait is None or box.wait.id != timer.uuid:
            return
        state = app.store.backend.get_states([uuid]).get(uuid)
        ended = box.wait if stands(box.wait, state) else None
        if _change(app, uuid, body, without_wait(box), ended, eta=timer.eta):
            return
        patience.wait()


def bring_result(app: Application, message: Signature[Any]) -> None:
    """Tell a task what became of the one whose result it waits for, or has waited for."""
    uuid, name = brought_to(message)
    failed, results = None, encode_results(message.args[2:])
    if message.name == FAILED:
        failure = Context(message, queue="", delivery=1, worker="", report=None).failed
        text = cut(printable(str(message.args[0].value)), MAX_ERROR)
        failed, results = (text, failure.error_type if failure else ""), NOTHING
    if len(results) > SIGNALS_BYTES:
        text = f"its result has {len(results):,} bytes, more than a checkpoint may have"
        failed, results = (f"{text} ({SIGNALS_BYTES:,})", TOO_LARGE), NOTHING
    patience = Patience()
    while True:
        body, box = _mailbox(app, uuid)
        state = app.store.backend.get_states([uuid]).get(uuid)
        if body is None or name in box.counts or (state is not None and state.is_finished):
            return  # nobody waits for it any more, or it was told before
        if box.wait is not None and not stands(box.wait, state):
            box = without_wait(box)
        waits = box.wait is not None and box.wait.name == name
        # Perhaps it came too late: so it takes no room.
        value = results if waits or results == NOTHING else UNREAD
        try:
            new, ended = delivered(box, name, value, name, failed)
        except SignalRefused as error:  # it came too late, so nobody misses it
            logger.debug("task %s does not get %s: %s", uuid, name, error)
            return
        if _change(app, uuid, body, new, ended):
            return
        patience.wait()


def open_wait(app: Application, state: TaskState) -> OpenWait | None:
    """Return the wait that the task is suspended in, by its state; None: it is in none."""
    if state.error_type != SUSPENDED or not app.store.backend.features.riders:
        return None
    _, box = _mailbox(app, state.task_uuid)
    return box.wait if box.wait is not None and stands(box.wait, state) else None


def keep_signals(app: Application, uuids: Sequence[str]) -> None:
    """Let what tasks were told live as long as they do, that have ended and are sent again."""
    backend = app.store.backend
    if not backend.features.riders:
        return
    for some in in_steps([record_of(uuid) for uuid in uuids]):
        for name, body in zip(some, backend.claims(some), strict=True):
            if body is not None:
                backend.amend(Rider(name=name, expected=body, body=body, life=CHECKPOINT_LIFE))


def forget_signals(app: Application, uuid: str) -> None:
    """Delete what a task was told, and its wait."""
    backend, record = app.store.backend, record_of(uuid)
    if backend.features.riders and (body := backend.claims([record])[0]) is not None:
        backend.release([(record, body)])


def suspended_by(app: Application, messages: Sequence[Message]) -> list[Message]:
    """Return the messages of the tasks whose waits these would end: timers, and results."""
    if not (messages and app.store.backend.features.riders):
        return []
    awaited = list(map(_awaited, messages))
    found = app.store.backend.claims([record_of(uuid) for uuid, _ in awaited])
    suspended: list[Message] = []
    for (uuid, what), message, body in zip(awaited, messages, found, strict=True):
        wait = decode(body).wait
        if wait is not None and what in (wait.id, wait.name):
            name = decode_signature(wait.body).name
            suspended.append(msgspec.structs.replace(message, uuid=uuid, name=name, body=wait.body))
    return suspended


def _awaited(message: Message) -> tuple[str, str]:
    """Return the task that a message wakes, and what of: its wait, or a signal."""
    try:
        signature = decode_signature(message.body)
    except DecodeError:  # somebody else has named his message so
        return "", ""
    if message.name == TIMER:
        return timed_by(signature), signature.uuid
    return brought_to(signature)


def _mailbox(app: Application, uuid: str) -> tuple[bytes | None, Mailbox]:
    [body] = app.store.backend.claims([record_of(uuid)])
    return body, decode(body)


def _change(
    app: Application,
    uuid: str,
    expected: bytes | None,
    new: Mailbox,
    ended: OpenWait | None = None,
    *,
    eta: dt.datetime | None = None,
) -> bool:
    """Change a mailbox, and let the task go on if its wait has ended; False: it has changed.

    Args:
        eta: of the message, when it goes on since its time is up.
    """
    rider = Rider(
        name=record_of(uuid), expected=expected, body=encode(new), life=life_of(new, app.now())
    )
    if ended is None:
        return app.store.backend.amend(rider)
    message = app.message(decode_signature(ended.body).replace(eta=eta))
    message = msgspec.structs.replace(message, tenant=ended.tenant)
    submission = Submission(
        token=sending_key(rider.name, ended.id), messages=[message], riders=[rider]
    )
    return app.store.submit(submission)

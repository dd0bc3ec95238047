"""Unique tasks: of calls that are the same, one at a time is sent.

A key is a claim in the result backend. It is taken in one step with PENDING and the message,
as a rider of the submission, and stands while its task is not over (`KeyClaim.stands`). So what
ends a task frees its key in the same step; workers remove claims that stand no more, to save room.
States, crash points and limits: docs/explanation/unique.md.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from machinery_py.app import Application
from machinery_py.backends.base import Backend, Rider, sending_key
from machinery_py.backends.listings import COMPLETE
from machinery_py.bounds import CHECKPOINT_LIFE
from machinery_py.errors import (
    BackendUnavailable,
    DuplicateTask,
    MachineryError,
    PublishRefused,
    PublishUnknown,
    Unsupported,
)
from machinery_py.registry.options import TaskSettings, block_of
from machinery_py.registry.task import Task
from machinery_py.registry.unique_keys import (
    KeyClaim,
    decode_claim,
    encode_claim,
    owner,
    unique_key,
)
from machinery_py.stores.base import Settlement, Store, Submission
from machinery_py.tasks.signature import (
    HEADER_EXPIRES,
    HEADER_ON_DUPLICATE,
    HEADER_UNIQUE,
    HEADER_UNIQUE_START,
    Signature,
    new_uuid,
)
from machinery_py.tasks.states import SUSPENDED, GroupMeta, State, TaskState
from machinery_py.texts import get_logger
from machinery_py.transactions import current

logger = get_logger(__name__)

_BY_DEFAULT = TaskSettings(unique=True)


def send_unique(
    app: Application,
    task: Task[..., Any] | None,
    signature: Signature[Any],
    groups: Sequence[GroupMeta] = (),
) -> tuple[str, bool]:
    """Publish it, unless another call holds its key; return the holder, and if it is another.

    Args:
        groups: in its callbacks.

    Raises:
        DuplicateTask: another call holds the key, and the task says that this is an error.
        Unsupported: the result backend keeps no keys.
        ArgumentError, PublishRefused, PublishUnknown: as Server.send_task.
    """
    if app.is_entered():
        raise PublishRefused(
            f"{signature.name} was not sent: it is unique, and this thread is in another call of "
            "the store (send it from a thread, not from a finaliser or signal handler)"
        )
    app.check_asked((signature,))
    check_keys(app.store.backend, signature.name)
    transaction = current(app)
    with app.sending((signature,)) as [signature]:
        store = app.store if transaction is None else transaction.store()
        sending = UniqueSending(app, store, task, app.completed(signature), groups)
        if transaction is not None:
            duplicate = sending.attempt(may_replace=False)
            if not duplicate:
                transaction.note_sent([sending.holder])
            return sending.holder, duplicate
        try:
            duplicate = app.patiently(sending.attempt, block=block_of(signature))
        except BackendUnavailable as error:
            raise PublishRefused(
                f"{signature.name} was not sent: its key could not be looked at: {error}"
            ) from error
    if not duplicate:
        app.report_sent([sending.signature])
    return sending.holder, duplicate


def check_keys(backend: Backend, name: str) -> None:
    """Raise Unsupported if this backend keeps no keys of unique tasks."""
    if not backend.features.claims:
        raise Unsupported(
            f"{name} is unique, and the {backend.features.name} backend keeps no keys "
            f"({COMPLETE}, or send it with options(unique=False))"
        )


def report_unkept_keys(app: Application) -> None:
    """Log at the start of a worker which of its tasks nobody can send: their keys are not kept."""
    names = [task.name for task in app.registry if task.settings.unique]
    if names and not app.store.backend.features.claims:
        logger.error(
            "no call of %s can be sent: the task is unique, and the %s backend keeps no keys (%s)",
            ", ".join(sorted(names)),
            app.store.backend.features.name,
            COMPLETE,
        )


class UniqueSending:
    """Sending of one call of a unique task; `holder` is the UUID that has the key."""

    def __init__(
        self,
        app: Application,
        store: Store,
        task: Task[..., Any] | None,
        signature: Signature[Any],
        groups: Sequence[GroupMeta],
    ) -> None:
        settings = (
            task.settings if task is not None and task.settings.unique is not False else _BY_DEFAULT
        )
        headers = dict(signature.headers)
        self._app, self._store = app, store
        self._groups = groups
        self._on_duplicate = headers.pop(HEADER_ON_DUPLICATE, settings.on_duplicate)
        self._window = settings.unique_for
        self._key = headers.get(HEADER_UNIQUE) or unique_key(
            signature.name,
            task.call if task else None,
            signature.args,
            settings.unique,
            owner=owner(app.config),
        )
        self._replaceable = self._on_duplicate == "replace"
        headers[HEADER_UNIQUE] = self._key
        headers.pop(HEADER_UNIQUE_START, None)
        if settings.unique_until == "start":
            headers[HEADER_UNIQUE_START] = "free"
        elif self._replaceable:
            headers[HEADER_UNIQUE_START] = "keep"
        eta = signature.eta
        if settings.debounce is not None and eta is None:
            eta = app.moment() + dt.timedelta(seconds=settings.debounce)
        self.signature: Signature[Any] = app.stamped(signature.replace(headers=headers, eta=eta))
        self.holder: str = signature.uuid
        self._token = new_uuid("")
        self._message = app.message(self.signature)
        # When the first step was taken whose answer is not known, or was no.
        self._asked_at: dt.datetime | None = None

    def attempt(self, *, may_replace: bool = True) -> bool:
        """Take the key and publish. True: another call has it. May be repeated after any error.

        Args:
            may_replace: False in a transaction: whoever runs the other call would wait for its end.
        """
        backend = self._store.backend
        while True:
            [body] = backend.claims([self._key])
            now = self._app.now()
            held = decode_claim(body) if body is not None else None
            states = self._states(held)
            mine = held is not None and held.token == self._token
            if mine or self._was_sent(states):
                self.holder = self.signature.uuid
                return False
            replaced: TaskState | None = None
            state = states.get(held.uuid) if held is not None else None
            if held is not None and state is not None and held.stands(state, now):
                if not self._may_replace(held):
                    return self._met(held.uuid, state)
                if not may_replace:
                    raise Unsupported(
                        f"{self.signature.name} would replace {held.uuid} in your transaction: "
                        "workers would wait for its end (send it after the commit, or with "
                        "options(on_duplicate='join'))"
                    )
                replaced = _replaced(state, by=self.signature.uuid, now=now)
            if self._asked_at is None and self._app.config.queue_limits:
                limits = self._app.limits_of((self._message,))
                self._store.broker.check_limits(limits)
            self._asked_at = self._asked_at or now
            if self._take(body, replaced, now):
                self.holder = self.signature.uuid
                return False

    def _states(self, held: KeyClaim | None) -> dict[str, TaskState]:
        """Return the states of the key's holder, and of our task if it may have been sent."""
        uuids = [held.uuid] if held is not None else []
        if self._asked_at is not None:
            uuids.append(self.signature.uuid)
        return self._store.backend.get_states(uuids) if uuids else {}

    def _was_sent(self, states: dict[str, TaskState]) -> bool:
        """Return whether an earlier attempt was carried out; the task may even be over by now."""
        own = states.get(self.signature.uuid)
        return own is not None and self._asked_at is not None and own.created_at >= self._asked_at

    def _unknown(self, error: Exception) -> PublishUnknown:
        return PublishUnknown(
            f"{self.signature.name} {self.signature.uuid} may have been sent: {error}"
        )

    def _may_replace(self, held: KeyClaim) -> bool:
        return (
            self._on_duplicate == "replace"
            and held.replaceable
            and not held.started
            and held.uuid != self.signature.uuid
        )

    def _met(self, uuid: str, state: TaskState) -> bool:
        if self._on_duplicate != "join":
            raise DuplicateTask(self.signature.name, uuid, state.state)
        self.holder = uuid
        return True

    def _take(self, expected: bytes | None, replaced: TaskState | None, now: dt.datetime) -> bool:
        expires = self.signature.headers.get(HEADER_EXPIRES)
        claim = KeyClaim(
            uuid=self.signature.uuid,
            token=self._token,
            replaceable=self._replaceable,
            until=now.timestamp() + self._window if self._window is not None else 0.0,
            expires=float(expires) if isinstance(expires, str) else 0.0,
        )
        rider = Rider(
            name=self._key,
            expected=expected,
            body=encode_claim(claim),
            life=claim.life(now, self.signature.eta),
        )
        submission = Submission(
            token=sending_key(self._key, self._token),
            messages=[self._message],
            states=[
                self._app.pending(self.signature, now),
                *([replaced] if replaced is not None else ()),
            ],
            groups=self._groups,
            riders=[rider],
        )
        try:
            return self._store.submit(submission)
        except (PublishRefused, BackendUnavailable) as error:
            if error.permanent:
                raise  # and the key is not held: if it was stored, the task has failed
            # The key may be ours, and between two stores the message then follows in any case.
            raise self._unknown(error) from error


def _replaced(state: TaskState, *, by: str, now: dt.datetime) -> TaskState:
    """Return the end of a call whose key a later one has taken."""
    return msgspec.structs.replace(
        state,
        state=State.FAILURE,
        error=f"replaced by {by} before it was started",
        error_type="Replaced",
        finished_at=now,
    )


def start(app: Application, signature: Signature[Any]) -> bool:
    """Note in the claim that its task begins, or free its key. False: a later call replaced it.

    With a backend that keeps no keys, which has taken the place of one that did, it begins.

    Raises:
        BackendUnavailable: it is not known, and the task must not run now.
    """
    backend, key = app.store.backend, str(signature.headers[HEADER_UNIQUE])
    if not backend.features.claims:
        return True
    while True:
        [body] = backend.claims([key])
        held = decode_claim(body) if body is not None else None
        if body is None or held is None or held.uuid != signature.uuid or held.started:
            # Its window is over, it has begun before, or it was replaced, which ended it.
            state = backend.get_states([signature.uuid]).get(signature.uuid)
            return state is None or not state.is_finished
        frees = signature.headers[HEADER_UNIQUE_START] == "free"
        started = None if frees else encode_claim(msgspec.structs.replace(held, started=True))
        life = held.life(app.now(), None)
        if backend.amend(Rider(name=key, expected=body, body=started, life=life)):
            return True


def tidy(app: Application, settlements: Iterable[tuple[Signature[Any], Settlement]]) -> None:
    """Remove the claims of tasks that are over; those of suspended ones live as long as they.

    A failure does no harm: the first stand no more, the others live a week from the sending on.
    """
    states = {
        str(signature.headers[HEADER_UNIQUE]): settlement.states[0]
        for signature, settlement in settlements
        if signature.headers
        and signature.headers.get(HEADER_UNIQUE)
        and settlement.states
        and (settlement.states[0].is_finished or settlement.states[0].error_type == SUSPENDED)
    }
    if not states:
        return
    backend, over = app.store.backend, list[tuple[str, bytes]]()
    try:
        for key, body in zip(states, backend.claims(list(states)), strict=True):
            held, state = None if body is None else decode_claim(body), states[key]
            if body is None or held is None or held.uuid != state.task_uuid:
                continue
            if state.is_finished:
                over.append((key, body))
            elif not held.until:
                life = CHECKPOINT_LIFE if state.eta is None else held.life(app.now(), state.eta)
                backend.amend(Rider(name=key, expected=body, body=body, life=life))
        if over:
            backend.release(over)
    except MachineryError as error:
        logger.debug("claims of tasks could not be removed or prolonged: %s", error)

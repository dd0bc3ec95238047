"""Reasons why a task has not ended: what holds it, in words, and what to type.

All of it is read when somebody asks: nothing is written for it while a task goes its way. What one
store does not tell is left out, and what does not answer is said.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from machinery_py.app import Application
from machinery_py.backends.base import OutboxBackend
from machinery_py.brokers.base import Message, WorkerInfo
from machinery_py.clock import moment_of
from machinery_py.control.answers import ActiveTask, HeldTask
from machinery_py.control.client import ChosenWorkers
from machinery_py.errors import ArgumentError, MachineryError, Unsupported
from machinery_py.inspection.calls import decoded, kept_call
from machinery_py.inspection.hints import NO_WORKER, problems, typed
from machinery_py.inspection.limits import rule_text
from machinery_py.limits.base import Rule, UsageReport, stored_name
from machinery_py.limits.settings import EXCLUSIVE, scope_of
from machinery_py.registry.unique_keys import lock_name, owner
from machinery_py.signals import open_wait
from machinery_py.tasks.attempts import attempts_of
from machinery_py.tasks.mailboxes import waits_for
from machinery_py.tasks.reasons import Reason, Why
from machinery_py.tasks.signature import HEADER_EXPIRES, Signature
from machinery_py.tasks.states import SUSPENDED, GroupMeta, State, TaskState
from machinery_py.texts import cut, length, quoted

T = TypeVar("T")

GROUP = "group_"  # how the UUIDs of groups begin
LOOK = 1000  # messages of a queue, and delayed ones, that are looked through
SHOWN = 3  # tasks that a reason names
WIDEST = 120  # characters of a task's arguments
RATE_WINDOW = 60.0  # seconds over which the pace of a queue is counted

#: Asks the workers with these names; without names all.
AskWorkers = Callable[..., ChosenWorkers]


def why(app: Application, ask: AskWorkers | None, uuid: str, *, stack: bool = False) -> Why:
    """Return what holds a task or a group with this UUID.

    Args:
        ask: None: no worker is asked, which takes up to two seconds.
        stack: of a task that runs, what its thread does now.

    Raises:
        StateNotFound: nothing is known of it.
    """
    backend = app.store.backend
    if uuid.startswith(GROUP) and (group := backend.get_group(uuid)) is not None:
        return _of_group(app, group)
    return _Look(app, ask, backend.get_state(uuid)).why(stack=stack)


def _of_group(app: Application, group: GroupMeta) -> Why:
    uuids = group.task_uuids
    states = app.store.backend.member_states(group.group_uuid, uuids[:LOOK])
    left = [one for one in uuids[:LOOK] if one not in states or not states[one].is_finished]
    missing = [f"{one} ({states[one].state if one in states else 'not sent'})" for one in left]
    text = f"{len(left):,} of its {len(uuids):,} tasks have not ended"
    if len(uuids) > LOOK:
        text = f"{len(left):,} of the first {LOOK:,} of its {len(uuids):,} tasks have not ended"
    reasons = [
        Reason(
            cause="members",
            text=f"{text}: {_some(missing)}",
            hint=typed(app, "why", left[0]),
        )
        if left
        else Reason(cause="ended", text="all its tasks have ended")
    ]
    return Why(
        uuid=group.group_uuid,
        state=State.PENDING if left else State.SUCCESS,
        reasons=reasons,
    )


def _some(texts: Sequence[str]) -> str:
    more = len(texts) - SHOWN
    return ", ".join(texts[:SHOWN]) + (f", and {more:,} more" if more > 0 else "")


class _Look:
    """One look at one task."""

    def __init__(self, app: Application, ask: AskWorkers | None, state: TaskState) -> None:
        self._app = app
        self._ask = ask if app.store.broker.features.topics else None
        self._state = state
        self._now = app.now()
        self._away: list[Reason] = []
        self._signature: Signature[Any] | None = kept_call(state)

    def why(self, *, stack: bool) -> Why:
        state = self._state
        if state.is_finished:
            reasons, since = [self._ended()], state.finished_at
        elif state.state is State.STARTED:
            reasons, since = list(self._running(stack=stack)), state.started_at
        else:
            reasons, since = list(self._waiting()), state.created_at
        return Why(
            uuid=state.task_uuid,
            name=self._call(),
            state=state.state,
            seconds=self._since(since),
            reasons=[*reasons, *self._away],
        )

    # What is asked

    def _read(self, what: str, read: Callable[[], T]) -> T | None:
        """Return what a store or the workers tell; None: nothing, and an outage is said."""
        try:
            return read()
        except Unsupported:
            return None
        except MachineryError as error:
            self._away.append(Reason(cause="store away", text=f"{what} cannot be read: {error}"))
            return None

    def _workers(self) -> list[WorkerInfo]:
        return self._read("the workers", self._app.store.broker.workers) or []

    def _active(self, *names: str) -> dict[str, list[ActiveTask]]:
        ask = self._ask
        if ask is None or not names:
            return {}
        return self._read("what runs", lambda: ask(*names).active()) or {}

    # Words

    def _since(self, moment: dt.datetime | None) -> float | None:
        if moment is None or moment.year <= 1:
            return None
        return max(0.0, (self._now - moment).total_seconds())

    def _until(self, moment: dt.datetime) -> str:
        seconds = (moment - self._now).total_seconds()
        return f"in {length(seconds)}" if seconds > 0 else "now"

    def _call(self) -> str:
        name, signature = self._state.task_name, self._signature
        if signature is None:
            return name
        shown = (f"{one.name + '=' if one.name else ''}{one.value!r}" for one in signature.args)
        return cut(f"{name}({', '.join(shown)})", WIDEST)

    def _hint(self, command: str, words: str = "") -> str:
        return typed(self._app, command, words)

    # A task that has ended, or runs

    def _ended(self) -> Reason:
        state = self._state
        if state.state is not State.FAILURE:
            return Reason(cause="ended", text="it has its result")
        kind = state.error_type.rpartition(".")[2]
        error = f"{kind}: {state.error}" if kind else state.error
        hint = self._hint("retry", state.task_uuid) if state.message else ""
        return Reason(cause="ended", text=cut(error, 4 * WIDEST), hint=hint)

    def _running(self, *, stack: bool) -> Iterator[Reason]:
        state = self._state
        there = [one for one in self._workers() if one.name == state.worker]
        progress = ", {:g} of {:g} done".format(*state.progress) if state.progress else ""
        yield Reason(cause="running", text=f"worker {state.worker or 'unknown'} runs it{progress}")
        if state.worker and not there and not self._away:
            yield self._gone(state.worker)
        if any(one.stalled for one in there):
            yield Reason(
                cause="worker stalled",
                text=f"worker {state.worker} is stalled: a task holds its interpreter",
                hint=self._hint("why", f"{state.task_uuid} --stack"),
            )
        ask = self._ask
        if stack and ask is not None and there:
            answers = self._read("stacks", lambda: ask(state.worker).stack())
            for threads in answers.values() if answers else ():
                for one in threads:
                    if one.task == state.task_uuid:
                        yield Reason(cause="running", text=f"in {one.thread}:\n{one.stack}")

    def _gone(self, worker: str) -> Reason:
        most = length(1.5 * self._app.config.lease)
        return Reason(
            cause="worker gone",
            text=f"worker {worker} is gone: another takes the task over, within {most}",
        )

    # A task that waits

    def _waiting(self) -> Iterator[Reason]:
        state, backend = self._state, self._app.store.backend
        queue = state.queue or self._app.config.default_queue
        waiting = self._messages(lambda broker: broker.pending(queue, LOOK))
        place = self._find(waiting)
        message = None if place is None else waiting[place]
        if message is None:
            delayed = self._messages(lambda broker: broker.delayed(LOOK))
            at = self._find(delayed)
            message = None if at is None else delayed[at]
        self._signature = decoded(message.body) if message is not None else None
        if self._read("revocations", lambda: backend.revoked([state.task_uuid])):
            text = "it is revoked: it fails when a worker comes to its message"
            yield Reason(cause="revoked", text=text)
        yield from self._expired()
        unserved = list(self._unserved(queue))
        if message is None:
            yield from unserved
            if (waits := self._open_wait()) is not None:
                yield waits
            else:
                yield from self._unseen(queue)
            return
        if message.parks:
            text = f"no worker that took it knows the task {quoted(state.task_name)}"
            yield Reason(
                cause="unknown task",
                text=f"{text} (put back {message.parks:,} times)",
                hint=self._hint("control", "registered"),
            )
        elif place is not None:
            yield from self._unknown_to_all(queue)
        limited = list(self._limited())
        yield from limited
        if message.eta is not None and place is None and not (limited or message.parks):
            yield self._delayed(message.eta)
        yield from unserved
        if place is not None:
            yield from self._behind(queue, place, message, waiting)

    def _open_wait(self) -> Reason | None:
        """Return the signal, or the task, that it waits for; None: it waits for none."""
        wait = self._read("signals", lambda: open_wait(self._app, self._state))
        if wait is None:
            return None
        text = f"it {waits_for(wait.name, moment_of(wait.until) if wait.until else None)}"
        if wait.child:
            hint = self._hint("why", wait.child)
            return Reason(cause="task", text=f"{text}: {wait.child}", hint=hint)
        hint = self._hint("signal", f"{self._state.task_uuid} {wait.name}")
        return Reason(cause="signal", text=text, hint=hint)

    def _messages(self, read: Callable[[Any], list[Message]]) -> list[Message]:
        return self._read("messages", lambda: read(self._app.store.broker)) or []

    def _find(self, messages: Sequence[Message]) -> int | None:
        uuid = self._state.task_uuid
        return next((at for at, one in enumerate(messages) if one.uuid == uuid), None)

    def _expired(self) -> Iterator[Reason]:
        text = self._signature.headers.get(HEADER_EXPIRES) if self._signature is not None else None
        try:
            expires = float(text) if isinstance(text, str) else math.inf
        except ValueError:
            return
        if self._now.timestamp() > expires:
            late = length(self._now.timestamp() - expires)
            yield Reason(
                cause="expired",
                text=f"it expired {late} ago: it fails when a worker comes to its message",
            )

    def _unserved(self, queue: str) -> Iterator[Reason]:
        broker = self._app.store.broker
        paused = self._read("paused queues", broker.paused) or ()
        for cause, text, hint in problems(self._app, queue, paused, self._workers()):
            if cause != NO_WORKER or not self._away:
                yield Reason(cause=cause, text=text, hint=hint)

    def _unknown_to_all(self, queue: str) -> Iterator[Reason]:
        """Say that no worker of the queue has the task, if all of them answer so."""
        names = [one.name for one in self._workers() if queue in one.queues]
        ask = self._ask
        if ask is None or not names:
            return
        answers = self._read("the tasks of workers", lambda: ask(*names).registered())
        if answers and not answers.missing and not answers.errors:
            name = self._state.task_name
            if not any(name in known for known in answers.values()):
                yield Reason(
                    cause="unknown task",
                    text=f"none of the workers of {quoted(queue)} knows the task {quoted(name)}",
                    hint=self._hint("control", "registered"),
                )

    def _behind(
        self, queue: str, place: int, message: Message, waiting: Sequence[Message]
    ) -> Iterator[Reason]:
        if message.tenant is not None:
            own = sum(one.tenant == message.tenant for one in waiting[:place])
            of = f" of its tenant {quoted(message.tenant)}"
            text = f"{_count(own, of)} before it in {quoted(queue)}, where tenants take turns"
        elif place:
            text = f"{_count(place)} before it in {quoted(queue)}"
        else:
            text = f"it is the next of {quoted(queue)}"
        per_minute = self._read("the pace of the queue", lambda: self._pace(queue))
        if place and per_minute:
            text += f"; at {per_minute:,} a minute its turn is {_about(60 * place / per_minute)}"
        names = [one.name for one in self._workers() if queue in one.queues]
        if busy := [
            f"{one.name} ({length(one.seconds)})"
            for tasks in self._active(*names).values()
            for one in tasks
        ]:
            text += f"; its workers run {_some(busy)}"
        yield Reason(cause="behind", text=text, hint=self._hint("queues") if place else "")

    def _pace(self, queue: str) -> int:
        backend = self._app.store.backend
        if not backend.features.listing:
            return 0
        counts = backend.finished_since(self._now - dt.timedelta(seconds=RATE_WINDOW))
        return sum(one.succeeded + one.failed for one in counts if one.queue == queue)

    def _delayed(self, eta: dt.datetime) -> Reason:
        when = self._until(eta)
        tries = attempts_of(self._signature) if self._signature is not None else ()
        if self._state.state is State.RETRY and tries:
            last = tries[-1]
            error = cut(f"{last.error_type}: {last.error}", WIDEST)
            text = f"it is tried again {when}: try {last.number} failed, {error}"
            hint = self._hint("show", self._state.task_uuid)
            return Reason(cause="retried", text=text, hint=hint)
        if self._state.error_type == SUSPENDED:
            return Reason(cause="delayed", text=f"it {self._state.error} (it is due {when})")
        return Reason(cause="delayed", text=f"it is due {when}")

    # Limits and locks

    def _limited(self) -> Iterator[Reason]:
        """Say which of its limits are used up."""
        task, signature = self._app.registry.find(self._state.task_name), self._signature
        if task is None or signature is None:
            return
        whose = owner(self._app.config)
        settings = task.settings
        try:
            rules = task.rules_of(signature.args)
            if settings.exclusive == "wait":
                name = lock_name(
                    task.name, task.call, signature.args, settings.exclusive_key, owner=whose
                )
                rules.append(Rule(name=EXCLUSIVE, key=name))
        except ArgumentError:  # it fails when it is run
            return
        if not rules:
            return
        scope = stored_name(scope_of(task.name, owner=whose))
        reports = self._read("limits", self._app.stores.limits.read) or []
        used = {
            (one.name, one.key): one
            for report in reports
            if report.scope == scope
            for one in report.usage
        }
        for rule in rules:
            found = used.get((rule.name, stored_name(rule.key)))
            if found is not None and (found.waiting or found.wait):
                yield self._limit(task.name, rule, found)

    def _limit(self, name: str, rule: Rule, used: UsageReport) -> Reason:
        if rule.name == EXCLUSIVE:
            text = f"its lock {quoted(rule.key)} is held; {_wait(used.waiting)} for it"
            return Reason(cause="lock", text=text, hint=self._hint("limits", name))
        now = Rule(name=used.name, limit=used.limit, interval=used.interval)
        of = f" of key {quoted(rule.key)}" if rule.key else ""
        said = [f"{_wait(used.waiting)} for it"]
        if not used.interval:
            said.insert(0, f"{used.running:,} {'runs' if used.running == 1 else 'run'}")
        if used.wait:
            said.append(f"the turn of the next that comes is {_about(used.wait)}")
        text = f"{rule_text(now)}{of}: {', '.join(said)}"
        return Reason(cause="limit", text=text, hint=self._hint("limits", name))

    # A task whose message nobody shows

    def _unseen(self, queue: str) -> Iterator[Reason]:
        state, workers = self._state, self._workers()
        names = [one.name for one in workers if queue in one.queues or one.name == state.worker]
        if (held := self._held(names)) is not None:
            yield held
            return
        backend = self._app.store.backend
        if isinstance(backend, OutboxBackend) and any(
            self._read("outboxes", lambda: backend.outboxes([state.task_uuid])) or ()
        ):
            text = "its message is kept beside its state until the broker takes it"
            yield Reason(cause="outbox", text=text)
        elif state.worker and state.worker not in [one.name for one in workers]:
            if not self._away:
                yield self._gone(state.worker)
        elif state.eta is not None and state.eta > self._now:
            yield self._delayed(state.eta)
        elif state.worker or any(one.holding for one in workers if queue in one.queues):
            worker = f"worker {state.worker}" if state.worker else f"a worker of {quoted(queue)}"
            yield Reason(cause="held", text=f"{worker} has taken it, and has not begun it")
        elif self._app.store.broker.features.peeking:
            count = self._read("the queue", lambda: self._app.store.broker.waiting(queue)) or 0
            if count >= LOOK:
                text = f"more than {LOOK:,} are before it in {quoted(queue)}"
                yield Reason(cause="beyond", text=text, hint=self._hint("queues"))
            else:
                text = "its message is in no queue: a step before it has not ended, or it is lost"
                yield Reason(cause="not found", text=text, hint=self._hint("queues"))
        else:
            text = f"it waits in {quoted(queue)}, whose messages this broker does not show"
            yield Reason(cause="behind", text=text, hint=self._hint("queues"))

    def _held(self, names: Sequence[str]) -> Reason | None:
        """Say which worker has taken it in advance, and what that one runs meanwhile."""
        ask = self._ask
        if ask is None or not names:
            return None
        answers = self._read("what workers hold", lambda: ask(*names).reserved())
        uuid = self._state.task_uuid
        worker = next((name for name, held in (answers or {}).items() if _has(held, uuid)), None)
        if worker is None:
            return None
        runs = [
            f"{one.name} {one.uuid} ({length(one.seconds)})"
            for tasks in self._active(worker).values()
            for one in tasks
        ]
        text = f"worker {worker} has taken it, and runs {_some(runs) if runs else 'nothing'}"
        return Reason(cause="held", text=text, hint=self._hint("control", "active"))


def _has(held: Sequence[HeldTask], uuid: str) -> bool:
    return any(one.uuid == uuid for one in held)


def _count(number: int, of: str = "") -> str:
    return f"{number:,}{of} {'is' if number == 1 else 'are'}"


def _wait(number: int) -> str:
    return f"{number:,} {'waits' if number == 1 else 'wait'}"


def _about(seconds: float) -> str:
    return f"in about {length(seconds)}" if seconds >= 1 else "at once"

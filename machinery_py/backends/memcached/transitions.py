"""Transitions of a task's record in memcached, and what follows from them. Pure; backend.py writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from machinery_py.backends.base import ALREADY, FENCED, Begun, Change, Verdict
from machinery_py.backends.memcached.documents import TaskItem, Todo, document_of
from machinery_py.backends.transactional import decide, is_over
from machinery_py.tasks.states import TaskState, advance
from machinery_py.wire.states import encode_group


class Settling:
    """A change of the task that it belongs to. Gives the verdict, and what else is to become true."""

    def __init__(self, change: Change, now: int) -> None:
        self._change = change
        self._now = now

    def __call__(self, record: TaskItem) -> tuple[Verdict, Sequence[Todo]]:
        change = self._change
        if record.epoch == 0:
            # A Go program or an eviction has thrown our epoch away: nobody can be told to be late.
            change = msgspec.structs.replace(change, epoch=0)
        verdict, states = decide(change, {change.key: record})
        if verdict is ALREADY:
            return verdict, record.todo
        if verdict is FENCED:
            return verdict, ()
        record.state = next(state for state in states if state.task_uuid == change.key)
        record.mark = change.mark or record.mark
        todo = todo_of(change, [state for state in change.states if state.task_uuid != change.key])
        # What an earlier batch noted was done before this delivery came; what this very batch noted was not.
        if todo:
            record.todo = (*record.todo, todo) if record.changed else (todo,)
        if change.outbox:
            record.outbox = (
                (*record.outbox, *change.outbox) if record.changed else tuple(change.outbox)
            )
            record.kept_at = self._now
        record.changed = True
        record.awaited = record.awaited or bool(todo.arrivals)
        return verdict, (todo,) if todo else ()


class Begin:
    """A delivery of this run begins. Gives how it stands, and what the run before has left to do."""

    def __init__(self, run: int, now: int) -> None:
        self._run = run
        self._now = now

    def __call__(self, record: TaskItem) -> tuple[Begun, Sequence[Todo]]:
        if is_over(record.state, self._run):
            return Begun(epoch=record.epoch, finished=True, outbox=record.outbox), record.todo
        # By the clock, so that an epoch from before an eviction is not given out again.
        record.epoch = max(record.epoch + 1, self._now)
        record.changed = True
        return Begun(epoch=record.epoch), ()


class Advance:
    """A state of a task that another one's change brings along."""

    def __init__(self, state: TaskState, force: bool) -> None:
        self._state = state
        self._force = force

    def __call__(self, record: TaskItem) -> None:
        after = self._state if self._force else advance(record.state, self._state)
        if after is not None:
            record.state, record.changed = after, True


def clear(sent: set[bytes], record: TaskItem) -> bool:
    """Remove published messages of a task; return whether there are no others."""
    if not sent.issuperset(record.outbox):
        return False
    if record.outbox:
        record.outbox, record.todo, record.changed = (), (), True
    return True


def own_state(change: Change) -> bool:
    return any(state.task_uuid == change.key for state in change.states)


def todo_of(change: Change, states: Iterable[TaskState]) -> Todo:
    return Todo(
        states=[document_of(state) for state in states],
        groups=[encode_group(group) for group in change.groups],
        arrivals=[
            (one.group_uuid, one.task_uuid, one.total, one.ok)
            for one in change.arrivals
            if one.callback
        ],
        force=change.force,
    )

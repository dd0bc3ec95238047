"""Transitions of a task's item in memcached, and their follow-ups. Pure; backend.py writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from machinery_py.backends.base import ALREADY, FENCED, SETTLED, Begun, Change, Verdict
from machinery_py.backends.memcached.documents import TaskItem, Todo, document_of
from machinery_py.backends.transactional import decide, is_over
from machinery_py.fences import NO_FENCE, Fence, fence_after
from machinery_py.tasks.signature import RunNumber
from machinery_py.tasks.states import TaskState, advance
from machinery_py.wire.states import encode_group


def settle(change: Change, now: int, item: TaskItem) -> tuple[Verdict, Sequence[Todo]]:
    """Change the task that the change belongs to; return the verdict and the follow-ups.

    A change of no task has an item as well if it has an outbox.
    """
    if item.epoch == 0:
        # A Go program or an eviction has thrown our epoch away: nobody can be told to be late.
        change = msgspec.structs.replace(change, epoch=NO_FENCE)
    verdict, states = decide(change, {change.key: item})
    if verdict is ALREADY:
        return verdict, item.todo
    if verdict is FENCED:
        return verdict, ()
    todo = todo_of(change, [state for state in change.states if state.task_uuid != change.key])
    own = next((state for state in states if state.task_uuid == change.key), None)
    if own is None and not change.outbox:
        return verdict, (todo,)
    item.state, item.mark = own or item.state, change.mark or item.mark
    # Follow-ups of an earlier batch were done before this delivery came; those of this batch not.
    if todo:
        item.todo = (*item.todo, todo) if item.changed else (todo,)
    if change.outbox:
        item.outbox = (*item.outbox, *change.outbox) if item.changed else tuple(change.outbox)
        item.kept_at = now
    item.changed = True
    item.awaited = item.awaited or bool(todo.arrivals)
    return verdict, (todo,) if todo else ()


def fire(
    change: Change, now: int, by_go: bool | None, item: TaskItem
) -> tuple[Verdict, Sequence[Todo]]:
    """Settle a group, once. `by_go`: whether Go has done so; None: there is no such group."""
    if by_go is None or item.nonce or item.theirs or item.changed:
        return FENCED, ()
    item.changed, item.kept_at = True, now
    if by_go:
        return FENCED, ()
    item.outbox, item.todo = tuple(change.outbox), (todo_of(change, change.states),)
    return SETTLED, item.todo


def begin(run: RunNumber, fence: Fence, item: TaskItem) -> tuple[Begun, Sequence[Todo]]:
    """Begin a delivery of this run; return how it stands, and open follow-ups of the run before."""
    if is_over(item.state, run):
        return Begun(epoch=item.epoch, finished=True, outbox=item.outbox), item.todo
    item.epoch = fence_after(item.epoch, fence)
    item.changed = True
    return Begun(epoch=item.epoch), ()


def write(state: TaskState, force: bool, item: TaskItem) -> None:
    """Write a state that another task's change brings along."""
    after = state if force else advance(item.state, state)
    if after is not None:
        item.state, item.changed = after, True


def clear(sent: set[bytes], item: TaskItem, *, with_todo: bool) -> bool:
    """Remove published messages of an item; return whether there are no others.

    Args:
        with_todo: also of an item that has follow-ups alone, which are done.
    """
    if not sent.issuperset(item.outbox):
        return False
    if item.outbox or (with_todo and item.todo):
        item.outbox, item.todo, item.changed = (), (), True
    return True


def todo_of(change: Change, states: Iterable[TaskState]) -> Todo:
    """Return the follow-ups of a change, with these states of other tasks."""
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

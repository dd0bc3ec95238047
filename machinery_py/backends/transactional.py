"""The contract of Backend.apply carried out once, for stores with transactions that are no rows.

Such a store brings the small steps (`_load`, `_save`, …) of `TransactionSteps`. If it has a
transaction of its own for each call, they are an object for each transaction; if it finds the one
that its thread is in, it is a `TransactionalBackend`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from machinery_py.backends.base import (
    ALREADY,
    FENCED,
    SETTLED,
    Backend,
    Begun,
    Change,
    OutboxBackend,
    Verdict,
)
from machinery_py.clock import micros
from machinery_py.fences import NO_FENCE, Fence, fence_after
from machinery_py.tasks.signature import RunNumber
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState, advance


class Stored(Protocol):
    """A stored task, as far as a change is decided by it."""

    state: TaskState | None
    mark: str
    epoch: Fence


class Row(msgspec.Struct, kw_only=True):
    """A stored task: its state, the mark that wrote it, and the epoch of its last delivery."""

    state: TaskState | None = None
    mark: str = ""
    epoch: Fence = NO_FENCE
    changed: bool = False


class TransactionSteps(ABC):
    """The steps of which changes are made, inside of a transaction."""

    @abstractmethod
    def _load(self, uuids: Iterable[str]) -> dict[str, Row]:
        """Return the rows that exist."""

    @abstractmethod
    def _save(self, rows: Sequence[tuple[str, Row]]) -> None: ...

    @abstractmethod
    def _add_groups(self, groups: Sequence[GroupMeta]) -> None:
        """Create the groups that are not there yet."""

    @abstractmethod
    def _arrive(self, arrivals: Sequence[Arrival]) -> None:
        """Count each member once; mark the group ready when it is complete or a member failed."""

    @abstractmethod
    def _fire(self, group_uuid: str) -> bool:
        """Mark the group as fired; return False if it was before."""

    @abstractmethod
    def _keep_outbox(self, key: str, bodies: Sequence[bytes]) -> None: ...

    @abstractmethod
    def _outbox(self, key: str) -> Sequence[bytes]: ...

    @abstractmethod
    def _next_epoch(self, epoch: Fence) -> Fence:
        """Return a fence that is greater than any before, `epoch` among them."""

    def apply_all(self, changes: Sequence[Change]) -> list[Verdict]:
        """Make the changes, as `Backend.apply`."""
        rows = self._load({state.task_uuid for change in changes for state in change.states})
        verdicts = [self._apply(change, rows) for change in changes]
        saved = [(uuid, row) for uuid, row in rows.items() if row.changed]
        if saved:
            self._save(saved)
        return verdicts

    def _apply(self, change: Change, rows: dict[str, Row]) -> Verdict:
        verdict, new = decide(change, rows)
        if verdict is not SETTLED:
            return verdict
        if change.fires and not self._fire(change.fires):
            return FENCED
        for state in new:
            row = rows.setdefault(state.task_uuid, Row())
            row.state, row.changed = state, True
            if state.task_uuid == change.key and change.mark:
                row.mark = change.mark
        if change.groups:
            self._add_groups(change.groups)
        if change.arrivals:
            self._arrive(change.arrivals)
        if change.outbox:
            self._keep_outbox(change.key, change.outbox)
        return SETTLED

    def begin_all(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        """Begin deliveries, as `OutboxBackend.begin`."""
        rows = self._load({uuid for uuid, _ in keys})
        begun = [self._begin(rows.setdefault(uuid, Row()), uuid, run) for uuid, run in keys]
        self._save([(uuid, row) for uuid, row in rows.items() if row.changed])
        return begun

    def _begin(self, row: Row, uuid: str, run: RunNumber) -> Begun:
        if is_over(row.state, run):
            return Begun(epoch=row.epoch, finished=True, outbox=self._outbox(uuid))
        row.epoch, row.changed = self._next_epoch(row.epoch), True
        return Begun(epoch=row.epoch)

    def marks_of(self, uuids: Sequence[str]) -> list[str]:
        """Return the marks of tasks, as `OutboxBackend.settled_by`."""
        rows = self._load(set(uuids))
        return [rows[uuid].mark if uuid in rows else "" for uuid in uuids]


class TransactionalBackend(TransactionSteps, Backend, OutboxBackend):
    """A backend whose steps find the transaction that their thread is in."""

    @abstractmethod
    def _transaction(self) -> contextlib.AbstractContextManager[object]:
        """Return a transaction, which joins the one that this thread is in already."""

    def _next_epoch(self, epoch: Fence) -> Fence:
        return fence_after(epoch, micros(self.now()))

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        self.refuse_riders(changes)
        with self._transaction():
            return self.apply_all(changes)

    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        with self._transaction():
            return self.begin_all(keys)

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        with self._transaction():
            return [self._outbox(key) for key in keys]

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        with self._transaction():
            return self.marks_of(uuids)


def is_over(state: TaskState | None, run: RunNumber) -> bool:
    """Return whether this run of a task was settled before."""
    # RETRY ends a run as well: the next one travels as a message of its own.
    return state is not None and (
        state.is_finished or state.run > run or (state.run == run and state.state is State.RETRY)
    )


def decide(change: Change, rows: Mapping[str, Stored]) -> tuple[Verdict, Iterable[TaskState]]:
    """Return whether the change may be made, and the states after it."""
    if change.epoch and (row := rows.get(change.key)) is not None and row.epoch != change.epoch:
        return (ALREADY if change.mark and row.mark == change.mark else FENCED), []
    new: dict[str, TaskState] = {}
    for state in change.states:
        uuid = state.task_uuid
        row = rows.get(uuid)
        current = new.get(uuid) or (row.state if row else None)
        after = state if change.force else advance(current, state)
        decides = uuid == change.key and uuid not in new
        ours = decides and row is not None and change.mark != "" and row.mark == change.mark
        if ours and (after is None or _is_at(current, state)):
            return ALREADY, []
        if after is not None:
            new[uuid] = after
        elif decides:
            return FENCED, []
    return SETTLED, new.values()


def _is_at(current: TaskState | None, state: TaskState) -> bool:
    """Return whether the task is in that state and run: a repeated RETRY sends no run twice."""
    return current is not None and current.state is state.state and current.run == state.run

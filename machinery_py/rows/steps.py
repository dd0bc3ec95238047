"""Steps carried out in Python, once for all stores that nobody else changes meanwhile.

A store under its lock, or in a transaction that keeps other writers out, brings the small
operations. The order of the conditions, and what follows from a step, stand here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from machinery_py.rows.contract import (
    NO_ROW,
    Committed,
    Conflict,
    Gone,
    Key,
    NoRoom,
    Repeated,
    StepResult,
    Version,
    Write,
)
from machinery_py.rows.messages import ClaimReceipt, Join, MessageStep


class StepTarget(ABC):
    """The store that steps are compared with and change, or what a transaction has read of it.

    Attributes:
        moment: µs since 1970 by the store's clock, of the steps of one call.
    """

    moment: int

    @abstractmethod
    def version_of(self, key: Key) -> Version:
        """Return the version of a row; NO_ROW if there is none, or it has expired."""

    @abstractmethod
    def put(self, key: Key, write: Write) -> Version:
        """Write a row, and return its version."""

    @abstractmethod
    def delete(self, key: Key) -> None:
        """Delete a row, with the members of the set that it is."""

    @abstractmethod
    def add_member(self, set: Key, member: str) -> int:
        """Return how many members the set has with this one; 0: it was there before.

        The row of the set is written after it.
        """

    @abstractmethod
    def are_there(self, receipts: Sequence[ClaimReceipt]) -> bool:
        """Return whether the messages are where these say."""

    @abstractmethod
    def count_waiting(self, queue: str) -> int:
        """Return how many messages wait in the queue."""

    @abstractmethod
    def move(self, step: MessageStep) -> None:
        """Take, push and tell what the step says."""

    def carry_out(self, step: MessageStep) -> StepResult:
        """Carry out a step, or return why it is refused."""
        if (refused := self._refusal(step)) is not None:
            return refused
        if step.create:
            for key, new in step.create.items():
                if self.version_of(key) == NO_ROW:
                    self.put(key, new)
        version = NO_ROW
        for key, write in step.write.items():
            if write is None:
                self.delete(key)
            else:
                version = self.put(key, write)
        for join in step.joins:
            self._join(join)
        if step.takes or step.pushes or step.tell:
            self.move(step)
        return Committed(version, self.moment)

    def _refusal(self, step: MessageStep) -> StepResult | None:
        if step.once is not None and self.version_of(step.once) != NO_ROW:
            return Repeated()
        for key, version in step.expect.items():
            if self.version_of(key) != version:
                return Conflict()
        if step.takes and not self.are_there(step.takes):
            return Gone()
        if step.held and not self.are_there(step.held):
            return Gone()
        for room in step.room:
            waiting = self.count_waiting(room.queue)
            if waiting + room.adds > room.limit:
                return NoRoom(room.queue, waiting)
        return None

    def _join(self, join: Join) -> None:
        if self.version_of(join.ready) != NO_ROW:
            return
        if self.version_of(join.set) == NO_ROW:
            self.delete(join.set)  # of a set that has expired, its members
        if not (count := self.add_member(join.set, join.member)):
            return
        self.put(join.set, Write(body=b"%d" % count))
        for key, write in join.beside.items():
            self.put(key, write)
        if count >= join.whole:
            self.put(join.ready, join.write)

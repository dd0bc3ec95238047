"""The steps of one transaction of the RabbitMQ backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from machinery_py.backends.base import Change, Verdict
from machinery_py.backends.rabbitmq.documents import (
    OUTBOX,
    OUTBOX_LOCK,
    OutboxEntry,
    ResultQueues,
    StoredTask,
    decode_outbox,
    decode_record,
    encode_record,
    pack,
)
from machinery_py.backends.rabbitmq.groups import RabbitMQGroups
from machinery_py.backends.transactional import Row, TransactionSteps
from machinery_py.connections.rabbitmq.queue_records import QueueTransaction
from machinery_py.fences import Fence, FenceSequence, fence_after
from machinery_py.tasks.states import Arrival, GroupMeta, TaskState


class RabbitMQSteps(TransactionSteps):
    """Changes of tasks and groups in a transaction that holds their locks; `end` ends them.

    Args:
        now: µs.
        expire_in: seconds that the queue of a task keeps what is in it.
    """

    def __init__(
        self,
        transaction: QueueTransaction,
        queues: ResultQueues,
        fences: FenceSequence,
        *,
        now: int,
        expire_in: float,
    ) -> None:
        self.transaction = transaction
        self.groups: Final = RabbitMQGroups(queues, transaction)
        self._queues, self._fences = queues, fences
        self._now, self._expire_in = now, expire_in
        self._bodies: dict[str, bytes] = {}  # messages of tasks, as they are written
        self._arrivals: list[Arrival] = []

    def end(self) -> None:
        """Put into the transaction what is written once, at its end."""
        self._let_arrive()
        self.groups.write()

    # Tasks

    def tasks(self, uuids: Iterable[str]) -> dict[str, StoredTask]:
        """Return the tasks that there are."""
        queues = {uuid: self._queues.task(uuid) for uuid in uuids}
        self.transaction.read(queues.values())
        return {
            uuid: decode_record(uuid, [one.body for one in held])
            for uuid, queue in queues.items()
            if (held := self.transaction.held(queue))
        }

    def states(self, uuids: Iterable[str]) -> dict[str, TaskState]:
        found = self.tasks(dict.fromkeys(uuids))
        return {uuid: row.state for uuid, row in found.items() if row.state is not None}

    def _load(self, uuids: Iterable[str]) -> dict[str, Row]:
        return dict(self.tasks(uuids))

    def _save(self, rows: Sequence[tuple[str, Row]]) -> None:
        for uuid, row in rows:
            seq = row.seq if isinstance(row, StoredTask) else 0
            body = self._bodies[uuid] = encode_record(uuid, row, seq + 1)
            state, most = row.state, self._expire_in
            life = state.life(most) if state is not None and state.is_finished else most
            self.transaction.replace(self._queues.task(uuid), body, life if life < most else None)

    def _apply(self, change: Change, rows: dict[str, Row]) -> Verdict:
        row = rows.get(change.key)
        if isinstance(row, StoredTask) and row.of_go and not row.epoch:
            # Go has read ours away, and its own PENDING came late: that tells of no other delivery.
            row.epoch = change.epoch
        return super()._apply(change, rows)

    def _next_epoch(self, epoch: Fence) -> Fence:
        return fence_after(epoch, self._fences.next())

    # Groups

    def _add_groups(self, groups: Sequence[GroupMeta]) -> None:
        self.groups.create(groups, self._now)

    def _arrive(self, arrivals: Sequence[Arrival]) -> None:
        self._arrivals += arrivals  # added together, once the messages of their tasks are known

    def _fire(self, group_uuid: str) -> bool:
        self._let_arrive()
        return self.groups.fire(group_uuid)

    def _let_arrive(self) -> None:
        arrivals, self._arrivals = self._arrivals, []
        self.groups.arrive(arrivals, self._bodies)

    # Outboxes

    def _keep_outbox(self, key: str, bodies: Sequence[bytes]) -> None:
        entry = OutboxEntry(key=key, kept_at=self._now, bodies=tuple(bodies))
        self.transaction.put(OUTBOX, pack(entry))

    def open_outboxes(self) -> Sequence[OutboxEntry]:
        """Return all that are in the queue, in its order."""
        self.transaction.lock([OUTBOX_LOCK])
        self.transaction.read([OUTBOX])
        return [decode_outbox(one.body) for one in self.transaction.held(OUTBOX)]

    def _outbox(self, key: str) -> Sequence[bytes]:
        return [body for one in self.open_outboxes() if one.key == key for body in one.bodies]

    def outboxes_of(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        return [self._outbox(key) for key in keys]

    def clear(self, sent: dict[str, set[bytes]]) -> None:
        """Drop the outboxes under these keys that hold no more than these messages."""
        entries = self.open_outboxes()
        self.transaction.drop(
            message
            for message, one in zip(self.transaction.held(OUTBOX), entries, strict=True)
            if one.key in sent and sent[one.key].issuperset(one.bodies)
        )

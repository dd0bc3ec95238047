"""States and groups in RabbitMQ, in Go Machinery's queues (documents.py, groups.py).

AMQP has no records and no conditions. They are made of queues, locks and transactions
(connections/rabbitmq/queue_records.py). A change of a task or a group holds its lock, reads its
queue, and writes in one AMQP transaction all that becomes true: the new message of each task in
place of those that were read, members that have arrived, the group that is ready or settled, the
outbox.

    crash of this process    what is true    who goes on
    before the commit        nothing         the redelivery runs the task
    after it                 all of it       the redelivery: `begin` says finished, and hands out
                                             the outbox; `unsent` finds one without a redelivery

Reading changes nothing: what was read is put back. (In Go a read takes the state away. A state
that a Go program has read is gone for us as well, and its task counts as one that was never
stored.)

Limits: a state expires `results_expire_in` after it was written, whether the task is finished or
not, as in Go; that must be longer than tasks wait and run. One call's result can be kept for less
(`result_expires`), and not for more. The results of a chord's members are kept for it. States are
lost when RabbitMQ restarts, as in Go: a task that was finished and not acknowledged then runs
again; outboxes and chords are kept. A waiter looks again and again. What is in no queue of Go's and
no guarantee needs is not kept: keys of unique tasks, schedules, revocations, listings.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from machinery_py.backends.base import (
    Backend,
    BackendFeatures,
    Begun,
    Change,
    OutboxBackend,
    ReadyGroup,
    Verdict,
)
from machinery_py.backends.polling import PollingListener
from machinery_py.backends.rabbitmq.documents import (
    LOCKS,
    OUTBOX,
    OUTBOX_LOCK,
    READY,
    READY_LOCK,
    GroupRecord,
    ResultQueues,
    lock_of,
)
from machinery_py.backends.rabbitmq.groups import meta_of
from machinery_py.backends.rabbitmq.steps import RabbitMQSteps
from machinery_py.clock import micros
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.connections.rabbitmq.io_thread import Channel
from machinery_py.connections.rabbitmq.queue_records import (
    QueueMoved,
    QueueTransaction,
    QueueTransactionLost,
    QueueTransactions,
    declare_lock,
)
from machinery_py.errors import BackendUnavailable, DecodeError
from machinery_py.fences import FenceSequence
from machinery_py.tasks.signature import RunNumber
from machinery_py.tasks.states import GroupMeta, State, TaskState
from machinery_py.wire.signatures import decode_signature

EXPIRE_IN = 3600.0  # seconds that a state is kept
# Seconds from the end of a Go worker's last member to its callback; it opens connections.
GO_TIME = 3.0
TRIES = 3
LOOK = 100  # tasks that a waiter reads at once; all locks are held meanwhile, for some 50 ms

T = TypeVar("T")


class AMQPBackend(Backend, OutboxBackend):
    """Queues on the driver's server. The driver belongs to whoever made it."""

    features: BackendFeatures = BackendFeatures(
        name="amqp",
        durable=False,
        listing=False,
        foreign=True,
        foreign_time=GO_TIME,
        keeps_unfinished=False,
        keeps_longer=False,
        revocations=False,
        schedules=False,
        riders=False,
    )

    def __init__(self, driver: AmqpDriver, *, expire_in: float = EXPIRE_IN) -> None:
        """Raises ConfigError: RabbitMQ cannot keep anything so long."""
        self.driver = driver
        self.expire_in = expire_in
        self._queues = ResultQueues(expire_in)
        self._transactions = QueueTransactions(driver, self._declare)
        self._fences = FenceSequence(lambda: micros(self.now()))

    def now(self) -> dt.datetime:
        return self.driver.clock.now()

    def _declare(self, channel: Channel) -> None:
        """Declare the queues for all tasks, and wait for each answer, which may be a refusal."""
        wait = self.driver.timeout
        for lock in (*LOCKS, OUTBOX_LOCK, READY_LOCK):
            declare_lock(channel, lock, wait)
        for queue in (OUTBOX, READY):
            channel.rpc("queue_declare", timeout=wait, **queue.declaration())

    # Transactions

    def _run(
        self,
        uuids: Iterable[str],
        doing: str,
        step: Callable[[RabbitMQSteps], T],
        *,
        once: bool = False,
    ) -> T:
        """Do a step with the locks of these tasks and groups.

        Args:
            once: a step that was lost with its connection is not repeated, since it may be done.
        """
        locks = set(map(lock_of, uuids))
        for left in reversed(range(TRIES)):
            try:
                with self._transactions.transaction(locks, doing) as transaction:
                    steps = self._steps(transaction)
                    result = step(steps)
                    steps.end()
                return result
            except QueueTransactionLost:
                if once or not left:
                    raise
            except QueueMoved as error:
                if not left:
                    raise BackendUnavailable(f"RabbitMQ: {doing}: {error}") from error
        raise AssertionError  # the last try returns or raises

    def _steps(self, transaction: QueueTransaction) -> RabbitMQSteps:
        return RabbitMQSteps(
            transaction,
            self._queues,
            self._fences,
            now=micros(self.now()),
            expire_in=self.expire_in,
        )

    # Changes

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        self.refuse_riders(changes)
        if not changes:
            return []
        uuids = {state.task_uuid for change in changes for state in change.states}
        uuids.update(arrival.group_uuid for change in changes for arrival in change.arrivals)
        uuids.update(group.group_uuid for change in changes for group in change.groups)
        uuids.update(change.fires for change in changes if change.fires)
        return self._run(uuids, "storing states", lambda steps: steps.apply_all(changes), once=True)

    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        if not keys:
            return []
        uuids = [uuid for uuid, _ in keys]
        return self._run(
            uuids, "beginning deliveries", lambda steps: steps.begin_all(keys), once=True
        )

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        return self._run(uuids, "reading states", lambda steps: steps.marks_of(uuids))

    # Outboxes

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        return self._run((), "reading outboxes", lambda steps: steps.outboxes_of(keys))

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        bodies: dict[str, set[bytes]] = {}
        for key, some in sent:
            bodies.setdefault(key, set()).update(some)
        self._run((), "clearing outboxes", lambda steps: steps.clear(bodies))

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        before = micros(self.now()) - int(older_than * 1e6)
        entries = self._run((), "reading outboxes", RabbitMQSteps.open_outboxes)
        old = [(entry.key, entry.bodies) for entry in entries if entry.kept_at <= before]
        return old[skip : skip + limit]

    # Reading

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        if not uuids:
            return {}
        return self._run(uuids, "reading states", lambda steps: steps.states(uuids))

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        def step(steps: RabbitMQSteps) -> tuple[GroupRecord, GroupMeta] | None:
            record = steps.groups.load(group_uuid)
            if record is None or not (record.document or record.callback):
                return None
            return record, meta_of(
                group_uuid, record, {} if record.document else steps.groups.members(group_uuid)
            )

        found = self._run([group_uuid], "reading a group", step)
        if found is None:
            return None
        record, meta = found
        if record.callback and not record.fired:
            if self._go_has_fired(record.callback):
                return msgspec.structs.replace(meta, chord_triggered=True)
        elif record.made_at + int(self.expire_in * 1e6) < micros(
            self.now()
        ) and not self.get_states(meta.task_uuids):
            return None  # it has expired with its members
        return meta

    def _go_has_fired(self, callback: bytes) -> bool:
        """Go's workers leave no other trace of it than the state of the callback."""
        try:
            uuid = decode_signature(callback).uuid
        except DecodeError:
            return False
        if not uuid:
            return False

        def step(steps: RabbitMQSteps) -> bool:
            record = steps.tasks([uuid]).get(uuid)
            if record is None or record.state is None:
                return False
            # A chord that was sent from here has its callback PENDING from the start.
            return record.of_go or record.state.state is not State.PENDING

        return self._run([uuid], "reading a callback's state", step)

    def member_states(self, group_uuid: str, uuids: Sequence[str]) -> dict[str, TaskState]:
        """As get_states; of a chord also if the state expired, or a Go program has read it."""
        states = self.get_states(uuids)
        if states.keys() >= set(uuids):
            return states
        kept = self._run(
            [group_uuid], "reading a group", lambda steps: steps.groups.members(group_uuid)
        )
        return {
            **{uuid: state for uuid in uuids if (state := kept.get(uuid)) is not None},
            **states,
        }

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        return self._run((), "reading ready groups", lambda steps: steps.groups.ready(limit))

    # Purges

    def purge_state(self, task_uuid: str) -> None:
        self._run(
            [task_uuid],
            "purging a state",
            lambda steps: steps.transaction.delete(self._queues.task(task_uuid)),
        )

    def purge_group_meta(self, group_uuid: str) -> None:
        self._run([group_uuid], "purging a group", lambda steps: steps.groups.purge(group_uuid))

    def listener(self) -> PollingListener:
        return PollingListener(
            self._finished, at_once=LOOK, soonest=0.01, latest=1.0, share=0.25, rest=4.0
        )

    def _finished(self, uuids: Sequence[str]) -> list[str]:
        return [uuid for uuid, state in self.get_states(uuids).items() if state.is_finished]

    def is_entered(self) -> bool:
        return self._transactions.is_entered()

    def close(self) -> None:
        self._transactions.close()

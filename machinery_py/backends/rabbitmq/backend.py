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
(`result_expires`), and not for more. The results of a chord's members are
kept for it. States are lost when RabbitMQ restarts, as in Go: a task that was finished and not
acknowledged then runs again, and a key is free whose task has no state; outboxes, chords and
schedules (records.py) are kept. States cannot be listed.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import msgspec

from machinery_py.backends.base import (
    REVOKED_LIFE,
    BackendFeatures,
    Begun,
    Change,
    ReadyGroup,
    Records,
    Rider,
    Verdict,
    lone_rider,
)
from machinery_py.backends.rabbitmq.documents import (
    LOCKS,
    OUTBOX,
    OUTBOX_LOCK,
    READY,
    READY_LOCK,
    REVOKED,
    REVOKED_LOCK,
    GroupRecord,
    OutboxEntry,
    ResultQueues,
    StoredTask,
    decode_outbox,
    decode_record,
    encode_record,
    lock_of,
    name_of,
    pack,
)
from machinery_py.backends.rabbitmq.groups import RabbitMQGroups, meta_of
from machinery_py.backends.rabbitmq.listener import AMQPListener
from machinery_py.backends.rabbitmq.records import SCHEDULES, SCHEDULES_LOCK, RabbitMQRecords
from machinery_py.backends.rabbitmq.revocations import Revocations
from machinery_py.backends.transactional import Row, TransactionalBackend
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
from machinery_py.connections.rabbitmq.queues import FINISHED, REVOCATIONS
from machinery_py.errors import BackendUnavailable, DecodeError
from machinery_py.fences import Fence, FenceSequence, fence_after
from machinery_py.tasks.signature import RunNumber
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.wire.signatures import decode_signature

EXPIRE_IN = 3600.0  # seconds that a state is kept
# Seconds from the end of a Go worker's last member to its callback; it opens connections.
GO_TIME = 3.0
TRIES = 3

T = TypeVar("T")


class _OpenTransaction:
    """The transaction that one thread is in, and what it has read and written."""

    def __init__(self, transaction: QueueTransaction, queues: ResultQueues, now: int) -> None:
        self.transaction = transaction
        self.groups = RabbitMQGroups(queues, transaction)
        self.records = RabbitMQRecords(transaction, now)
        self.bodies: dict[str, bytes] = {}  # as they are written
        self.arrivals: list[Arrival] = []


class AMQPBackend(TransactionalBackend):
    """Queues on the driver's server. The driver belongs to whoever made it."""

    features = BackendFeatures(
        name="amqp",
        durable=False,
        listing=False,
        foreign=True,
        foreign_time=GO_TIME,
        keeps_unfinished=False,
        keeps_longer=False,
        claims=True,
        riders=False,
    )

    def __init__(self, driver: AmqpDriver, *, expire_in: float = EXPIRE_IN) -> None:
        """Raises ConfigError: RabbitMQ cannot keep anything so long."""
        self.driver = driver
        self.expire_in = expire_in
        self._queues = ResultQueues(expire_in)
        self._transactions = QueueTransactions(driver, self._declare)
        self._revocations = Revocations(self._transactions)
        self._mine = threading.local()
        self._fences = FenceSequence(lambda: micros(self.now()))

    def now(self) -> dt.datetime:
        return self.driver.clock.now()

    def _declare(self, channel: Channel) -> None:
        """Declare the queues for all tasks, and wait for each answer, which may be a refusal."""
        wait = self.driver.timeout
        for lock in (*LOCKS, OUTBOX_LOCK, READY_LOCK, REVOKED_LOCK, SCHEDULES_LOCK):
            declare_lock(channel, lock, wait)
        for queue in (OUTBOX, READY, REVOKED, SCHEDULES):
            channel.rpc("queue_declare", timeout=wait, **queue.declaration())
        for name, kind in ((FINISHED, "direct"), (REVOCATIONS, "fanout")):
            exchange = {"exchange": name, "exchange_type": kind, "durable": True}
            channel.rpc("exchange_declare", timeout=wait, **exchange)
        channel.rpc("queue_bind", queue=REVOKED.queue, exchange=REVOCATIONS, timeout=wait)

    # Transactions

    def _run(
        self,
        uuids: Iterable[str],
        doing: str,
        step: Callable[[_OpenTransaction], T],
        *,
        locks: Iterable[str] = (),
        once: bool = False,
    ) -> T:
        """Do a step with the locks of these tasks, groups and claims, and with `locks`.

        Joins the transaction that this thread is in already, which must have taken those locks.

        Args:
            once: a step that was lost with its connection is not repeated, since it may be done.
        """
        if (joined := getattr(self._mine, "current", None)) is not None:
            return step(joined)
        held = {*locks, *map(lock_of, uuids)}
        for left in reversed(range(TRIES)):
            try:
                with self._transactions.transaction(held, doing) as transaction:
                    current = self._mine.current = _OpenTransaction(
                        transaction, self._queues, micros(self.now())
                    )
                    try:
                        result = step(current)
                        current.groups.write()
                    finally:
                        self._mine.current = None
                return result
            except QueueTransactionLost:
                if once or not left:
                    raise
            except QueueMoved as error:
                if not left:
                    raise BackendUnavailable(f"RabbitMQ: {doing}: {error}") from error
        raise AssertionError  # the last try returns or raises

    @property
    def _current(self) -> _OpenTransaction:
        current: _OpenTransaction = self._mine.current
        return current

    def _transaction(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()  # `_run` is around it

    # Changes

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        if not changes:
            return []
        uuids = {state.task_uuid for change in changes for state in change.states}
        uuids.update(arrival.group_uuid for change in changes for arrival in change.arrivals)
        uuids.update(group.group_uuid for change in changes for group in change.groups)
        uuids.update(change.fires for change in changes if change.fires)
        rider = lone_rider(changes, self.features.name)
        locks: Sequence[str] = ()
        if rider is not None and rider.life:
            uuids.add(rider.name)
        elif rider is not None:
            locks = [SCHEDULES_LOCK]

        def step(_: _OpenTransaction) -> list[Verdict]:
            verdicts = TransactionalBackend.apply(self, changes)
            self._let_arrive()
            return verdicts

        return self._run(uuids, "storing states", step, locks=locks, once=True)

    def _apply(self, change: Change, rows: dict[str, Row]) -> Verdict:
        row = rows.get(change.key)
        if isinstance(row, StoredTask) and row.of_go and not row.epoch:
            # Go has read ours away, and its own PENDING came late: that tells of no other delivery.
            row.epoch = change.epoch
        return super()._apply(change, rows)

    def _tasks(self, uuids: Iterable[str]) -> dict[str, StoredTask]:
        transaction = self._current.transaction
        queues = {uuid: self._queues.task(uuid) for uuid in uuids}
        transaction.read(queues.values())
        return {
            uuid: decode_record(uuid, [one.body for one in held])
            for uuid, queue in queues.items()
            if (held := transaction.held(queue))
        }

    def _load(self, uuids: Iterable[str]) -> dict[str, Row]:
        return dict(self._tasks(uuids))

    def _save(self, rows: Sequence[tuple[str, Row]]) -> None:
        current = self._current
        for uuid, row in rows:
            seq = row.seq if isinstance(row, StoredTask) else 0
            body = current.bodies[uuid] = encode_record(uuid, row, seq + 1)
            state, most = row.state, self.expire_in  # the queue's own expiry
            life = state.life(most) if state is not None and state.is_finished else most
            queue = self._queues.task(uuid)
            current.transaction.replace(queue, body, life if life < most else None)

    def _add_groups(self, groups: Sequence[GroupMeta]) -> None:
        self._current.groups.create(groups, micros(self.now()))

    def _arrive(self, arrivals: Sequence[Arrival]) -> None:
        self._current.arrivals += arrivals  # added together, once their states are written

    def _let_arrive(self) -> None:
        current = self._current
        arrivals, current.arrivals = current.arrivals, []
        current.groups.arrive(arrivals, current.bodies)

    def _fire(self, group_uuid: str) -> bool:
        self._let_arrive()
        return self._current.groups.fire(group_uuid)

    def _finished(self, uuids: Sequence[str]) -> None:
        for uuid in uuids:
            self._current.transaction.publish(FINISHED, name_of(uuid), b"")

    def _next_epoch(self, epoch: Fence) -> Fence:
        return fence_after(epoch, self._fences.next())

    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        if not keys:
            return []
        return self._run(
            [uuid for uuid, _ in keys],
            "beginning deliveries",
            lambda _: TransactionalBackend.begin(self, keys),
            once=True,
        )

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        return self._run(
            uuids, "reading states", lambda _: TransactionalBackend.settled_by(self, uuids)
        )

    # Outboxes

    def _keep_outbox(self, key: str, bodies: Sequence[bytes]) -> None:
        entry = OutboxEntry(key=key, kept_at=micros(self.now()), bodies=tuple(bodies))
        self._current.transaction.put(OUTBOX, pack(entry))

    def _entries(self) -> list[OutboxEntry]:
        transaction = self._current.transaction
        transaction.lock([OUTBOX_LOCK])
        transaction.read([OUTBOX])
        return [decode_outbox(one.body) for one in transaction.held(OUTBOX)]

    def _outbox(self, key: str) -> Sequence[bytes]:
        return [body for entry in self._entries() if entry.key == key for body in entry.bodies]

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        return self._run((), "reading outboxes", lambda _: [self._outbox(key) for key in keys])

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        bodies: dict[str, set[bytes]] = {}
        for key, some in sent:
            bodies.setdefault(key, set()).update(some)

        def step(current: _OpenTransaction) -> None:
            entries = self._entries()
            current.transaction.drop(
                one
                for one, entry in zip(current.transaction.held(OUTBOX), entries, strict=True)
                if entry.key in bodies and bodies[entry.key].issuperset(entry.bodies)
            )

        self._run((), "clearing outboxes", step)

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        before = micros(self.now()) - int(older_than * 1e6)
        entries = self._run((), "reading outboxes", lambda _: self._entries())
        old = [(entry.key, entry.bodies) for entry in entries if entry.kept_at <= before]
        return old[skip : skip + limit]

    # Records and claims

    def _held_by(self, rider: Rider) -> bytes | None:
        records = self._current.records
        return records.claims([rider.name])[0] if rider.life else records.record(rider.name)

    def _ride(self, rider: Rider) -> None:
        if rider.life:
            self._current.records.keep_claim(rider.name, rider.body, rider.life)
        else:
            self._current.records.keep_record(rider.name, rider.body)

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        names = [name for name, _ in claims]

        def step(current: _OpenTransaction) -> None:
            current.records.claims(names)  # all at once, not one after the other
            TransactionalBackend.release(self, claims)

        if claims:
            self._run(names, "releasing claims", step)

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        if not names:
            return []
        return self._run(names, "reading claims", lambda current: current.records.claims(names))

    def records(self, known: str = "") -> Records:
        table = self._run(
            (), "reading schedules", lambda current: current.records.table(), locks=[SCHEDULES_LOCK]
        )
        return Records(
            now=self.now(),
            version=table.version,
            bodies=None if table.version == known else table.by_name(),
        )

    # Reading

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        if not uuids:
            return {}
        rows = self._run(uuids, "reading states", lambda _: self._load(dict.fromkeys(uuids)))
        return {uuid: row.state for uuid, row in rows.items() if row.state is not None}

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        def step(current: _OpenTransaction) -> tuple[GroupRecord, GroupMeta] | None:
            record = current.groups.load(group_uuid)
            if record is None or not (record.document or record.callback):
                return None
            return record, meta_of(
                group_uuid, record, {} if record.document else current.groups.members(group_uuid)
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

        def step(_: _OpenTransaction) -> bool:
            record = self._tasks([uuid]).get(uuid)
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
            [group_uuid], "reading a group", lambda current: current.groups.members(group_uuid)
        )
        return {
            **{uuid: state for uuid in uuids if (state := kept.get(uuid)) is not None},
            **states,
        }

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        return self._run((), "reading ready groups", lambda current: current.groups.ready(limit))

    # Revocations, purges

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        until = micros(self.now()) + int(life * 1e6)
        self._run(
            (),
            "revoking",
            lambda current: self._revocations.add(current.transaction, uuids, until),
            locks=[REVOKED_LOCK],
        )

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        return self._revocations.among(uuids) if uuids else set()

    def purge_state(self, task_uuid: str) -> None:
        self._run(
            [task_uuid],
            "purging a state",
            lambda current: current.transaction.delete(self._queues.task(task_uuid)),
        )

    def purge_group_meta(self, group_uuid: str) -> None:
        self._run([group_uuid], "purging a group", lambda current: current.groups.purge(group_uuid))

    def listener(self) -> AMQPListener:
        return AMQPListener(self._transactions, self._which_finished)

    def _which_finished(self, uuids: Sequence[str]) -> list[str]:
        return [uuid for uuid, state in self.get_states(uuids).items() if state.is_finished]

    def is_entered(self) -> bool:
        return self._transactions.is_entered() or self._revocations.is_entered()

    def close(self) -> None:
        self._transactions.close()

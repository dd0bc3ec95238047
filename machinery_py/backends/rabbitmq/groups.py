"""Groups in RabbitMQ: members that have arrived, complete groups, settled ones.

All of it happens inside a transaction that holds the group's lock.

A member that ends is one message in `machinery.results.members.<group>`, and for Go one in
`<group>`. The server counts ours; only when there are as many as the group has members are they
read, and each UUID counted once.

Members that Go workers have ended are in `<group>` alone. Go's worker that ends the last one sends
the callback without asking; so the workers here look after such a group, and leave it to Go for a
while (`BackendFeatures.foreign_time`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from machinery_py.backends.base import ReadyGroup
from machinery_py.backends.rabbitmq.documents import (
    READY,
    READY_LOCK,
    GroupRecord,
    Member,
    ReadyEntry,
    ResultQueues,
    decode_group_record,
    decode_member,
    decode_ready,
    decode_record,
    document_of,
    pack,
)
from machinery_py.connections.rabbitmq.queue_records import Queue, QueueTransaction
from machinery_py.errors import DecodeError
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.wire.states import decode_group, decode_state, encode_group


class RabbitMQGroups:
    """Changes of groups in a transaction; `write` puts them into it."""

    def __init__(self, queues: ResultQueues, transaction: QueueTransaction) -> None:
        self._queues = queues
        self._transaction = transaction
        self._records: dict[str, GroupRecord | None] = {}
        self._changed: dict[str, GroupRecord] = {}

    # Records

    def load(self, group: str) -> GroupRecord | None:
        if group not in self._records:
            queue = self._queues.group(group)
            self._transaction.read([queue])
            found = [decode_group_record(one.body) for one in self._transaction.held(queue)]
            self._records[group] = max(found, key=lambda record: record.seq) if found else None
        return self._records[group]

    def _save(self, group: str, record: GroupRecord) -> None:
        self._records[group] = self._changed[group] = record

    def write(self) -> None:
        """Put the changed records into the transaction: once, at its end."""
        for group, record in self._changed.items():
            queue = self._queues.group(group)
            record.seq += 1
            self._transaction.replace(queue, pack(record))

    def create(self, groups: Sequence[GroupMeta], now: int) -> None:
        """Create the groups that are not there yet."""
        self._transaction.read([self._queues.group(one.group_uuid) for one in groups])
        for group in groups:
            record = self.load(group.group_uuid) or GroupRecord()
            if not record.document:
                record.document, record.made_at = encode_group(group), now
                self._save(group.group_uuid, record)

    def purge(self, group: str) -> None:
        self._transaction.lock([READY_LOCK])
        for queue in (self._queues.group(group), self._queues.members(group)):
            self._transaction.delete(queue)
        self._unlist(group)

    # Arrivals

    def arrive(self, arrivals: Sequence[Arrival], bodies: Mapping[str, bytes]) -> None:
        """Add members, and make their groups ready if they are complete or broken.

        Args:
            bodies: the new messages of their tasks.
        """
        groups: dict[str, dict[str, Arrival]] = {}
        for one in arrivals:
            if one.callback:
                groups.setdefault(one.group_uuid, {}).setdefault(one.task_uuid, one)
        self._transaction.read([self._queues.group(group) for group in groups])
        for group, members in groups.items():
            self._arrive(group, members, bodies)

    def _arrive(
        self, group: str, members: Mapping[str, Arrival], bodies: Mapping[str, bytes]
    ) -> None:
        transaction, record = self._transaction, self.load(group) or GroupRecord()
        if record.fired:
            return
        first = next(iter(members.values()))
        queue = self._queues.members(group)
        count = transaction.count(queue) + len(members)
        known = self._known(queue) if count >= first.total else frozenset[str]()
        for uuid in members.keys() - known:
            body = bodies.get(uuid, b"")
            transaction.put(queue, pack(Member(uuid=uuid, body=body)))
            if body:
                transaction.put(self._queues.task(group), document_of(body))
        changed = not record.callback
        record.callback, record.total = first.callback, first.total
        failed = next((uuid for uuid, one in members.items() if not one.ok), "")
        complete = count >= first.total and len(known | members.keys()) >= first.total
        if (failed or complete) and not record.ready:
            record.ready, record.failed_member, changed = True, failed, True
            transaction.put(
                READY, pack(ReadyEntry(group=group, callback=first.callback, failed_member=failed))
            )
        if changed:
            self._save(group, record)

    def _known(self, queue: Queue) -> frozenset[str]:
        """Return the members that have arrived; drop those that arrived again."""
        self._transaction.read([queue])
        seen: set[str] = set()
        for one in self._transaction.held(queue):
            member = decode_member(one.body).uuid
            if member in seen:
                self._transaction.drop([one])
            seen.add(member)
        return frozenset(seen)

    def members(self, group: str) -> dict[str, TaskState | None]:
        """Return the members of a chord that have arrived, ours and Go's, with the known states."""
        ours, shared = self._queues.members(group), self._queues.task(group)
        self._transaction.count(shared)  # not to be probed: a Go worker may be reading it
        self._transaction.read([ours, shared])
        found: dict[str, TaskState | None] = {}
        for one in self._transaction.held(shared):
            try:
                state = decode_state(one.body)
            except DecodeError:
                continue  # no member
            found[state.task_uuid] = state
        for one in self._transaction.held(ours):
            member = decode_member(one.body)
            row = decode_record(member.uuid, [member.body] if member.body else [])
            found[member.uuid] = row.state or found.get(member.uuid)
        return found

    # Settling

    def fire(self, group: str) -> bool:
        """Settle the group, once; return whether this call did."""
        record = self.load(group)
        if record is None or record.fired:
            return False
        self._transaction.lock([READY_LOCK])
        record.fired = True
        self._save(group, record)
        self._unlist(group)
        self._transaction.declare(self._queues.triggered(group))  # what Go's workers ask for
        self._transaction.delete(self._queues.members(group))
        return True

    def _unlist(self, group: str) -> None:
        self._transaction.read([READY])
        self._transaction.drop(
            one for one in self._transaction.held(READY) if decode_ready(one.body).group == group
        )

    def ready(self, limit: int) -> list[ReadyGroup]:
        self._transaction.lock([READY_LOCK])
        self._transaction.read([READY])
        entries = [decode_ready(one.body) for one in self._transaction.held(READY)[:limit]]
        return [
            ReadyGroup(group_uuid=one.group, callback=one.callback, failed_member=one.failed_member)
            for one in entries
        ]


def meta_of(group: str, record: GroupRecord, members: Mapping[str, TaskState | None]) -> GroupMeta:
    """Return the group as Go's backends would keep it.

    Go sends chords without a group document: then it has the members that have arrived, once they
    are complete, or one of them has failed.
    """
    if record.document:
        meta = decode_group(record.document)
        return msgspec.structs.replace(meta, chord_triggered=record.fired)
    over = len(members) >= record.total or any(
        one is not None and one.state is State.FAILURE for one in members.values()
    )
    return GroupMeta(
        group_uuid=group, task_uuids=tuple(members) if over else (), chord_triggered=record.fired
    )

"""Groups in RabbitMQ: members that have arrived, complete groups, settled ones.

All of it happens inside a transaction that holds the group's lock.

A member that ends is one message in `machinery.results.members.<group>`, and for Go one in `<group>`. The server counts ours;
only when there are as many as the group has members are they read, and each UUID counted once.

Members that Go workers have ended are in `<group>` alone. Go's worker that ends the last one sends the callback, and asks
nobody; so the workers here look after such a group, and leave it to Go for a while (`BackendFeatures.foreign_time`).
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
    Places,
    ReadyEntry,
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

    def __init__(self, places: Places, transaction: QueueTransaction) -> None:
        self._places = places
        self._turn = transaction
        self._records: dict[str, GroupRecord | None] = {}
        self._changed: dict[str, GroupRecord] = {}

    # Records

    def load(self, group: str) -> GroupRecord | None:
        if group not in self._records:
            place = self._places.group(group)
            self._turn.read([place])
            found = [decode_group_record(one.body) for one in self._turn.held(place)]
            self._records[group] = max(found, key=lambda record: record.seq) if found else None
        return self._records[group]

    def _save(self, group: str, record: GroupRecord) -> None:
        self._records[group] = self._changed[group] = record

    def write(self) -> None:
        """To be called once, when all is said."""
        for group, record in self._changed.items():
            place = self._places.group(group)
            record.seq += 1
            self._turn.drop(self._turn.held(place))
            self._turn.put(place, pack(record))

    def create(self, groups: Sequence[GroupMeta], now: int) -> None:
        """Create the groups that are not there yet."""
        self._turn.read([self._places.group(one.group_uuid) for one in groups])
        for group in groups:
            record = self.load(group.group_uuid) or GroupRecord()
            if not record.document:
                record.document, record.made_at = encode_group(group), now
                self._save(group.group_uuid, record)

    def purge(self, group: str) -> None:
        self._turn.take([READY_LOCK])
        for place in (self._places.group(group), self._places.members(group)):
            self._turn.delete(place)
        self._unlist(group)

    # Arrivals

    def arrive(self, arrivals: Sequence[Arrival], bodies: Mapping[str, bytes]) -> None:
        """Let these be in, and make their groups ready if they are complete or broken. `bodies`: of their tasks' queues."""
        groups: dict[str, dict[str, Arrival]] = {}
        for one in arrivals:
            if one.callback:
                groups.setdefault(one.group_uuid, {}).setdefault(one.task_uuid, one)
        self._turn.read([self._places.group(group) for group in groups])
        for group, members in groups.items():
            self._arrive(group, members, bodies)

    def _arrive(
        self, group: str, members: Mapping[str, Arrival], bodies: Mapping[str, bytes]
    ) -> None:
        transaction, record = self._turn, self.load(group) or GroupRecord()
        if record.fired:
            return
        first = next(iter(members.values()))
        place = self._places.members(group)
        count = transaction.count(place) + len(members)
        known = self._known(place) if count >= first.total else frozenset[str]()
        for uuid in members.keys() - known:
            body = bodies.get(uuid, b"")
            transaction.put(place, pack(Member(uuid=uuid, body=body)))
            if body:
                transaction.put(self._places.shared_members(group), document_of(body))
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

    def _known(self, place: Queue) -> frozenset[str]:
        """The members that are in. Those that came in several times stay once."""
        self._turn.read([place])
        seen: set[str] = set()
        for one in self._turn.held(place):
            member = decode_member(one.body).uuid
            if member in seen:
                self._turn.drop([one])
            seen.add(member)
        return frozenset(seen)

    def members(self, group: str) -> dict[str, TaskState | None]:
        """The members of a chord that are in, ours and Go's, in the order of their coming, with their states if known."""
        ours, shared = self._places.members(group), self._places.shared_members(group)
        self._turn.count(shared)  # not to be probed: a Go worker may be reading it
        self._turn.read([ours, shared])
        found: dict[str, TaskState | None] = {}
        for one in self._turn.held(shared):
            try:
                state = decode_state(one.body)
            except DecodeError:
                continue  # whoever put it there: it is no member
            found[state.task_uuid] = state
        for one in self._turn.held(ours):
            member = decode_member(one.body)
            row = decode_record(member.uuid, [member.body] if member.body else [])
            found[member.uuid] = row.state or found.get(member.uuid)
        return found

    # Settling

    def fire(self, group: str) -> bool:
        """Settle the group, if nobody has."""
        record = self.load(group)
        if record is None or record.fired:
            return False
        self._turn.take([READY_LOCK])
        record.fired = True
        self._save(group, record)
        self._unlist(group)
        self._turn.make(self._places.triggered(group))  # what Go's workers ask for
        self._turn.delete(self._places.members(group))
        return True

    def _unlist(self, group: str) -> None:
        self._turn.read([READY])
        self._turn.drop(
            one for one in self._turn.held(READY) if decode_ready(one.body).group == group
        )

    def ready(self, limit: int) -> list[ReadyGroup]:
        self._turn.take([READY_LOCK])
        self._turn.read([READY])
        entries = [decode_ready(one.body) for one in self._turn.held(READY)[:limit]]
        return [
            ReadyGroup(group_uuid=one.group, callback=one.callback, failed_member=one.failed_member)
            for one in entries
        ]


def meta_of(group: str, record: GroupRecord, members: Mapping[str, TaskState | None]) -> GroupMeta:
    """Return the group as Go's backends would keep it. Go sends chords without it: then it has the members that are in, once they
    are all, or one of them has failed.
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

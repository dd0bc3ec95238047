"""A backend over a few dicts, which a store reads and writes in a transaction.

Such stores are memory, a file, a key-value store. Each brings `_transaction` and `_tables`. This
module decides which states may follow which, what a chord waits for and what expires.
"""

from __future__ import annotations

import datetime as dt
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from machinery_py.backends.base import REVOKED_LIFE, Listener, ReadyGroup, Records, Rider
from machinery_py.backends.listings import Count, Listing, Place, counts_of
from machinery_py.backends.polling import PollingListener
from machinery_py.backends.transactional import Row, TransactionalBackend
from machinery_py.bounds import LISTING_STEP
from machinery_py.clock import SYSTEM_CLOCK, Clock, micros
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState

SWEEP = 60.0  # seconds between two looks for what has expired
LONG_AGO = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
INSTANT = dt.timedelta(microseconds=1)
LONGEST_CHORD = dt.timedelta(days=7)  # without an arrival, until its results may expire


class GroupRow(msgspec.Struct):
    """A group and its members that have finished.

    `touched_at`: when the last one came in, or the callback was settled.
    """

    meta: GroupMeta
    touched_at: dt.datetime
    members: dict[str, None] = {}
    total: int = 0
    callback: bytes = b""
    failed_member: str = ""
    fired: bool = False

    @property
    def ready(self) -> bool:
        complete = bool(self.total) and len(self.members) >= self.total
        return bool(self.callback) and not self.fired and (complete or bool(self.failed_member))


class Tables(msgspec.Struct):
    """All that the backend keeps, as a record that msgspec can encode.

    There are no sets: equal tables have equal bytes.

    Attributes:
        changed_at: of each task, in the order of the last change, for the sweep and the listings.
        ready: groups whose callback is to be settled.
        revoked: task UUID → until when.
        version: counts the changes of `records`.
        claims: with the moment at which each is forgotten.
    """

    rows: dict[str, Row] = {}
    changed_at: dict[str, dt.datetime] = {}
    groups: dict[str, GroupRow] = {}
    ready: dict[str, None] = {}
    outboxes: dict[str, tuple[dt.datetime, tuple[bytes, ...]]] = {}
    revoked: dict[str, dt.datetime] = {}
    records: dict[str, bytes] = {}
    version: int = 0
    claims: dict[str, tuple[bytes, dt.datetime]] = {}


class MappingBackend(TransactionalBackend):
    """The backend's contract over `Tables`."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK, *, expire_in: float = 3600.0) -> None:
        self.clock = clock
        self.expire_in = expire_in

    @property
    @abstractmethod
    def _tables(self) -> Tables:
        """The tables of the transaction in which this is called."""

    def now(self) -> dt.datetime:
        return self.clock.now()

    def _load(self, uuids: Iterable[str]) -> dict[str, Row]:
        rows = self._tables.rows
        return {
            uuid: Row(state=row.state, mark=row.mark, epoch=row.epoch)
            for uuid in uuids
            if (row := rows.get(uuid)) is not None and not self._is_over(uuid, row.state)
        }

    def _save(self, rows: Sequence[tuple[str, Row]]) -> None:
        now, tables = self.now(), self._tables
        # Never the same moment twice: the listings are ordered by it.
        latest = next(reversed(tables.changed_at.values()), LONG_AGO)
        for uuid, row in rows:
            tables.rows[uuid] = row
            tables.changed_at.pop(uuid, None)
            tables.changed_at[uuid] = latest = max(now, latest + INSTANT)

    def _add_groups(self, groups: Sequence[GroupMeta]) -> None:
        for meta in groups:
            group = self._tables.groups.get(meta.group_uuid)
            if group is None:
                self._tables.groups[meta.group_uuid] = GroupRow(meta, self.now())
            elif not group.meta.task_uuids:
                group.meta = meta

    def _arrive(self, arrivals: Sequence[Arrival]) -> None:
        now, tables = self.now(), self._tables
        for arrival in arrivals:
            uuid = arrival.group_uuid
            if uuid not in tables.groups:
                tables.groups[uuid] = GroupRow(GroupMeta(group_uuid=uuid, created_at=now), now)
            group = tables.groups[uuid]
            if arrival.task_uuid in group.members:
                continue
            group.members[arrival.task_uuid] = None
            group.touched_at = now
            group.total = arrival.total
            group.callback = arrival.callback
            if not arrival.ok and not group.failed_member:
                group.failed_member = arrival.task_uuid
            if group.ready:
                tables.ready[uuid] = None

    def _fire(self, group_uuid: str) -> bool:
        group = self._tables.groups.get(group_uuid)
        if group is None or group.fired:
            return False
        group.fired = True
        group.meta = msgspec.structs.replace(group.meta, chord_triggered=True)
        group.touched_at = self.now()
        self._tables.ready.pop(group_uuid, None)
        return True

    def _keep_outbox(self, key: str, bodies: Sequence[bytes]) -> None:
        self._tables.outboxes[key] = self.now(), tuple(bodies)

    def _outbox(self, key: str) -> Sequence[bytes]:
        return self._tables.outboxes[key][1] if key in self._tables.outboxes else ()

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        with self._transaction():
            for key, bodies in sent:
                if self._outbox(key) == tuple(bodies):
                    self._tables.outboxes.pop(key, None)

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        before = self.now() - dt.timedelta(seconds=older_than)
        with self._transaction():
            found: list[tuple[str, Sequence[bytes]]] = [
                (key, bodies)
                for key, (kept_at, bodies) in self._tables.outboxes.items()
                if kept_at <= before
            ]
            return found[skip : skip + limit]

    def _held_by(self, rider: Rider) -> bytes | None:
        return self._claim(rider.name) if rider.life else self._tables.records.get(rider.name)

    def _ride(self, rider: Rider) -> None:
        tables, name, body = self._tables, rider.name, rider.body
        if body is None:
            (tables.claims if rider.life else tables.records).pop(name, None)
        elif rider.life:
            tables.claims[name] = body, self.now() + dt.timedelta(seconds=rider.life)
        else:
            tables.records[name] = body
        tables.version += not rider.life

    def records(self, known: str = "") -> Records:
        with self._transaction():
            version = str(self._tables.version)
            bodies = None if version == known else dict(self._tables.records)
            return Records(now=self.now(), version=version, bodies=bodies)

    def _claim(self, name: str) -> bytes | None:
        body, ends_at = self._tables.claims.get(name, (None, self.now()))
        return body if ends_at > self.now() else None

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        with self._transaction():
            return [self._claim(name) for name in names]

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        with self._transaction():
            rows = self._tables.rows
            return {
                uuid: row.state
                for uuid in uuids
                if (row := rows.get(uuid)) is not None
                and row.state is not None
                and not self._is_over(uuid, row.state)
            }

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        with self._transaction():
            group = self._tables.groups.get(group_uuid)
            return group.meta if group else None

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        with self._transaction():
            names = sorted(self._tables.ready)[:limit]
            groups = [(name, self._tables.groups[name]) for name in names]
            return [
                ReadyGroup(
                    group_uuid=name, callback=group.callback, failed_member=group.failed_member
                )
                for name, group in groups
            ]

    def list_states(
        self,
        *,
        states: Collection[State] = (),
        name: str = "",
        since: dt.datetime | None = None,
        after: Place | None = None,
        limit: int = 100,
    ) -> Listing:
        found: list[tuple[Place, TaskState]] = []
        looked, end = 0, after
        with self._transaction():
            for place in self._places(since, after):
                if looked >= LISTING_STEP or len(found) >= limit:
                    return Listing(found=found, end=end, looked=looked)
                one, end, looked = self._tables.rows[place[1]].state, place, looked + 1
                fits = one is not None and one.state in (states or State)
                if one is None or not fits or name not in ("", one.task_name):
                    continue
                if not self._is_over(place[1], one):
                    found.append((place, one))
        return Listing(found=found, end=None, looked=looked)

    def _places(self, since: dt.datetime | None, after: Place | None) -> Iterator[Place]:
        for uuid, changed_at in reversed(self._tables.changed_at.items()):
            if since is not None and changed_at < since:
                return
            place = micros(changed_at), uuid
            if after is None or place < after:
                yield place

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        with self._transaction():
            return sorted(
                uuid
                for uuid, row in self._tables.rows.items()
                if uuid.startswith(prefix) and not self._is_over(uuid, row.state)
            )[:limit]

    def finished_since(self, moment: dt.datetime, step: int = 3600) -> list[Count]:
        rows: list[tuple[int, str, int, int]] = []
        with self._transaction():
            for at, uuid in self._places(moment, None):
                one = self._tables.rows[uuid].state
                if one is not None and one.is_finished and not self._is_over(uuid, one):
                    second, failed = at // 1_000_000, one.state is State.FAILURE
                    rows.append((second - second % step, one.queue, not failed, failed))
        return counts_of(rows)

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        until = self.now() + dt.timedelta(seconds=life)
        with self._transaction():
            self._tables.revoked.update(dict.fromkeys(uuids, until))
            if life <= 0:
                for uuid in uuids:
                    del self._tables.revoked[uuid]

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        with self._transaction():
            return self._tables.revoked.keys() & uuids if self._tables.revoked else set()

    def purge_state(self, task_uuid: str) -> None:
        with self._transaction():
            self._tables.rows.pop(task_uuid, None)
            self._tables.changed_at.pop(task_uuid, None)

    def _delete_finished(self, states: Sequence[TaskState]) -> None:
        with self._transaction():
            awaited = self._awaited()
            for uuid in {one.task_uuid for one in states} - awaited:
                row = self._tables.rows.get(uuid)
                if row is not None and row.state is not None and row.state.is_finished:
                    self.purge_state(uuid)

    def purge_group_meta(self, group_uuid: str) -> None:
        with self._transaction():
            self._tables.groups.pop(group_uuid, None)
            self._tables.ready.pop(group_uuid, None)

    def listener(self) -> Listener:
        """Return a listener that polls the states; a store that can notify brings its own."""
        return PollingListener(self._finished_of, latest=0.1, rest=4.0)

    def _finished_of(self, uuids: Sequence[str]) -> list[str]:
        return [uuid for uuid, state in self.get_states(uuids).items() if state.is_finished]

    def tend(self) -> float:
        now = self.now()
        before = now - dt.timedelta(seconds=self.expire_in)
        with self._transaction():
            tables = self._tables
            awaited = self._awaited()
            _drop(tables.claims, [name for name, (_, end) in tables.claims.items() if end <= now])
            _drop(tables.revoked, [uuid for uuid, end in tables.revoked.items() if end <= now])
            for uuid, changed_at in list(tables.changed_at.items()):
                if changed_at > before:
                    break
                state = tables.rows[uuid].state
                if (state is None or self._has_lapsed(uuid, state)) and uuid not in awaited:
                    self.purge_state(uuid)
            for name, group in list(tables.groups.items()):
                if group.touched_at <= before and not group.ready and self._is_forsaken(group):
                    self.purge_group_meta(name)
        return SWEEP

    def _is_over(self, uuid: str, state: TaskState | None) -> bool:
        """Whether it has expired, and only no sweep has come yet."""
        if state is None or not self._has_lapsed(uuid, state):
            return False
        return uuid not in self._awaited()

    def _has_lapsed(self, uuid: str, state: TaskState) -> bool:
        life = dt.timedelta(seconds=state.life(self.expire_in))
        return state.is_finished and self._tables.changed_at[uuid] + life <= self.now()

    def _awaited(self) -> set[str]:
        """Members whose results a chord will want, at most a week after the last one came in."""
        long_ago = self.now() - LONGEST_CHORD
        return {
            uuid
            for group in self._tables.groups.values()
            if group.members and not group.fired and group.touched_at > long_ago
            for uuid in group.meta.task_uuids
        }

    def _is_forsaken(self, group: GroupRow) -> bool:
        """Whether no member has a state any more."""
        rows = self._tables.rows.keys()
        return rows.isdisjoint(group.meta.task_uuids) and rows.isdisjoint(group.members)


def _drop(table: dict[str, Any], keys: Sequence[str]) -> None:
    for key in keys:
        del table[key]

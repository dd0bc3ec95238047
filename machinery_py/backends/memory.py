"""States and groups in this process: for tests, and the reference that the other backends are compared with.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from machinery_py.backends.base import REVOKED_LIFE, BackendFeatures, Listener, ReadyGroup, Records
from machinery_py.backends.transactional import Row, TransactionalBackend
from machinery_py.connections.memory import MemoryHub
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState

SWEEP = 60.0  # seconds between two looks for what has expired
LONGEST_CHORD = dt.timedelta(
    days=7
)  # without an arrival, until the results that did come in may expire


@dataclass(slots=True)
class _GroupMembers:
    """A group and the members that are in."""

    meta: GroupMeta
    touched_at: dt.datetime
    members: set[str] = field(default_factory=set)
    total: int = 0
    callback: bytes = b""
    failed_member: str = ""
    fired: bool = False

    @property
    def ready(self) -> bool:
        complete = bool(self.total) and len(self.members) >= self.total
        return bool(self.callback) and not self.fired and (complete or bool(self.failed_member))


class MemoryBackend(TransactionalBackend):
    """Dicts under the hub's lock."""

    features = BackendFeatures(
        name="memory", durable=False, shared=False, embedded=True, claims=True
    )

    def __init__(self, hub: MemoryHub, *, expire_in: float = 3600.0) -> None:
        self.hub = hub
        self.expire_in = expire_in
        self._rows: dict[str, Row] = {}
        self._changed_at: dict[str, dt.datetime] = {}
        self._groups: dict[str, _GroupMembers] = {}
        self._ready: set[str] = set()
        self._outboxes: dict[str, tuple[Sequence[bytes], float]] = {}
        self._revoked: dict[str, dt.datetime] = {}  # → until when
        self._records: dict[str, bytes] = {}
        self._records_version = 0
        self._claims: dict[
            str, tuple[bytes, dt.datetime]
        ] = {}  # with the moment at which each is forgotten
        self._listeners: set[MemoryListener] = set()

    def now(self) -> dt.datetime:
        return self.hub.clock.now()

    def _transaction(self) -> contextlib.AbstractContextManager[object]:
        return self.hub.lock

    def _load(self, uuids: Iterable[str]) -> dict[str, Row]:
        rows = self._rows
        return {
            uuid: Row(state=row.state, mark=row.mark, epoch=row.epoch)
            for uuid in uuids
            if (row := rows.get(uuid)) is not None and not self._is_over(uuid, row.state)
        }

    def _save(self, rows: Sequence[tuple[str, Row]]) -> None:
        now = self.now()
        for uuid, row in rows:
            self._rows[uuid] = row
            # Kept in the order of their last change: the sweep and the listings read it from an end.
            self._changed_at.pop(uuid, None)
            self._changed_at[uuid] = now

    def _add_groups(self, groups: Sequence[GroupMeta]) -> None:
        for meta in groups:
            group = self._groups.get(meta.group_uuid)
            if group is None:
                self._groups[meta.group_uuid] = _GroupMembers(meta, self.now())
            elif not group.meta.task_uuids:
                group.meta = meta

    def _arrive(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            group = self._groups.setdefault(
                arrival.group_uuid,
                _GroupMembers(
                    GroupMeta(group_uuid=arrival.group_uuid, created_at=self.now()), self.now()
                ),
            )
            if arrival.task_uuid in group.members:
                continue
            group.members.add(arrival.task_uuid)
            group.touched_at = self.now()
            group.total = arrival.total
            group.callback = arrival.callback
            if not arrival.ok and not group.failed_member:
                group.failed_member = arrival.task_uuid
            if group.ready:
                self._ready.add(arrival.group_uuid)

    def _fire(self, group_uuid: str) -> bool:
        group = self._groups.get(group_uuid)
        if group is None or group.fired:
            return False
        group.fired = True
        group.meta = GroupMeta(
            group_uuid=group_uuid,
            task_uuids=group.meta.task_uuids,
            chord_triggered=True,
            created_at=group.meta.created_at,
        )
        group.touched_at = self.now()
        self._ready.discard(group_uuid)
        return True

    def _keep_outbox(self, key: str, bodies: Sequence[bytes]) -> None:
        self._outboxes[key] = (tuple(bodies), self.hub.clock.monotonic())

    def _outbox(self, key: str) -> Sequence[bytes]:
        return self._outboxes.get(key, ((), 0.0))[0]

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        with self.hub.lock:
            for key, bodies in sent:
                if self._outbox(key) == tuple(bodies):
                    self._outboxes.pop(key, None)

    def unsent(self, limit: int, *, older_than: float) -> list[tuple[str, Sequence[bytes]]]:
        with self.hub.lock:
            before = self.hub.clock.monotonic() - older_than
            found = [
                (key, bodies)
                for key, (bodies, kept_at) in self._outboxes.items()
                if kept_at <= before
            ]
            return found[:limit]

    def _swap_record(self, name: str, expected: bytes | None, body: bytes | None) -> bool:
        if self._records.get(name) != expected:
            return False
        if body is None:
            self._records.pop(name, None)
        else:
            self._records[name] = body
        self._records_version += 1
        return True

    def _swap_claim(
        self, name: str, expected: bytes | None, body: bytes | None, life: float
    ) -> bool:
        if self._claim(name) != expected:
            return False
        if body is None:
            self._claims.pop(name, None)
        else:
            self._claims[name] = body, self.now() + dt.timedelta(seconds=life)
        return True

    def _claim(self, name: str) -> bytes | None:
        body, ends_at = self._claims.get(name, (None, self.now()))
        return body if ends_at > self.now() else None

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        with self.hub.lock:
            return [self._claim(name) for name in names]

    def records(self, known: str = "") -> Records:
        with self.hub.lock:
            version = str(self._records_version)
            bodies = None if version == known else dict(self._records)
            return Records(now=self.now(), version=version, bodies=bodies)

    def _finished(self, uuids: Sequence[str]) -> None:
        for listener in self._listeners:
            listener.notify(uuids)

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        with self.hub.lock:
            rows = self._rows
            return {
                uuid: row.state
                for uuid in uuids
                if (row := rows.get(uuid)) is not None
                and row.state is not None
                and not self._is_over(uuid, row.state)
            }

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        with self.hub.lock:
            group = self._groups.get(group_uuid)
            return group.meta if group else None

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        with self.hub.lock:
            names = sorted(self._ready)[:limit]
            return [
                ReadyGroup(
                    group_uuid=name,
                    callback=self._groups[name].callback,
                    failed_member=self._groups[name].failed_member,
                )
                for name in names
            ]

    def list_states(
        self,
        *,
        state: State | None = None,
        name: str = "",
        since: dt.datetime | None = None,
        limit: int = 100,
    ) -> list[TaskState]:
        with self.hub.lock:
            found: list[TaskState] = []
            for uuid in reversed(self._changed_at):
                one = self._rows[uuid].state
                if len(found) >= limit or (since is not None and self._changed_at[uuid] < since):
                    break
                if one is None or state not in (None, one.state) or name not in ("", one.task_name):
                    continue
                if not self._is_over(uuid, one):
                    found.append(one)
            return found

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        with self.hub.lock:
            return sorted(
                uuid
                for uuid, row in self._rows.items()
                if uuid.startswith(prefix) and not self._is_over(uuid, row.state)
            )[:limit]

    def finished_since(self, moment: dt.datetime) -> dict[str, tuple[int, int]]:
        counts: dict[str, tuple[int, int]] = {}
        for state in self.list_states(since=moment, limit=2**31):
            if state.is_finished:
                good, bad = counts.get(state.queue, (0, 0))
                failed = state.state is State.FAILURE
                counts[state.queue] = (good + (not failed), bad + failed)
        return counts

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        with self.hub.lock:
            self._revoked.update(dict.fromkeys(uuids, self.now() + dt.timedelta(seconds=life)))

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        with self.hub.lock:
            return self._revoked.keys() & uuids if self._revoked else set()

    def purge_state(self, task_uuid: str) -> None:
        with self.hub.lock:
            self._rows.pop(task_uuid, None)
            self._changed_at.pop(task_uuid, None)

    def purge_group_meta(self, group_uuid: str) -> None:
        with self.hub.lock:
            self._groups.pop(group_uuid, None)
            self._ready.discard(group_uuid)

    def listener(self) -> MemoryListener:
        listener = MemoryListener(self)
        with self.hub.lock:
            self._listeners.add(listener)
        return listener

    def drop_listener(self, listener: MemoryListener) -> None:
        with self.hub.lock:
            self._listeners.discard(listener)

    def tend(self) -> float:
        with self.hub.lock:
            before = self.now() - dt.timedelta(seconds=self.expire_in)
            awaited = self._awaited()
            for name in [name for name in self._claims if self._claim(name) is None]:
                del self._claims[name]
            for uuid in [uuid for uuid, until in self._revoked.items() if until <= self.now()]:
                del self._revoked[uuid]
            for uuid, changed_at in list(self._changed_at.items()):
                if changed_at > before:
                    break
                state = self._rows[uuid].state
                if (state is None or state.is_finished) and uuid not in awaited:
                    self.purge_state(uuid)
            for name, group in list(self._groups.items()):
                if group.touched_at <= before and not group.ready and self._is_forsaken(group):
                    self.purge_group_meta(name)
        return SWEEP

    def _is_over(self, uuid: str, state: TaskState | None) -> bool:
        """Whether it has expired, and only no sweep has come yet."""
        if state is None or not state.is_finished:
            return False
        return (
            self._changed_at[uuid] <= self.now() - dt.timedelta(seconds=self.expire_in)
            and uuid not in self._awaited()
        )

    def _awaited(self) -> set[str]:
        """Members whose results a chord will want, at most a week after the last one came in."""
        long_ago = self.now() - LONGEST_CHORD
        return {
            uuid
            for group in self._groups.values()
            if group.members and not group.fired and group.touched_at > long_ago
            for uuid in group.meta.task_uuids
        }

    def _is_forsaken(self, group: _GroupMembers) -> bool:
        """No member has a state any more."""
        return self._rows.keys().isdisjoint(group.meta.task_uuids) and self._rows.keys().isdisjoint(
            group.members
        )

    def close(self) -> None:
        pass  # the hub belongs to whoever made it


class MemoryListener(Listener):
    """An event that is set when a watched task finishes."""

    def __init__(self, backend: MemoryBackend) -> None:
        self._backend = backend
        self._event = threading.Event()
        self._watched: set[str] = set()

    def watch(self, uuids: Iterable[str]) -> None:
        with self._backend.hub.lock:
            self._watched.update(uuids)

    def unwatch(self, uuids: Iterable[str]) -> None:
        with self._backend.hub.lock:
            self._watched.difference_update(uuids)

    def notify(self, uuids: Sequence[str]) -> None:
        """Called with the lock held."""
        if not self._watched.isdisjoint(uuids):
            self._watched.difference_update(uuids)
            self._event.set()

    def wait(self, timeout: float) -> None:
        self._event.wait(timeout)
        self._event.clear()

    def wake(self) -> None:
        self._event.set()

    def close(self) -> None:
        self._backend.drop_listener(self)

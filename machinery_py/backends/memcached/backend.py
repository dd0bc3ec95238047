"""States and groups in memcached, under Go Machinery's keys (connections/memcached/keys.py).

A change of a task is one `cas` of its item, which holds the outbox and a note of the follow-ups:
states of other tasks, groups, arrivals. These come next; each may be done twice.

    crash after                     who goes on
    the index, before the item      nobody: nothing is true
    the item                        the redelivery: `begin` finds the note, carries it out, and
                                    returns the outbox; the same when the change comes again
                                    (ALREADY), or `unsent` finds the outbox
    all of it                       the redelivery: doing it once more changes nothing

A firing is one `add` of mpy:f:<group>, with the same note and outbox in it. There is no redelivery
for it, so only the index (index.py) finds it again.

Limits: memcached forgets when it restarts and when its memory is full. A lost state reads as
"expired"; a task whose state was lost runs and is stored as a new one, and if it was finished but
not acknowledged, it runs again. A chord that loses an item may never call its callback. States
cannot be listed.
"""

from __future__ import annotations

import datetime as dt
import functools
import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from machinery_py.backends.base import (
    CONFLICT,
    FENCED,
    REVOKED_LIFE,
    SETTLED,
    Backend,
    BackendFeatures,
    Begun,
    Change,
    OutboxBackend,
    ReadyGroup,
    Records,
    Verdict,
    lone_rider,
)
from machinery_py.backends.memcached.documents import (
    CHORD_LIFE,
    Commit,
    TaskItem,
    Todo,
    decode_commit,
    decode_record,
    encode_record,
    kept_for,
    key_of,
    pack,
    state_in,
)
from machinery_py.backends.memcached.groups import GO_TIME, MemcachedGroups
from machinery_py.backends.memcached.index import Index
from machinery_py.backends.memcached.records import MemcachedRecords
from machinery_py.backends.memcached.transitions import begin, clear, settle, todo_of, write
from machinery_py.backends.polling import PollingListener
from machinery_py.clock import micros
from machinery_py.connections.memcached.client import (
    STORED,
    Item,
    LineCommand,
    MemcacheDriver,
    delete,
    put,
    seconds,
    swap,
)
from machinery_py.connections.memcached.keys import FIRED, OUTBOX, REVOKED
from machinery_py.errors import NameRefused
from machinery_py.fences import FenceSequence
from machinery_py.tasks.signature import RunNumber
from machinery_py.tasks.states import GroupMeta, TaskState
from machinery_py.texts import get_logger, quoted
from machinery_py.wire.states import decode_group

logger = get_logger(__name__)

EXPIRE_IN = 3600.0  # seconds that a finished task is kept
SWEEP = 30.0  # seconds between two looks at the index

T = TypeVar("T")


class MemcacheBackend(Backend, OutboxBackend):
    """Items on the driver's servers. The driver belongs to whoever made it."""

    features = BackendFeatures(
        name="memcache",
        durable=False,
        listing=False,
        claims=True,
        riders=False,
        forgets=True,
        foreign=True,
        foreign_time=GO_TIME,
    )

    def __init__(self, driver: MemcacheDriver, *, expire_in: float = EXPIRE_IN) -> None:
        self.driver = driver
        self.expire_in = expire_in
        self._index = Index(driver)
        self._groups = MemcachedGroups(driver, self._index, expire_in=expire_in)
        self._records = MemcachedRecords(driver, self._index, self._carry_out)
        self._tend_at = 0.0
        self._fences = FenceSequence(lambda: micros(self.now()))

    def now(self) -> dt.datetime:
        return self.driver.clock.now()

    # Changes

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        if rider := lone_rider(changes, self.features.name):
            return [SETTLED if self._records.amend(rider, changes[0]) else CONFLICT]
        self._groups.announce([one for change in changes for one in change.arrivals])
        self._index.note(
            outboxes=[change.key for change in changes if change.outbox or change.fires]
        )
        now = micros(self.now())
        tasks = [index for index, change in enumerate(changes) if _is_of_task(change)]
        settled = self._edit(
            [
                (changes[index].key, functools.partial(settle, changes[index], now))
                for index in tasks
            ]
        )
        verdicts = {index: verdict for index, (verdict, _) in zip(tasks, settled, strict=True)}
        todo = [one for _, more in settled for one in more]
        for index, change in enumerate(changes):
            if index not in verdicts:
                verdicts[index] = self._commit(change, todo)
        self._carry_out(todo)
        fired = [
            change
            for index, change in enumerate(changes)
            if change.fires and verdicts[index] is SETTLED
        ]
        for change in fired:
            self._groups.after_fire(change.fires)
        self._index.drop(outboxes=[change.key for change in fired if not change.outbox])
        return [verdicts[index] for index in range(len(changes))]

    def _commit(self, change: Change, todo: list[Todo]) -> Verdict:
        """Make a change that belongs to no task: a firing, or one without a condition."""
        own = todo_of(change, change.states)
        commit = Commit(b"", micros(self.now()), tuple(change.outbox), (own,) if own else ())
        if change.fires:
            if not self._groups.fire(change.fires, commit):
                return FENCED
        elif change.outbox:
            command = put(key_of(change.key, OUTBOX), pack(commit), seconds(CHORD_LIFE))
            self.driver.send([command], doing="keeping messages")
        todo.append(own)
        return SETTLED

    def _carry_out(self, todo: Sequence[Todo]) -> None:
        """Make true what the items say beside themselves. May be repeated."""
        groups = [decode_group(document) for one in todo for document in one.groups]
        if groups:
            self._groups.create(groups)
        self._write(
            [
                (state, one.force)
                for one in todo
                for document in one.states
                if (state := state_in(document)) is not None
            ]
        )
        arrivals = [arrival for one in todo for arrival in one.arrivals]
        if arrivals:
            self._groups.arrive(arrivals)

    def _write(self, states: Sequence[tuple[TaskState, bool]]) -> None:
        """Write states; one that cannot be written is left out, though its message is sent."""
        try:
            self._edit(
                [(one.task_uuid, functools.partial(write, one, force)) for one, force in states]
            )
        except NameRefused as error:
            if len(states) == 1:
                logger.error("what follows a task is left out: %s", error)
                return
            for state in states:
                self._write([state])

    def _load(self, uuids: Iterable[str]) -> dict[str, TaskItem]:
        keys = {uuid: key_of(uuid) for uuid in uuids}
        found = self.driver.fetch(keys.values(), doing="reading states")
        return {
            uuid: decode_record(uuid, found[key].value)
            for uuid, key in keys.items()
            if key in found
        }

    def _edit(self, jobs: Sequence[tuple[str, Callable[[TaskItem], T]]]) -> list[T]:
        """Let each job change the item of its task, and return what it says.

        All jobs of a task are one `cas`. A job may be called several times; the last call counts.
        """
        nonce, now = secrets.token_bytes(8), self.now()
        results: dict[int, T] = {}
        places: dict[bytes, list[int]] = {}
        for index, (uuid, _) in enumerate(jobs):
            places.setdefault(key_of(uuid), []).append(index)

        def change(key: bytes, found: Item | None) -> LineCommand | None:
            uuid = jobs[places[key][0]][0]
            item = decode_record(uuid, found.value) if found is not None else TaskItem()
            if item.nonce == nonce:
                return None  # it was written, and the reply was lost
            for index in places[key]:
                results[index] = jobs[index][1](item)
            if not item.changed:
                return None
            if item.theirs:
                raise _not_ours(uuid, item.theirs)
            item.nonce = nonce
            expiry = seconds(kept_for(item, now, self.expire_in))
            return swap(key, encode_record(uuid, item), expiry, found)

        self.driver.edit(places, change, doing="writing states")
        return [results[index] for index in range(len(jobs))]

    # Deliveries of another store's broker

    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        found = self._edit(
            [(uuid, functools.partial(begin, run, self._fences.next())) for uuid, run in keys]
        )
        self._carry_out([one for _, todo in found for one in todo])
        return [begun for begun, _ in found]

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        found = self._commits(keys)
        return [[body for commit in found[key] for body in commit.outbox] for key in keys]

    def _commits(self, keys: Collection[str]) -> dict[str, list[Commit]]:
        """Return the open commit of each key: in its task, its group or by itself."""
        records = self._load(keys)
        items = self.driver.fetch(
            [key_of(key, prefix) for key in keys for prefix in (FIRED, OUTBOX)],
            doing="reading outboxes",
        )
        found: dict[str, list[Commit]] = {}
        for key in keys:
            commits = [
                decode_commit(items[name].value)
                for prefix in (FIRED, OUTBOX)
                if (name := key_of(key, prefix)) in items
            ]
            # Nobody delivers a firing again, so its note has to be done from here as well.
            found[key] = [commit for commit in commits if commit.outbox or commit.todo]
            record = records.get(key)
            if record is not None and record.outbox:
                found[key].append(Commit(record.nonce, record.kept_at, record.outbox, record.todo))
        for key, owed in self._records.commits(keys).items():
            found[key] += owed
        return found

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        bodies_of: dict[str, set[bytes]] = {}
        for key, bodies in sent:
            bodies_of.setdefault(key, set()).update(bodies)
        keys = {key_of(key, prefix): key for key in bodies_of for prefix in (FIRED, OUTBOX)}
        items = self.driver.fetch(keys, doing="reading outboxes")
        cleared: dict[bytes, LineCommand] = {}
        for name, item in items.items():
            commit = decode_commit(item.value)
            if bodies_of[keys[name]].issuperset(commit.outbox):
                commit.outbox, commit.todo = (), ()
                life = seconds(CHORD_LIFE if name.startswith(FIRED) else 1.0)
                cleared[name] = swap(name, pack(commit), life, item)
        replies = self.driver.send(list(cleared.values()), doing="clearing outboxes")
        stored = {name for name, reply in zip(cleared, replies, strict=True) if reply == STORED}
        kept = {keys[name] for name in items if name not in stored}
        tasks = [key for key in bodies_of if key_of(key, FIRED) not in items]
        gone = self._edit([(key, functools.partial(clear, bodies_of[key])) for key in tasks])
        kept |= {key for key, is_gone in zip(tasks, gone, strict=True) if not is_gone}
        self._records.clear(bodies_of.items())
        self._index.drop(outboxes=[key for key in bodies_of if key not in kept])

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        before = micros(self.now()) - int(older_than * 1e6)
        segments = self._index.segments().values()
        keys = sorted({key for segment in segments for key in segment.outboxes})
        found: list[tuple[str, Sequence[bytes]]] = []
        for key, commits in self._commits(keys).items():
            is_young = any(commit.kept_at > before for commit in commits)
            if not commits or is_young or len(found) >= skip + limit:
                continue
            self._carry_out([one for commit in commits for one in commit.todo])
            bodies = [body for commit in commits for body in commit.outbox]
            if bodies:
                found.append((key, bodies))
            else:
                self.clear_outbox([(key, ())])
        return found[skip:]

    def records(self, known: str = "") -> Records:
        return self._records.records(known, self.now())

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        return self._records.claims(names) if names else []

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        self._records.release(claims)

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        records = self._load(set(uuids))
        return [records[uuid].mark if uuid in records else "" for uuid in uuids]

    # Reading

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        items = self._load(uuids)
        return {uuid: item.state for uuid, item in items.items() if item.state is not None}

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        return self._groups.get(group_uuid, lambda uuids: bool(self.get_states(uuids)))

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        return self._groups.ready(limit)

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        commands = [put(key_of(uuid, REVOKED), b"1", seconds(life)) for uuid in uuids]
        self.driver.send(commands, doing="revoking")

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        keys = {key_of(uuid, REVOKED): uuid for uuid in uuids}
        return {keys[key] for key in self.driver.fetch(keys, doing="reading revocations")}

    def purge_state(self, task_uuid: str) -> None:
        for record in self._load([task_uuid]).values():
            if record.theirs:
                raise _not_ours(task_uuid, record.theirs)
        self.driver.send([delete(key_of(task_uuid))], doing="purging a state")

    def purge_group_meta(self, group_uuid: str) -> None:
        self._groups.purge(group_uuid)

    def listener(self) -> PollingListener:
        # The client asks in batches of its own. Looks at many tasks are long, and so are pauses.
        return PollingListener(
            self._finished, at_once=sys.maxsize, soonest=0.001, latest=0.1, share=0.25, rest=4.0
        )

    def _finished(self, uuids: Sequence[str]) -> list[str]:
        return [uuid for uuid, state in self.get_states(uuids).items() if state.is_finished]

    def tend(self) -> float:
        if self.driver.clock.monotonic() < self._tend_at:
            return SWEEP
        self._tend_at = self.driver.clock.monotonic() + SWEEP
        segments = self._index.segments().values()
        keys = {key for segment in segments for key in segment.outboxes}
        groups = {group.group_uuid for group in self._groups.ready(2**31)}
        self._index.tend(groups | {key for key, commits in self._commits(keys).items() if commits})
        self._records.tend()
        return SWEEP


def _is_of_task(change: Change) -> bool:
    """Return whether the change is settled by the item of a task."""
    return not change.fires and any(state.task_uuid == change.key for state in change.states)


def _not_ours(uuid: str, found: str) -> NameRefused:
    return NameRefused(
        f"the item {quoted(uuid)} in memcached is no state of this task, and was left as it is "
        f"(choose another UUID): {found}",
        uuid,
    )

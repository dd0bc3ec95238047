"""States and groups in memcached, under Go Machinery's keys.

    <task UUID>        Go's document with all that is ours as its last field: epoch, mark, outbox (documents.py)
    <group UUID>       Go's document of the group; the rest of it in groups.py
    mpy:o:<key>        an outbox that belongs to no task and no group
    mpy:v:<task UUID>  the task is revoked
    mpy:roots, mpy:x:  which outboxes and groups are open (index.py)

A change of a task is one `cas` of its item, which holds the outbox and a note of what else is to become true: states of other
tasks, groups, arrivals. That is done next; each of it can stand to be done twice.

    crash after                     who goes on
    the index, before the item      nobody: nothing is true
    the item                        the redelivery: `begin` finds the note, does it, and hands out the outbox; the same when the
                                    change comes again (ALREADY), or `unsent` finds the outbox
    all of it                       the redelivery: doing it once more changes nothing

A firing is one `add` of mpy:f:<group>, with the same note and outbox in it; there is no redelivery for it, so it is found
again by the index alone.

Limits: memcached forgets when it restarts and when its memory is full. A state that is lost reads as "expired"; a task whose
state was lost runs and is stored as a new one, and if it was finished but not acknowledged, it runs again. A chord that loses
an item may never call its callback. States cannot be listed.
"""

from __future__ import annotations

import datetime as dt
import functools
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from machinery_py.backends.base import (
    FENCED,
    REVOKED_LIFE,
    SETTLED,
    Amendment,
    Backend,
    BackendFeatures,
    Begun,
    Change,
    OutboxBackend,
    ReadyGroup,
    Records,
    Verdict,
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
from machinery_py.backends.memcached.index import Index, rounds
from machinery_py.backends.memcached.listener import MemcacheListener
from machinery_py.backends.memcached.records import MemcachedRecords
from machinery_py.backends.memcached.transitions import (
    Advance,
    Begin,
    Settling,
    clear,
    own_state,
    todo_of,
)
from machinery_py.clock import micros
from machinery_py.connections.memcached.client import (
    STORED,
    LineCommand,
    MemcacheDriver,
    delete,
    put,
    seconds,
    swap,
)
from machinery_py.connections.memcached.keys import FIRED, OUTBOX, REVOKED
from machinery_py.errors import NameRefused
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
        forgets=True,
        foreign=True,
        foreign_time=GO_TIME,
    )

    def __init__(self, driver: MemcacheDriver, *, expire_in: float = EXPIRE_IN) -> None:
        self.driver = driver
        self.expire_in = expire_in
        self._index = Index(driver)
        self._groups = MemcachedGroups(driver, self._index, expire_in=expire_in)
        self._amending = MemcachedRecords(driver, self._index, self._carry_out)
        self._tend_at = 0.0

    def now(self) -> dt.datetime:
        return self.driver.clock.now()

    # Changes

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        self._groups.announce([one for change in changes for one in change.arrivals])
        self._index.note(
            outboxes=[change.key for change in changes if change.outbox or change.fires]
        )
        verdicts: dict[int, Verdict] = {}
        todo: list[Todo] = []
        tasks, now = (
            [
                index
                for index, change in enumerate(changes)
                if not change.fires and own_state(change)
            ],
            micros(self.now()),
        )
        settled = self._edit(
            [(changes[index].key, Settling(changes[index], now)) for index in tasks]
        )
        for index, (verdict, more) in zip(tasks, settled, strict=True):
            verdicts[index] = verdict
            todo += more
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
        """A change that belongs to no task: of a group that is fired, or without a condition."""
        own = todo_of(change, change.states)
        commit = Commit(b"", micros(self.now()), tuple(change.outbox), (own,) if own else ())
        if change.fires:
            if not self._groups.fire(change.fires, commit):
                return FENCED
        elif change.outbox:
            self.driver.send(
                [put(key_of(change.key, OUTBOX), pack(commit), seconds(CHORD_LIFE))],
                doing="keeping messages",
            )
        todo.append(own)
        return SETTLED

    def _carry_out(self, todo: Iterable[Todo]) -> None:
        """Make true what the items say beside themselves."""
        todo = list(todo)
        groups = [decode_group(document) for one in todo for document in one.groups]
        if groups:
            self._groups.create(groups)
        states = [
            (state, one.force)
            for one in todo
            for document in one.states
            if (state := state_in(document)) is not None
        ]
        self._advance([(state.task_uuid, Advance(state, force)) for state, force in states])
        arrivals = [arrival for one in todo for arrival in one.arrivals]
        if arrivals:
            self._groups.arrive(arrivals)

    def _advance(self, jobs: Sequence[tuple[str, Advance]]) -> None:
        """Write states; one that cannot be written is left out, and its message is sent all the same."""
        try:
            self._edit(jobs)
        except NameRefused as error:
            if len(jobs) == 1:
                logger.error("what follows a task is left out: %s", error)
                return
            for job in jobs:
                self._advance([job])

    def _load(self, uuids: Iterable[str]) -> dict[str, TaskItem]:
        keys = {uuid: key_of(uuid) for uuid in uuids}
        found = self.driver.fetch(keys.values(), doing="reading states")
        return {
            uuid: decode_record(uuid, found[key].value, found[key].cas)
            for uuid, key in keys.items()
            if key in found
        }

    def _edit(self, jobs: Sequence[tuple[str, Callable[[TaskItem], T]]]) -> list[T]:
        """Let each job change the record of its task, by one `cas` for all jobs of a task.

        A job may be called several times, and says what came of it; the last call counts.
        """
        results: dict[int, T] = {}
        tried: dict[str, tuple[bytes, dict[int, T]]] = {}
        waiting = list(range(len(jobs)))
        if not jobs:
            return []
        for _ in rounds("the state of a task"):
            records = self._load({jobs[index][0] for index in waiting})
            for uuid, (written, outcomes) in tried.items():
                if uuid in records and records[uuid].nonce == written:
                    results |= outcomes  # it was written, and the reply was lost
            by_task: dict[str, dict[int, T]] = {}
            for index in waiting:
                if index not in results:
                    uuid, job = jobs[index]
                    record = records.setdefault(uuid, TaskItem())
                    by_task.setdefault(uuid, {})[index] = job(record)
            writes = [uuid for uuid in by_task if records[uuid].changed]
            for uuid in by_task.keys() - set(writes):
                results |= by_task[uuid]
            nonce, now = secrets.token_bytes(8), self.now()
            replies = self.driver.send(
                [self._written(uuid, records[uuid], nonce, now) for uuid in writes],
                doing="writing states",
            )
            for uuid, reply in zip(writes, replies, strict=True):
                if reply == STORED:
                    results |= by_task[uuid]
            tried = {uuid: (nonce, by_task[uuid]) for uuid in writes}
            waiting = [index for index in waiting if index not in results]
            if not waiting:
                break
        return [results[index] for index in range(len(jobs))]

    def _written(self, uuid: str, record: TaskItem, nonce: bytes, now: dt.datetime) -> LineCommand:
        if record.theirs:
            raise _not_ours(uuid, record.theirs)
        record.nonce = nonce
        expiry = seconds(kept_for(record, now, self.expire_in))
        return swap(key_of(uuid), encode_record(uuid, record), expiry, record.cas)

    # Deliveries of another store's broker

    def begin(self, keys: Sequence[tuple[str, int]]) -> list[Begun]:
        now = micros(self.now())
        found = self._edit([(uuid, Begin(run, now)) for uuid, run in keys])
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
        for key, owed in self._amending.commits(keys).items():
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
                cleared[name] = swap(name, pack(commit), life, item.cas)
        replies = self.driver.send(list(cleared.values()), doing="clearing outboxes")
        stored = {name for name, reply in zip(cleared, replies, strict=True) if reply == STORED}
        kept = {keys[name] for name in items if name not in stored}
        tasks = [key for key in bodies_of if key_of(key, FIRED) not in items]
        gone = self._edit([(key, functools.partial(clear, bodies_of[key])) for key in tasks])
        kept |= {key for key, is_gone in zip(tasks, gone, strict=True) if not is_gone}
        self._amending.clear(bodies_of.items())
        self._index.drop(outboxes=[key for key in bodies_of if key not in kept])

    def unsent(self, limit: int, *, older_than: float) -> list[tuple[str, Sequence[bytes]]]:
        before = micros(self.now()) - int(older_than * 1e6)
        keys = sorted(
            {key for segment in self._index.segments().values() for key in segment.outboxes}
        )
        found: list[tuple[str, Sequence[bytes]]] = []
        for key, commits in self._commits(keys).items():
            if (
                not commits
                or len(found) >= limit
                or any(commit.kept_at > before for commit in commits)
            ):
                continue
            self._carry_out([one for commit in commits for one in commit.todo])
            bodies = [body for commit in commits for body in commit.outbox]
            if bodies:
                found.append((key, bodies))
            else:
                self.clear_outbox([(key, ())])
        return found

    def records(self, known: str = "") -> Records:
        return self._amending.records(known, self.now())

    def amend(self, amendment: Amendment) -> bool:
        return self._amending.amend(amendment)

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        return self._amending.claims(names) if names else []

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        self._amending.release(claims)

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        records = self._load(set(uuids))
        return [records[uuid].mark if uuid in records else "" for uuid in uuids]

    # Reading

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        return {
            uuid: record.state
            for uuid, record in self._load(uuids).items()
            if record.state is not None
        }

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        return self._groups.get(group_uuid, lambda uuids: bool(self.get_states(uuids)))

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        return self._groups.ready(limit)

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        self.driver.send(
            [put(key_of(uuid, REVOKED), b"1", seconds(life)) for uuid in uuids], doing="revoking"
        )

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

    def listener(self) -> MemcacheListener:
        return MemcacheListener(self._finished)

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
        self._amending.tend()
        return SWEEP

    def close(self) -> None:
        pass  # the driver belongs to whoever made it


def _not_ours(uuid: str, found: str) -> NameRefused:
    return NameRefused(
        f"the item {quoted(uuid)} in memcached is no state of this task, and was left as it is (choose another "
        f"UUID): {found}",
        uuid,
    )

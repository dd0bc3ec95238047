"""States and groups in memcached, under Go Machinery's keys (connections/memcached/keys.py).

A change of a task is one `cas` of its item, which holds the outbox and a note of the follow-ups:
states of other tasks, groups, arrivals. These come next; each may be done twice.

    crash after                     who goes on
    the index, before the item      nobody: nothing is true
    the item                        the redelivery: `begin` finds the note, carries it out, and
                                    returns the outbox; the same when the change comes again
                                    (ALREADY), or `unsent` finds the outbox
    all of it                       the redelivery: doing it once more changes nothing

A firing is such an item as well, mpy:f:<group>, which is written once. There is no redelivery for
it, so only the index (index.py) finds it again.

Limits: memcached forgets when it restarts and when its memory is full. A lost state reads as
"expired"; a task whose state was lost runs and is stored as a new one, and if it was finished but
not acknowledged, it runs again. A chord that loses an item may never call its callback. What is in
no document of Go's and no guarantee needs is not kept: keys of unique tasks, schedules,
revocations, listings.
"""

from __future__ import annotations

import datetime as dt
import functools
import secrets
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TypeVar

from machinery_py.backends.base import (
    SETTLED,
    Backend,
    BackendFeatures,
    Begun,
    Change,
    OutboxBackend,
    ReadyGroup,
    Verdict,
)
from machinery_py.backends.memcached.documents import (
    TaskItem,
    Todo,
    decode_record,
    encode_record,
    kept_for,
    key_of,
    state_in,
)
from machinery_py.backends.memcached.groups import GO_TIME, MemcachedGroups
from machinery_py.backends.memcached.index import Index, OpenName
from machinery_py.backends.memcached.transitions import begin, clear, fire, settle, write
from machinery_py.backends.polling import PollingListener
from machinery_py.clock import micros
from machinery_py.connections.memcached.client import (
    Item,
    LineCommand,
    MemcacheDriver,
    delete,
    seconds,
    swap,
)
from machinery_py.connections.memcached.keys import FIRED
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

    features: BackendFeatures = BackendFeatures(
        name="memcache",
        durable=False,
        listing=False,
        revocations=False,
        schedules=False,
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
        self._tend_at = 0.0
        self._fences = FenceSequence(lambda: micros(self.now()))

    def now(self) -> dt.datetime:
        return self.driver.clock.now()

    # Changes

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        self.refuse_riders(changes)
        self._groups.announce([one for change in changes for one in change.arrivals])
        self._index.note(
            outboxes=[change.key for change in changes if change.outbox or change.fires]
        )
        by_go = self._groups.settled_by_go([change.fires for change in changes if change.fires])
        now = micros(self.now())
        jobs: list[tuple[str, bytes, Callable[[TaskItem], tuple[Verdict, Sequence[Todo]]]]] = []
        for change in changes:
            if change.fires:
                job = functools.partial(fire, change, now, by_go.get(change.fires))
                jobs.append((change.fires, FIRED, job))
            else:
                jobs.append((change.key, b"", functools.partial(settle, change, now)))
        settled = self._edit(jobs)
        self._carry_out([todo for _, more in settled for todo in more])
        for change, (verdict, _) in zip(changes, settled, strict=True):
            if change.fires and (verdict is SETTLED or by_go.get(change.fires)):
                self._groups.after_fire(change.fires)
                if not change.outbox:
                    self._index.drop(outboxes=[change.key])
        return [verdict for verdict, _ in settled]

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
                [
                    (one.task_uuid, b"", functools.partial(write, one, force))
                    for one, force in states
                ]
            )
        except NameRefused as error:
            if len(states) == 1:
                logger.error("what follows a task is left out: %s", error)
                return
            for state in states:
                self._write([state])

    def _load(self, uuids: Iterable[str], prefix: bytes = b"") -> dict[str, TaskItem]:
        keys = {uuid: key_of(uuid, prefix) for uuid in uuids}
        found = self.driver.fetch(keys.values(), doing="reading states")
        return {
            uuid: decode_record(uuid, found[key].value, prefix)
            for uuid, key in keys.items()
            if key in found
        }

    def _edit(self, jobs: Sequence[tuple[str, bytes, Callable[[TaskItem], T]]]) -> list[T]:
        """Let each job change the item of its task, or of its group's firing; return its answers.

        All jobs of an item are one `cas`. A job may be called several times; the last call counts.

        Args:
            jobs: each with a UUID, and the prefix of the item.
        """
        nonce, now = secrets.token_bytes(8), self.now()
        answers: dict[int, T] = {}
        places: dict[bytes, list[int]] = {}
        for place, (uuid, prefix, _) in enumerate(jobs):
            places.setdefault(key_of(uuid, prefix), []).append(place)

        def change(key: bytes, found: Item | None) -> LineCommand | None:
            uuid, prefix, _ = jobs[places[key][0]]
            item = decode_record(uuid, found.value, prefix) if found is not None else TaskItem()
            if item.nonce == nonce:
                return None  # it was written, and the reply was lost
            for place in places[key]:
                answers[place] = jobs[place][2](item)
            if not item.changed:
                return None
            if item.theirs:
                raise _not_ours(uuid, item.theirs)
            item.nonce = nonce
            expiry = seconds(kept_for(item, now, self.expire_in))
            return swap(key, encode_record(uuid, item, prefix), expiry, found)

        self.driver.edit(places, change, doing="writing states")
        return [answers[place] for place in range(len(jobs))]

    # Deliveries of another store's broker

    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        found = self._edit(
            [(uuid, b"", functools.partial(begin, run, self._fences.next())) for uuid, run in keys]
        )
        self._carry_out([one for _, todo in found for one in todo])
        return [begun for begun, _ in found]

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        found = self._open(keys)
        return [[body for item in found[key] for body in item.outbox] for key in keys]

    def _open(self, keys: Collection[str]) -> dict[str, list[TaskItem]]:
        """Return the items under each key of which messages are to be published."""
        tasks, firings = self._load(keys), self._load(keys, FIRED)
        found: dict[str, list[TaskItem]] = {key: [] for key in keys}
        for key, item in tasks.items():
            if item.outbox:
                found[key].append(item)
        for key, item in firings.items():
            # Nobody delivers a firing again, so what follows it has to be done from here as well.
            if item.outbox or item.todo:
                found[key].append(item)
        return found

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        bodies: dict[str, set[bytes]] = {}
        for key, some in sent:
            bodies.setdefault(key, set()).update(some)
        jobs = [
            (key, prefix, functools.partial(clear, bodies[key], with_todo=prefix == FIRED))
            for key in bodies
            for prefix in (b"", FIRED)
        ]
        are_clear = self._edit(jobs)
        kept = {key for (key, _, _), is_clear in zip(jobs, are_clear, strict=True) if not is_clear}
        self._index.drop(outboxes=bodies.keys() - kept)

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        before = micros(self.now()) - int(older_than * 1e6)
        keys = sorted(one.key for one in self._index.names() if not one.is_group)
        found: list[tuple[str, Sequence[bytes]]] = []
        for key, items in self._open(keys).items():
            is_young = any(item.kept_at > before for item in items)
            if not items or is_young or len(found) >= skip + limit:
                continue
            self._carry_out([todo for item in items for todo in item.todo])
            bodies = [body for item in items for body in item.outbox]
            if bodies:
                found.append((key, bodies))
            else:
                self.clear_outbox([(key, ())])
        return found[skip:]

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
        outboxes = [one.key for one in self._index.names() if not one.is_group]
        still_open = {OpenName(False, key) for key, items in self._open(outboxes).items() if items}
        still_open |= {OpenName(True, one.group_uuid) for one in self._groups.ready(sys.maxsize)}
        self._index.tend(still_open)
        return SWEEP


def _not_ours(uuid: str, found: str) -> NameRefused:
    return NameRefused(
        f"the item {quoted(uuid)} in memcached is no state of this task, and was left as it is "
        f"(choose another UUID): {found}",
        uuid,
    )

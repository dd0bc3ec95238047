"""States and groups in MongoDB, in Go Machinery's documents.

One write makes a change true: to the document of its key, if that is still as it was read. The
follow-ups (other states, groups, arrivals) are written into the same document as its *intent*,
carried out afterwards, and then taken out; `tend` finishes an intent that stays. Each step of an
intent may be done twice. The protocol stands in docs/explanation/mongodb-protocol.md.

    documents.py    what is in the document of a task
    tasks.py        reading and writing these
    changes.py      changes, their follow-ups and intents
    groups.py       groups and chords
    records.py      records of schedules, claims of unique tasks

Limits: what Go programs wrote is listed only after we have changed it. Nothing expires while no
worker runs.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Sequence
from typing import Final

from pymongo import DeleteOne, UpdateOne

from machinery_py.backends.base import (
    ALREADY,
    CONFLICT,
    FENCED,
    REVOKED_LIFE,
    SETTLED,
    Backend,
    BackendFeatures,
    Begun,
    Change,
    Keeping,
    OutboxBackend,
    ReadyGroup,
    Records,
    Verdict,
    lone_rider,
)
from machinery_py.backends.listings import Count, Listing, Place, counts_of
from machinery_py.backends.mongodb import groups as mongo_groups
from machinery_py.backends.mongodb.changes import MongoChanges, has_intent
from machinery_py.backends.mongodb.checkpoints import MongoCheckpoints
from machinery_py.backends.mongodb.documents import (
    TaskDocument,
    has_expired,
    packed_outbox,
    state_of,
    unpacked_outbox,
)
from machinery_py.backends.mongodb.records import MongoRecords
from machinery_py.backends.mongodb.tasks import ROUNDS, MongoTasks, seen_of
from machinery_py.backends.polling import PollingListener
from machinery_py.backends.transactional import is_over
from machinery_py.bounds import STEP_ITEMS, in_steps
from machinery_py.clock import micros
from machinery_py.connections.durability import Concern
from machinery_py.connections.mongodb.client import (
    Document,
    DriverUser,
    MongoDriver,
    Store,
    find_by_id,
    step,
)
from machinery_py.fences import Fence, FenceSequence, fence_after
from machinery_py.tasks.signature import RunNumber
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.texts import printable

EXPIRE_IN = 3600.0  # seconds that a finished task is kept
LOOK = 5000  # states that one step of a listing looks at
LAST = 2**63 - 1  # µs
HELD = mongo_groups.CHORD_LIFE // 2  # µs; a member is kept for longer than that, and its own time
SWEEP = 60.0  # seconds between two looks for what has expired
SWEEP_GROUPS = 100  # expired groups that one look deletes

_FINISHED = [State.SUCCESS.value, State.FAILURE.value]


class MongoBackend(DriverUser, Backend, OutboxBackend):
    """Collections of the driver's database. The driver belongs to whoever made it.

    Attributes:
        tasks, changes, schedules, kept: the parts that a store with a broker in this database uses
            as well.
    """

    features: BackendFeatures = BackendFeatures(
        name="mongodb",
        foreign=True,
        claims=True,
        riders=False,
        checkpoints=True,
        foreign_time=mongo_groups.GO_TIME,
    )

    def __init__(self, driver: MongoDriver, *, expire_in: float = EXPIRE_IN) -> None:
        super().__init__(driver)
        self.expire_in = expire_in
        self.tasks: Final = MongoTasks(driver, expire_in=expire_in)
        self.changes: Final = MongoChanges(driver, self.tasks)
        self.kept: Final = MongoCheckpoints(driver)
        self.schedules: Final = MongoRecords(driver, self.tasks, self.changes)
        self._next_sweep = 0.0
        self._fences = FenceSequence(driver.now)

    def now(self) -> dt.datetime:
        return self.driver.moment()

    # Changes

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        if rider := lone_rider(changes, self.features.name):
            return [SETTLED if self.schedules.amend(rider, changes[0]) else CONFLICT]
        verdicts = self.changes.commit(changes, with_intents=True)
        judged = list(zip(changes, verdicts, strict=True))
        settled = [change for change, verdict in judged if verdict is SETTLED]
        # A member that somebody else has ended has no intent: what is in is counted anew.
        recounted = [change for change in settled if change.arrivals and not has_intent(change)]
        new = [change for change in settled if not change.arrivals or has_intent(change)]
        self.changes.follow(new, again=False)
        self.changes.follow(recounted, again=True)
        self.changes.clear_intents([change for change in settled if has_intent(change)])
        repeated = [change.key for change, verdict in judged if verdict is ALREADY]
        if repeated:
            self.changes.finish_intents(repeated)
        return verdicts

    # Two stores

    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        begun: dict[int, Begun] = {}
        for _ in range(ROUNDS):
            left = {index: uuid for index, (uuid, _) in enumerate(keys) if index not in begun}
            if not left:
                return [begun[index] for index in range(len(keys))]
            rows = self.tasks.load(left.values())
            before = seen_of(rows)
            boxes = self.outboxes(list(left.values()))
            found: dict[int, Begun] = {}
            for (index, uuid), outbox in zip(left.items(), boxes, strict=True):
                row = rows.setdefault(uuid, TaskDocument())
                if is_over(row.state, keys[index][1]):
                    found[index] = Begun(epoch=row.epoch, finished=True, outbox=outbox)
                else:
                    row.epoch, row.changed = fence_after(row.epoch, self._fences.next()), True
                    found[index] = Begun(epoch=row.epoch)
            lost = self.tasks.save(rows, before)
            begun |= {index: one for index, one in found.items() if left[index] not in lost}
        raise self.tasks.too_many_rivals()

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        boxes = self._outboxes(keys) if keys else {}
        return [unpacked_outbox(boxes.get(key, b"")) for key in keys]

    @step("reading outboxes")
    def _outboxes(self, store: Store, keys: Sequence[str]) -> dict[str, bytes]:
        query = {"_id": {"$in": list(keys)}, "outbox_at": {"$gt": 0}}
        return {
            one["_id"]: bytes(one["outbox"])
            for place in (store.tasks, store.machinery_chords, store.machinery_outboxes)
            for one in place.find(query, {"outbox": 1})
        }

    @step("clearing outboxes")
    def clear_outbox(self, store: Store, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        # Only what was sent: the next run of the task may have written its own outbox meanwhile.
        boxes = {key: packed_outbox(bodies) for key, bodies in sent}
        query = {"_id": {"$in": list(boxes)}, "outbox_at": {"$gt": 0}}
        for place in (store.tasks, store.machinery_chords, store.machinery_outboxes):
            these = [
                {"_id": one["_id"], "outbox_at": one["outbox_at"]}
                for one in place.find(query, {"outbox": 1, "outbox_at": 1})
                if bytes(one["outbox"]) == boxes[one["_id"]]
            ]
            if these and place is store.machinery_outboxes:
                place.bulk_write([DeleteOne(one) for one in these], ordered=False)
            elif these:
                empty = {"$set": {"outbox": b"", "outbox_at": 0}}
                place.bulk_write([UpdateOne(one, empty) for one in these], ordered=False)

    @step("looking for outboxes")
    def unsent(
        self, store: Store, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        query = {"outbox_at": {"$gt": 0, "$lte": self.driver.now() - int(older_than * 1e6)}}
        return [
            (one["_id"], unpacked_outbox(bytes(one["outbox"])))
            for place in (store.tasks, store.machinery_chords, store.machinery_outboxes)
            for one in place.find(query, {"outbox": 1}).sort("outbox_at").limit(skip + limit)
        ][skip : skip + limit]

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        marks = self._marks(uuids) if uuids else {}
        return [marks.get(uuid, "") for uuid in uuids]

    @step("reading marks")
    def _marks(self, store: Store, uuids: Sequence[str]) -> dict[str, str]:
        found = find_by_id(store.tasks, uuids, {"mark": 1})
        return {one["_id"]: one.get("mark") or "" for one in found}

    # Checkpoints

    def checkpoints(self, uuid: str) -> dict[str, bytes]:
        return self.kept.read(uuid)

    def fence_checkpoints(self, uuid: str, fence: Fence) -> None:
        self.kept.leave_fence(uuid, fence)

    def keep_checkpoints(self, keeping: Keeping) -> Verdict:
        row = self.tasks.load([keeping.uuid]).get(keeping.uuid)
        if row is None or row.epoch != keeping.epoch or row.mark == keeping.mark:
            return FENCED
        return self.kept.keep(keeping, keeping.epoch)

    def drop_checkpoints(self, uuid: str, names: Sequence[str]) -> None:
        self.kept.drop(uuid, names)

    def end_checkpoints(self, uuid: str, life: float) -> None:
        self.kept.end(uuid, life)

    # Schedules and claims

    def records(self, known: str = "") -> Records:
        return self.schedules.records(known)

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        return self.schedules.claims(names) if names else []

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        if claims:
            self.schedules.release(claims)

    # States

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        return self._states(uuids) if uuids else {}

    @step("reading states")
    def _states(self, store: Store, uuids: Sequence[str]) -> dict[str, TaskState]:
        states = self._kept(list(find_by_id(store.tasks, uuids)))
        return {state.task_uuid: state for state in states}

    def _kept(self, documents: Sequence[Document]) -> list[TaskState]:
        """Return the states that have not expired."""
        now = self.driver.now()
        return [
            state
            for one in documents
            if not has_expired(one, now) and (state := state_of(one)) is not None
        ]

    @step("listing states")
    def list_states(
        self,
        store: Store,
        *,
        states: Collection[State] = (),
        name: str = "",
        since: dt.datetime | None = None,
        after: Place | None = None,
        limit: int = 100,
    ) -> Listing:
        low = 1 if since is None else micros(since)
        at, uuid = after or (LAST, "")
        # The index has no `_id`: what is sorted by that is not more than this stretch.
        stretch = {"changed_at": {"$gte": low, "$lte": at}}
        times = store.tasks.find(stretch, {"changed_at": 1, "_id": 0}).sort("changed_at", -1)
        floor = [one["changed_at"] for one in times.skip(LOOK - 1).limit(1)]
        query: Document = {
            "changed_at": {"$gte": floor[0] if floor else low, "$lte": at},
            "$or": [{"changed_at": {"$lt": at}}, {"_id": {"$lt": uuid}}],
        }
        if states:
            query["state"] = {"$in": [state.value for state in states]}
        if name:
            query["task_name"] = name
        order = [("changed_at", -1), ("_id", -1)]
        rows = list(store.tasks.find(query).sort(order).limit(limit))
        end: Place | None = (floor[0], "") if floor else None
        if len(rows) == limit:
            end = rows[-1]["changed_at"], rows[-1]["_id"]
        now = self.driver.now()
        found = [
            ((one["changed_at"], one["_id"]), state)
            for one in rows
            if not has_expired(one, now) and (state := state_of(one)) is not None
        ]
        return Listing(found=found, end=end, looked=LOOK if floor else len(rows))

    @step("looking for a task")
    def find(self, store: Store, prefix: str, limit: int = 2) -> list[str]:
        begin = printable(prefix)
        query = {"_id": {"$gte": begin, "$lt": begin + "\U0010ffff"}}
        found = store.tasks.find(query, {"expires_at": 1}).sort("_id", 1).limit(limit)
        now = self.driver.now()
        return [one["_id"] for one in found if not has_expired(one, now)]

    @step("counting what has finished")
    def finished_since(self, store: Store, moment: dt.datetime, step: int = 3600) -> list[Count]:
        at = "$changed_at"
        begun_at = {"$toString": {"$subtract": [at, {"$mod": [at, step * 1_000_000]}]}}
        match = {"changed_at": {"$gte": micros(moment)}, "state": {"$in": _FINISHED}}
        key = {"$concat": [begun_at, " ", "$state", " ", "$queue"]}
        group = {"_id": key, "count": {"$sum": 1}}
        rows: list[tuple[int, str, int, int]] = []
        for one in store.tasks.aggregate([{"$match": match}, {"$group": group}]):
            (number, state, queue), count = one["_id"].split(" ", 2), one["count"]
            good = count if state == State.SUCCESS else 0
            rows.append((int(float(number)) // 1_000_000, queue, good, count - good))
        return counts_of(rows)

    @step("revoking tasks")
    def revoke(self, store: Store, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        until = self.driver.now() + int(life * 1e6)
        writes: list[UpdateOne | DeleteOne] = [
            UpdateOne({"_id": uuid}, {"$set": {"expires_at": until}}, upsert=True)
            if life > 0
            else DeleteOne({"_id": uuid})
            for uuid in dict.fromkeys(uuids)
        ]
        for some in in_steps(writes):
            store.machinery_revoked.bulk_write(some, ordered=False)

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        return self._revoked(uuids) if uuids else set()

    @step("looking for revoked tasks")
    def _revoked(self, store: Store, uuids: Sequence[str]) -> set[str]:
        return {one["_id"] for one in find_by_id(store.machinery_revoked, uuids, {"_id": 1})}

    def purge_state(self, task_uuid: str) -> None:
        self.tasks.load([task_uuid])  # what is no state is refused
        self._purge_state(task_uuid)
        self.kept.end(task_uuid, 0)

    @step("forgetting a task")
    def _purge_state(self, store: Store, task_uuid: str) -> None:
        store.tasks.delete_one({"_id": task_uuid})

    @step("deleting states")
    def _delete_finished(self, store: Store, states: Sequence[TaskState]) -> None:
        lives = {one.task_uuid: int(one.life(self.expire_in) * 1e6) for one in states}
        fields = {"changed_at": 1, "expires_at": 1, "version": 1}
        deletes = [
            DeleteOne({"_id": one["_id"], "version": one.get("version")})
            for one in find_by_id(store.tasks, list(lives), fields)
            # What a chord waits for is kept for longer.
            if 0 < one.get("expires_at", 0) < one["changed_at"] + lives[one["_id"]] + HELD
        ]
        for some in in_steps(deletes):
            store.tasks.bulk_write(some, ordered=False)

    def listener(self) -> PollingListener:
        return PollingListener(self._finished, notifier=self.driver.notifier("results"))

    @step("looking for results")
    def _finished(self, store: Store, uuids: Sequence[str]) -> list[str]:
        query = {"_id": {"$in": uuids}, "state": {"$in": _FINISHED}}
        return [one["_id"] for one in store.tasks.find(query, {"_id": 1})]

    # Groups

    @step("reading a group")
    def get_group(self, store: Store, group_uuid: str) -> GroupMeta | None:
        return mongo_groups.get_group(store, group_uuid)

    @step("looking for complete groups")
    def ready_groups(self, store: Store, limit: int) -> list[ReadyGroup]:
        return mongo_groups.ready_groups(store, limit)

    @step("looking for incomplete groups")
    def partial_groups(self, store: Store, limit: int) -> list[Arrival]:
        return mongo_groups.partial_groups(store, limit, now=self.driver.now())

    @step("forgetting incomplete groups")
    def drop_partial(self, store: Store, group_uuids: Sequence[str]) -> None:
        mongo_groups.drop_partial(store, group_uuids)

    @step("forgetting a group")
    def purge_group_meta(self, store: Store, group_uuid: str) -> None:
        mongo_groups.purge_group(store, group_uuid)

    # House-keeping

    def tend(self) -> float:
        for change, send in self.changes.old_firings():
            if not send:  # else it is for a store that can send
                self.changes.follow([change], again=True)
                self.changes.clear_intents([change])
        for intent in self.schedules.old_intents():
            self.schedules.finish(intent, True)
        return self.tend_tasks()

    def tend_tasks(self) -> float:
        """Do as `tend`, except for firings and schedules."""
        is_full = self.changes.finish_old_intents()
        monotonic = self.driver.clock.monotonic()
        if monotonic >= self._next_sweep:
            self._next_sweep = monotonic + SWEEP  # first: a sweep that fails is not due at once
            self.schedules.sweep()
            self.kept.sweep()
            if self._sweep():
                self._next_sweep, is_full = 0.0, True
        return 0.05 if is_full else self.driver.intent_age

    @step("looking for what is over")
    def _sweep(self, store: Store) -> bool:
        """Forget what has expired; return whether there may be more."""
        now = self.driver.now()
        over = {"expires_at": {"$gt": 0, "$lte": now}}
        old = [one["_id"] for one in store.tasks.find(over, {"_id": 1}).limit(STEP_ITEMS)]
        if old:
            store.tasks.delete_many({"_id": {"$in": old}, **over})
        store.machinery_revoked.delete_many(over)
        again_at = now + int(SWEEP * 1e6)
        groups = mongo_groups.sweep_groups(store, now=now, again_at=again_at, limit=SWEEP_GROUPS)
        return len(old) >= STEP_ITEMS or groups >= SWEEP_GROUPS

    def concerns(self) -> list[Concern]:
        return self.driver.concerns()

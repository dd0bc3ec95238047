"""States and groups in MongoDB, in Go Machinery's documents; the protocol stands in docs/explanation/mongodb-protocol.md.

A change is made true by one write: to the document of its key, if that is still as it was read. What else the change asks for
(other states, groups, arrivals) is written into the same document as its *deed*, done afterwards, and then taken out; a deed
that stays is finished by `tend`. Every step of a deed may be done twice.

Limits: what Go programs wrote is not listed before we have changed it. Nothing expires while nobody tends (no worker runs).
"""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar, cast

import msgspec
from pymongo import UpdateOne

from machinery_py._drivers.mongo import Document, MongoDriver, Store, insert_new, micros
from machinery_py.backends import mongo_groups
from machinery_py.backends.base import (
    ALREADY,
    FENCED,
    SETTLED,
    Backend,
    BackendFeatures,
    Begun,
    Change,
    ReadyGroup,
    Verdict,
)
from machinery_py.backends.mongo_listener import MongoListener
from machinery_py.backends.mongo_records import (
    Kept,
    fields_of,
    kept_of,
    new_document,
    packed_changes,
    packed_deed,
    packed_outbox,
    state_of,
    unpacked_changes,
    unpacked_outbox,
)
from machinery_py.backends.transactional import Row, decide
from machinery_py.errors import BackendUnavailable
from machinery_py.states import Arrival, GroupMeta, State, TaskState, advance

EXPIRE_IN = 3600.0  # seconds that a finished task is kept
REVOKED_LIFE = 3 * 86400 * 1_000_000  # µs that a revocation is kept
DEED_AGE = 5.0  # seconds; by then the one who is at a deed is dead, or in trouble (overtaking it does no harm)
SWEEP = 60.0  # seconds between two looks for what has expired
BATCH = 1000  # documents in one step
ROUNDS = 200  # tries of a write that others are faster at

T = TypeVar("T")
_SLIM = {"results": 0, "outbox": 0}


class MongoBackend(Backend):
    """Collections of the driver's database. The driver belongs to whoever made it."""

    features = BackendFeatures(name="mongodb")

    def __init__(self, driver: MongoDriver, *, expire_in: float = EXPIRE_IN) -> None:
        self.driver = driver
        self.expire_in = expire_in
        self._next_sweep = 0.0

    def now(self) -> dt.datetime:
        return self.driver.moment()

    def _run(self, work: Callable[[Store], T], doing: str, *, again: bool = True) -> T:
        return self.driver.run(work, doing=doing, away=BackendUnavailable, again=again)

    def _until(self) -> int:
        return self.driver.now() + int(self.expire_in * 1e6)

    # Changes

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        verdicts = self.commit(changes, with_deeds=True)
        owed = [change for change, verdict in zip(changes, verdicts, strict=True) if verdict is SETTLED]
        self.follow(owed, again=False)
        self.clear_deeds([change for change in owed if _is_kept(change)])
        repeated = [change.key for change, verdict in zip(changes, verdicts, strict=True) if verdict is ALREADY]
        if repeated:
            self._finish_deeds(repeated)
        return verdicts

    def commit(self, changes: Sequence[Change], *, with_deeds: bool) -> list[Verdict]:
        """Write the state of each change's key, or the mark of its group; nothing of what follows.

        A change that has neither is SETTLED: all of it follows. Safe to repeat for changes with a mark.
        """
        verdicts: list[Verdict] = [SETTLED] * len(changes)
        waiting = [index for index, change in enumerate(changes) if _own(change) or change.epoch]
        for index, change in enumerate(changes):
            if change.fires and not self.fire(change):
                verdicts[index] = FENCED
        for _ in range(ROUNDS):
            if not waiting:
                break
            waiting = self._commit(changes, [index for index in waiting if verdicts[index] is not FENCED], verdicts, with_deeds)
        else:
            raise BackendUnavailable(f"MongoDB at {self.driver.place}: writing states: others were faster {ROUNDS} times")
        finished = any(state.is_finished for change in changes for state in change.states)
        if finished:
            self.driver.ring("results")
        return verdicts

    def _commit(self, changes: Sequence[Change], waiting: Sequence[int], verdicts: list[Verdict], with_deeds: bool) -> list[int]:
        """One round; returns those that have to be tried again, because somebody else has written their document."""
        rows = self.load(changes[index].key for index in waiting)
        before = {uuid: (row.version, row.word) for uuid, row in rows.items()}
        more: dict[str, Document] = {}
        held = {one.task_uuid for index in waiting for one in changes[index].arrivals if one.callback}
        touched: dict[str, list[int]] = {}
        for index in waiting:
            change = changes[index]
            narrow = msgspec.structs.replace(change, states=_own(change))
            verdicts[index], new = decide(narrow, cast("dict[str, Row]", rows))
            if verdicts[index] is not SETTLED:
                continue
            for state in new:
                row = rows.setdefault(change.key, Kept())
                row.state, row.changed = state, True
                if change.mark:
                    row.mark = change.mark
                touched.setdefault(change.key, []).append(index)
            deed = packed_deed(change) if with_deeds else b""
            if deed or change.outbox:
                now = self.driver.now()
                more[change.key] = {"deed": deed, "deed_at": now if deed else 0} if deed else {}
                if change.outbox:
                    more[change.key] |= {"outbox": packed_outbox(change.outbox), "outbox_at": now}
        changed = {uuid: row for uuid, row in rows.items() if row.changed}
        lost = self._save(changed, before, more, held)
        return [index for uuid in lost for index in touched.get(uuid, ())]

    def load(self, uuids: Iterable[str]) -> dict[str, Kept]:
        """The documents that there are, for writing over them."""
        wanted = list(dict.fromkeys(uuids))

        def read(store: Store) -> dict[str, Kept]:
            return {
                one["_id"]: kept_of(one)
                for start in range(0, len(wanted), BATCH)
                for one in store.tasks.find({"_id": {"$in": wanted[start : start + BATCH]}}, _SLIM)
            }

        return self._run(read, "reading states") if wanted else {}

    def _save(
        self, rows: dict[str, Kept], before: dict[str, tuple[int, str | None]], more: dict[str, Document], held: set[str]
    ) -> set[str]:
        """Write the rows over what was read; returns those that are something else by now."""
        if not rows:
            return set()
        driver = self.driver
        place, until = driver.next_place(len(rows)), self._until()
        long = until + mongo_groups.CHORD_LIFE
        moment = driver.moment()
        stamp = secrets.token_hex(8)
        fresh: list[Document] = []
        writes: list[UpdateOne] = []
        for number, (uuid, row) in enumerate(rows.items()):
            expires_at = long if uuid in held else until
            extra = {**more.get(uuid, {}), "stamp": stamp}
            if uuid not in before:
                document = new_document(uuid, row, now=place + number, expires_at=expires_at, moment=moment)
                fresh.append({**document, **extra})
                continue
            version, word = before[uuid]
            seen = {"version": version} if version else {"version": {"$exists": False}}
            fields = fields_of(row, version=version + 1, now=place + number, expires_at=expires_at)
            writes.append(UpdateOne({"_id": uuid, "state": word, **seen}, {"$set": {**fields, **extra}}))

        def write(store: Store) -> bool:
            is_whole = all(insert_new(store.tasks, fresh))
            for start in range(0, len(writes), BATCH):
                some = writes[start : start + BATCH]
                is_whole &= store.tasks.bulk_write(some, ordered=False).matched_count == len(some)
            return is_whole

        if self._run(write, "writing states"):
            return set()
        # Some were not as we had read them, or this was the repeat after a lost reply: our stamp tells which are ours.
        def ours(store: Store) -> set[str]:
            query = {"_id": {"$in": list(rows)}, "stamp": stamp}
            return {one["_id"] for one in store.tasks.find(query, {"_id": 1})}

        return rows.keys() - self._run(ours, "reading states")

    def write_states(self, states: Sequence[TaskState], *, force: bool = False, again: bool = False) -> None:
        """Each through `advance`, as far as it goes; with `force` as it is, but `again` only over an earlier run."""
        left = list(states)
        for _ in range(ROUNDS):
            if not left:
                return
            rows = self.load(state.task_uuid for state in left)
            before = {uuid: (row.version, row.word) for uuid, row in rows.items()}
            for state in left:
                row = rows.get(state.task_uuid) or Kept()
                is_old = not again or row.state is None or row.state.run < state.run
                after = advance(row.state, state) if not force else state if is_old else None
                if after is not None:
                    row.state, row.changed = after, True
                    rows[state.task_uuid] = row
            lost = self._save({uuid: row for uuid, row in rows.items() if row.changed}, before, {}, set())
            left = [state for state in left if state.task_uuid in lost]
        raise BackendUnavailable(f"MongoDB at {self.driver.place}: writing states: others were faster {ROUNDS} times")

    def follow(self, changes: Sequence[Change], *, again: bool) -> None:
        """Do what follows from changes that are committed; their outboxes are not looked at.

        Args:
            again: it may have been done before, in part or wholly.
        """
        plain: list[TaskState] = []
        for change in changes:
            others = [state for state in change.states if state.task_uuid != change.key]
            if change.force and others:
                self.write_states(others, force=True, again=again)
            else:
                plain += others
        self.write_states(plain)
        groups = [group for change in changes for group in change.groups]
        if groups:
            self._add_groups(groups)
        arrivals = [one for change in changes for one in change.arrivals]
        if arrivals:
            self._arrive(arrivals, again=again)
        for change in changes:
            if change.fires:
                self._after_firing(change.fires)

    def _add_groups(self, groups: Sequence[GroupMeta]) -> None:
        until, moment = self._until(), self.driver.moment()
        self._run(lambda store: mongo_groups.add_groups(store, groups, until=until, moment=moment), "writing groups")

    def _arrive(self, arrivals: Sequence[Arrival], *, again: bool) -> None:
        until = self._until() + mongo_groups.CHORD_LIFE
        late = self._run(
            lambda store: mongo_groups.arrive(store, arrivals, until=until, recount=again), "counting members", again=False
        )
        if late:
            expires_at = self._until()
            self._run(lambda store: mongo_groups.expire_members(store, late, expires_at=expires_at), "counting members")

    # Firing

    def fire(self, change: Change, send: bytes = b"") -> bool:
        """Settle the change's group, for one caller; what follows is left to `follow`, and `send` to the one store."""
        by, now, until = secrets.token_hex(8), self.driver.now(), self._until()
        fields = {
            "fired": now, "fired_by": by, "ready": 0, "expires_at": until, "deed_at": now,
            "deed": packed_changes([msgspec.structs.replace(change, outbox=())]),
            "send": send, "outbox": packed_outbox(change.outbox), "outbox_at": now if change.outbox else 0,
        }
        return self._run(
            lambda store: mongo_groups.fire(store, change.fires, by=by, fields=fields, until=until), "settling a group"
        )

    def _after_firing(self, group_uuid: str) -> None:
        expires_at = self._until()
        self._run(lambda store: mongo_groups.after_firing(store, group_uuid, expires_at=expires_at), "settling a group")

    # Deeds

    def clear_deeds(self, changes: Sequence[Change]) -> None:
        """What follows from these changes has been done."""
        keys = [change.key for change in changes if _own(change)]
        groups = [change.fires for change in changes if change.fires]
        none: Document = {"$set": {"deed": b"", "deed_at": 0}}
        neither: Document = {"$set": {"deed": b"", "deed_at": 0, "send": b""}}

        def clear(store: Store) -> None:
            if keys:
                store.tasks.update_many({"_id": {"$in": keys}}, none)
            if groups:
                store.machinery_chords.update_many({"_id": {"$in": groups}}, neither)

        if keys or groups:
            self._run(clear, "clearing what was done")

    def _finish_deeds(self, keys: Sequence[str]) -> None:
        """Do what is left of these tasks' changes: their owner died, or lost a reply."""
        for row in self.load(keys).values():
            deed = unpacked_changes(row.deed)
            if deed:
                self.follow(deed, again=True)
                self.clear_deeds(deed)

    def _finish_old_deeds(self) -> int:
        before = self.driver.now() - int(DEED_AGE * 1e6)
        old = {"deed_at": {"$gt": 0, "$lt": before}}

        tasks = self._run(lambda store: [one["_id"] for one in store.tasks.find(old, {"_id": 1}).limit(BATCH)],
                          "looking for what is unfinished")
        self._finish_deeds(tasks)
        for change, send in self.old_firings():
            if not send:  # else it is for a store that can send
                self.follow([change], again=True)
                self.clear_deeds([change])
        return len(tasks)

    def old_firings(self) -> list[tuple[Change, bytes]]:
        """Groups that were settled, and what follows was not done."""
        old = {"deed_at": {"$gt": 0, "$lt": self.driver.now() - int(DEED_AGE * 1e6)}}
        found = self._run(lambda store: list(store.machinery_chords.find(old, {"deed": 1, "send": 1}).limit(BATCH)),
                          "looking for what is unfinished")
        return [(change, bytes(one["send"])) for one in found for change in unpacked_changes(bytes(one["deed"]))]

    # Two stores

    def begin(self, keys: Sequence[tuple[str, int]]) -> list[Begun]:
        begun: dict[int, Begun] = {}
        for _ in range(ROUNDS):
            left = [index for index in range(len(keys)) if index not in begun]
            if not left:
                break
            rows = self.load(keys[index][0] for index in left)
            before = {uuid: (row.version, row.word) for uuid, row in rows.items()}
            boxes = dict(zip((keys[i][0] for i in left), self.outboxes([keys[i][0] for i in left]), strict=True))
            found = {index: _begin(rows.setdefault(keys[index][0], Kept()), keys[index][1], boxes[keys[index][0]])
                     for index in left}
            lost = self._save({uuid: row for uuid, row in rows.items() if row.changed}, before, {}, set())
            begun |= {index: one for index, one in found.items() if keys[index][0] not in lost}
        else:
            raise BackendUnavailable(f"MongoDB at {self.driver.place}: beginning deliveries: others were faster")
        return [begun[index] for index in range(len(keys))]

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        query = {"_id": {"$in": list(keys)}, "outbox_at": {"$gt": 0}}

        def read(store: Store) -> dict[str, bytes]:
            found = {one["_id"]: bytes(one["outbox"]) for one in store.tasks.find(query, {"outbox": 1})}
            return found | {one["_id"]: bytes(one["outbox"]) for one in store.machinery_chords.find(query, {"outbox": 1})}

        boxes = self._run(read, "reading outboxes") if keys else {}
        return [unpacked_outbox(boxes.get(key, b"")) for key in keys]

    def clear_outbox(self, keys: Sequence[str]) -> None:
        def clear(store: Store) -> None:
            for collection in (store.tasks, store.machinery_chords):
                collection.update_many({"_id": {"$in": list(keys)}}, {"$set": {"outbox": b"", "outbox_at": 0}})

        self._run(clear, "clearing outboxes")

    def unsent(self, limit: int, *, older_than: float) -> list[tuple[str, Sequence[bytes]]]:
        query = {"outbox_at": {"$gt": 0, "$lte": self.driver.now() - int(older_than * 1e6)}}

        def read(store: Store) -> list[tuple[str, bytes]]:
            return [
                (one["_id"], bytes(one["outbox"]))
                for collection in (store.tasks, store.machinery_chords)
                for one in collection.find(query, {"outbox": 1}).limit(limit)
            ][:limit]

        return [(key, unpacked_outbox(box)) for key, box in self._run(read, "looking for outboxes")]

    # Looking

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        def read(store: Store) -> dict[str, str]:
            return {
                one["_id"]: one.get("mark") or ""
                for start in range(0, len(uuids), BATCH)
                for one in store.tasks.find({"_id": {"$in": list(uuids[start : start + BATCH])}}, {"mark": 1})
            }

        marks = self._run(read, "reading marks") if uuids else {}
        return [marks.get(uuid, "") for uuid in uuids]

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        def read(store: Store) -> dict[str, TaskState]:
            return {
                state.task_uuid: state
                for start in range(0, len(uuids), BATCH)
                for one in store.tasks.find({"_id": {"$in": list(uuids[start : start + BATCH])}})
                if (state := state_of(one)) is not None
            }

        return self._run(read, "reading states") if uuids else {}

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        return self._run(lambda store: mongo_groups.get_group(store, group_uuid), "reading a group")

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        return self._run(lambda store: mongo_groups.ready_groups(store, limit), "looking for complete groups")

    def list_states(
        self, *, state: State | None = None, name: str = "", since: dt.datetime | None = None, limit: int = 100
    ) -> list[TaskState]:
        query: Document = {"changed_at": {"$gte": 1 if since is None else micros(since)}}
        if state is not None:
            query["state"] = state.value
        if name:
            query["task_name"] = name
        documents = self._run(
            lambda store: list(store.tasks.find(query).sort("changed_at", -1).limit(limit)), "listing states"
        )
        return [one for document in documents if (one := state_of(document)) is not None]

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        query = {"_id": {"$gte": prefix, "$lt": prefix + "\U0010ffff"}}
        return self._run(
            lambda store: [one["_id"] for one in store.tasks.find(query, {"_id": 1}).sort("_id", 1).limit(limit)],
            "looking for a task",
        )

    def finished_since(self, moment: dt.datetime) -> dict[str, tuple[int, int]]:
        def count(store: Store, state: State) -> dict[str, int]:
            match = {"changed_at": {"$gte": micros(moment)}, "state": state.value}
            found = store.tasks.aggregate([{"$match": match}, {"$group": {"_id": "$queue", "count": {"$sum": 1}}}])
            return {one["_id"]: one["count"] for one in found}

        good = self._run(lambda store: count(store, State.SUCCESS), "counting what has finished")
        bad = self._run(lambda store: count(store, State.FAILURE), "counting what has finished")
        return {queue: (good.get(queue, 0), bad.get(queue, 0)) for queue in good.keys() | bad.keys()}

    def revoke(self, uuids: Sequence[str]) -> None:
        until = self.driver.now() + REVOKED_LIFE
        writes = [UpdateOne({"_id": uuid}, {"$set": {"expires_at": until}}, upsert=True) for uuid in dict.fromkeys(uuids)]

        def write(store: Store) -> None:
            for start in range(0, len(writes), BATCH):
                store.machinery_revoked.bulk_write(writes[start : start + BATCH], ordered=False)

        self._run(write, "revoking tasks")

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        def read(store: Store) -> set[str]:
            return {
                one["_id"]
                for start in range(0, len(uuids), BATCH)
                for one in store.machinery_revoked.find({"_id": {"$in": list(uuids[start : start + BATCH])}}, {"_id": 1})
            }

        return self._run(read, "looking for revoked tasks") if uuids else set()

    def purge_state(self, task_uuid: str) -> None:
        self._run(lambda store: store.tasks.delete_one({"_id": task_uuid}), "forgetting a task")

    def purge_group_meta(self, group_uuid: str) -> None:
        self._run(lambda store: mongo_groups.purge_group(store, group_uuid), "forgetting a group")

    def listener(self) -> MongoListener:
        return MongoListener(self.driver)

    # House-keeping

    def tend(self) -> float:
        full = self._finish_old_deeds() >= BATCH
        monotonic = self.driver.clock.monotonic()
        if monotonic >= self._next_sweep:
            self._next_sweep = monotonic + SWEEP
            full = self._sweep() or full
        return 0.05 if full else DEED_AGE

    def _sweep(self) -> bool:
        """Forget what has expired; whether there may be more."""
        now = self.driver.now()

        def sweep(store: Store) -> bool:
            over = {"expires_at": {"$gt": 0, "$lte": now}}
            old = [one["_id"] for one in store.tasks.find(over, {"_id": 1}).limit(BATCH)]
            if old:
                store.tasks.delete_many({"_id": {"$in": old}, **over})
            store.machinery_revoked.delete_many(over)
            looked = mongo_groups.sweep_groups(store, now=now, again_at=now + int(SWEEP * 1e6), limit=100)
            return len(old) >= BATCH or looked >= 100

        is_full = self._run(sweep, "looking for what is over")
        if is_full:
            self._next_sweep = 0.0
        return is_full

    def close(self) -> None:
        pass  # the driver belongs to whoever made it


def _own(change: Change) -> list[TaskState]:
    return [state for state in change.states if state.task_uuid == change.key]


def _is_kept(change: Change) -> bool:
    """Whether a deed was written with the change."""
    return bool(change.fires) or bool(_own(change) and packed_deed(change))


def _begin(row: Row, run: int, outbox: Sequence[bytes]) -> Begun:
    state = row.state
    if state is not None and is_over(state, run):
        return Begun(epoch=row.epoch, finished=True, outbox=outbox)
    row.epoch, row.changed = row.epoch + 1, True
    return Begun(epoch=row.epoch)


def is_over(state: TaskState, run: int) -> bool:
    """Whether that run has ended. RETRY ends a run as well: the next one travels as a message of its own."""
    return state.is_finished or state.run > run or (state.run == run and state.state is State.RETRY)

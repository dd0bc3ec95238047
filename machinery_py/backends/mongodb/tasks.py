"""The documents of tasks: read, written over what was read, marks and outboxes. What is in them: documents.py.

A write names the version (and, for Go's sake, the state) that it has seen, so of many who change one document at once each
knows whether it was the one. A write whose reply was lost knows its own by the stamp that it left.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from pymongo import DeleteOne, UpdateOne

from machinery_py.backends.mongodb.documents import (
    TaskDocument,
    fields_of,
    kept_of,
    new_document,
    packed_outbox,
    unpacked_outbox,
)
from machinery_py.backends.mongodb.groups import CHORD_LIFE
from machinery_py.connections.mongodb.client import Document, MongoDriver, Store, insert_new
from machinery_py.errors import BackendUnavailable, NameRefused
from machinery_py.names import is_made
from machinery_py.tasks.states import State, TaskState, advance
from machinery_py.texts import get_logger

logger = get_logger(__name__)

BATCH = 1000  # documents in one step
ROUNDS = 200  # tries of a write that others are faster at

T = TypeVar("T")
_SLIM = {"results": 0, "outbox": 0}

#: Only tasks in one of these states, or in a later run, may have ended a run.
_ENDED = frozenset({State.SUCCESS.value, State.FAILURE.value, State.RETRY.value})

#: UUID → version and state of the document that is written over.
Before = dict[str, tuple[int, str | None]]


class MongoTasks:
    """The collection `tasks` of the driver's database."""

    def __init__(self, driver: MongoDriver, *, expire_in: float) -> None:
        self.driver = driver
        self._expire_in = expire_in

    def run(self, work: Callable[[Store], T], doing: str, *, again: bool = True) -> T:
        return self.driver.run(work, doing=doing, away=BackendUnavailable, again=again)

    def until(self) -> int:
        """Until when is kept what is finished now."""
        return self.driver.now() + int(self._expire_in * 1e6)

    def too_many_rivals(self) -> BackendUnavailable:
        return BackendUnavailable(
            f"MongoDB at {self.driver.place}: writing states: others were faster {ROUNDS} times"
        )

    def load(self, uuids: Iterable[str]) -> dict[str, TaskDocument]:
        """The documents that there are, for writing over them."""
        wanted, now = list(dict.fromkeys(uuids)), self.driver.now()

        def read(store: Store) -> dict[str, TaskDocument]:
            return {
                one["_id"]: kept_of(one, now)
                for start in range(0, len(wanted), BATCH)
                for one in store.tasks.find(
                    {"_id": {"$in": wanted[start : start + BATCH]}}, _SLIM
                ).batch_size(BATCH + 1)
            }

        return self.run(read, "reading states") if wanted else {}

    def refusals(self, uuids: Iterable[str]) -> dict[str, NameRefused]:
        """Why states of these UUIDs are not written: something else lies there. Nobody is asked for UUIDs that we or Go made."""
        refused: dict[str, NameRefused] = {}
        chosen = [uuid for uuid in dict.fromkeys(uuids) if not is_made(uuid)]
        try:
            self.load(chosen)
        except NameRefused:
            for uuid in chosen:
                try:
                    self.load([uuid])
                except NameRefused as error:
                    refused[uuid] = error
        return refused

    def load_ended(self, uuids: Iterable[str]) -> dict[str, TaskDocument]:
        """As `load`, of those of which a run may have ended. Asked for by `_id` alone, so that no server looks at other tasks."""
        wanted = list(dict.fromkeys(uuids))

        def read(store: Store) -> list[str]:
            return [
                one["_id"]
                for start in range(0, len(wanted), BATCH)
                for one in store.tasks.find(
                    {"_id": {"$in": wanted[start : start + BATCH]}}, {"state": 1, "run": 1}
                ).batch_size(BATCH + 1)
                if one.get("state") in _ENDED or one.get("run")
            ]

        return self.load(self.run(read, "reading states")) if wanted else {}

    def save(
        self,
        rows: dict[str, TaskDocument],
        before: Before,
        more: dict[str, Document],
        held: set[str],
    ) -> set[str]:
        """Write the rows over what was read; returns those that are something else by now.

        Args:
            more: fields that are set besides.
            held: members of chords, whose results are kept until their chord was settled.
        """
        if not rows:
            return set()
        driver = self.driver
        place, until = driver.next_place(len(rows)), self.until()
        long = until + CHORD_LIFE
        moment = driver.moment()
        stamp = secrets.token_hex(8)
        fresh: list[Document] = []
        writes: list[UpdateOne] = []
        for number, (uuid, row) in enumerate(rows.items()):
            expires_at = long if uuid in held else until
            extra = {**more.get(uuid, {}), "stamp": stamp}
            if uuid not in before:
                document = new_document(
                    uuid, row, now=place + number, expires_at=expires_at, moment=moment
                )
                fresh.append({**document, **extra})
                continue
            version, word = before[uuid]
            seen = {"version": version} if version else {"version": {"$exists": False}}
            fields = fields_of(row, version=version + 1, now=place + number, expires_at=expires_at)
            writes.append(
                UpdateOne({"_id": uuid, "state": word, **seen}, {"$set": {**fields, **extra}})
            )

        def write(store: Store) -> bool:
            is_whole = all(insert_new(store.tasks, fresh))
            for start in range(0, len(writes), BATCH):
                some = writes[start : start + BATCH]
                is_whole &= store.tasks.bulk_write(some, ordered=False).matched_count == len(some)
            return is_whole

        if self.run(write, "writing states"):
            return set()

        # Some were not as we had read them, or this was the repeat after a lost reply: our stamp tells which are ours.
        def ours(store: Store) -> set[str]:
            query = {"_id": {"$in": list(rows)}, "stamp": stamp}
            return {one["_id"] for one in store.tasks.find(query, {"_id": 1})}

        return rows.keys() - self.run(ours, "reading states")

    def advance(
        self, states: Sequence[TaskState], *, force: bool = False, again: bool = False
    ) -> None:
        """Each through `advance`, as far as it goes; with `force` as it is, but `again` only over an earlier run.

        One whose document is somebody else's is left out: its message is sent all the same.
        """
        left = list(states)
        for _ in range(ROUNDS):
            refused = self.refusals(state.task_uuid for state in left)
            for error in refused.values():
                logger.error("what follows a task is left out: %s", error)
            left = [state for state in left if state.task_uuid not in refused]
            if not left:
                return
            rows = self.load(state.task_uuid for state in left)
            before = seen_of(rows)
            for state in left:
                row = rows.get(state.task_uuid) or TaskDocument()
                is_old = not again or row.state is None or row.state.run < state.run
                after = advance(row.state, state) if not force else state if is_old else None
                if after is not None:
                    row.state, row.changed = after, True
                    rows[state.task_uuid] = row
            lost = self.save(
                {uuid: row for uuid, row in rows.items() if row.changed}, before, {}, set()
            )
            left = [state for state in left if state.task_uuid in lost]
        raise self.too_many_rivals()

    # What the contract of backends says of these

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        query = {"_id": {"$in": list(keys)}, "outbox_at": {"$gt": 0}}

        def read(store: Store) -> dict[str, bytes]:
            places = (store.tasks, store.machinery_chords, store.machinery_outboxes)
            return {
                one["_id"]: bytes(one["outbox"])
                for place in places
                for one in place.find(query, {"outbox": 1})
            }

        boxes = self.run(read, "reading outboxes") if keys else {}
        return [unpacked_outbox(boxes.get(key, b"")) for key in keys]

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        """Only what was sent: the next run of the task may have put its own there meanwhile, at another moment."""
        boxes = {key: packed_outbox(bodies) for key, bodies in sent}

        def clear(store: Store) -> None:
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

        self.run(clear, "clearing outboxes")

    def unsent(self, limit: int, *, older_than: float) -> list[tuple[str, Sequence[bytes]]]:
        query = {"outbox_at": {"$gt": 0, "$lte": self.driver.now() - int(older_than * 1e6)}}

        def read(store: Store) -> list[tuple[str, bytes]]:
            return [
                (one["_id"], bytes(one["outbox"]))
                for collection in (store.tasks, store.machinery_chords, store.machinery_outboxes)
                for one in collection.find(query, {"outbox": 1}).limit(limit)
            ][:limit]

        return [(key, unpacked_outbox(box)) for key, box in self.run(read, "looking for outboxes")]

    def marks(self, uuids: Sequence[str]) -> list[str]:
        def read(store: Store) -> dict[str, str]:
            return {
                one["_id"]: one.get("mark") or ""
                for start in range(0, len(uuids), BATCH)
                for one in store.tasks.find(
                    {"_id": {"$in": list(uuids[start : start + BATCH])}}, {"mark": 1}
                )
            }

        marks = self.run(read, "reading marks") if uuids else {}
        return [marks.get(uuid, "") for uuid in uuids]


def seen_of(rows: dict[str, TaskDocument]) -> Before:
    """Return the version and word of each row, which `save` compares before it writes."""
    return {uuid: (row.version, row.word) for uuid, row in rows.items()}

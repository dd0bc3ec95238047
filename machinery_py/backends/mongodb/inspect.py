"""Questions about states and groups in MongoDB, and revocations. Part of MongoBackend."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from pymongo import UpdateOne

from machinery_py.backends.base import REVOKED_LIFE, Backend, ReadyGroup
from machinery_py.backends.mongodb import groups as mongo_groups
from machinery_py.backends.mongodb.documents import is_over, state_of
from machinery_py.backends.mongodb.listener import MongoListener
from machinery_py.backends.mongodb.tasks import BATCH, MongoTasks
from machinery_py.clock import micros
from machinery_py.connections.mongodb.client import Document, MongoDriver, Store
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState


class MongoLooking(Backend):
    """The reading half. The driver belongs to whoever made it."""

    def __init__(self, driver: MongoDriver, tasks: MongoTasks) -> None:
        self.driver = driver
        self._tasks = tasks

    def now(self) -> dt.datetime:
        return self.driver.moment()

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        return self._tasks.marks(uuids)

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        now = self.driver.now()

        def read(store: Store) -> dict[str, TaskState]:
            return {
                state.task_uuid: state
                for start in range(0, len(uuids), BATCH)
                for one in store.tasks.find({"_id": {"$in": list(uuids[start : start + BATCH])}})
                if not is_over(one, now) and (state := state_of(one)) is not None
            }

        return self._tasks.run(read, "reading states") if uuids else {}

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        return self._tasks.run(
            lambda store: mongo_groups.get_group(store, group_uuid), "reading a group"
        )

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        return self._tasks.run(
            lambda store: mongo_groups.ready_groups(store, limit), "looking for complete groups"
        )

    def partial_groups(self, limit: int) -> list[Arrival]:
        now = self.driver.now()
        return self._tasks.run(
            lambda store: mongo_groups.partial_groups(store, limit, now=now),
            "looking for incomplete groups",
        )

    def drop_partial(self, group_uuids: Sequence[str]) -> None:
        self._tasks.run(
            lambda store: mongo_groups.drop_partial(store, group_uuids),
            "forgetting incomplete groups",
        )

    def list_states(
        self,
        *,
        state: State | None = None,
        name: str = "",
        since: dt.datetime | None = None,
        limit: int = 100,
    ) -> list[TaskState]:
        query: Document = {"changed_at": {"$gte": 1 if since is None else micros(since)}}
        if state is not None:
            query["state"] = state.value
        if name:
            query["task_name"] = name
        documents = self._tasks.run(
            lambda store: list(store.tasks.find(query).sort("changed_at", -1).limit(limit)),
            "listing states",
        )
        now = self.driver.now()
        return [
            one
            for document in documents
            if not is_over(document, now) and (one := state_of(document)) is not None
        ]

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        query = {"_id": {"$gte": prefix, "$lt": prefix + "\U0010ffff"}}
        return self._tasks.run(
            lambda store: [
                one["_id"]
                for one in store.tasks.find(query, {"expires_at": 1}).sort("_id", 1).limit(limit)
                if not is_over(one, self.driver.now())
            ],
            "looking for a task",
        )

    def finished_since(self, moment: dt.datetime) -> dict[str, tuple[int, int]]:
        def count(store: Store, state: State) -> dict[str, int]:
            match = {"changed_at": {"$gte": micros(moment)}, "state": state.value}
            found = store.tasks.aggregate(
                [{"$match": match}, {"$group": {"_id": "$queue", "count": {"$sum": 1}}}]
            )
            return {one["_id"]: one["count"] for one in found}

        good = self._tasks.run(
            lambda store: count(store, State.SUCCESS), "counting what has finished"
        )
        bad = self._tasks.run(
            lambda store: count(store, State.FAILURE), "counting what has finished"
        )
        return {
            queue: (good.get(queue, 0), bad.get(queue, 0)) for queue in good.keys() | bad.keys()
        }

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        until = self.driver.now() + int(life * 1e6)
        writes = [
            UpdateOne({"_id": uuid}, {"$set": {"expires_at": until}}, upsert=True)
            for uuid in dict.fromkeys(uuids)
        ]

        def write(store: Store) -> None:
            for start in range(0, len(writes), BATCH):
                store.machinery_revoked.bulk_write(writes[start : start + BATCH], ordered=False)

        self._tasks.run(write, "revoking tasks")

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        def read(store: Store) -> set[str]:
            return {
                one["_id"]
                for start in range(0, len(uuids), BATCH)
                for one in store.machinery_revoked.find(
                    {"_id": {"$in": list(uuids[start : start + BATCH])}}, {"_id": 1}
                )
            }

        return self._tasks.run(read, "looking for revoked tasks") if uuids else set()

    def purge_state(self, task_uuid: str) -> None:
        self._tasks.load([task_uuid])  # what is no state is refused
        self._tasks.run(
            lambda store: store.tasks.delete_one({"_id": task_uuid}), "forgetting a task"
        )

    def purge_group_meta(self, group_uuid: str) -> None:
        self._tasks.run(
            lambda store: mongo_groups.purge_group(store, group_uuid), "forgetting a group"
        )

    def listener(self) -> MongoListener:
        return MongoListener(self.driver)

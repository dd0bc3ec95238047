"""Checkpoints in MongoDB: one document for each task.

    _id         UUID of the task
    fence       of the latest delivery that has read or kept them
    rows        the body of each, under its name in hexadecimal: a field holds no dot
    expires_at  µs; until the task is over a year from the last one

There is no transaction over the message (or state) and this document. So whoever keeps one looks
first whether its delivery is the task's, and then writes if no later one has been here; and a later
delivery leaves its fence before it reads. What was on its way when a delivery was lost is refused,
or was there before it was lost, as far as anybody can see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pymongo.errors import DuplicateKeyError

from machinery_py.backends.base import CONFLICT, FENCED, SETTLED, Keeping, Verdict
from machinery_py.bounds import CHECKPOINT_LIFE
from machinery_py.connections.mongodb.client import Document, DriverUser, Store, step
from machinery_py.fences import Fence

SWEEP = 100  # expired ones that one look deletes


class MongoCheckpoints(DriverUser):
    """The collection `machinery_checkpoints` of the driver's database."""

    @step("keeping checkpoints")
    def keep(self, store: Store, keeping: Keeping, fence: Fence) -> Verdict:
        """Keep them, for a delivery that was the task's a moment ago."""
        place = store.machinery_checkpoints
        query: Document = {"_id": keeping.uuid, "fence": {"$lte": fence}}
        rows: Document = {_field(name): body for name, body in keeping.rows.items()}
        none = {field: {"$exists": False} for field in rows}
        fields = {"fence": fence, "expires_at": self._until(CHECKPOINT_LIFE), **rows}
        try:
            place.update_one({**query, **none}, {"$set": fields}, upsert=True)
        except DuplicateKeyError:
            return CONFLICT if place.find_one(query, {"_id": 1}) else FENCED
        return SETTLED

    @step("reading checkpoints")
    def leave_fence(self, store: Store, uuid: str, fence: Fence) -> None:
        """Let no earlier delivery keep anything from now on."""
        update: Document = {"$max": {"fence": fence, "expires_at": self._until(CHECKPOINT_LIFE)}}
        store.machinery_checkpoints.update_one({"_id": uuid}, update, upsert=True)

    @step("reading checkpoints")
    def read(self, store: Store, uuid: str) -> dict[str, bytes]:
        found: Any = store.machinery_checkpoints.find_one({"_id": uuid}) or {}
        if found.get("expires_at", 0) <= self.driver.now():
            return {}
        rows = found.get("rows") or {}
        return {bytes.fromhex(name).decode(): bytes(body) for name, body in rows.items()}

    @step("forgetting checkpoints")
    def drop(self, store: Store, uuid: str, names: Sequence[str]) -> None:
        gone: Document = {_field(name): "" for name in names}
        store.machinery_checkpoints.update_one({"_id": uuid}, {"$unset": gone})

    @step("forgetting checkpoints")
    def end(self, store: Store, uuid: str, life: float) -> None:
        place = store.machinery_checkpoints
        if life <= 0:
            place.delete_one({"_id": uuid})
        else:
            place.update_one({"_id": uuid}, {"$set": {"expires_at": self._until(life)}})

    @step("forgetting checkpoints")
    def sweep(self, store: Store) -> None:
        """Forget some that have expired."""
        over: Document = {"expires_at": {"$lte": self.driver.now()}}
        place = store.machinery_checkpoints
        old = [one["_id"] for one in place.find(over, {"_id": 1}).limit(SWEEP)]
        if old:
            place.delete_many({"_id": {"$in": old}, **over})

    def _until(self, life: float) -> int:
        return self.driver.now() + round(life * 1e6)


def _field(name: str) -> str:
    return f"rows.{name.encode().hex()}"

"""The fences of a database: the last one is in the only document of `machinery_fences`."""

from __future__ import annotations

from pymongo import ReturnDocument
from pymongo.errors import DuplicateKeyError

from machinery_py.connections.mongodb.client import Document, Store
from machinery_py.fences import LATEST, Fence


def next_fence(store: Store, now: int, count: int) -> Fence:
    """Return the first of so many fences; the others follow it.

    One round trip, unless clocks were set back or a million fences a second are given. Safe to
    repeat.
    """
    last: Document = {"_id": "last"}
    if now < LATEST:
        end = now + count - 1
        try:
            before = {**last, "fence": {"$lt": now}}
            store.machinery_fences.update_one(before, {"$set": {"fence": end}}, upsert=True)
        except DuplicateKeyError:
            pass  # it is greater
        else:
            return Fence(now)
    found = store.machinery_fences.find_one_and_update(
        last, {"$inc": {"fence": count}}, upsert=True, return_document=ReturnDocument.AFTER
    )
    assert found is not None
    return Fence(found["fence"] - count + 1)

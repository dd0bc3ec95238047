"""Locks in MongoDB.

    machinery_locks    a document for each name ever held: token, fence, expires_at (0: released). It stays, for its fence.

Limits: time is the server's as the driver has measured it, a few milliseconds off. A primary that steps down and loses writes
forgets who holds what, unless the URL says w=majority or nothing; the fence tells a resource.
"""

from __future__ import annotations

import secrets

from pymongo import ReturnDocument

from machinery_py.clock import moment_of
from machinery_py.connections.mongodb.client import Document, MongoDriver, Store, insert_new
from machinery_py.locks.base import Lock, LockHolding


class MongoLock(Lock):
    """Documents in the driver's database. The driver belongs to whoever made it."""

    def __init__(self, driver: MongoDriver) -> None:
        self._driver = driver

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        token = secrets.token_hex(16)

        def take(store: Store) -> Document | None:
            now = self._driver.now()
            until = now + int(ttl * 1e6)
            taken = store.machinery_locks.find_one_and_update(
                {"_id": name, "expires_at": {"$lte": now}},
                {"$set": {"token": token, "expires_at": until}, "$inc": {"fence": 1}},
                return_document=ReturnDocument.AFTER,
            )
            if taken is not None:
                return taken
            fresh: Document = {"_id": name, "token": token, "expires_at": until, "fence": 1}
            if insert_new(store.machinery_locks, [fresh]) == [True]:
                return fresh
            # Of a call whose reply was lost the repeat finds its own token.
            return store.machinery_locks.find_one({"_id": name, "token": token})

        taken = self._driver.run(take, doing="taking a lock")
        if taken is None:
            return None
        return LockHolding(
            name=name, token=token, fence=taken["fence"], expires_at=moment_of(taken["expires_at"])
        )

    def renew(self, held: LockHolding, *, ttl: float) -> bool:
        def renew(store: Store) -> bool:
            now = self._driver.now()
            return (
                store.machinery_locks.update_one(
                    {"_id": held.name, "token": held.token, "expires_at": {"$gt": now}},
                    {"$set": {"expires_at": now + int(ttl * 1e6)}},
                ).matched_count
                > 0
            )

        return self._driver.run(renew, doing="renewing a lock")

    def release(self, held: LockHolding) -> bool:
        return self._driver.run(
            lambda store: (
                store.machinery_locks.update_one(
                    {
                        "_id": held.name,
                        "token": held.token,
                        "expires_at": {"$gt": self._driver.now()},
                    },
                    {"$set": {"expires_at": 0, "token": ""}},
                ).matched_count
                > 0
            ),
            doing="releasing a lock",
            again=False,
        )

    def close(self) -> None:
        pass  # the driver belongs to whoever made it

"""Locks in MongoDB.

    machinery_locks    a document for each name ever held: token, fence, expires_at (0: released)

Limits: time is the server's as the driver has measured it, a few milliseconds off. A primary that
steps down and loses writes forgets who holds what, unless the URL says w=majority or nothing; the
fence tells a resource.
"""

from __future__ import annotations

import secrets

from pymongo import ReturnDocument

from machinery_py.clock import moment_of
from machinery_py.connections.mongodb.client import Document, DriverUser, Store, insert_new, step
from machinery_py.locks.base import Lock, LockHolding


class MongoLock(DriverUser, Lock):
    """Documents in the driver's database. The driver belongs to whoever made it."""

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        token = secrets.token_hex(16)
        taken = self._take(name, token, ttl)
        if taken is None:
            return None
        return LockHolding(
            name=name, token=token, fence=taken["fence"], expires_at=moment_of(taken["expires_at"])
        )

    @step("taking a lock")
    def _take(self, store: Store, name: str, token: str, ttl: float) -> Document | None:
        now = self.driver.now()
        until = now + int(ttl * 1e6)
        taken = store.machinery_locks.find_one_and_update(
            {"_id": name, "expires_at": {"$lte": now}},
            {"$set": {"token": token, "expires_at": until}, "$inc": {"fence": 1}},
            return_document=ReturnDocument.AFTER,
        )
        if taken is not None:
            return taken
        # By the clock: so the count does not begin anew in a database that was emptied.
        fresh: Document = {"_id": name, "token": token, "expires_at": until, "fence": now}
        if insert_new(store.machinery_locks, [fresh]) == [True]:
            return fresh
        # After a lost reply the repeat finds its own token.
        return store.machinery_locks.find_one({"_id": name, "token": token})

    @step("renewing a lock")
    def renew(self, store: Store, held: LockHolding, *, ttl: float) -> bool:
        return self._set(store, held, {"expires_at": self.driver.now() + int(ttl * 1e6)})

    @step("releasing a lock", again=False)
    def release(self, store: Store, held: LockHolding) -> bool:
        return self._set(store, held, {"expires_at": 0, "token": ""})

    def _set(self, store: Store, held: LockHolding, fields: Document) -> bool:
        """Write these fields if the lock is still held."""
        ours = {"_id": held.name, "token": held.token, "expires_at": {"$gt": self.driver.now()}}
        return store.machinery_locks.update_one(ours, {"$set": fields}).matched_count > 0

    def close(self) -> None:
        pass  # the driver belongs to whoever made it

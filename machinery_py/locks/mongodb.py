"""Locks in MongoDB.

    machinery_locks    a document for each name held in the last day: token, fence, expires_at
                       (negative: the moment of its release)

Limits: time is the server's as the driver has measured it, a few milliseconds off. A primary that
steps down and loses writes forgets who holds what, unless the URL says w=majority or nothing; the
fence tells a resource.
"""

from __future__ import annotations

import contextlib
import secrets

from pymongo import ReturnDocument

from machinery_py.bounds import STEP_ITEMS
from machinery_py.clock import moment_of
from machinery_py.connections.mongodb.client import (
    Document,
    DriverUser,
    MongoDriver,
    Store,
    insert_new,
    step,
)
from machinery_py.errors import MachineryError
from machinery_py.locks.base import Lock, LockHolding

SWEEP = 60.0  # seconds between two looks for names that nobody uses
KEPT = 24 * 3600 * 1_000_000  # µs that a free name is kept: a clock may be set back so far


class MongoLock(DriverUser, Lock):
    """Documents in the driver's database. The driver belongs to whoever made it."""

    def __init__(self, driver: MongoDriver) -> None:
        super().__init__(driver)
        self._next_sweep = 0.0  # by the monotonic clock

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        token = secrets.token_hex(16)
        taken = self._take(name, token, ttl)
        if taken is None:
            return None
        return LockHolding(
            name=name, token=token, fence=taken["fence"], expires_at=moment_of(taken["expires_at"])
        )

    @step("looking for locks that nobody uses")
    def _sweep(self, store: Store) -> None:
        """Forget names that were free for a day, at most STEP_ITEMS of them."""
        now, locks = self.driver.now(), store.machinery_locks
        unused = {"expires_at": {"$gt": KEPT - now, "$lt": now - KEPT}}
        found = list(locks.find(unused, {"expires_at": 1}).limit(STEP_ITEMS))
        names = [one["_id"] for one in found if one["expires_at"]]
        locks.delete_many({"_id": {"$in": names}, **unused})
        # An older program has released these, and has not said when.
        names = [one["_id"] for one in found if not one["expires_at"]]
        query = {"_id": {"$in": names}, "expires_at": 0}
        locks.update_many(query, {"$set": {"expires_at": -now}})

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
        # By the clock: so the count does not begin anew when the name was forgotten.
        fresh: Document = {"_id": name, "token": token, "expires_at": until, "fence": now}
        if insert_new(store.machinery_locks, [fresh]) == [True]:
            return fresh
        # After a lost reply the repeat finds its own token.
        return store.machinery_locks.find_one({"_id": name, "token": token})

    @step("renewing a lock")
    def renew(self, store: Store, held: LockHolding, *, ttl: float) -> bool:
        return self._set(store, held, {"expires_at": self.driver.now() + int(ttl * 1e6)})

    def release(self, held: LockHolding) -> bool:
        released = self._release(held)
        if (monotonic := self.driver.clock.monotonic()) >= self._next_sweep:
            self._next_sweep = monotonic + SWEEP
            with contextlib.suppress(MachineryError):  # the next look finds them
                self._sweep()
        return released

    @step("releasing a lock", again=False)
    def _release(self, store: Store, held: LockHolding) -> bool:
        return self._set(store, held, {"expires_at": -self.driver.now(), "token": ""})

    def _set(self, store: Store, held: LockHolding, fields: Document) -> bool:
        """Write these fields if the lock is still held."""
        ours = {"_id": held.name, "token": held.token, "expires_at": {"$gt": self.driver.now()}}
        return store.machinery_locks.update_one(ours, {"$set": fields}).matched_count > 0

    def close(self) -> None:
        pass  # the driver belongs to whoever made it

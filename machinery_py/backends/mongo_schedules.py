"""The small records of schedules in MongoDB, and what becomes true with their changes.

    machinery_records     name → body, kept (0: it was removed, and is remembered for a day), stamp; deed, send, deed_at
    machinery_outboxes    key → messages that are still to be published on another broker

An amendment is made true by one write: to the record, if it holds what was expected and nothing is left of the amendment
before. States, groups and messages are its deed, done afterwards and then taken out; each may be done twice. A deed that stays is
finished by whoever changes the record next, or by `tend`.

The version of all records is how many documents there are and the sum of their stamps, which are random.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec

from machinery_py._drivers.mongo import Document, MongoDriver, Store, insert_new, printable
from machinery_py.backends.base import Amendment, Change
from machinery_py.backends.mongo_records import packed_changes, packed_outbox, unpacked_changes
from machinery_py.backends.mongo_tasks import BATCH, ROUNDS, MongoTasks
from machinery_py.errors import BackendUnavailable

REMOVED_LIFE = 86400 * 1_000_000  # µs that a removed record is remembered: a version never comes again
_FIELDS = {"stamp": 1, "deed": 1, "send": 1}


class Tick(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An amendment that was made, and what follows from it. `send`: as it was handed to `amend`."""

    name: str
    stamp: int
    change: Change
    send: bytes = b""

    @property
    def token(self) -> str:
        """Names what it sends."""
        return f"amend {self.name} {self.stamp:x}"


#: Does what follows from an amendment, and clears its deed. `again`: in part it may have been done.
Finish = Callable[[Tick, bool], None]


class MongoSchedules:
    """Records in the driver's database."""

    def __init__(self, driver: MongoDriver, tasks: MongoTasks) -> None:
        self.driver = driver
        self._run = tasks.run

    def version(self) -> str:
        whole = [{"$group": {"_id": None, "count": {"$sum": 1}, "stamps": {"$sum": "$stamp"}}}]
        found = self._run(lambda store: list(store.machinery_records.aggregate(whole)), "reading schedules")
        return f"{found[0]['count']}.{found[0]['stamps']}" if found else "0.0"

    def bodies(self) -> dict[str, bytes]:
        return self._run(
            lambda store: {one["_id"]: bytes(one["body"]) for one in store.machinery_records.find({"kept": 1}, {"body": 1})},
            "reading schedules",
        )

    def amend(self, amendment: Amendment, send: bytes, finish: Finish) -> bool:
        """Change the record, for one caller. `finish` is called for this amendment, and for one that was left before it."""
        name, stamp = printable(amendment.name), secrets.randbits(40)
        change = Change(key=amendment.outbox_key, states=amendment.states, groups=amendment.groups, outbox=amendment.outbox)
        deed = bool(change.states or change.groups or change.outbox or send)
        now = self.driver.now()
        fields: Document = {
            "kept": int(amendment.body is not None), "body": amendment.body or b"", "stamp": stamp, "at": now,
            "deed": packed_changes([change]) if deed else b"", "send": send, "deed_at": now if deed else 0,
        }

        def write(store: Store) -> bool | Tick:
            """Whether it is ours; or what has to be finished before."""
            records = store.machinery_records
            found = records.find_one({"_id": name})
            if found is not None and found["stamp"] == stamp:
                return True  # a repeat after a lost reply
            if (bytes(found["body"]) if found is not None and found["kept"] else None) != amendment.expected:
                return False
            if found is None:
                return insert_new(records, [{"_id": name, **fields}])[0]
            if found["deed_at"]:
                return _tick_of(found)
            # Whoever changes the record gives it another stamp.
            seen = {"_id": name, "stamp": found["stamp"], "deed_at": 0}
            return records.update_one(seen, {"$set": fields}).matched_count > 0

        for _ in range(ROUNDS):
            left = self._run(write, "changing a schedule")
            if isinstance(left, bool):
                if left and deed:
                    finish(Tick(name=name, stamp=stamp, change=change, send=send), False)
                return left
            finish(left, True)
        raise BackendUnavailable(f"MongoDB at {self.driver.place}: changing a schedule: others were faster {ROUNDS} times")

    def keep_outbox(self, tick: Tick) -> None:
        """The messages of a tick, for another broker. May be repeated."""
        if tick.change.outbox:
            box: Document = {"_id": tick.change.key, "outbox": packed_outbox(tick.change.outbox), "outbox_at": self.driver.now()}
            self._run(lambda store: insert_new(store.machinery_outboxes, [box]), "keeping an outbox")

    def clear(self, tick: Tick) -> None:
        """What follows from this amendment has been done."""
        done: Document = {"$set": {"deed": b"", "send": b"", "deed_at": 0}}
        self._run(lambda store: store.machinery_records.update_one({"_id": tick.name, "stamp": tick.stamp}, done),
                  "clearing what was done")

    def old_ticks(self) -> list[Tick]:
        """Amendments that were made, and what follows was not done."""
        old = {"deed_at": {"$gt": 0, "$lt": self.driver.now() - int(self.driver.deed_age * 1e6)}}
        found = self._run(lambda store: list(store.machinery_records.find(old, _FIELDS).limit(BATCH)),
                          "looking for what is unfinished")
        return [_tick_of(one) for one in found]

    def sweep(self) -> None:
        """Forget what was removed long ago."""
        old: Document = {"kept": 0, "deed_at": 0, "at": {"$lt": self.driver.now() - REMOVED_LIFE}}
        self._run(lambda store: store.machinery_records.delete_many(old), "looking for what is over")


def _tick_of(document: Document) -> Tick:
    (change,) = unpacked_changes(bytes(document["deed"]))
    return Tick(name=document["_id"], stamp=document["stamp"], change=change, send=bytes(document["send"]))

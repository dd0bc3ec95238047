"""Records of schedules and claims of unique tasks in MongoDB, and the follow-ups of their changes.

    machinery_records     name → body, kept (0: removed, remembered for a day), stamp; deed, send
    machinery_claims      the same, turn and expires_at
    machinery_outboxes    key → messages that are still to be published on another broker

One write makes an amendment true: to the record, if it holds what was expected and no earlier
intent. States, groups and messages are its intent (`deed`, `send`), carried out afterwards and then
taken out; each may be done twice. An intent that stays is finished by the next change of the
record, or by `tend`.

The reader of a claim looks at its task next, and takes a task without a state for one that is over.
So the states of an open intent are written before its claim is shown. A worker that only marks a
claim changes its turn and leaves stamp and intent as they are: its task has come, so its message
was stored, and its sender is about to clear the intent.

The version of all records is their number and the sum of their stamps, which are random.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import msgspec
from pymongo import DeleteOne, UpdateOne
from pymongo.collection import Collection

from machinery_py.backends.base import Change, Records, Rider
from machinery_py.backends.mongodb.changes import MongoChanges
from machinery_py.backends.mongodb.documents import packed_changes, packed_outbox, unpacked_changes
from machinery_py.backends.mongodb.tasks import ROUNDS, MongoTasks
from machinery_py.bounds import STEP_ITEMS
from machinery_py.connections.mongodb.client import (
    Document,
    DriverUser,
    MongoDriver,
    Store,
    insert_new,
    step,
)
from machinery_py.texts import printable

REMOVED_LIFE = 86400 * 1_000_000  # µs that a removed record is remembered: no version comes twice
_FIELDS = {"stamp": 1, "deed": 1, "send": 1}
_OPEN = {"body": 1, "kept": 1, "expires_at": 1, "deed_at": 1, **_FIELDS}


class RecordIntent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Follow-ups of an amendment that was made. `send`: as it was handed to `amend`."""

    name: str
    stamp: int
    change: Change
    send: bytes = b""
    is_claim: bool = False

    @property
    def token(self) -> str:
        """Name of what it sends."""
        return f"{'claim' if self.is_claim else 'amend'} {self.name} {self.stamp:x}"


#: Carries an intent out and clears it. `again`: in part it may have been done.
Finish = Callable[[RecordIntent, bool], None]


class MongoRecords(DriverUser):
    """Records and claims in the driver's database. May be used from any thread."""

    def __init__(self, driver: MongoDriver, tasks: MongoTasks, changes: MongoChanges) -> None:
        super().__init__(driver)
        self._tasks = tasks
        self._changes = changes

    def records(self, known: str) -> Records:
        version = self._version()
        bodies = None if version == known else self._bodies()
        return Records(now=self.driver.moment(), version=version, bodies=bodies)

    @step("reading schedules")
    def _version(self, store: Store) -> str:
        whole = [{"$group": {"_id": None, "count": {"$sum": 1}, "stamps": {"$sum": "$stamp"}}}]
        found = list(store.machinery_records.aggregate(whole))
        return f"{found[0]['count']}.{found[0]['stamps']}" if found else "0.0"

    @step("reading schedules")
    def _bodies(self, store: Store) -> dict[str, bytes]:
        found = store.machinery_records.find({"kept": 1}, {"body": 1})
        return {one["_id"]: bytes(one["body"]) for one in found}

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        wanted = [printable(name) for name in names]
        found = self._claims(wanted)
        for one in found.values():
            if one["deed_at"]:
                self._show(_intent_of(one, is_claim=True), again=True)
        now = self.driver.now()
        return [_body(found.get(name), now) for name in wanted]

    @step("reading claims")
    def _claims(self, store: Store, names: Sequence[str]) -> dict[str, Document]:
        found = store.machinery_claims.find({"_id": {"$in": names}}, _OPEN)
        return {one["_id"]: one for one in found}

    @step("releasing claims")
    def release(self, store: Store, claims: Sequence[tuple[str, bytes]]) -> None:
        """Forget claims that hold just this; one with an open intent is emptied, and goes later."""
        known = {printable(name): body for name, body in claims}
        these = {"_id": {"$in": list(known)}, "kept": 1}
        held: list[Document] = [
            {"_id": one["_id"], "turn": one["turn"], "kept": 1}
            for one in store.machinery_claims.find(these, {"body": 1, "turn": 1})
            if bytes(one["body"]) == known[one["_id"]]
        ]
        gone = {"kept": 0, "body": b"", "turn": secrets.randbits(40)}
        empty: Document = {"$set": {**gone, "expires_at": self.driver.now()}}
        if held:
            store.machinery_claims.bulk_write([DeleteOne({**one, "deed_at": 0}) for one in held])
            store.machinery_claims.bulk_write([UpdateOne(one, empty) for one in held])

    def amend(
        self, rider: Rider, change: Change, send: bytes = b"", finish: Finish | None = None
    ) -> bool:
        """Change the record, for one caller.

        Args:
            change: becomes true with it.
            send: messages, which `finish` sends.
            finish: carries out this intent, and one that was left before it (default: `finish`).
        """
        finish = finish or self.finish
        name, stamp, is_claim = printable(rider.name), secrets.randbits(40), rider.life > 0
        now = self.driver.now()
        held: Document = {"kept": int(rider.body is not None), "body": rider.body or b""}
        if is_claim:
            life = int(rider.life * 1e6) if rider.body is not None else 0
            held |= {"turn": stamp, "expires_at": now + life}
        intent = None
        if change.states or change.groups or change.outbox or send:
            alone = msgspec.structs.replace(change, riders=())
            intent = RecordIntent(
                name=name, stamp=stamp, change=alone, send=send, is_claim=is_claim
            )
        fields: Document = {
            **held,
            "stamp": stamp,
            "at": now,
            "deed": packed_changes([intent.change]) if intent else b"",
            "send": send,
            "deed_at": now if intent else 0,
        }

        def write(store: Store) -> bool | RecordIntent:
            """Return whether it is ours; or what has to be finished before."""
            records = _place(store, is_claim)
            found = records.find_one({"_id": name})
            if found is not None and stamp in (found["stamp"], found.get("turn")):
                return True  # a repeat after a lost reply
            if _body(found, now) != rider.expected:
                return False
            if found is None:
                return insert_new(records, [{"_id": name, **fields}])[0]
            # Each change gives it another stamp, except one that only marks a claim.
            word = "turn" if is_claim else "stamp"
            seen: Document = {"_id": name, word: found[word]}
            if is_claim and not intent:
                return records.update_one(seen, {"$set": held}).matched_count > 0
            if found["deed_at"]:
                return _intent_of(found, is_claim=is_claim)
            return records.update_one({**seen, "deed_at": 0}, {"$set": fields}).matched_count > 0

        for _ in range(ROUNDS):
            doing = "changing a claim" if is_claim else "changing a schedule"
            left = self.driver.run(write, doing=doing)
            if isinstance(left, bool):
                if left and intent:
                    finish(intent, False)
                return left
            finish(left, True)
        raise self._tasks.too_many_rivals("changing a schedule")

    # Follow-ups

    def finish(self, intent: RecordIntent, again: bool) -> None:
        """Carry out an intent that sends nothing here. May be repeated, with `again`."""
        self.follow(intent, again=again)
        if not intent.send:  # else it is for a store that can send
            self.clear(intent)

    def follow(self, intent: RecordIntent, *, again: bool) -> None:
        """Write states, groups and outbox of an intent."""
        self._show(intent, again=again)
        if intent.change.outbox:
            self._keep_outbox(intent.change)

    def _show(self, intent: RecordIntent, *, again: bool) -> None:
        change = msgspec.structs.replace(intent.change, key="", outbox=())
        self._changes.follow([change], again=again)

    @step("keeping an outbox")
    def _keep_outbox(self, store: Store, change: Change) -> None:
        box = {"outbox": packed_outbox(change.outbox), "outbox_at": self.driver.now()}
        insert_new(store.machinery_outboxes, [{"_id": change.key, **box}])

    @step("clearing what was done")
    def clear(self, store: Store, intent: RecordIntent) -> None:
        """Note that the follow-ups of this amendment are done."""
        done: Document = {"$set": {"deed": b"", "send": b"", "deed_at": 0}}
        this = {"_id": intent.name, "stamp": intent.stamp}
        _place(store, intent.is_claim).update_one(this, done)

    @step("looking for what is unfinished")
    def old_intents(self, store: Store) -> list[RecordIntent]:
        """Return the intents whose owners have died."""
        old = {"deed_at": {"$gt": 0, "$lt": self.driver.intents_before()}}
        return [
            _intent_of(one, is_claim=is_claim)
            for is_claim in (False, True)
            for one in _place(store, is_claim).find(old, _FIELDS).limit(STEP_ITEMS)
        ]

    @step("looking for what is over")
    def sweep(self, store: Store) -> None:
        """Forget what was removed long ago, and the claims whose time is over."""
        now = self.driver.now()
        removed = {"kept": 0, "deed_at": 0, "at": {"$lt": now - REMOVED_LIFE}}
        store.machinery_records.delete_many(removed)
        store.machinery_claims.delete_many({"expires_at": {"$lte": now}, "deed_at": 0})


def _place(store: Store, is_claim: bool) -> Collection[Document]:
    return store.machinery_claims if is_claim else store.machinery_records


def _body(document: Document | None, now: int) -> bytes | None:
    """Return the body of a record; a removed one, and a claim whose time is over, have none."""
    if document is None or not document["kept"] or 0 < document.get("expires_at", 0) <= now:
        return None
    return bytes(document["body"])


def _intent_of(document: Document, *, is_claim: bool) -> RecordIntent:
    (change,) = unpacked_changes(bytes(document["deed"]))
    return RecordIntent(
        name=document["_id"],
        stamp=document["stamp"],
        change=change,
        send=bytes(document["send"]),
        is_claim=is_claim,
    )

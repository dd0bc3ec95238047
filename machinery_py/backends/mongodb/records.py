"""The small records of schedules and the claims of unique tasks in MongoDB, and what becomes true with their changes.

    machinery_records     name → body, kept (0: it was removed, and is remembered for a day), stamp; deed, send, deed_at
    machinery_claims      the same, turn and expires_at
    machinery_outboxes    key → messages that are still to be published on another broker

An amendment is made true by one write: to the record, if it holds what was expected and nothing is left of the amendment
before. States, groups and messages are its deed, done afterwards and then taken out; each may be done twice. A deed that stays is
finished by whoever changes the record next, or by `tend`.

Who reads a claim looks at its task next, and takes a task without a state for one that is over. So the states of a deed that is
open are written before its claim is shown. A worker that only marks a claim changes its turn and leaves stamp and deed as they
are: its task has come, so its message was stored, and whoever stored it is about to clear the deed.

The version of all records is how many documents there are and the sum of their stamps, which are random.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from pymongo import DeleteOne, UpdateOne
from pymongo.collection import Collection

from machinery_py.backends.base import Amendment, Change
from machinery_py.backends.mongodb.documents import packed_changes, packed_outbox, unpacked_changes
from machinery_py.backends.mongodb.tasks import BATCH, ROUNDS, MongoTasks
from machinery_py.connections.mongodb.client import (
    Document,
    MongoDriver,
    Store,
    insert_new,
    printable,
)
from machinery_py.errors import BackendUnavailable

REMOVED_LIFE = (
    86400 * 1_000_000
)  # µs that a removed record is remembered: a version never comes again
_FIELDS = {"stamp": 1, "deed": 1, "send": 1}
_OPEN = {"body": 1, "kept": 1, "expires_at": 1, "deed_at": 1, **_FIELDS}


class Tick(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An amendment that was made, and what follows from it. `send`: as it was handed to `amend`."""

    name: str
    stamp: int
    change: Change
    send: bytes = b""
    is_claim: bool = False

    @property
    def token(self) -> str:
        """Names what it sends."""
        return f"{'claim' if self.is_claim else 'amend'} {self.name} {self.stamp:x}"


#: Does what follows from an amendment, and clears its deed. `again`: in part it may have been done.
Finish = Callable[[Tick, bool], None]


class MongoSchedules:
    """Records and claims in the driver's database."""

    def __init__(self, driver: MongoDriver, tasks: MongoTasks) -> None:
        self.driver = driver
        self._run = tasks.run

    def version(self) -> str:
        whole = [{"$group": {"_id": None, "count": {"$sum": 1}, "stamps": {"$sum": "$stamp"}}}]
        found = self._run(
            lambda store: list(store.machinery_records.aggregate(whole)), "reading schedules"
        )
        return f"{found[0]['count']}.{found[0]['stamps']}" if found else "0.0"

    def bodies(self) -> dict[str, bytes]:
        return self._run(
            lambda store: {
                one["_id"]: bytes(one["body"])
                for one in store.machinery_records.find({"kept": 1}, {"body": 1})
            },
            "reading schedules",
        )

    def claims(self, names: Sequence[str], show: Callable[[Tick], object]) -> list[bytes | None]:
        """Return the content of each claim. `show` is called before for one whose states may not be written yet."""
        wanted = [printable(name) for name in names]
        now = self.driver.now()
        found = self._run(
            lambda store: {
                one["_id"]: one
                for one in store.machinery_claims.find({"_id": {"$in": wanted}}, _OPEN)
            },
            "reading claims",
        )
        for one in found.values():
            if one["deed_at"]:
                show(_tick_of(one, is_claim=True))
        return [_body(found.get(name), now) for name in wanted]

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        """Forget those that hold just this. One whose deed is open is emptied, and goes when it is done."""
        known = {printable(name): body for name, body in claims}
        now = self.driver.now()

        def release(store: Store) -> None:
            found = store.machinery_claims.find(
                {"_id": {"$in": list(known)}, "kept": 1}, {"body": 1, "turn": 1}
            )
            held: list[Document] = [
                {"_id": one["_id"], "turn": one["turn"], "kept": 1}
                for one in found
                if bytes(one["body"]) == known[one["_id"]]
            ]
            empty: Document = {
                "$set": {"kept": 0, "body": b"", "turn": secrets.randbits(40), "expires_at": now}
            }
            if held:
                store.machinery_claims.bulk_write(
                    [DeleteOne({**one, "deed_at": 0}) for one in held]
                )
                store.machinery_claims.bulk_write([UpdateOne(one, empty) for one in held])

        if known:
            self._run(release, "releasing claims")

    def amend(self, amendment: Amendment, send: bytes, finish: Finish) -> bool:
        """Change the record, for one caller. `finish` is called for this amendment, and for one that was left before it."""
        name, stamp, is_claim = printable(amendment.name), secrets.randbits(40), amendment.life > 0
        change = Change(
            key=amendment.outbox_key,
            states=amendment.states,
            groups=amendment.groups,
            outbox=amendment.outbox,
        )
        deed = bool(change.states or change.groups or change.outbox or send)
        now = self.driver.now()
        held: Document = {"kept": int(amendment.body is not None), "body": amendment.body or b""}
        if is_claim:
            held |= {
                "turn": stamp,
                "expires_at": now + int(amendment.life * 1e6)
                if amendment.body is not None
                else now,
            }
        fields: Document = {
            **held,
            "stamp": stamp,
            "at": now,
            "deed": packed_changes([change]) if deed else b"",
            "send": send,
            "deed_at": now if deed else 0,
        }

        def write(store: Store) -> bool | Tick:
            """Whether it is ours; or what has to be finished before."""
            records = _place(store, is_claim)
            found = records.find_one({"_id": name})
            if found is not None and stamp in (found["stamp"], found.get("turn")):
                return True  # a repeat after a lost reply
            if _body(found, now) != amendment.expected:
                return False
            if found is None:
                return insert_new(records, [{"_id": name, **fields}])[0]
            # Whoever changes it gives it another stamp, but for who only marks a claim.
            word = "turn" if is_claim else "stamp"
            seen: Document = {"_id": name, word: found[word]}
            if is_claim and not deed:
                return records.update_one(seen, {"$set": held}).matched_count > 0
            if found["deed_at"]:
                return _tick_of(found, is_claim=is_claim)
            return records.update_one({**seen, "deed_at": 0}, {"$set": fields}).matched_count > 0

        for _ in range(ROUNDS):
            left = self._run(write, "changing a claim" if is_claim else "changing a schedule")
            if isinstance(left, bool):
                if left and deed:
                    finish(
                        Tick(name=name, stamp=stamp, change=change, send=send, is_claim=is_claim),
                        False,
                    )
                return left
            finish(left, True)
        raise BackendUnavailable(
            f"MongoDB at {self.driver.place}: changing a schedule: others were faster {ROUNDS} times"
        )

    def keep_outbox(self, tick: Tick) -> None:
        """The messages of a tick, for another broker. May be repeated."""
        if tick.change.outbox:
            box: Document = {
                "_id": tick.change.key,
                "outbox": packed_outbox(tick.change.outbox),
                "outbox_at": self.driver.now(),
            }
            self._run(
                lambda store: insert_new(store.machinery_outboxes, [box]), "keeping an outbox"
            )

    def clear(self, tick: Tick) -> None:
        """Note that the follow-ups of this amendment are done."""
        done: Document = {"$set": {"deed": b"", "send": b"", "deed_at": 0}}
        self._run(
            lambda store: _place(store, tick.is_claim).update_one(
                {"_id": tick.name, "stamp": tick.stamp}, done
            ),
            "clearing what was done",
        )

    def old_ticks(self) -> list[Tick]:
        """Amendments that were made, and what follows was not done."""
        old = {"deed_at": {"$gt": 0, "$lt": self.driver.now() - int(self.driver.deed_age * 1e6)}}
        return self._run(
            lambda store: [
                _tick_of(one, is_claim=is_claim)
                for is_claim in (False, True)
                for one in _place(store, is_claim).find(old, _FIELDS).limit(BATCH)
            ],
            "looking for what is unfinished",
        )

    def sweep(self) -> None:
        """Forget what was removed long ago, and the claims whose time is over."""
        now = self.driver.now()
        removed: Document = {"kept": 0, "deed_at": 0, "at": {"$lt": now - REMOVED_LIFE}}
        over: Document = {"expires_at": {"$lte": now}, "deed_at": 0}

        def sweep(store: Store) -> None:
            store.machinery_records.delete_many(removed)
            store.machinery_claims.delete_many(over)

        self._run(sweep, "looking for what is over")


def _place(store: Store, is_claim: bool) -> Collection[Document]:
    return store.machinery_claims if is_claim else store.machinery_records


def _body(document: Document | None, now: int) -> bytes | None:
    """Return the body of a record; a removed one, and a claim whose time is over, have none."""
    if document is None or not document["kept"] or 0 < document.get("expires_at", 0) <= now:
        return None
    return bytes(document["body"])


def _tick_of(document: dict[str, Any], *, is_claim: bool) -> Tick:
    (change,) = unpacked_changes(bytes(document["deed"]))
    return Tick(
        name=document["_id"],
        stamp=document["stamp"],
        change=change,
        send=bytes(document["send"]),
        is_claim=is_claim,
    )

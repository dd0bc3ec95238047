"""Limits in MongoDB.

Collection: connections/mongodb/collections.py. Each record is a document, written over only in the
version that was read; so each rule of a run is a step of its own. What a rule has counted is taken
back when a later rule makes the run wait; a crash between the two leaves a slot until its lease
ends, or a run counted that did not begin.

Limits: time is the server's as the driver has measured it, a few milliseconds off. Many processes
that ask for one key at once disturb each other: some hundred answers a second for one key.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from machinery_py.connections.mongodb.client import Document, DriverUser, Store, insert_new, step
from machinery_py.errors import BackendUnavailable
from machinery_py.limits import rules as pure
from machinery_py.limits.base import Admission, Rule, Slot, slots_of
from machinery_py.limits.records import RecordJob, RecordLimits, decode_record, decode_rules, encode
from machinery_py.limits.rules import Asking, LimitRecord, kept_until, record_key

OF_SCOPE = ""  # key of the document that keeps what `change` has set; those of records have a colon
SWEEP = 0.01  # share of the steps that delete what holds nobody back
FOR_EVER = 2**62
PATIENCE = 5.0  # seconds for a record that others change all the time
PAUSE = 0.002, 0.02  # seconds until it is read again
T = TypeVar("T")


class MongoLimits(DriverUser, RecordLimits):
    """Documents in the driver's database. The driver belongs to its creator."""

    def _enter(self, asking: Asking) -> Admission:
        held: list[Slot] = []
        passed: list[Rule] = []
        for rule in sorted(asking.rules, key=lambda rule: rule.interval):  # slots first
            answer = super()._enter(msgspec.structs.replace(asking, rules=(rule,)))
            if answer.wait:
                for one in passed:
                    self._undo(asking, one)
                places = slots_of(asking.scope, asking.who, asking.token, asking.rules)
                return msgspec.structs.replace(answer, held=places)
            passed.append(rule)
            held += answer.held
        return Admission(held=tuple(held))

    def _undo(self, asking: Asking, rule: Rule) -> None:
        def work(records: Sequence[LimitRecord], _: Sequence[Rule], now: int) -> None:
            pure.undo(records[0], asking)

        self._work(RecordJob(asking.scope, [record_key(rule)], work))

    @step("asking a limit")
    def _work(self, store: Store, job: RecordJob[T]) -> T:
        scope, (key,) = job.scope, job.keys
        here, of_scope = _id(scope, key), _id(scope, OF_SCOPE)
        deadline = time.monotonic() + PATIENCE
        while True:
            found = {
                one["_id"]: one
                for one in store.machinery_limits.find({"_id": {"$in": [here, of_scope]}})
            }
            changed = decode_rules(found[of_scope]["body"]) if of_scope in found else ()
            record = decode_record(found[here]["body"]) if here in found else LimitRecord()
            now = self.driver.now()
            result = job.work([record], changed, now)
            if _save(store, here, record, now, found.get(here)):
                break
            if time.monotonic() > deadline:
                raise BackendUnavailable(
                    f"asking a limit: {key!r} of {scope!r} was changed by others for "
                    f"{PATIENCE} s (too many processes ask for one key)"
                )
            time.sleep(random.uniform(*PAUSE))
        if random.random() < SWEEP:
            store.machinery_limits.delete_many({"until": {"$lte": now}})
        return result

    @step("changing a limit")
    def _set(self, store: Store, scope: str, rules: Sequence[Rule]) -> None:
        query = {"_id": _id(scope, OF_SCOPE)}
        if rules:
            fields = {"body": encode(rules), "until": FOR_EVER}
            store.machinery_limits.update_one(query, {"$set": fields}, upsert=True)
        else:
            store.machinery_limits.delete_one(query)

    @step("reading limits")
    def changed(self, store: Store) -> Mapping[str, Sequence[Rule]]:
        return {
            one["_id"].partition("\n")[0]: decode_rules(one["body"])
            for one in store.machinery_limits.find({"until": FOR_EVER})
        }

    @step("reading limits")
    def _all(self, store: Store) -> tuple[Iterable[tuple[str, str, LimitRecord]], int]:
        now = self.driver.now()
        found = store.machinery_limits.find({"until": {"$gt": now, "$lt": FOR_EVER}})
        records: list[tuple[str, str, LimitRecord]] = []
        for one in found.sort("until", -1):
            scope, _, key = one["_id"].partition("\n")
            records.append((scope, key, decode_record(one["body"])))
        return records, now


def _id(scope: str, key: str) -> str:
    return f"{scope}\n{key}"


def _save(store: Store, place: str, record: LimitRecord, now: int, before: Document | None) -> bool:
    """Write the record over the document that was read; False: another one is there."""
    fields = {"body": encode(record), "until": kept_until(record, now)}
    if before is None:
        return insert_new(store.machinery_limits, [{"_id": place, "version": 1, **fields}])[0]
    seen = {"_id": place, "version": before["version"]}
    written = store.machinery_limits.update_one(
        seen, {"$set": {"version": before["version"] + 1, **fields}}
    )
    return written.matched_count > 0

"""Changes of tasks and groups in MongoDB: one write makes a change true, follow-ups come after it.

The written document keeps the follow-ups (states of other tasks, groups, arrivals) as its intent
until they are done. They may be done twice. An intent that stays is finished by the next change of
the task, or by `tend`.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

import msgspec

from machinery_py.backends.base import FENCED, SETTLED, Change, Verdict
from machinery_py.backends.mongodb import groups as mongo_groups
from machinery_py.backends.mongodb.documents import (
    TaskDocument,
    packed_changes,
    packed_intent,
    packed_outbox,
    unpacked_changes,
)
from machinery_py.backends.mongodb.tasks import ROUNDS, MongoTasks, seen_of
from machinery_py.backends.transactional import Row, decide
from machinery_py.bounds import STEP_ITEMS
from machinery_py.connections.mongodb.client import (
    Document,
    DriverUser,
    MongoDriver,
    Store,
    step,
)
from machinery_py.tasks.states import Arrival, GroupMeta, TaskState

_NO_INTENT: Document = {"deed": b"", "deed_at": 0}


class MongoChanges(DriverUser):
    """Changes in the driver's database. May be used from any thread."""

    def __init__(self, driver: MongoDriver, tasks: MongoTasks) -> None:
        super().__init__(driver)
        self._tasks = tasks

    def commit(self, changes: Sequence[Change], *, with_intents: bool) -> list[Verdict]:
        """Write the state of each change's key, or the mark of its group; none of the follow-ups.

        A change that has neither is SETTLED: all of it is a follow-up. Changes with a mark may be
        repeated.
        """
        verdicts: list[Verdict] = [SETTLED] * len(changes)
        for index, change in enumerate(changes):
            if change.fires and not self.fire(change):
                verdicts[index] = FENCED
        waiting = [
            index
            for index, change in enumerate(changes)
            if (own_states(change) or change.epoch) and verdicts[index] is not FENCED
        ]
        for _ in range(ROUNDS):
            if not waiting:
                break
            waiting = self._commit(changes, waiting, verdicts, with_intents)
        else:
            raise self._tasks.too_many_rivals()
        if any(state.is_finished for change in changes for state in change.states):
            self.driver.notify("results")
        return verdicts

    def _commit(
        self,
        changes: Sequence[Change],
        waiting: Sequence[int],
        verdicts: list[Verdict],
        with_intents: bool,
    ) -> list[int]:
        """Do one round; return the changes to try again, because somebody else was faster."""
        rows = self._tasks.load(changes[index].key for index in waiting)
        before = seen_of(rows)
        if with_intents and (unfinished := [uuid for uuid, row in rows.items() if row.intent]):
            # A new intent takes the place of one that somebody has left behind.
            self.finish_intents(unfinished)
        more: dict[str, Document] = {}
        held = {
            one.task_uuid for index in waiting for one in changes[index].arrivals if one.callback
        }
        touched: dict[str, list[int]] = {}
        for index in waiting:
            change = changes[index]
            narrow = msgspec.structs.replace(change, states=own_states(change))
            verdicts[index], new = decide(narrow, cast("dict[str, Row]", rows))
            if verdicts[index] is not SETTLED:
                continue
            for state in new:
                row = rows.setdefault(change.key, TaskDocument())
                row.state, row.changed = state, True
                if change.mark:
                    row.mark = change.mark
                touched.setdefault(change.key, []).append(index)
            intent = packed_intent(change) if with_intents else b""
            if intent or change.outbox:
                now = self.driver.now()
                more[change.key] = {"deed": intent, "deed_at": now} if intent else {}
                if change.outbox:
                    more[change.key] |= {"outbox": packed_outbox(change.outbox), "outbox_at": now}
        lost = self._tasks.save(rows, before, more, held)
        return [index for uuid in lost for index in touched.get(uuid, ())]

    def follow(self, changes: Sequence[Change], *, again: bool) -> None:
        """Carry out the follow-ups of committed changes, except their outboxes.

        Args:
            again: it may have been done before, in part or wholly.
        """
        plain: list[TaskState] = []
        for change in changes:
            others = [state for state in change.states if state.task_uuid != change.key]
            if change.force and others:
                self._tasks.advance(others, force=True, again=again)
            else:
                plain += others
        self._tasks.advance(plain)
        groups = [group for change in changes for group in change.groups]
        if groups:
            self._add_groups(groups)
        arrivals = [one for change in changes for one in change.arrivals]
        late = self._arrive(arrivals, again) if arrivals else []
        if late:
            self._expire_members(late)
        for change in changes:
            if change.fires:
                self._after_firing(change.fires)

    @step("writing groups")
    def _add_groups(self, store: Store, groups: Sequence[GroupMeta]) -> None:
        until, moment = self._tasks.until(), self.driver.moment()
        mongo_groups.add_groups(store, groups, until=until, moment=moment)

    @step("counting members", again=False)
    def _arrive(self, store: Store, arrivals: Sequence[Arrival], again: bool) -> list[str]:
        now, until = self.driver.now(), self._tasks.until() + mongo_groups.CHORD_LIFE
        return mongo_groups.arrive(store, arrivals, now=now, until=until, recount=again)

    @step("counting members")
    def _expire_members(self, store: Store, members: Sequence[str]) -> None:
        now, until = self.driver.now(), self._tasks.until()
        mongo_groups.expire_members(store, members, now=now, expires_at=until)

    @step("settling a group")
    def _after_firing(self, store: Store, group_uuid: str) -> None:
        now, until = self.driver.now(), self._tasks.until()
        mongo_groups.after_firing(store, group_uuid, now=now, expires_at=until)

    def fire(self, change: Change, send: bytes = b"") -> bool:
        """Settle the change's group; True for one caller. The follow-ups are left to `follow`.

        Args:
            send: messages that a store with a broker in this database has to send then.
        """
        by, now, until = secrets.token_hex(8), self.driver.now(), self._tasks.until()
        fields = {
            "fired": now,
            "fired_by": by,
            "ready": 0,
            "look_at": 0,
            "expires_at": until,
            "deed_at": now,
            "deed": packed_changes([msgspec.structs.replace(change, outbox=())]),
            "send": send,
            "outbox": packed_outbox(change.outbox),
            "outbox_at": now if change.outbox else 0,
        }
        return self._fire(change.fires, by, fields, until)

    @step("settling a group")
    def _fire(self, store: Store, group_uuid: str, by: str, fields: Document, until: int) -> bool:
        return mongo_groups.fire(store, group_uuid, by=by, fields=fields, until=until)

    # Intents

    def clear_intents(self, changes: Sequence[Change]) -> None:
        """Note that the follow-ups of these changes are done."""
        own = [change for change in changes if own_states(change)]
        groups = [change.fires for change in changes if change.fires]
        if own or groups:
            self._clear([one.key for one in own], [one.mark for one in own], groups)

    @step("clearing what was done")
    def _clear(self, store: Store, keys: list[str], marks: list[str], groups: list[str]) -> None:
        if keys:
            # A later change may have left its own intent there.
            ours = {"_id": {"$in": keys}, **({"mark": {"$in": marks}} if all(marks) else {})}
            store.tasks.update_many(ours, {"$set": _NO_INTENT})
        if groups:
            fired = {"_id": {"$in": groups}}
            store.machinery_chords.update_many(fired, {"$set": {**_NO_INTENT, "send": b""}})

    def finish_intents(self, keys: Sequence[str]) -> None:
        """Carry out what is left of these tasks' changes: their owner died, or lost a reply."""
        for uuid, row in self._tasks.load(keys).items():
            intent = unpacked_changes(row.intent)
            if intent:
                self.follow(intent, again=True)
                self._clear_one(uuid, row.intent_at)

    @step("clearing what was done")
    def _clear_one(self, store: Store, uuid: str, intent_at: int) -> None:
        # Not one that was written meanwhile.
        store.tasks.update_one({"_id": uuid, "deed_at": intent_at}, {"$set": _NO_INTENT})

    def finish_old_intents(self) -> bool:
        """Carry out intents whose owners have died; return whether there may be more."""
        tasks = self._old_intents()
        self.finish_intents(tasks)
        return len(tasks) >= STEP_ITEMS

    @step("looking for what is unfinished")
    def _old_intents(self, store: Store) -> list[str]:
        old = {"deed_at": {"$gt": 0, "$lt": self.driver.intents_before()}}
        return [one["_id"] for one in store.tasks.find(old, {"_id": 1}).limit(STEP_ITEMS)]

    @step("looking for what is unfinished")
    def old_firings(self, store: Store) -> list[tuple[Change, bytes]]:
        """Return settled groups' changes with open follow-ups, and the messages to send."""
        old = {"deed_at": {"$gt": 0, "$lt": self.driver.intents_before()}}
        return [
            (change, bytes(one["send"]))
            for one in store.machinery_chords.find(old, {"deed": 1, "send": 1}).limit(STEP_ITEMS)
            for change in unpacked_changes(bytes(one["deed"]))
        ]


def own_states(change: Change) -> list[TaskState]:
    """Return the states of the task that the change belongs to."""
    return [state for state in change.states if state.task_uuid == change.key]


def has_intent(change: Change) -> bool:
    """Return whether an intent is written with the change."""
    return bool(change.fires) or bool(own_states(change) and packed_intent(change))

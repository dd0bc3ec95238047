"""States and groups in MongoDB, in Go Machinery's documents; the protocol stands in docs/explanation/mongodb-protocol.md.

A change is made true by one write: to the document of its key, if that is still as it was read. What else the change asks for
(other states, groups, arrivals) is written into the same document as its *deed*, done afterwards, and then taken out; a deed
that stays is finished by `tend`. Every step of a deed may be done twice.

Limits: what Go programs wrote is not listed before we have changed it. Nothing expires while nobody tends (no worker runs).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

import msgspec

from machinery_py.backends.base import (
    ALREADY,
    FENCED,
    SETTLED,
    Amendment,
    BackendFeatures,
    Begun,
    Change,
    OutboxBackend,
    Records,
    Verdict,
)
from machinery_py.backends.mongodb import groups as mongo_groups
from machinery_py.backends.mongodb.documents import (
    TaskDocument,
    packed_changes,
    packed_deed,
    packed_outbox,
    unpacked_changes,
)
from machinery_py.backends.mongodb.inspect import MongoLooking
from machinery_py.backends.mongodb.records import MongoSchedules, Tick
from machinery_py.backends.mongodb.tasks import BATCH, ROUNDS, MongoTasks, seen_of
from machinery_py.backends.transactional import Row, decide, is_over
from machinery_py.connections.durability import Concern
from machinery_py.connections.mongodb.client import Document, MongoDriver, Store
from machinery_py.tasks.states import Arrival, GroupMeta, TaskState

EXPIRE_IN = 3600.0  # seconds that a finished task is kept
SWEEP = 60.0  # seconds between two looks for what has expired


class MongoBackend(MongoLooking, OutboxBackend):
    """Collections of the driver's database. The driver belongs to whoever made it."""

    features = BackendFeatures(
        name="mongodb", foreign=True, claims=True, foreign_time=mongo_groups.GO_TIME
    )

    def __init__(self, driver: MongoDriver, *, expire_in: float = EXPIRE_IN) -> None:
        super().__init__(driver, MongoTasks(driver, expire_in=expire_in))
        self.expire_in = expire_in
        self.load_ended = self._tasks.load_ended
        self.refusals = self._tasks.refusals
        self.schedules = MongoSchedules(driver, self._tasks)
        self._next_sweep = 0.0

    # Changes

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        verdicts = self.commit(changes, with_deeds=True)
        owed = [
            change for change, verdict in zip(changes, verdicts, strict=True) if verdict is SETTLED
        ]
        # A member that somebody else has ended has no deed: what is in is counted anew.
        self.follow(
            [change for change in owed if _is_kept(change) or not change.arrivals], again=False
        )
        self.follow(
            [change for change in owed if change.arrivals and not _is_kept(change)], again=True
        )
        self.clear_deeds([change for change in owed if _is_kept(change)])
        repeated = [
            change.key
            for change, verdict in zip(changes, verdicts, strict=True)
            if verdict is ALREADY
        ]
        if repeated:
            self._finish_deeds(repeated)
        return verdicts

    def commit(self, changes: Sequence[Change], *, with_deeds: bool) -> list[Verdict]:
        """Write the state of each change's key, or the mark of its group; nothing of what follows.

        A change that has neither is SETTLED: all of it follows. Safe to repeat for changes with a mark.
        """
        verdicts: list[Verdict] = [SETTLED] * len(changes)
        waiting = [index for index, change in enumerate(changes) if _own(change) or change.epoch]
        for index, change in enumerate(changes):
            if change.fires and not self.fire(change):
                verdicts[index] = FENCED
        for _ in range(ROUNDS):
            if not waiting:
                break
            waiting = self._commit(
                changes,
                [index for index in waiting if verdicts[index] is not FENCED],
                verdicts,
                with_deeds,
            )
        else:
            raise self._tasks.too_many_rivals()
        finished = any(state.is_finished for change in changes for state in change.states)
        if finished:
            self.driver.notify("results")
        return verdicts

    def _commit(
        self,
        changes: Sequence[Change],
        waiting: Sequence[int],
        verdicts: list[Verdict],
        with_deeds: bool,
    ) -> list[int]:
        """One round; returns those that have to be tried again, because somebody else has written their document."""
        rows = self._tasks.load(changes[index].key for index in waiting)
        before = seen_of(rows)
        if with_deeds and (unfinished := [uuid for uuid, row in rows.items() if row.deed]):
            self._finish_deeds(
                unfinished
            )  # a new deed takes the place of one that somebody has left behind
        more: dict[str, Document] = {}
        held = {
            one.task_uuid for index in waiting for one in changes[index].arrivals if one.callback
        }
        touched: dict[str, list[int]] = {}
        for index in waiting:
            change = changes[index]
            narrow = msgspec.structs.replace(change, states=_own(change))
            verdicts[index], new = decide(narrow, cast("dict[str, Row]", rows))
            if verdicts[index] is not SETTLED:
                continue
            for state in new:
                row = rows.setdefault(change.key, TaskDocument())
                row.state, row.changed = state, True
                if change.mark:
                    row.mark = change.mark
                touched.setdefault(change.key, []).append(index)
            deed = packed_deed(change) if with_deeds else b""
            if deed or change.outbox:
                now = self.driver.now()
                more[change.key] = {"deed": deed, "deed_at": now if deed else 0} if deed else {}
                if change.outbox:
                    more[change.key] |= {"outbox": packed_outbox(change.outbox), "outbox_at": now}
        changed = {uuid: row for uuid, row in rows.items() if row.changed}
        lost = self._tasks.save(changed, before, more, held)
        return [index for uuid in lost for index in touched.get(uuid, ())]

    def follow(self, changes: Sequence[Change], *, again: bool) -> None:
        """Do what follows from changes that are committed; their outboxes are not looked at.

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
        if arrivals:
            self._arrive(arrivals, again=again)
        for change in changes:
            if change.fires:
                self._after_firing(change.fires)

    def _add_groups(self, groups: Sequence[GroupMeta]) -> None:
        until, moment = self._tasks.until(), self.driver.moment()
        self._tasks.run(
            lambda store: mongo_groups.add_groups(store, groups, until=until, moment=moment),
            "writing groups",
        )

    def _arrive(self, arrivals: Sequence[Arrival], *, again: bool) -> None:
        now, until = self.driver.now(), self._tasks.until() + mongo_groups.CHORD_LIFE
        late = self._tasks.run(
            lambda store: mongo_groups.arrive(store, arrivals, now=now, until=until, recount=again),
            "counting members",
            again=False,
        )
        if late:
            expires_at = self._tasks.until()
            self._tasks.run(
                lambda store: mongo_groups.expire_members(store, late, expires_at=expires_at),
                "counting members",
            )

    # Firing

    def fire(self, change: Change, send: bytes = b"") -> bool:
        """Settle the change's group, for one caller; what follows is left to `follow`, and `send` to the one store."""
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
        return self._tasks.run(
            lambda store: mongo_groups.fire(store, change.fires, by=by, fields=fields, until=until),
            "settling a group",
        )

    def _after_firing(self, group_uuid: str) -> None:
        expires_at = self._tasks.until()
        self._tasks.run(
            lambda store: mongo_groups.after_firing(store, group_uuid, expires_at=expires_at),
            "settling a group",
        )

    # Deeds

    def clear_deeds(self, changes: Sequence[Change]) -> None:
        """Note that the follow-ups of these changes are done."""
        keys = [change.key for change in changes if _own(change)]
        marks = [change.mark for change in changes if _own(change)]
        # A later change may have left its own deed there.
        ours: Document = {"_id": {"$in": keys}, **({"mark": {"$in": marks}} if all(marks) else {})}
        groups = [change.fires for change in changes if change.fires]
        none: Document = {"$set": {"deed": b"", "deed_at": 0}}
        neither: Document = {"$set": {"deed": b"", "deed_at": 0, "send": b""}}

        def clear(store: Store) -> None:
            if keys:
                store.tasks.update_many(ours, none)
            if groups:
                store.machinery_chords.update_many({"_id": {"$in": groups}}, neither)

        if keys or groups:
            self._tasks.run(clear, "clearing what was done")

    def _finish_deeds(self, keys: Sequence[str]) -> None:
        """Do what is left of these tasks' changes: their owner died, or lost a reply."""
        none: Document = {"$set": {"deed": b"", "deed_at": 0}}
        for uuid, row in self._tasks.load(keys).items():
            deed = unpacked_changes(row.deed)
            if deed:
                self.follow(deed, again=True)
                # Not one that was written meanwhile.
                this: Document = {"_id": uuid, "deed_at": row.deed_at}
                self._tasks.run(
                    lambda store, this=this: store.tasks.update_one(this, none),  # type: ignore[misc]
                    "clearing what was done",
                )

    def _finish_old_deeds(self) -> int:
        before = self.driver.now() - int(self.driver.deed_age * 1e6)
        old = {"deed_at": {"$gt": 0, "$lt": before}}
        tasks = self._tasks.run(
            lambda store: [one["_id"] for one in store.tasks.find(old, {"_id": 1}).limit(BATCH)],
            "looking for what is unfinished",
        )
        self._finish_deeds(tasks)
        return len(tasks)

    def old_firings(self) -> list[tuple[Change, bytes]]:
        """Groups that were settled, and what follows was not done."""
        old = {"deed_at": {"$gt": 0, "$lt": self.driver.now() - int(self.driver.deed_age * 1e6)}}
        found = self._tasks.run(
            lambda store: list(
                store.machinery_chords.find(old, {"deed": 1, "send": 1}).limit(BATCH)
            ),
            "looking for what is unfinished",
        )
        return [
            (change, bytes(one["send"]))
            for one in found
            for change in unpacked_changes(bytes(one["deed"]))
        ]

    # Two stores

    def begin(self, keys: Sequence[tuple[str, int]]) -> list[Begun]:
        begun: dict[int, Begun] = {}
        for _ in range(ROUNDS):
            left = [index for index in range(len(keys)) if index not in begun]
            if not left:
                break
            rows = self._tasks.load(keys[index][0] for index in left)
            before = seen_of(rows)
            boxes = dict(
                zip(
                    (keys[i][0] for i in left),
                    self.outboxes([keys[i][0] for i in left]),
                    strict=True,
                )
            )
            found = {
                index: _begin(
                    rows.setdefault(keys[index][0], TaskDocument()),
                    keys[index][1],
                    boxes[keys[index][0]],
                )
                for index in left
            }
            lost = self._tasks.save(
                {uuid: row for uuid, row in rows.items() if row.changed}, before, {}, set()
            )
            begun |= {index: one for index, one in found.items() if keys[index][0] not in lost}
        else:
            raise self._tasks.too_many_rivals()
        return [begun[index] for index in range(len(keys))]

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        return self._tasks.outboxes(keys)

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        self._tasks.clear_outbox(sent)

    def unsent(self, limit: int, *, older_than: float) -> list[tuple[str, Sequence[bytes]]]:
        return self._tasks.unsent(limit, older_than=older_than)

    # Schedules and claims

    def records(self, known: str = "") -> Records:
        version = self.schedules.version()
        return Records(
            now=self.now(),
            version=version,
            bodies=None if version == known else self.schedules.bodies(),
        )

    def amend(self, amendment: Amendment) -> bool:
        return self.schedules.amend(amendment, b"", self.finish_tick)

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        return (
            self.schedules.claims(names, lambda tick: self._show_tick(tick, again=True))
            if names
            else []
        )

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        self.schedules.release(claims)

    def finish_tick(self, tick: Tick, again: bool) -> None:
        """Finish an amendment that sends nothing here. May be repeated, with `again`."""
        self.follow_tick(tick, again=again)
        if not tick.send:  # else it is for a store that can send
            self.schedules.clear(tick)

    def follow_tick(self, tick: Tick, *, again: bool) -> None:
        self._show_tick(tick, again=again)
        self.schedules.keep_outbox(tick)

    def _show_tick(self, tick: Tick, *, again: bool) -> None:
        self.follow([msgspec.structs.replace(tick.change, key="", outbox=())], again=again)

    # House-keeping

    def tend(self) -> float:
        for change, send in self.old_firings():
            if not send:  # else it is for a store that can send
                self.follow([change], again=True)
                self.clear_deeds([change])
        for tick in self.schedules.old_ticks():
            self.finish_tick(tick, again=True)
        return self.tend_tasks()

    def tend_tasks(self) -> float:
        """As `tend`, less the firings and schedules."""
        full = self._finish_old_deeds() >= BATCH
        monotonic = self.driver.clock.monotonic()
        if monotonic >= self._next_sweep:
            self._next_sweep = monotonic + SWEEP
            full = self._sweep() or full
        return 0.05 if full else self.driver.deed_age

    def _sweep(self) -> bool:
        """Forget what has expired; whether there may be more."""
        now = self.driver.now()

        def sweep(store: Store) -> bool:
            over = {"expires_at": {"$gt": 0, "$lte": now}}
            old = [one["_id"] for one in store.tasks.find(over, {"_id": 1}).limit(BATCH)]
            if old:
                store.tasks.delete_many({"_id": {"$in": old}, **over})
            store.machinery_revoked.delete_many(over)
            looked = mongo_groups.sweep_groups(
                store, now=now, again_at=now + int(SWEEP * 1e6), limit=100
            )
            return len(old) >= BATCH or looked >= 100

        self.schedules.sweep()
        is_full = self._tasks.run(sweep, "looking for what is over")
        if is_full:
            self._next_sweep = 0.0
        return is_full

    def concerns(self) -> list[Concern]:
        return self.driver.concerns()

    def close(self) -> None:
        pass  # the driver belongs to whoever made it


def _own(change: Change) -> list[TaskState]:
    return [state for state in change.states if state.task_uuid == change.key]


def _is_kept(change: Change) -> bool:
    """Whether a deed was written with the change."""
    return bool(change.fires) or bool(_own(change) and packed_deed(change))


def _begin(row: Row, run: int, outbox: Sequence[bytes]) -> Begun:
    state = row.state
    if is_over(state, run):
        return Begun(epoch=row.epoch, finished=True, outbox=outbox)
    row.epoch, row.changed = row.epoch + 1, True
    return Begun(epoch=row.epoch)

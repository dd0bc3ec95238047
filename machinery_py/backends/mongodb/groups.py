"""Groups in MongoDB: their documents, the counting of members, and who settles a chord.

    group_metas         Go's; by_python: we set the flag chord_triggered
    machinery_chords    count, callback, state of a chord; deed (intent) and outbox of its firing;
                        look_at, looks: when to look whether Go has ended the missing members
    machinery_arrivals  a document for each member that has ended; its _id makes it count once

Only the process that inserted an arrival raises `arrived`, once. So it is never too high, and
reaching the total is enough. After a crash between the two it stays too low. Whoever finishes that
intent finds the arrival, cannot know whether it was counted, and raises `doubts`: `arrived` may be
too low by as much, so the last arrivals are counted.

A firing first sets Go's flag; of Python workers the chord's own document then lets one through. Go
sets the flag without looking whether it was set: a Go worker that sees all members ended always
sends the callback. So a group with members that Go has ended is left to Go for GO_TIME
(`BackendFeatures.foreign_time`). If no flag has come by then (our member was the last one, or the
Go worker died) it is ours.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence

from pymongo import ReturnDocument, UpdateOne

from machinery_py.backends.base import ReadyGroup
from machinery_py.bounds import in_steps
from machinery_py.connections.mongodb.client import Document, Store, find_by_id, insert_new
from machinery_py.tasks.states import Arrival, GroupMeta
from machinery_py.texts import printable

CHORD_LIFE = 7 * 86400 * 1_000_000  # µs without an arrival until a chord is taken for broken
LOOK = 30_000_000  # µs from a chord's first arrival until a look whether Go has ended the others
GROWING_LOOKS = 8  # looks at an incomplete group; from then on their pauses do not grow
GO_TIME = 1.0  # seconds that a Go worker has from the end of its member to its flag


def _chord(uuid: str, until: int) -> Document:
    return {
        "_id": uuid,
        "total": 0,
        "arrived": 0,
        "doubts": 0,
        "callback": b"",
        "failed": "",
        "ready": 0,
        "fired": 0,
        "fired_by": "",
        "deed": b"",
        "deed_at": 0,
        "send": b"",
        "outbox": b"",
        "outbox_at": 0,
        "expires_at": until,
        "look_at": 0,
        "looks": 0,
    }


def add_groups(
    store: Store, groups: Sequence[GroupMeta], *, until: int, moment: dt.datetime
) -> None:
    """Create the groups that are not there yet."""
    insert_new(store.machinery_chords, [_chord(group.group_uuid, until) for group in groups])
    insert_new(
        store.group_metas,
        [
            {
                "_id": group.group_uuid,
                "task_uuids": list(group.task_uuids),
                "chord_triggered": group.chord_triggered,
                "lock": group.lock,
                "created_at": group.created_at if group.created_at.year >= 1970 else moment,
                "ttl": group.ttl,
                **({"plan": group.plan} if group.plan else {}),
            }
            for group in groups
        ],
    )


def get_group(store: Store, uuid: str) -> GroupMeta | None:
    document = store.group_metas.find_one({"_id": printable(uuid)})
    if document is None:
        return None
    chord = store.machinery_chords.find_one({"_id": uuid}, {"fired": 1})
    created_at = document.get("created_at")
    return GroupMeta(
        group_uuid=uuid,
        task_uuids=tuple(document.get("task_uuids") or ()),
        lock=bool(document.get("lock")),
        chord_triggered=bool(document.get("chord_triggered")) or bool(chord and chord["fired"]),
        created_at=created_at
        if isinstance(created_at, dt.datetime)
        else GroupMeta(group_uuid="").created_at,
        ttl=int(document.get("ttl") or 0),
        plan=str(document.get("plan") or ""),
    )


def arrive(
    store: Store, arrivals: Iterable[Arrival], *, now: int, until: int, recount: bool
) -> list[str]:
    """Count each member once; return the members whose chord is settled already.

    Args:
        recount: it may have been done before, and have died between an arrival and its count.
    """
    by_group: dict[str, list[Arrival]] = {}
    for one in arrivals:
        by_group.setdefault(one.group_uuid, []).append(one)
    late: list[str] = []
    for group, members in by_group.items():
        unique = {one.task_uuid: one for one in members}
        insert_new(store.machinery_chords, [_chord(group, until)])
        new = insert_new(
            store.machinery_arrivals,
            [
                {"_id": printable(f"{group}\n{uuid}"), "group": group, "member": uuid}
                for uuid in unique
            ],
        )
        if _count(store, group, list(unique.values()), new, now=now, until=until, recount=recount):
            late += unique
    return late


def _count(
    store: Store,
    group: str,
    members: Sequence[Arrival],
    new: Sequence[bool],
    *,
    now: int,
    until: int,
    recount: bool,
) -> bool:
    """Raise the count and make the group ready; return whether it was settled before."""
    last = members[-1]
    failed = [
        one.task_uuid
        for one, is_new in zip(members, new, strict=True)
        if not one.ok and (is_new or recount)
    ]
    if failed:
        store.machinery_chords.update_one(
            {"_id": group, "failed": "", "fired": 0}, {"$set": {"failed": failed[0]}}
        )
    # Not to be repeated, unless the server knows the repeat: the caller's step has again=False.
    more = {"arrived": sum(new), "doubts": list(new).count(False) if recount else 0}
    chord = store.machinery_chords.find_one_and_update(
        {"_id": group},
        {"$inc": more, "$set": {"total": last.total, "callback": last.callback}},
        return_document=ReturnDocument.AFTER,
    )
    if chord is None or chord["fired"]:
        return chord is not None
    arrived = chord["arrived"]
    if arrived < last.total <= arrived + chord.get("doubts", 0):
        arrived = store.machinery_arrivals.count_documents({"group": group})
    is_full = last.total > 0 and arrived >= last.total
    if last.callback:
        is_ready = is_full or chord["failed"] != ""
        look_at = 0 if is_ready else chord.get("look_at") or now + LOOK
        fields = {
            "ready": int(is_ready),
            "expires_at": 0 if is_ready else until,
            "look_at": look_at,
        }
        store.machinery_chords.update_one({"_id": group, "fired": 0, "ready": 0}, {"$set": fields})
    return False


def ready_groups(store: Store, limit: int) -> list[ReadyGroup]:
    found = store.machinery_chords.find({"ready": 1}, {"callback": 1, "failed": 1})
    return [
        ReadyGroup(
            group_uuid=one["_id"], callback=bytes(one["callback"]), failed_member=one["failed"]
        )
        for one in found.sort("_id", 1).limit(limit)
    ]


def partial_groups(store: Store, limit: int, *, now: int) -> list[Arrival]:
    """Return incomplete groups that are due for a look, each to one caller; the pauses grow."""
    chords, found = store.machinery_chords, []
    due: Document = {"look_at": {"$gt": 0, "$lte": now}}
    fields = {"total": 1, "callback": 1, "look_at": 1, "looks": 1}
    for one in list(chords.find(due, fields).limit(limit)):
        looks = one.get("looks", 0) + 1
        later = {"$set": {"look_at": now + LOOK * min(looks, GROWING_LOOKS), "looks": looks}}
        seen = {"_id": one["_id"], "look_at": one["look_at"]}
        if chords.update_one(seen, later).matched_count:
            found.append(
                Arrival(
                    group_uuid=one["_id"],
                    task_uuid="",
                    total=one["total"],
                    ok=True,
                    callback=bytes(one["callback"]),
                )
            )
    return found


def drop_partial(store: Store, uuids: Sequence[str]) -> None:
    store.machinery_chords.update_many({"_id": {"$in": list(uuids)}}, {"$set": {"look_at": 0}})


def fire(store: Store, uuid: str, *, by: str, fields: Document, until: int) -> bool:
    """Settle the group with `fields`; True for one caller, and its repeat with the same `by`."""
    group = store.group_metas.find_one_and_update(
        {"_id": uuid, "chord_triggered": False},
        {"$set": {"chord_triggered": True, "by_python": True}},
        {"_id": 1},
    ) or store.group_metas.find_one({"_id": uuid}, {"by_python": 1, "chord_triggered": 1})
    for _ in range(2):
        chord = store.machinery_chords.find_one({"_id": uuid}, {"fired_by": 1, "failed": 1})
        unfired: Document = {"_id": uuid, "fired": 0}
        by_go = group and group.get("chord_triggered") and not group.get("by_python")
        # Go sets its flag for a group with a failed member, too, and then tells nobody.
        if by_go and not (chord and chord["failed"]):
            gone = {"fired": 1, "fired_by": "go", "ready": 0, "look_at": 0, "expires_at": until}
            store.machinery_chords.update_one(unfired, {"$set": gone})
            return False
        if store.machinery_chords.update_one(unfired, {"$set": fields}).matched_count:
            return True
        if chord is not None or group is None:
            return chord is not None and chord["fired_by"] == by
        insert_new(store.machinery_chords, [_chord(uuid, until)])  # a Go program made the group
    return False


def after_firing(store: Store, uuid: str, *, now: int, expires_at: int) -> None:
    """Go's flag; from now on the members' results expire as others do. May be repeated."""
    store.group_metas.update_one({"_id": uuid}, {"$set": {"chord_triggered": True}})
    expire_members(store, _arrived(store, uuid), now=now, expires_at=expires_at)


def _arrived(store: Store, uuid: str) -> list[str]:
    found = store.machinery_arrivals.find({"group": uuid}, {"member": 1})
    return [one["member"] for one in found]


def expire_members(store: Store, members: Sequence[str], *, now: int, expires_at: int) -> None:
    """Keep the members' results no longer than other results, or than their calls say."""
    for some in map(list, in_steps(members)):
        plain = {"_id": {"$in": some}, "keep_for": None, "expires_at": {"$gt": expires_at}}
        done = store.tasks.update_many(plain, {"$set": {"expires_at": expires_at}})
        if done.matched_count < len(some):
            own = {"_id": {"$in": some}, "keep_for": {"$ne": None}}
            sooner = [
                UpdateOne(
                    {"_id": one["_id"]}, {"$min": {"expires_at": now + int(one["keep_for"] * 1e6)}}
                )
                for one in store.tasks.find(own, {"keep_for": 1})
            ]
            if sooner:
                store.tasks.bulk_write(sooner, ordered=False)


def purge_group(store: Store, uuid: str) -> None:
    store.machinery_arrivals.delete_many({"group": uuid})
    store.machinery_chords.delete_one({"_id": uuid})
    store.group_metas.delete_one({"_id": uuid})


def sweep_groups(store: Store, *, now: int, again_at: int, limit: int) -> int:
    """Forget expired groups without a member that has a state; return how many were looked at."""
    over = {"expires_at": {"$gt": 0, "$lte": now}}
    found = list(store.machinery_chords.find(over, {"_id": 1}).limit(limit))
    for one in found:
        uuid = one["_id"]
        group = store.group_metas.find_one({"_id": uuid}, {"task_uuids": 1})
        members = list(group.get("task_uuids") or ()) if group else []
        if any(find_by_id(store.tasks, members + _arrived(store, uuid), {"_id": 1})):
            store.machinery_chords.update_one({"_id": uuid}, {"$set": {"expires_at": again_at}})
        else:
            purge_group(store, uuid)
    return len(found)

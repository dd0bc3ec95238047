"""Turns of tenants in the fair queues of MongoDB.

The `order` of a message with a tenant holds its turn, and within a turn the time. It gets its turn
when it comes to its queue: the one that is served, and one behind all that its tenant has waiting.
Both are read from the messages themselves, so that nothing else is kept that a crash could leave
wrong.

Limits: of two messages of a tenant that come at the same moment, each may get the same turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from pymongo import UpdateOne

from machinery_py.bounds import STEP_ITEMS
from machinery_py.brokers.mongodb.messages import QUEUED, Status
from machinery_py.connections.mongodb.client import Document, Store

FAIR = 2**60  # the first turn; behind the places of messages without a tenant
WITHIN = 2**24  # places of a turn, a millisecond each: after five hours they begin again


def give_turns(store: Store, documents: Sequence[Document], now: int) -> None:
    """Give their turns to those of these documents that have a tenant and are to wait."""
    turns: dict[tuple[str, int, str], int] = {}
    for number, one in enumerate(documents):
        if "tenant" in one and one["status"] == Status.WAITING:
            lane = one["queue"], one["priority"], one["tenant"]
            turn = turns[lane] if lane in turns else _next_turn(store, *lane)
            turns[lane] = turn + 1
            one["order"] = FAIR + turn * WITHIN + (now // 1000 + number) % WITHIN


def _next_turn(store: Store, queue: str, priority: int, tenant: str) -> int:
    """Return the turn of the next message of a tenant."""

    def turn(direction: int, **which: object) -> int:
        query = {"queue": queue, "priority": priority, "order": {"$gte": FAIR}, **which}
        found = store.machinery_messages.find_one(query, {"order": 1}, sort=[("order", direction)])
        return -1 if found is None else (int(found["order"]) - FAIR) // WITHIN

    # Of those that are held, too: they may come back, and must not wait for all that come later.
    served = max(turn(1, status=QUEUED), turn(-1, status=Status.HELD))
    return max(0, served, turn(-1, status=QUEUED, tenant=tenant) + 1)


def promote_fair(store: Store, now: int) -> int:
    """Bring due messages that have a tenant to their queues; return how many."""
    messages = store.machinery_messages
    late: Document = {"status": Status.DELAYED, "due_at": {"$lte": now}, "tenant": {"$ne": None}}
    found = list(messages.find(late, {"body": 0}).sort("due_at", 1).limit(STEP_ITEMS))
    for one in found:
        one["status"] = Status.WAITING
    give_turns(store, found, now)
    writes = [
        UpdateOne(
            {"_id": one["_id"], "status": Status.DELAYED},
            {"$set": {"status": Status.WAITING, "order": one["order"]}},
        )
        for one in found
    ]
    return messages.bulk_write(writes, ordered=False).modified_count if writes else 0

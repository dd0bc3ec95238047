"""Turns of tenants in the fair queues of a SQLite file.

A message of a tenant is stored with turn 0, and gets its turn in the transaction in which it comes
to its queue: not one that is over, and behind all that the tenant has waiting. Messages of other
queues have turn 0 for ever. All of this is called inside a transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import Protocol

_WITHOUT = """
SELECT id, queue, priority, tenant FROM items INDEXED BY items_turnless
WHERE state = 0 AND turn = 0 AND tenant IS NOT NULL ORDER BY id
"""

# In: queue, priority, tenant. Out: the turn that is served, the tenant's last one; NULL if none.
_LAST = """
SELECT (SELECT turn FROM turns WHERE queue = ?1 AND priority = ?2 AND tenant = ''),
    (SELECT turn FROM turns WHERE queue = ?1 AND priority = ?2 AND tenant = ?3)
"""
_KEEP = "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?)"
_SET = "UPDATE items SET turn = ? WHERE id = ?"

# In: queue, priority, turn. The turn that is served never goes back.
_SERVE = """
INSERT INTO turns VALUES (?, ?, '', ?)
ON CONFLICT (queue, priority, tenant) DO UPDATE SET turn = max(turn, excluded.turn)
"""
_EMPTIED = """
DELETE FROM turns WHERE queue = ?1 AND tenant <> '' AND NOT EXISTS (
    SELECT 1 FROM items INDEXED BY items_waiting WHERE state = 0 AND queue = ?1)
"""
_FORGET = "DELETE FROM turns WHERE queue = ? AND priority = ? AND turn < ? AND tenant <> ''"


class Served(Protocol):
    """A claimed message."""

    queue: str
    priority: int
    turn: int
    tenant: str | None


def give_turns(connection: sqlite3.Connection) -> None:
    """Give a turn to each waiting message of a tenant that has none yet."""
    found: dict[tuple[str, int, str], int] = {}
    rows: list[tuple[int, int]] = []
    for id, queue, priority, tenant in connection.execute(_WITHOUT).fetchall():
        lane = queue, priority, f":{tenant}"
        if lane not in found:
            served, last = connection.execute(_LAST, lane).fetchone()
            found[lane] = max(served or 1, (last or 0) + 1) - 1
        found[lane] += 1
        rows.append((found[lane], id))
    if rows:
        connection.executemany(_SET, rows)
        connection.executemany(_KEEP, [(*lane, turn) for lane, turn in found.items()])


def serve_turns(connection: sqlite3.Connection, claimed: Iterable[Served]) -> None:
    """Note which turns are served by a claim, and forget those that are over."""
    served: dict[tuple[str, int], int] = {}
    for one in claimed:
        if one.tenant is not None:
            lane = one.queue, one.priority
            served[lane] = max(one.turn, served.get(lane, 0))
    for lane, turn in served.items():
        connection.execute(_SERVE, (*lane, turn))
        connection.execute(_FORGET, (*lane, turn))


def forget_turns(connection: sqlite3.Connection, queue: str) -> None:
    """Forget the tenants of a queue if it is empty; what is held may come back with an old turn."""
    connection.execute(_EMPTIED, (queue,))

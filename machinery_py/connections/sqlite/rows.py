"""How values go into the SQLite stores: ids as one parameter, many rows in one statement."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec

from machinery_py.texts import printable

Rows = list[tuple[Any, ...]]


def as_json(values: Sequence[str] | Sequence[int]) -> str:
    """Return any number of ids as one parameter, for `json_each(?)`."""
    try:
        return msgspec.json.encode(values).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode([printable(str(value)) for value in values]).decode()


def insert_rows(
    connection: sqlite3.Connection, head: str, rows: Sequence[tuple[Any, ...]], tail: str = ""
) -> int:
    """Run `head VALUES (?, …), … tail` in few big statements; return how many rows changed."""
    changed = start = 0
    for size in (128, 32, 8, 1):
        while len(rows) - start >= size:
            sql = _insert(head, len(rows[0]), size, tail)
            parameters = tuple(chain.from_iterable(rows[start : start + size]))
            changed += connection.execute(sql, parameters).rowcount
            start += size
    return changed


@functools.lru_cache(maxsize=256)
def _insert(head: str, columns: int, rows: int, tail: str) -> str:
    row = "(" + ",".join("?" * columns) + ")"
    return f"{head} VALUES {','.join([row] * rows)} {tail}"

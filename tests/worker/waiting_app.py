"""An app whose tasks wait for one another in task processes, for test_slots.py."""

from __future__ import annotations

import os

from machinery_py import Server
from machinery_py.testing.waiting import HANG

server = Server(os.environ.get("WAITING_STORE", "memory://"))


@server.task(pool="process")
def inner(number: int) -> int:
    return number + 1


@server.task(pool="process")
def outer(depth: int) -> int:
    result = outer.send(depth - 1) if depth else inner.send(0)
    return result.get(timeout=HANG) + 1


@server.task(pool="process")
async def outer_async(depth: int) -> int:
    result = outer_async.send(depth - 1) if depth else inner.send(0)
    return await result.get_async(timeout=HANG) + 1

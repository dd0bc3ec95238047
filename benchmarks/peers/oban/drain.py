# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""A node with one queue, of a hundred jobs at a time."""

from __future__ import annotations

import asyncio

import uvloop
from oban import Oban

from benchmarks.peers.driving import gate
from benchmarks.peers.oban.app import connect

gate()


async def work():
    async with Oban(pool=await connect(), queues={"default": 100}):
        await asyncio.Event().wait()


uvloop.run(work())

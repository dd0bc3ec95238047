# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""PgQueuer on asyncpg. Jobs are coroutines; it logs their ends, and stores no result."""

from __future__ import annotations

import asyncpg
from pgqueuer.core.applications import PgQueuer
from pgqueuer.db import AsyncpgDriver

from benchmarks.peers.driving import URL


async def connect():
    return AsyncpgDriver(await asyncpg.connect(URL))


async def make():
    queue = PgQueuer(await connect())

    @queue.entrypoint("noop")
    async def noop(job):
        return int(job.payload.split()[0])

    return queue

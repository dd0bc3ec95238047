# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Oban for Python, on psycopg 3. Jobs are coroutines; it stores their ends, and no result."""

from __future__ import annotations

from oban import Oban, worker

from benchmarks.peers.driving import URL


@worker(queue="default")
class Noop:
    async def process(self, job):
        return None


async def connect():
    return await Oban.create_pool(URL)

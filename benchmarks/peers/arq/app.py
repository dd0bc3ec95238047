# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""arq: a job stays on its queue until it has been run; coroutines on uvloop."""

from __future__ import annotations

from arq.connections import RedisSettings

from benchmarks.peers.driving import URL

settings = RedisSettings.from_dsn(f"{URL}/0")


async def noop(context, number):
    return number

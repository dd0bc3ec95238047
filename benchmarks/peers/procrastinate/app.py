# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Procrastinate on psycopg 3. Tasks are coroutines; it stores no result."""

from __future__ import annotations

import procrastinate

from benchmarks.peers.driving import URL

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=URL))


@app.task(name="noop", queue="default")
async def noop(number: int, text: str = "") -> int:
    return number

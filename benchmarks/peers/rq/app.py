# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""RQ: a job is in a registry while it runs, and is taken out of it afterwards."""

from __future__ import annotations

from redis import Redis
from rq import Queue

from benchmarks.peers.driving import URL

connection = Redis.from_url(f"{URL}/0")
queue = Queue("default", connection=connection)


def noop(number):
    return number

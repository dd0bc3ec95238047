# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Huey: takes a message off its list before the run and never acknowledges."""

from __future__ import annotations

from huey import RedisHuey

from benchmarks.peers.driving import IS_LATENCY, URL

# The note to the waiter costs two commands a task: it is on where somebody waits.
huey = RedisHuey("peers", url=f"{URL}/0", notify_result=IS_LATENCY)


@huey.task()
def noop(number):
    return number

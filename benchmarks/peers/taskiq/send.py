# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Sender for taskiq, which has no bulk send: "bulk" is a hundred coroutines side by side."""

from __future__ import annotations

import asyncio
import time

import uvloop

from benchmarks.peers.driving import WAIT, expect, run
from benchmarks.peers.taskiq.app import backend, broker, noop

asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
loop = asyncio.new_event_loop()
loop.run_until_complete(broker.startup())
BESIDE = 100


async def send_one(numbers):
    return [(await noop.kiq(number)).task_id for number in numbers]


async def send_bulk(numbers):
    ids = []
    for start in range(0, len(numbers), BESIDE):
        ids += [
            task.task_id
            for task in await asyncio.gather(
                *(noop.kiq(n) for n in numbers[start : start + BESIDE])
            )
        ]
    return ids


async def get_results(ids):
    return [(await backend.get_result(id)).return_value for id in ids]


async def call(numbers):
    taken = []
    for number in numbers:
        began = time.perf_counter()
        task = await noop.kiq(number)
        result = await task.wait_result(check_interval=0.0005, timeout=WAIT)
        expect(result.return_value, number)
        taken.append(time.perf_counter() - began)
    return taken


def now(function):
    return lambda those: loop.run_until_complete(function(those))


run(one=now(send_one), bulk=now(send_bulk), results=now(get_results), latency=now(call))

# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Sender for arq, which has no bulk send: "bulk" is a hundred coroutines that send side by side."""

from __future__ import annotations

import asyncio
import time

import uvloop
from arq import create_pool
from arq.jobs import Job

from benchmarks.peers.arq.app import settings
from benchmarks.peers.driving import WAIT, expect, run

asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
loop = asyncio.new_event_loop()
pool = loop.run_until_complete(create_pool(settings))
BESIDE = 100


async def send_one(numbers):
    return [(await pool.enqueue_job("noop", number)).job_id for number in numbers]


async def send_bulk(numbers):
    ids = []
    for start in range(0, len(numbers), BESIDE):
        jobs = await asyncio.gather(
            *(pool.enqueue_job("noop", number) for number in numbers[start : start + BESIDE])
        )
        ids += [job.job_id for job in jobs]
    return ids


async def get_results(ids):
    return [(await Job(id, pool).result_info()).result for id in ids]


async def call(numbers):
    taken = []
    for number in numbers:
        began = time.perf_counter()
        job = await pool.enqueue_job("noop", number)
        expect(await job.result(timeout=WAIT, poll_delay=0.0005), number)
        taken.append(time.perf_counter() - began)
    return taken


def now(function):
    return lambda those: loop.run_until_complete(function(those))


run(one=now(send_one), bulk=now(send_bulk), results=now(get_results), latency=now(call))

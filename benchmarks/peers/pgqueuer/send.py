# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Sends one by one and a thousand at once; the waiter is notified of ends."""

from __future__ import annotations

import asyncio
import datetime as dt
import time

import uvloop
from pgqueuer.core.completion import CompletionWatcher
from pgqueuer.queries import Queries

from benchmarks.peers.driving import CHUNK, TEXT, WAIT, expect, run
from benchmarks.peers.pgqueuer.app import connect

POLL = dt.timedelta(milliseconds=1)  # between a notification and its look
loop = uvloop.new_event_loop()


def payload_of(number):
    return f"{number} {TEXT}".encode()


async def begin():
    return Queries(await connect())


queries = loop.run_until_complete(begin())


async def send_one(numbers):
    return [
        f"{id}:{number}"
        for number in numbers
        for id in await queries.enqueue("noop", payload_of(number))
    ]


async def send_bulk(numbers):
    ids = []
    for start in range(0, len(numbers), CHUNK):
        part = numbers[start : start + CHUNK]
        payloads = [payload_of(number) for number in part]
        found = await queries.enqueue(["noop"] * len(part), payloads, [0] * len(part))
        ids += [f"{id}:{number}" for id, number in zip(found, part, strict=True)]
    return ids


async def get_results(ids):
    """Return the numbers of the jobs that were successful: nothing else is kept of them."""
    numbers = {}
    for one in ids:
        id, number = one.split(":")
        numbers[int(id)] = int(number)
    found = dict(await queries.job_status(list(numbers)))
    return [number if found.get(id) == "successful" else None for id, number in numbers.items()]


async def call(numbers):
    taken = []
    async with CompletionWatcher(await connect(), queries=queries, debounce=POLL) as watcher:
        for number in numbers:
            began = time.perf_counter()
            [id] = await queries.enqueue("noop", payload_of(number))
            done = await asyncio.wait_for(watcher.wait_for(id), WAIT)
            expect(number if done == "successful" else done, number)
            taken.append(time.perf_counter() - began)
    return taken


def tables():
    loop.run_until_complete(queries.install())


run(
    one=lambda numbers: loop.run_until_complete(send_one(numbers)),
    bulk=lambda numbers: loop.run_until_complete(send_bulk(numbers)),
    results=lambda ids: loop.run_until_complete(get_results(ids)),
    latency=lambda numbers: loop.run_until_complete(call(numbers)),
    tables=tables,
)

# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Sends one by one and a thousand at once."""

from __future__ import annotations

import asyncio
import time

import uvloop
from oban import Oban
from oban.schema import install

from benchmarks.peers.driving import CHUNK, TEXT, WAIT, expect, run
from benchmarks.peers.oban.app import Noop, connect

POLL = 0.001  # seconds
BESIDE = {"text": TEXT} if TEXT else {}
loop = uvloop.new_event_loop()


async def begin():
    pool = await connect()
    return pool, Oban(pool=pool)


pool, oban = loop.run_until_complete(begin())


async def send_one(numbers):
    return [
        str((await oban.enqueue(Noop.new({"number": number, **BESIDE}))).id) for number in numbers
    ]


async def send_bulk(numbers):
    ids = []
    for start in range(0, len(numbers), CHUNK):
        part = [Noop.new({"number": number, **BESIDE}) for number in numbers[start : start + CHUNK]]
        ids += [str(job.id) for job in await oban.enqueue_many(part)]
    return ids


async def get_results(ids):
    """Return the arguments of jobs that are completed: their function returns nothing else."""
    async with pool.connection() as connection:
        rows = await connection.execute(
            "SELECT id, (args->>'number')::int FROM oban_jobs "
            "WHERE id = ANY(%s) AND state = 'completed'",
            ([int(id) for id in ids],),
        )
        found = {row[0]: row[1] for row in await rows.fetchall()}
    return [found.get(int(id)) for id in ids]


async def call(numbers):
    taken = []
    for number in numbers:
        began = time.perf_counter()
        job = await oban.enqueue(Noop.new({"number": number, **BESIDE}))
        while await get_results([str(job.id)]) != [number]:
            if time.perf_counter() - began > WAIT:
                expect(None, number)
            await asyncio.sleep(POLL)
        taken.append(time.perf_counter() - began)
    return taken


def tables():
    loop.run_until_complete(install(pool))


run(
    one=lambda numbers: loop.run_until_complete(send_one(numbers)),
    bulk=lambda numbers: loop.run_until_complete(send_bulk(numbers)),
    results=lambda ids: loop.run_until_complete(get_results(ids)),
    latency=lambda numbers: loop.run_until_complete(call(numbers)),
    tables=tables,
)

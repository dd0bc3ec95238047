# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Sends, one by one and with `enqueue_many`."""

from __future__ import annotations

import time

from rq import Queue
from rq.job import Job

from benchmarks.peers.driving import CHUNK, WAIT, expect, run
from benchmarks.peers.rq.app import connection, noop, queue


def one(numbers):
    return [queue.enqueue(noop, number).id for number in numbers]


def bulk(numbers):
    ids = []
    for start in range(0, len(numbers), CHUNK):
        jobs = queue.enqueue_many(
            [Queue.prepare_data(noop, [number]) for number in numbers[start : start + CHUNK]]
        )
        ids += [job.id for job in jobs]
    return ids


def results(ids):
    return [job.return_value() for job in Job.fetch_many(ids, connection=connection)]


def latency(numbers):
    taken = []
    for number in numbers:
        began = time.perf_counter()
        expect(queue.enqueue(noop, number).latest_result(timeout=int(WAIT)).return_value, number)
        taken.append(time.perf_counter() - began)
    return taken


run(one=one, bulk=bulk, results=results, latency=latency)

# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Sends by the synchronous connector, one by one and a thousand at once."""

from __future__ import annotations

import time

import psycopg

from benchmarks.peers.driving import CHUNK, TEXT, URL, WAIT, expect, run
from benchmarks.peers.procrastinate.app import app, noop

POLL = 0.001  # seconds
BESIDE = {"text": TEXT} if TEXT else {}
app.open()
database = psycopg.connect(URL, autocommit=True)


def one(numbers):
    return [str(noop.defer(number=number, **BESIDE)) for number in numbers]


def bulk(numbers):
    ids = []
    for start in range(0, len(numbers), CHUNK):
        part = ({"number": number, **BESIDE} for number in numbers[start : start + CHUNK])
        ids += map(str, noop.batch_defer(*part))
    return ids


def results(ids):
    """Return the arguments of jobs that have succeeded: their function returns nothing else."""
    rows = database.execute(
        "SELECT id, (args->>'number')::int FROM procrastinate_jobs "
        "WHERE id = ANY(%s) AND status = 'succeeded'",
        ([int(id) for id in ids],),
    ).fetchall()
    found = dict(rows)
    return [found.get(int(id)) for id in ids]


def latency(numbers):
    taken = []
    for number in numbers:
        began = time.perf_counter()
        id = str(noop.defer(number=number, **BESIDE))
        while results([id]) != [number]:
            if time.perf_counter() - began > WAIT:
                expect(None, number)
            time.sleep(POLL)
        taken.append(time.perf_counter() - began)
    return taken


def tables():
    app.schema_manager.apply_schema()


run(one=one, bulk=bulk, results=results, latency=latency, tables=tables)

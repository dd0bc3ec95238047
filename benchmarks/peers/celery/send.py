# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Sends; Celery has nothing that sends many at once (a group is sent one by one)."""

from __future__ import annotations

import time

from benchmarks.peers.celery.app import app, noop
from benchmarks.peers.driving import WAIT, expect, run


def one(numbers):
    return [noop.delay(number).id for number in numbers]


def results(ids):
    found = dict(app.backend.get_many(ids, timeout=WAIT))
    return [found[id]["result"] for id in ids]


def latency(numbers):
    taken = []
    for number in numbers:
        began = time.perf_counter()
        expect(noop.delay(number).get(timeout=WAIT), number)
        taken.append(time.perf_counter() - began)
    return taken


run(one=one, bulk=None, results=results, latency=latency)

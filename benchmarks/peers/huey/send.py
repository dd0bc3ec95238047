# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Sends; Huey has nothing that sends many at once."""

from __future__ import annotations

import time

from benchmarks.peers.driving import WAIT, expect, run
from benchmarks.peers.huey.app import huey, noop


def one(numbers):
    return [noop(number).id for number in numbers]


def results(ids):
    return [huey.result(id, preserve=True) for id in ids]


def latency(numbers):
    taken = []
    for number in numbers:
        began = time.perf_counter()
        expect(noop(number).get(blocking=True, timeout=WAIT), number)
        taken.append(time.perf_counter() - began)
    return taken


run(one=one, bulk=None, results=results, latency=latency)

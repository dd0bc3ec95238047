# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Sends; Dramatiq has nothing that sends many at once (a group is sent one by one)."""

from __future__ import annotations

import time

from benchmarks.peers.dramatiq.app import backend, noop
from benchmarks.peers.driving import WAIT, expect, run


def one(numbers):
    return [noop.send(number).message_id for number in numbers]


def results(ids):
    message = noop.message(0)
    return [backend.get_result(message.copy(message_id=id)) for id in ids]


def latency(numbers):
    taken = []
    for number in numbers:
        began = time.perf_counter()
        expect(
            noop.send(number).get_result(backend=backend, block=True, timeout=int(WAIT * 1000)),
            number,
        )
        taken.append(time.perf_counter() - began)
    return taken


run(one=one, bulk=None, results=results, latency=latency)

"""Sender for Go Machinery itself, driven a line at a time; Go Machinery has no bulk send."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import cast

from benchmarks.peers.driving import WAIT, run
from machinery_py import Server
from tests.interop.golang import Peer

URL = f"{os.environ['PEERS_URL']}/0"
LOOK = 0.01  # seconds between two looks for results that are not there yet


def one(numbers: Sequence[int]) -> Sequence[str]:
    return cast(
        "list[str]", go.ask("send_numbers", start=numbers[0], count=len(numbers), timeout=600.0)
    )


def results(ids: Sequence[str]) -> Sequence[object]:
    server = Server(URL)
    deadline = time.monotonic() + WAIT
    while True:  # a Go worker takes a message off its list before the run
        states = server.backend.get_states(ids)
        if (
            all(uuid in states and states[uuid].is_finished for uuid in ids)
            or time.monotonic() > deadline
        ):
            break
        time.sleep(LOOK)
    server.close()
    return [
        states[uuid].results[0].value for uuid in ids if uuid in states and states[uuid].results
    ]


def latency(numbers: Sequence[int]) -> Sequence[float]:
    return cast("list[float]", go.ask("latency", count=len(numbers), timeout=600.0))


with Peer("v1", broker=URL, backend=URL) as go:
    run(one=one, bulk=None, results=results, latency=latency)

"""Sends, one by one and in groups."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.peers.driving import CHUNK, TEXT, WAIT, expect, run
from benchmarks.peers.machinery.app import increase, noop, server, total
from machinery_py import chain as chain_of
from machinery_py import chord as chord_of
from machinery_py import group

STEP = 5 * CHUNK
BESIDE = [TEXT] if TEXT else []


def one(numbers: Sequence[int]) -> list[str]:
    return [noop.send(number, *BESIDE).uuid for number in numbers]


def bulk(numbers: Sequence[int]) -> list[str]:
    uuids: list[str] = []
    for start in range(0, len(numbers), STEP):
        sent = server.send_group(
            group(noop.signature(number, *BESIDE) for number in numbers[start : start + STEP])
        )
        uuids.extend(result.uuid for result in sent.results)
    return uuids


def results(uuids: Sequence[str]) -> list[object]:
    states = server.backend.get_states(list(uuids))
    return [
        states[uuid].results[0].value if states[uuid].state == "SUCCESS" else states[uuid].state
        for uuid in uuids
    ]


def latency(numbers: Sequence[int]) -> list[float]:
    taken: list[float] = []
    for number in numbers:
        began = time.perf_counter()
        expect(noop.send(number, *BESIDE).get(timeout=WAIT), number)
        taken.append(time.perf_counter() - began)
    return taken


def chain(count: int) -> object:
    steps = chain_of(increase.signature(0), *(increase.partial() for _ in range(count - 1)))
    return server.send(steps).get(timeout=WAIT)


def chord(count: int) -> object:
    members = group(noop.signature(number) for number in range(count))
    return server.send(chord_of(members, total.partial(), collect=True)).get(timeout=WAIT)


run(one=one, bulk=bulk, results=results, latency=latency, chain=chain, chord=chord)

"""Sender: one transaction writes token, states (one a task) and messages, and reads sleepers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.driving import CHUNK, WAIT, expect, run
from benchmarks.peers.raw.commands import (
    COUNT,
    DONE,
    KEPT,
    QUEUE,
    SLEEPERS,
    STATE,
    TOKEN,
    connect,
    message,
    state,
)

redis = connect()


def _send(numbers: Sequence[int]) -> list[str]:
    made = [message(number) for number in numbers]
    with redis.pipeline() as pipe:
        pipe.set(TOKEN + made[0][0], b"1", nx=True, ex=KEPT)
        for id, _body in made:
            pipe.get(STATE + id)
            pipe.set(STATE + id, state(id, "PENDING", 0), ex=KEPT)
        pipe.rpush(QUEUE, *(body for _id, body in made))
        pipe.incrby(COUNT, len(made))
        pipe.spop(SLEEPERS, len(made))
        pipe.execute()
    return [id for id, _body in made]


def one(numbers: Sequence[int]) -> list[str]:
    return [_send([number])[0] for number in numbers]


def bulk(numbers: Sequence[int]) -> list[str]:
    return [
        id
        for start in range(0, len(numbers), CHUNK)
        for id in _send(numbers[start : start + CHUNK])
    ]


def results(ids: Sequence[str]) -> list[object]:
    states = [json.loads(text or b"null") for text in redis.mget([STATE + id for id in ids])]
    return [
        found["Results"][0]["Value"] if found["State"] == "SUCCESS" else found["State"]
        for found in states
    ]


def latency(numbers: Sequence[int]) -> list[float]:
    taken: list[float] = []
    with redis.pubsub() as ear:  # type: ignore[no-untyped-call]  # redis-py has no types for it
        ear.subscribe(DONE)
        assert ear.get_message(timeout=WAIT)  # it listens
        for number in numbers:
            began = time.perf_counter()
            [id] = _send([number])
            said: Any = ear.get_message(timeout=WAIT)
            assert said and said["data"] == id.encode()
            expect(results([id])[0], number)
            taken.append(time.perf_counter() - began)
    return taken


run(one=one, bulk=bulk, results=results, latency=latency)

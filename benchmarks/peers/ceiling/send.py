"""Sender: one script stores PENDING and queues the message, a hundred at a time in bulk."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.peers.ceiling.commands import (
    CALLBACK,
    MISSING,
    QUEUE,
    connect,
    decode,
    encode,
    message,
    script,
    signature,
)
from benchmarks.peers.driving import WAIT, expect, run

STEP = 100

redis = connect()
_send = redis.register_script(script("send"))


def one(numbers: Sequence[int]) -> list[str]:
    ids: list[str] = []
    for number in numbers:
        made = message(signature("noop", (number,)))
        _send(keys=[QUEUE], args=made)
        ids.append(made[0])
    return ids


def bulk(numbers: Sequence[int], **fields: object) -> list[str]:
    ids: list[str] = []
    for start in range(0, len(numbers), STEP):
        made = [
            message(signature("noop", (number,), **fields))
            for number in numbers[start : start + STEP]
        ]
        _send(keys=[QUEUE], args=[part for each in made for part in each])
        ids.extend(each[0] for each in made)
    return ids


def results(ids: Sequence[str]) -> list[object]:
    states = [decode(text or b"null") for text in redis.mget(ids)]
    return [
        found["Results"][0]["Value"] if found["State"] == "SUCCESS" else found["State"]
        for found in states
    ]


@contextlib.contextmanager
def _listening() -> Iterator[tuple[dict[str, str], Callable[[], int]]]:
    """Return the headers of a task that answers here, and a function that waits for an answer."""
    channel = f"reply:{uuid.uuid4().hex}"
    with redis.pubsub(ignore_subscribe_messages=True) as ear:  # type: ignore[no-untyped-call]  # redis-py has no types for it

        def answer() -> int:
            said: Any = ear.get_message(timeout=WAIT)
            value: int = decode(said["data"])["Results"][0]["Value"]
            return value

        ear.subscribe(channel)
        ear.get_message(timeout=WAIT)
        yield {"reply": channel}, answer


def latency(numbers: Sequence[int]) -> list[float]:
    taken: list[float] = []
    with _listening() as (headers, answer):
        for number in numbers:
            began = time.perf_counter()
            _send(keys=[QUEUE], args=message(signature("noop", (number,), Headers=headers)))
            expect(answer(), number)
            taken.append(time.perf_counter() - began)
    return taken


def chain(count: int) -> int:
    with _listening() as (headers, answer):
        step = signature("increase", (), Headers=headers)
        for number in reversed(range(count - 1)):
            step = signature("increase", () if number else (0,), OnSuccess=[step])
        _send(keys=[QUEUE], args=message(step))
        return answer()


def chord(count: int) -> int:
    group = uuid.uuid4().hex
    with _listening() as (headers, answer), redis.pipeline(transaction=False) as pipe:
        pipe.set(MISSING + group, count)
        pipe.set(CALLBACK + group, encode(signature("total", (group,), Headers=headers)))
        pipe.execute()
        bulk(range(count), GroupUUID=group, GroupTaskCount=count)
        return answer()


run(one=one, bulk=bulk, results=results, latency=latency, chain=chain, chord=chord)

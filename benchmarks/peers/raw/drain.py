"""Worker: takes a batch, notes that it is held and begun; then stores its results and deletes it.

The results are announced, too.
"""

from __future__ import annotations

import json
from typing import Any

from redis import Redis

from benchmarks.peers.driving import gate
from benchmarks.peers.raw.commands import (
    BATCH,
    DONE,
    ENDED,
    HELD,
    KEPT,
    QUEUE,
    STATE,
    connect,
    state,
)


def work() -> None:
    redis = connect()
    while True:
        bodies: Any = redis.lpop(QUEUE, BATCH)
        if not bodies:  # only BLMPOP can wait, and it costs more
            found: Any = redis.blmpop(1.0, 1, QUEUE, direction="LEFT", count=BATCH)
            if not found:
                continue
            bodies = found[1]
        tasks = [
            (task["UUID"], task["Args"][0]["Value"], body)
            for body in bodies
            for task in [json.loads(body)]
        ]
        _begin(redis, tasks)
        _settle(redis, tasks)


def _begin(redis: Redis, tasks: list[tuple[str, int, bytes]]) -> None:
    with redis.pipeline() as pipe:
        pipe.hset(HELD, mapping={id: body for id, _number, body in tasks})
        for id, _number, _body in tasks:
            pipe.get(STATE + id)
            pipe.set(STATE + id, state(id, "STARTED", 0), ex=KEPT)
        pipe.execute()


def _settle(redis: Redis, tasks: list[tuple[str, int, bytes]]) -> None:
    with redis.pipeline() as pipe:
        for id, number, _body in tasks:
            pipe.get(STATE + id)
            pipe.set(STATE + id, state(id, "SUCCESS", number), ex=KEPT)
            pipe.publish(DONE, id)
        pipe.hdel(HELD, *(id for id, _number, _body in tasks))
        pipe.incrby(ENDED, len(tasks))
        pipe.execute()


gate()
work()

"""Subscriber with a prefetch of two batches.

It notes that a batch has begun, stores its results, announces them, acknowledges the batch.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.peers.driving import gate
from benchmarks.peers.raw.commands import BATCH, DONE, ENDED, KEPT, STATE, connect, state
from benchmarks.peers.raw_amqp.line import QUEUE, Line


class Worker:
    def __init__(self) -> None:
        self._redis = connect()
        self._line = Line()
        self._taken: list[tuple[int, str, int]] = []  # tag, id, number
        self._line.channel.basic_qos(prefetch_count=2 * BATCH)
        self._line.channel.basic_consume(QUEUE, self._take)

    def run(self) -> None:
        self._line.run()

    def _take(self, _: Any, method: Any, __: Any, body: bytes) -> None:
        if not self._taken:
            self._line.soon(self._work)
        task = json.loads(body)
        self._taken.append((method.delivery_tag, task["UUID"], task["Args"][0]["Value"]))
        if len(self._taken) >= BATCH:
            self._work()

    def _work(self) -> None:
        taken, self._taken = self._taken, []
        if not taken:
            return  # done, since it was a whole batch
        with self._redis.pipeline(transaction=False) as pipe:
            for _, id, _number in taken:
                pipe.get(STATE + id)
                pipe.set(STATE + id, state(id, "STARTED", 0), ex=KEPT)
            pipe.execute()
        with self._redis.pipeline() as pipe:
            for _, id, number in taken:
                pipe.get(STATE + id)
                pipe.set(STATE + id, state(id, "SUCCESS", number), ex=KEPT)
                pipe.publish(DONE, id)
            pipe.incrby(ENDED, len(taken))
            pipe.execute()
        self._line.channel.basic_ack(taken[-1][0], multiple=True)


gate()
Worker().run()

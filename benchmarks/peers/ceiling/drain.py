"""Worker: a thread claims, four run tasks, one stores what they give, in batches."""

from __future__ import annotations

import collections
import itertools
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.peers.ceiling.commands import (
    ARRIVALS,
    BEAT,
    HELD,
    MEMBERS,
    QUEUE,
    WORKERS,
    connect,
    decode,
    encode,
    script,
    state,
)
from benchmarks.peers.driving import gate

THREADS = 4
BATCH = 100  # messages in stock
SETTLED = 500  # at a time, at most
BEATS = 1.0  # seconds between two heartbeats; one holds for five

redis = connect()


def noop(number: int) -> int:
    return number


def increase(number: int) -> int:
    return number + 1


def total(group: str) -> int:
    return sum(int(value) for value in redis.lrange(MEMBERS + group, 0, -1))


TASKS: Mapping[str, Callable[..., int]] = {"noop": noop, "increase": increase, "total": total}


class Ended(NamedTuple):
    """A task that has run."""

    number: int
    id: str
    state: bytes
    value: int
    group: str
    reply: str
    following: bytes | None


def execute(number: int, body: bytes) -> Ended:
    task = decode(body)
    value = TASKS[task["Name"]](*(one["Value"] for one in task["Args"]))
    following = None
    if task["OnSuccess"]:
        follower = task["OnSuccess"][0]
        follower["Args"] = [{"Name": "", "Type": "int64", "Value": value}, *follower["Args"]]
        following = encode(follower)
    return Ended(
        number,
        task["UUID"],
        state(task["UUID"], task["Name"], "SUCCESS", value),
        value,
        task["GroupUUID"],
        task["Headers"].get("reply", ""),
        following,
    )


class Worker:
    """One process of workers."""

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._keys = [QUEUE, HELD + self._name, ARRIVALS + self._name, BEAT + self._name]
        self._exchange = redis.register_script(script("exchange"))
        self._line: queue.SimpleQueue[tuple[int, bytes]] = queue.SimpleQueue()
        self._ended: collections.deque[Ended] = collections.deque()
        self._has_ended = threading.Event()
        self._numbers = 0

    def work(self) -> None:
        redis.set(BEAT + self._name, 1, px=5000)
        redis.sadd(WORKERS, self._name)
        for role in [self._run] * THREADS + [self._settle, self._beat]:
            threading.Thread(target=role, daemon=True).start()
        while True:
            room = BATCH - self._line.qsize()
            if room < BATCH // 2:
                time.sleep(0.0005)
                continue
            claimed = self._call(room, ())
            if not claimed:
                redis.blmove(QUEUE, ARRIVALS + self._name, 1, "LEFT", "RIGHT")
                continue
            for number, body in enumerate(claimed, self._numbers):
                self._line.put((number, body))
            self._numbers += len(claimed)

    def _call(self, wanted: int, ended: Sequence[Ended]) -> list[bytes]:
        following = [one.following for one in ended if one.following]
        members = [part for one in ended if one.group for part in (one.group, one.value)]
        answers = [part for one in ended if one.reply for part in (one.reply, one.state)]
        states = itertools.chain.from_iterable((one.id, one.state) for one in ended)
        args: list[Any] = [wanted, self._numbers, len(ended), len(following), len(members) // 2]
        args += [*(one.number for one in ended), *states, *following, *members, *answers]
        claimed: list[bytes] = self._exchange(keys=self._keys, args=args)
        return claimed

    def _run(self) -> None:
        while True:
            self._ended.append(execute(*self._line.get()))
            if not self._has_ended.is_set():
                self._has_ended.set()

    def _settle(self) -> None:
        while True:
            self._has_ended.wait()
            self._has_ended.clear()
            while self._ended:
                batch = [self._ended.popleft() for _ in range(min(len(self._ended), SETTLED))]
                self._call(0, batch)
            time.sleep(0)

    def _beat(self) -> None:
        recover = redis.register_script(script("recover"))
        while True:
            redis.set(BEAT + self._name, 1, px=5000)
            recover(keys=[QUEUE, WORKERS])
            time.sleep(BEATS)


gate()
Worker().work()

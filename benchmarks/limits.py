"""Measurement of limited tasks: 1,000 keys with a rate each, and two workers.

Like those of measure.py it runs in the child.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from typing import Any

from benchmarks.workers import THREADS, go, helper, said
from benchmarks.workload import BULK, WAIT, Figures, Wrong, check_all_succeeded, cpu, make_server

KEYS = 1000
RATE = "10/s"  # of each key
POLL = 0.05  # seconds between two looks at the queues


def limited(url: str, count: int) -> Figures:
    """Run tasks of many keys, in any order, so that some of them have to wait."""
    from machinery_py import group

    server = make_server(url)
    task = make_limited(server)
    numbers = random.Random(1).sample(range(count), count)
    uuids: list[str] = []
    for start in range(0, count, BULK):
        some = group(task.signature(number % KEYS) for number in numbers[start : start + BULK])
        uuids.extend(one.uuid for one in server.send_group(some).results)
    used = 0.0
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(helper("helper_limited", url)) for _ in range(2)]
        began = time.monotonic()
        for child in children:
            go(child)
        while any(one.waiting or one.running or one.delayed for one in server.broker.stats()):
            if time.monotonic() - began > WAIT:
                raise Wrong(f"not done after {WAIT:g} s: {server.broker.stats()}")
            time.sleep(POLL)
        seconds = time.monotonic() - began
        for child in children:
            go(child)
            used += float(said(child))
    check_all_succeeded(server, uuids)
    return {"limited": count / seconds, "cpu of limited": 1e6 * used / count}


def make_limited(server: Any) -> Any:
    return server.task("limited", rate=RATE, rate_key="key")(key_of)


def key_of(key: int) -> int:
    return key


def helper_limited(url: str, _count: int) -> Figures:
    """Run a worker from the first line on standard input to the second; print its CPU seconds."""
    server = make_server(url)
    make_limited(server)
    server.broker.stats()  # opens the store
    print("ready", flush=True)
    sys.stdin.readline()
    before = cpu()
    with server.new_worker("bench", THREADS):
        sys.stdin.readline()
        print(cpu() - before, flush=True)
    return {}

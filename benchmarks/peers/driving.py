"""Common part of the scripts of all systems.

It also runs in the environments of the others, so it needs the standard library alone.

`send.py tables|one|bulk|check|latency|chain|chord COUNT FILE` prints one line of JSON; FILE keeps
the ids between `one` and `check`. `drain.py PROCESSES` says "ready" when everything is imported,
and becomes a worker when its standard input has a line.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

URL = os.environ.get("PEERS_URL", "redis://127.0.0.1:6379")  # of Redis without a database
AMQP = os.environ.get("PEERS_AMQP", "")  # where the messages are, if not in Redis
# What each task gets beside its number, for systems on PostgreSQL: text that does not compress.
TEXT = random.Random(0).randbytes(int(os.environ.get("PEERS_BYTES", "0")) // 2).hex()
IS_LATENCY = os.environ.get("PEERS_LATENCY") == "1"
WARM = 10  # calls before what is timed: connections, scripts, caches
WAIT = 30.0  # seconds for any one result
CHUNK = 1000  # sent or looked at in one step

Send = Callable[[Sequence[int]], Sequence[str]]  # numbers → ids
Workflow = Callable[[int], object]  # how many tasks → its result


def run(
    *,
    one: Send,
    bulk: Send | None,
    results: Callable[[Sequence[str]], Sequence[object]],
    latency: Callable[[Sequence[int]], Sequence[float]],
    chain: Workflow | None = None,
    chord: Workflow | None = None,
    tables: Callable[[], object] | None = None,
) -> None:
    """Do what the arguments of the process say.

    Args:
        one: sends the numbers one after the other.
        bulk: sends them in large steps, if the library can.
        results: those of the ids, in their order.
        latency: calls for one number after the other, waits for each result, and returns the
            seconds that each took.
        chain: sends so many tasks, each of which adds one to the result of the last, from 0 on.
        chord: sends a task for each number below this one, and one that adds their results.
        tables: makes what the library needs in an empty database.
    """
    action, size, name = sys.argv[1:]
    count, file = int(size), Path(name)
    if action == "tables":
        assert tables is not None
        tables()
        answer: dict[str, object] = {}
    elif action in ("one", "bulk"):
        send = one if action == "one" else bulk
        assert send is not None
        ids = list(send(range(WARM)))
        began = time.perf_counter()
        ids += send(range(WARM, count))
        seconds = time.perf_counter() - began
        file.write_text(json.dumps(ids))
        answer = {"rate": (count - WARM) / seconds}
    elif action == "check":
        ids = json.loads(file.read_text())
        wrong = 0
        for start in range(0, len(ids), CHUNK):
            part = results(ids[start : start + CHUNK])
            wrong += (
                sum(found != start + index for index, found in enumerate(part))
                + len(ids[start : start + CHUNK])
                - len(part)
            )
        answer = {"wrong": wrong, "checked": len(ids)}
    elif action == "latency":
        latency(range(WARM))
        answer = {"seconds": list(latency(range(count)))}
    else:
        assert chain is not None and chord is not None
        workflow = chain if action == "chain" else chord
        workflow(WARM)
        began = time.perf_counter()
        found = workflow(count)
        answer = {"seconds": time.perf_counter() - began}
        expect(found, count if action == "chain" else sum(range(count)))
    print(json.dumps(answer), flush=True)


def gate() -> int:
    """Wait until the measurement begins; how many processes the worker is to have."""
    print("ready", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the measurement is gone")
    os.dup2(2, 1)  # nobody reads what a worker prints
    threading.Thread(target=_end_with, args=[os.dup(0)], name="end", daemon=True).start()
    return int(sys.argv[1])


def _end_with(pipe: int) -> None:
    """End this process and all that it has started as soon as the measuring process is gone."""
    os.read(pipe, 1)
    os.killpg(
        os.getpgrp(), signal.SIGKILL
    )  # a group of our own: a worker is started in a new session


def expect(found: object, number: int) -> None:
    if found != number:
        raise SystemExit(f"the result is {found!r}, not {number}")

"""The app of test_unique_kills.py, and a process that sends from it.

python -m tests.system.unique_app COUNT GATE     send `alone` COUNT times once GATE exists,
                                                 and print their UUIDs
"""

from __future__ import annotations

import os
import sys

from machinery_py import Config, Server, current_task
from machinery_py.testing.waiting import wait_until

LEASE = 2.0  # seconds

server = Server(
    Config(
        broker=os.environ.get("SAME_BROKER", "memory://"),
        lease=LEASE,
        result_backend=os.environ.get("SAME_BACKEND", ""),
    )
)


def note(word: str, name: str) -> None:
    ledger = os.open(os.environ["SAME_LEDGER"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(ledger, f"{word} {name} {os.getpid()}\n".encode())
    finally:
        os.close(ledger)


@server.task(unique=True)
def alone(name: str) -> str:
    note("begin", name)
    wait_until(
        lambda: os.path.exists(name) or current_task().cancelled,
        timeout=600.0,
        what="the gate is open",
    )
    note("end", name)
    return name


@server.task(exclusive="wait", exclusive_key="feed")
def feed(name: str) -> str:
    note("begin", name)
    wait_until(
        lambda: os.path.exists(name) or current_task().cancelled,
        timeout=600.0,
        what="the gate is open",
    )
    note("cancelled" if current_task().cancelled else "end", name)
    return name


@server.task(rate="50/s", max_running=3)
def metered(name: str) -> str:
    note("begin", name)
    wait_until(lambda: os.path.exists(name), timeout=600.0, what="the gate is open")
    note("end", name)
    return name


@server.task(batch=4, batch_within=600.0)
def gather(rows: list[str]) -> list[str]:
    for row in rows:
        note("begin", row)
    wait_until(
        lambda: os.path.exists(os.environ["SAME_LEDGER"] + "-gate"),
        timeout=600.0,
        what="the gate is open",
    )
    for row in rows:
        note("end", row)
    return rows


def main(count: str, gate: str) -> None:
    server.broker.stats()
    note("ready", gate)
    wait_until(lambda: os.path.exists(gate), what="the start")
    for _ in range(int(count)):
        result = alone.send("same")
        print(result.uuid, result.duplicate, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

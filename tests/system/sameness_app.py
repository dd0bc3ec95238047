"""The app of test_unique_kills.py, and a process that sends from it.

python -m tests.system.sameness_app send COUNT GATE     send `alone` so often when the file GATE is there; prints UUIDs
python -m tests.system.sameness_app die POINT           send `alone` once, and die before or behind the broker has the message
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from machinery_py import Config, Server, current_task
from machinery_py.brokers.base import Message
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


def main(command: str, word: str, gate: str) -> None:
    if command == "send":
        server.broker.stats()
        note("ready", gate)
        wait_until(lambda: os.path.exists(gate), what="the start")
        for _ in range(int(word)):
            result = alone.send("same")
            print(result.uuid, result.duplicate, flush=True)
        return
    broker = server.app.store.broker
    put = broker.put

    def deadly_put(messages: Sequence[Message], *, token: str) -> bool:
        if word == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        put(messages, token=token)
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    broker.put = deadly_put  # type: ignore[method-assign]
    alone.send(gate)


if __name__ == "__main__":
    main(*sys.argv[1:])

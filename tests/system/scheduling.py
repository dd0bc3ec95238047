"""The program of test_schedulers.py: a worker with a schedule, which dies at the worst moments.

python -m tests.system.scheduling BROKER BACKEND LEDGER DEADLINESS
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

from machinery_py import Config, Server, current_task
from machinery_py.stores.outbox import TwoStores

rng = random.Random(os.getpid())


def make_server(broker: str, backend: str, ledger: str) -> Server:
    server = Server(Config(broker=broker, result_backend=backend))

    def tick() -> None:
        signature = current_task().signature
        file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{signature.headers['machinery_tick']} {signature.uuid}\n".encode())
        os.close(file)

    server.register_task("tick", tick)
    return server


def die(deadliness: float) -> None:
    if rng.random() < deadliness:
        os.kill(os.getpid(), signal.SIGKILL)


def deadly(target: Any, name: str, deadliness: float) -> None:
    """The process may die in front of each call of this method, and behind it."""
    method: Callable[..., Any] = getattr(target, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        die(deadliness)
        result = method(*args, **kwargs)
        die(deadliness)
        return result

    setattr(target, name, call)


def main(broker: str, backend: str, ledger: str, deadliness: float) -> None:
    server = make_server(broker, backend, ledger)
    store = server.app.store
    deadly(store, "submit", deadliness)
    if isinstance(store, TwoStores):
        deadly(store.backend, "apply", deadliness)
        deadly(store, "publish", deadliness)
        deadly(store.backend, "clear_outbox", deadliness)
    server.new_worker(f"w{os.getpid()}", concurrency=1).launch()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))

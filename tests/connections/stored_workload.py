"""A workload that makes a store keep everything that it can keep, for test_stored_items.py.

python -m tests.connections.stored_workload BROKER BACKEND     a worker whose task kills it
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machinery_py import Config, Server, Signature, chord, current_task, group
from machinery_py.testing.waiting import HANG, wait_until

ROOT = Path(__file__).parents[2]
DEADLY = "STORED_WORKLOAD_DEADLY"  # set where the task `deadly` kills its process
SHORT = "ab"  # a UUID that could be the name of a queue


_looked = threading.Event()  # while the task `slow` runs


def make_server(broker: str, backend: str = "") -> Server:
    return Server(
        Config(
            broker=broker,
            result_backend=backend,
            lease=2.0,
            unregistered_timeout=3.0,
            fair_queues={"fair": "tenant"} if has_turns(broker) else {},
        )
    )


def has_turns(broker: str) -> bool:
    return broker.partition(":")[0] in ("redis", "sqlite", "postgresql", "memory")


def tasks(server: Server) -> dict[str, Any]:
    return {
        "add": server.register_task("add", _add),
        "fail": server.register_task("fail", _fail),
        "deadly": server.register_task("deadly", _deadly),
        "slow": server.register_task("slow", _slow),
        "alone": server.task("alone", unique=True)(_add),
        "limited": server.task("limited", rate="100/s", max_running=1)(_add),
        "shared": server.task("shared", queue="fair")(_share),
        "flow": server.register_task("flow", _flow),
    }


def _add(*numbers: int) -> int:
    return len(numbers)


def _flow() -> int:
    return current_task().step("add", _add, 1, 2)


def _share(tenant: str) -> str:
    return tenant


def _deadly(seconds: float) -> None:
    if DEADLY in os.environ:
        os._exit(9)
    time.sleep(seconds)


def _slow() -> None:
    _looked.wait(HANG)


def _fail() -> None:
    raise ValueError("on purpose")


def run(
    broker: str,
    backend: str = "",
    *,
    uuid: str = SHORT,
    look: Callable[[], object] = lambda: None,
) -> None:
    """Use everything.

    `look` is called before the work, while a redelivered task runs, while a chord is incomplete,
    and at the end.

    `uuid`: of one of the tasks.
    """
    server = make_server(broker, backend)
    known = tasks(server)
    add, fail = known["add"], known["fail"]
    _looked.clear()
    deadly = known["deadly"].send(3.0)
    if not broker.startswith("memory"):
        _kill_a_worker(broker, backend)
    members = [add.signature(n, n) for n in range(3)]
    held: Any = chord(
        [add.options(result_expires=60).signature(1), known["slow"].signature()], add.partial()
    ).send()
    results = [
        deadly,
        chord(members, add.partial()).send(),
        chord([add.signature(1, 2), fail.signature()], add.partial()).send(),
        held,
        group(*members).send(),
        add.options(priority=7).send(5, 5),
        add.options(delay=0.3).send(1, 1),
        server.send_task(Signature(name="add", uuid=uuid)),
    ]
    keeps = server.backend.features
    if keeps.checkpoints:
        results.append(known["flow"].send())
    if keeps.claims:
        results.append(known["alone"].send())
    if not broker.startswith("amqp"):  # it has no locks
        results += [known["limited"].send(1), known["limited"].send(2)]
        server.control.limit("limited", rate="50/s")
    if has_turns(broker):
        results += [known["shared"].send("ada"), known["shared"].send("bob")]
    if broker.startswith("redis"):
        many = (add.signature(n) for n in range(1100))
        results.append(chord(many, add.partial()).send())  # in steps
    if keeps.revocations:
        server.revoke([add.options(delay=60).send(0).uuid])
    if keeps.schedules:
        server.schedules.add("@every 1s", "tick", add.signature(1))
    server.send_task(Signature(name="unknown"))
    add.options(queue="aside").send(1)
    server.inspect.pause("aside")
    look()
    workers = [
        server.new_worker(f"w{n}", queues=["aside", server.config.default_queue, "fair"])
        for n in (1, 2)
    ]
    with contextlib.ExitStack() as running:
        for worker in workers:
            running.enter_context(worker)
        if broker.partition(":")[0] not in ("amqp", "memcache"):
            running.enter_context(server.lock("ours"))
        if broker.startswith("redis"):
            server.app.stores.lock.go().lock("machinery_lock_app", time.time_ns() + 10**9)
        wait_until(lambda: deadly.get_state().started_at is not None, HANG)
        server.broker.broadcast("news", [b"a record"], ttl=60.0)
        time.sleep(1.0)
        look()
        wait_until(lambda: held.group[1].get_state().started_at is not None, HANG)
        wait_until(held.group[0].is_finished, HANG)
        look()
        _looked.set()
        wait_until(lambda: all(one.is_finished() for one in results), HANG, what="every result")
        wait_until(server.inspect.dead, HANG, what="a dead letter")
        server.inspect.resume("aside")
        if keeps.schedules:
            wait_until(lambda: server.schedules.get("tick").sent > 0, HANG, what="a tick")
            server.schedules.remove("tick")
        time.sleep(1.5)
    look()
    server.close()


def _kill_a_worker(broker: str, backend: str) -> None:
    command = [sys.executable, "-m", "tests.connections.stored_workload", broker, backend]
    ended = subprocess.run(
        command, cwd=ROOT, env={**os.environ, DEADLY: "1"}, timeout=HANG, check=False
    )
    assert ended.returncode == 9


if __name__ == "__main__":
    other = make_server(*sys.argv[1:])
    tasks(other)
    other.new_worker(concurrency=1).launch()

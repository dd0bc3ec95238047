"""The tasks of a chaos run, in threads and processes, and the ledger: what ran where and when.

The ledger is written past all stores, by the worker and its task processes alike.

One line for each event, in one `write`, so that a kill leaves whole lines. Tabs divide the fields:

    start     moment, uuid, run, fence, digest of the arguments, unix time,
              "again" or "first" (delivery of this message)
    end       moment, uuid, run, fence, "ok" or "raised"
    settled   moment, uuid, run, state      the worker was told that this is true now
    attempt   moment, uuid, parent          a task is about to send another one
    accepted  moment, uuid, parent          and has sent it
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

from machinery_py import Config, Server, Signature, current_task
from machinery_py.config.sections import AMQPConfig
from machinery_py.errors import PublishRefused, PublishUnknown
from machinery_py.events import TaskEvent, TaskFailed, TaskRetried, TaskSucceeded
from tests.chaos.plan import fold

FOLDER = os.environ.get("CHAOS_FOLDER", "")
WORKER = os.environ.get("CHAOS_WORKER", "")  # a name that no other process of the run ever has
STEP = 0.005  # seconds; a step takes up to four of these, so that faults find it running
BACKOFF = 0.05  # seconds between the tries of `flaky`


def config_of(url: str, lease: float) -> Config:
    """The configuration of a whole run. `url`: the broker's, then a space and another backend's."""
    broker, _, backend = url.partition(" ")
    # Classic queues may lose a delayed message when their server is killed:
    # see docs/explanation/amqp-protocol.md.
    amqp = AMQPConfig(queue_declare_args={"x-queue-type": "quorum"})
    return Config(
        broker=broker, result_backend=backend, lease=lease, shutdown_timeout=20.0, amqp=amqp
    )


server = Server(
    config_of(os.environ.get("CHAOS_URL", "memory://"), float(os.environ.get("CHAOS_LEASE", "10")))
)
_ledger = (
    os.open(f"{FOLDER}/ledger-{WORKER}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    if FOLDER
    else -1
)


class Planned(Exception):
    """A failure that the plan wants."""


def note(event: str, *facts: object) -> None:
    if _ledger >= 0:
        os.write(
            _ledger,
            "\t".join([event, f"{time.monotonic():.6f}", *map(str, facts)]).encode() + b"\n",
        )


def digest(values: Sequence[Any]) -> str:
    """What tells these arguments from others."""
    return hashlib.sha1(json.dumps(list(values)).encode()).hexdigest()[:16]


@server.around_task
def keep_ledger(signature: Signature[object]) -> Iterator[None]:
    facts = signature.uuid, signature.run, current_task().fence & 0xFFFFFFFF
    times = "again" if current_task().is_redelivery else "first"
    note(
        "start", *facts, digest([arg.value for arg in signature.args]), f"{time.time():.6f}", times
    )
    try:
        yield
    except BaseException:
        note("end", *facts, "raised")
        raise
    note("end", *facts, "ok")


def _settled(event: TaskEvent) -> None:
    words = {TaskSucceeded: "SUCCESS", TaskFailed: "FAILURE", TaskRetried: "RETRY"}
    note("settled", event.signature.uuid, event.signature.run, words[type(event)])


for kind in (TaskSucceeded, TaskFailed, TaskRetried):
    server.events.subscribe(kind, _settled)


@server.task
def noop(number: int) -> int:
    return number


@server.task(pool="process")
def nap(seconds: float, number: int) -> int:
    time.sleep(seconds)
    return number


@server.task
def fails(number: int, *before: int) -> int:
    time.sleep(number % 5 * STEP)
    raise Planned(f"planned failure {number}")


@server.task(pool="process", backoff=(BACKOFF,))
def flaky(tries: int, number: int) -> int:
    if current_task().attempt <= tries:
        raise Planned(f"planned failure of try {current_task().attempt}")
    return number


@server.task(pool="process")
def step(number: int, *before: int) -> int:
    time.sleep(number % 5 * STEP)
    return fold(number, before)


@server.task
def gather(number: int, *results: int) -> int:
    time.sleep(number % 5 * STEP)
    return fold(number, results)


@server.task
def on_failure(error: str, number: int) -> int:
    return number


@server.task
def spawn(count: int, number: int) -> int:
    task = current_task()
    for index in range(count):
        # A run that repeats sends others: each has been sent once.
        uuid = f"{task.uuid}.{WORKER}.{task.fence}.{index}"
        note("attempt", uuid, task.uuid)
        try:
            server.send_task(noop.signature(number).replace(uuid=uuid))
        except (PublishRefused, PublishUnknown):
            continue  # the store was away for longer than `publish_timeout`: nothing was promised
        note("accepted", uuid, task.uuid)
    return number

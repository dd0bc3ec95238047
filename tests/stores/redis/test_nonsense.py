"""Keys of ours with the right type and nonsense inside: named or put aside, and work goes on."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis import Redis

from machinery_py import Server
from machinery_py.errors import MachineryError
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.servers import RedisServer

QUEUE = "machinery_tasks"
PREFIX = f"mpy:{{{QUEUE}}}:"
NO_TEXT = b"\xff\x00../x"
TEXTS = (b"", b"nonsense", b"\x93\x01", b"9" * 30, b"-1")
MEMBERS = ((b"nonsense", 0.0), (NO_TEXT, -5e300), (b"nonsense", float("inf")))
SETS = (
    *(PREFIX + name for name in "stlze"),
    *(f"mpy:{name}" for name in ("ready", "groups", "revoked", "open", "done", "partial")),
    *(f"mpy:{name}" for name in ("outbox", "committed", "limits")),
    "delayed_tasks",
)
HASHES = (
    *(PREFIX + name for name in ("a", "d", "f:gone")),
    "mpy:records",
    "mpy:rate:$now",
)
#: With the number of a queue's receipts spoilt nothing can be claimed from that queue.
COUNTERS = (PREFIX + "n", PREFIX + "c", "mpy:records:n", "mpy:fence")
OF_A_TASK = ("mpy:m:{$task}", "mpy:limit:{add}", "mpy:lock:{x}")


@pytest.fixture
def redis(empty_redis: RedisServer) -> Iterator[Redis]:
    with Redis.from_url(empty_redis.url) as client:
        yield client


@pytest.fixture
def server(empty_redis: RedisServer) -> Iterator[Server]:
    server = Server(empty_redis.url)
    add = server.register_task("add", lambda a, b: a + b)
    server.register_periodic_task("@daily", "daily", add.signature(1, 1))
    yield server
    server.close()


def inspect(server: Server) -> None:
    """Look at everything. What another program wrote may be refused, in our words."""
    broker, inspector = server.broker, server.inspect
    looks: dict[str, Callable[[], object]] = {
        "queues": inspector.queues,
        "workers": inspector.workers,
        "tasks": inspector.tasks,
        "dead": inspector.dead,
        "waiting": lambda: broker.pending(QUEUE, 10),
        "delayed": lambda: broker.delayed(10),
        "schedules": server.schedules.list,
    }
    for name, look in looks.items():
        try:
            look()
        except MachineryError as error:
            assert "mpy:" in str(error) or QUEUE in str(error), (name, error)  # it says which


def put(redis: Redis, key: str, value: Any) -> None:
    match value:
        case bytes():
            redis.set(key, value)
        case tuple():
            redis.zadd(key, {value[0]: value[1]})
        case _:
            redis.hset(key, mapping=value)


CASES: list[tuple[str, Any]] = [
    *((key, member) for key in SETS for member in MEMBERS),
    *((key, {field: text}) for key in HASHES for field in (b"1", NO_TEXT) for text in TEXTS[:3]),
    *((key, text) for key in (*COUNTERS, *OF_A_TASK) for text in TEXTS),
]


@pytest.mark.parametrize(
    ("key", "value"), CASES, ids=[f"{key}-{number}" for number, (key, _) in enumerate(CASES)]
)
def test_nonsense_in_a_key_stops_no_worker(
    redis: Redis, server: Server, caplog: pytest.LogCaptureFixture, key: str, value: Any
) -> None:
    caplog.set_level(logging.WARNING)
    add = server.get_registered_task("add")
    first = add.send(1, 2)
    key = key.replace("$task", first.uuid).replace("$now", str(redis.time()[0]))
    redis.zadd(PREFIX + "s", {"gone": 1})
    put(redis, key, value)

    with server.new_worker(concurrency=2, queues=[QUEUE, "other"]) as worker:
        assert add.options(queue="other").send(3, 4).get(timeout=HANG) == 7
        if key != PREFIX + "n":
            assert add.send(5, 6).get(timeout=HANG) == 11
            wait_until(lambda: first.get_state().is_finished, what="the task sent before")
        inspect(server)
        wait_until(lambda: worker.ready, what="the worker is well")

    assert "Traceback" not in caplog.text
    assert "no tasks can be received" not in caplog.text


@pytest.mark.parametrize("text", TEXTS[:4], ids=["empty", "text", "bytes", "large"])
def test_queue_that_cannot_be_claimed_from_is_not_asked_in_a_hot_loop(
    redis: Redis, server: Server, text: bytes
) -> None:
    server.get_registered_task("add").send(1, 2)
    redis.set(PREFIX + "n", text)
    consumer = server.broker.consume([QUEUE, "other"], worker="ada")
    before = commands(redis)

    assert consumer.receive(10, 1.0) == []

    assert commands(redis) - before < 500  # a hot loop sends some 50,000
    consumer.close()


def commands(redis: Redis) -> int:
    return int(redis.info("stats")["total_commands_processed"])


def test_counter_of_fences_that_is_no_number_is_put_right(redis: Redis, server: Server) -> None:
    redis.set("mpy:fence", "somebody's")
    add = server.get_registered_task("add")
    for number in range(40):
        add.send(number, 1)
    with contextlib.closing(server.broker.consume([QUEUE], worker="w")) as consumer:
        found = [one.fence for _ in range(4) for one in consumer.receive(10, 1.0)]

    assert len(found) == 40
    assert found == sorted(set(found))

"""What is left in Redis when all is done: nothing that grows with names made at run time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from machinery_py import Server, chord, group
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.keys import ITEMS
from machinery_py.errors import QueueNotFound
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.private_redis import RedisServer

#: Of each queue, until it is forgotten: without them its receipts would begin anew.
PER_QUEUE = {"mpy:{<queue>}:n", "mpy:{<queue>}:c", "mpy:{<queue>}:x"}
#: Until house-keeping has looked once more; the last worker that ends leaves it.
TOMBSTONES = "mpy:{<queue>}:t"


@pytest.fixture
def server(empty_redis: RedisServer) -> Iterator[Server]:
    server = Server(empty_redis.url)
    yield server
    server.close()


def lasting(redis: RedisServer) -> dict[str, str]:
    """Return the keys without an expiry, each with the item that it is."""
    driver = RedisDriver(redis.url)

    def ask(*parts: bytes) -> Any:
        return driver.ask(*parts, doing="looking")

    found = {}
    for key in ask(b"KEYS", b"*"):
        if ask(b"TTL", key) == -1:
            name, kind = key.decode(), ask(b"TYPE", key).decode()
            items = [one.name for one in ITEMS if one.matches(name, kind)]
            found[name] = items[-1]
    driver.close()
    return found


def sum_of(*numbers: int) -> int:
    return sum(numbers)


def work(server: Server, name: str) -> None:
    """Use the features, with names that are made of this one."""

    def add(a: int, b: int) -> int:
        with server.limiter("turns", "1000/s", key=name), server.lock(name):
            pass
        with server.limiter(f"limiter-{name}", "1000/s"):
            pass
        return a + b

    task = server.task(f"add-{name}")(add)
    queue = f"queue-{name}"
    options = task.options(queue=queue)
    with server.new_worker(concurrency=4, queues=[queue, f"{queue}-2"]):
        sent = [
            options.send(1, 1),
            task.options(queue=queue, priority=3).send(1, 1),
            task.options(queue=queue, delay=0.05).send(1, 1),
            task.options(queue=f"{queue}-2").send(1, 1),
        ]
        members = [options.signature(1, number) for number in range(3)]
        total = server.task(f"total-{name}")(sum_of).options(queue=queue)
        assert [one.get(timeout=HANG) for one in sent] == [2, 2, 2, 2]
        assert group(*members).send().get(timeout=HANG) == [1, 2, 3]
        assert chord(members, total.partial()).send().get(timeout=HANG) == 6
        wait_until(lambda: not any(one.running for one in server.inspect.queues()))


def test_what_lasts_does_not_grow_with_names(server: Server, empty_redis: RedisServer) -> None:
    for name in ("a", "b"):
        work(server, name)
    server.app.store.tend()

    found = lasting(empty_redis)

    growing = {key: item for key, item in found.items() if "<" in item}
    assert set(growing.values()) - PER_QUEUE <= {TOMBSTONES}, growing


def test_queue_that_is_forgotten_leaves_nothing(server: Server, empty_redis: RedisServer) -> None:
    work(server, "a")
    before = [one.queue for one in server.inspect.queues()]
    assert "queue-a" in before

    for queue in before:
        assert server.inspect.forget_queue(queue)

    assert server.inspect.queues() == []
    assert not [key for key, item in lasting(empty_redis).items() if "<queue>" in item]
    with pytest.raises(QueueNotFound):
        server.inspect.forget_queue("queue-a")
    work(server, "a")  # and it is made anew


def test_queue_in_use_is_not_forgotten(server: Server) -> None:
    @server.task
    def add(a: int, b: int) -> int:
        return a + b

    options = add.options(queue="used")
    options.send(1, 1)
    assert not server.inspect.forget_queue("used")
    server.inspect.purge("used")
    add.options(queue="used", delay=HANG).send(1, 1)
    assert not server.inspect.forget_queue("used")
    server.inspect.purge("used")
    server.inspect.pause("used")
    assert not server.inspect.forget_queue("used")
    server.inspect.resume("used")
    with contextlib.closing(server.broker.consume(["used"], worker="w")) as consumer:
        assert not server.inspect.forget_queue("used")
        assert consumer.receive(1, 0) == []
    assert server.inspect.forget_queue("used")


def test_notes_of_messages_that_go_took_are_deleted(empty_redis: RedisServer) -> None:
    driver = RedisDriver(empty_redis.url)
    broker = RedisBroker(driver)
    driver.ask(b"SADD", b"mpy:queues", b"mail", doing="naming")
    driver.ask(b"HSET", b"mpy:{mail}:a", b"a" * 40, b"1 0 0\n", doing="noting")
    driver.ask(b"RPUSH", b"mpy:{mail}:o", b"0 1", doing="noting")
    driver.ask(b"RPUSH", b"mail", b"waits", doing="putting")
    broker.tend()
    assert driver.ask(b"EXISTS", b"mpy:{mail}:a", b"mpy:{mail}:o", doing="looking") == 2

    driver.ask(b"LPOP", b"mail", doing="taking, as Go does")
    broker.tend()

    assert driver.ask(b"EXISTS", b"mpy:{mail}:a", b"mpy:{mail}:o", doing="looking") == 0
    driver.close()

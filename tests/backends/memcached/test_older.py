"""Items that the version before has left: its counts of members, its index, and what went."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from machinery_py import Config, Server, Signature
from machinery_py.backends.base import FENCED, SETTLED, Change
from machinery_py.backends.memcached.backend import MemcacheBackend
from machinery_py.config.server_urls import parse_memcache_url
from machinery_py.connections.memcached.client import MemcacheDriver
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import State, TaskState
from machinery_py.tasks.workflow import Group
from machinery_py.testing.waiting import HANG
from tests.backends.memcached.case import put
from tests.support.servers import MemcachedServer

pack = msgspec.msgpack.encode
AT = 1_790_000_000_000_000  # µs
SEGMENT = b"0123456789abcdef"


def leave(driver: MemcacheDriver, group: str) -> None:
    """Leave what a worker of that version writes; of two members of the group one has ended."""
    items = {
        "mpy:roots": pack([SEGMENT]),
        f"mpy:x:{SEGMENT.decode()}": pack([AT, ["task_1", "tick every 1"], [group]]),
        f"mpy:b:0:{group}": b"\x01" * 8,
        f"mpy:n:{group}": b"1",
        "mpy:f:settled": pack([b"nonce", AT, [b"message"], []]),
        "mpy:o:key": pack([b"nonce", AT, [b"message"], []]),
        "mpy:v:task_1": b"1",
        "mpy:u:key": pack([b"nonce", b"body", AT, AT, []]),
        "mpy:s:every": pack([b"nonce", b"body", AT, 0, []]),
        "mpy:schedules": pack(["era", {"every": AT}]),
    }
    commands = [put(key.encode(), value, b"3600") for key, value in items.items()]
    assert set(driver.send(commands, doing="testing")) == {b"STORED"}


@pytest.fixture
def driver(empty_memcached: MemcachedServer) -> Iterator[MemcacheDriver]:
    driver = MemcacheDriver(parse_memcache_url(empty_memcached.url))
    yield driver
    driver.close()


def test_items_of_the_version_before_break_nothing(driver: MemcacheDriver) -> None:
    leave(driver, "group_1")
    backend = MemcacheBackend(driver)
    backend.init_group("settled", ["task_1"])

    backend.tend()
    assert backend.ready_groups(9) == []
    assert backend.unsent(9, older_than=0.0) == []
    assert backend.outboxes(["settled", "key"]) == [[b"message"], []]
    group = backend.get_group("settled")
    assert group is not None
    assert group.chord_triggered  # an old worker has fired it, and sends what follows
    assert backend.apply([Change(key="settled", fires="settled")]) == [FENCED]
    backend.clear_outbox([("settled", [b"message"])])
    assert backend.outboxes(["settled"]) == [[]]
    backend.purge_group_meta("settled")


def test_old_worker_can_read_a_firing(driver: MemcacheDriver) -> None:
    backend = MemcacheBackend(driver)
    backend.init_group("g", ["task_1"])

    assert backend.apply([Change(key="g", fires="g", outbox=[b"message"])]) == [SETTLED]

    [item] = driver.fetch([b"mpy:f:g"], doing="testing").values()
    nonce, kept_at, outbox, _ = msgspec.msgpack.decode(item.value)
    assert (type(nonce), type(kept_at), outbox) == (bytes, int, [b"message"])


def test_chord_that_an_old_worker_has_begun_is_finished(
    empty_memcached: MemcachedServer, driver: MemcacheDriver
) -> None:
    server = Server(Config(broker="memory://", result_backend=empty_memcached.url))
    server.register_task("one", lambda: 1)
    server.register_task("total", lambda *parts: sum(parts))
    old = Signature.of("one").replace(routing_key="of_an_old_worker")
    result = server.send_chord(Group([old, Signature.of("one")]) | Signature.of("total"))
    leave(driver, result.group.uuid)
    ended = TaskState(
        task_uuid=result.group.results[0].uuid, state=State.SUCCESS, results=(Arg.of(2),)
    )
    assert MemcacheBackend(driver).apply([Change(key=ended.task_uuid, states=(ended,))]) == [
        SETTLED
    ]

    with server.new_worker(concurrency=2):
        assert result.get(timeout=HANG) == 3
    server.close()

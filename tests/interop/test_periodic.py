"""Schedulers of both languages with the same schedule: each tick is sent by one of them."""

from __future__ import annotations

import contextlib
import time

import pytest

from machinery_py.testing.servers import RedisServer
from machinery_py.testing.waiting import HANG, wait_until
from tests.interop.fleet import call, message, new_server
from tests.interop.golang import Peer, peer

TICKS = 10


@pytest.mark.parametrize("go_schedulers, python_schedulers", [(2, 2), (1, 1)])
def test_each_tick_is_sent_once(version: str, empty_redis: RedisServer, go_schedulers: int, python_schedulers: int) -> None:
    tick = call("where", routing_key="ticks")
    lock = f"redis://127.0.0.1:{empty_redis.port}"
    with contextlib.ExitStack() as stack:
        for _ in range(go_schedulers):
            go = stack.enter_context(Peer(version, broker=empty_redis.url, backend=empty_redis.url, lock=lock))
            go.ask("periodic", spec="@every 1s", name="tick", message=message(tick))
        for _ in range(python_schedulers):
            server = new_server(empty_redis.url, lock=lock, go_program=peer(version).name)
            stack.callback(server.close)
            server.register_periodic_task("@every 1s", "tick", tick)
            stack.enter_context(server.new_worker("scheduler", 1, queues=["none"]))

        def sent() -> int:
            return len(server.broker.pending("ticks", 1000))

        wait_until(sent, HANG, "the first tick")
        begin, before = time.monotonic(), sent()
        wait_until(lambda: sent() >= before + TICKS, HANG, f"{TICKS} ticks")
        ticks, seconds = sent() - before, time.monotonic() - begin

    # Twice as many if each language sent them all. Go's lock lets one tick slip through now and then: where it finds a lock that
    # is over and still there, it sets it to end in 0 seconds.
    assert ticks <= 1.4 * seconds + 1
    uuids = [one.uuid for one in server.broker.pending("ticks", 1000)]
    assert len(set(uuids)) == len(uuids)

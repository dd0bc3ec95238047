"""Schedulers of both languages with the same schedule: each tick is sent by one of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pika
import pytest

from machinery_py import Server
from machinery_py.testing.waiting import HANG, wait_until
from tests.interop.conftest import FULL
from tests.interop.fleet import call, message, new_server
from tests.interop.golang import VERSIONS, Peer, peer
from tests.support.servers import RedisServer

TICKS = {"redis": 10, "amqp": 5}
CASES = [("v1", "redis", 1, 1), ("v2", "redis", 2, 2), ("v2", "amqp", 1, 1)]
if FULL:
    CASES = [
        (version, kind, count, count)
        for version in VERSIONS
        for kind in ("redis", "amqp")
        for count in (2, 1)
    ]


def counter(server: Server, broker: str, stack: contextlib.ExitStack) -> Callable[[], int]:
    """How many ticks were sent, asked without a look into the queue."""
    if not broker.startswith("amqp"):
        return lambda: len(server.broker.pending("ticks", 1000))
    server.broker.declare(["ticks"])
    channel = stack.enter_context(
        contextlib.closing(pika.BlockingConnection(pika.URLParameters(broker)))
    ).channel()
    return lambda: int(channel.queue_declare("ticks", passive=True).method.message_count)


@pytest.mark.parametrize("version, kind, go_schedulers, python_schedulers", CASES)
def test_each_tick_is_sent_once(
    request: pytest.FixtureRequest,
    version: str,
    empty_redis: RedisServer,
    kind: str,
    go_schedulers: int,
    python_schedulers: int,
) -> None:
    tick = call("where", routing_key="ticks")
    broker = empty_redis.url if kind == "redis" else str(request.getfixturevalue("go_amqp_url"))
    lock = f"redis://127.0.0.1:{empty_redis.port}"
    with contextlib.ExitStack() as stack:
        for _ in range(go_schedulers):
            go = stack.enter_context(
                Peer(version, broker=broker, backend=empty_redis.url, lock=lock)
            )
            go.ask("periodic", spec="@every 1s", name="tick", message=message(tick))
        for _ in range(python_schedulers):
            server = new_server(
                broker, backend=empty_redis.url, lock=lock, go_program=peer(version).name
            )
            stack.callback(server.close)
            server.register_periodic_task("@every 1s", "tick", tick)
            stack.enter_context(server.new_worker("scheduler", 1, queues=["none"]))
        sent = counter(server, broker, stack)

        wait_until(sent, HANG, "the first tick")
        begin, before = time.monotonic(), sent()
        wait_until(lambda: sent() >= before + TICKS[kind], HANG, "the ticks")
        ticks, seconds = sent() - before, time.monotonic() - begin

        # Twice as many if each language sent them all. Go's lock lets one tick slip through now and
        # then: a lock that is over but still there gets an end in 0 seconds.
        assert ticks <= 1.4 * seconds + 1
        uuids = [one.uuid for one in server.broker.pending("ticks", 1000)]
        assert len(set(uuids)) == len(uuids) >= ticks

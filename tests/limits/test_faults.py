"""Limits in a Redis that forgets, restarts empty, or holds what is not ours."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from machinery_py import Config, Server
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.scripts import Script
from machinery_py.errors import BackendUnavailable, NameRefused
from machinery_py.limits import Limits, Rule
from machinery_py.limits.keeper import SlotKeeper
from machinery_py.limits.redis import RedisLimits
from machinery_py.testing.conformance.limits import LEASE, ask, entrant, slot, waits
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.support.servers import RedisServer

TWO = Rule(name="running", limit=2)
RATE = Rule(name="rate", interval=60.0)


@pytest.fixture
def limits(empty_redis: RedisServer) -> Iterator[Limits]:
    with closing(RedisDriver(empty_redis.url, timeout=1.0)) as driver:
        yield RedisLimits(driver)


def test_limits_start_anew_in_a_redis_that_restarts_empty(
    empty_redis: RedisServer, limits: Limits
) -> None:
    held = [slot(limits, who, TWO) for who in "ab"]
    waits(limits, "cd", RATE)
    limits.change("s", [Rule(name="rate", interval=3600.0)])

    empty_redis.stop()
    with pytest.raises(BackendUnavailable):
        ask(limits, "e", TWO)
    empty_redis.start()

    assert limits.renew(held, ttl=LEASE) == [True, True]
    assert ask(limits, "e", TWO).wait > 0.0
    assert [wait > 0.0 for wait in waits(limits, "dc", RATE)] == [False, True]
    limits.leave(held)
    assert ask(limits, "e", TWO, again=True).wait == 0.0


def test_cancelled_waiting_ends_while_the_store_is_away(empty_redis: RedisServer) -> None:
    server = Server(Config(broker="memory://limits-away", lock=empty_redis.url))
    limiter = server.limiter("smtp", "1/h")

    async def main() -> None:
        assert await limiter.acquire_async()
        waiting = asyncio.create_task(limiter.acquire_async())
        wait = functools.partial(wait_until, lambda: server.inspect.limits()[0].usage[0].waiting)
        await asyncio.to_thread(wait, HANG)
        empty_redis.stop()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())


@pytest.mark.parametrize("times", [1, 2])
def test_slot_taken_by_a_cancelled_coroutine_is_given_back(
    empty_redis: RedisServer, times: int
) -> None:
    server = Server(Config(broker=empty_redis.url, lease=60.0))
    limiter = server.limiter("db", max_running=1)

    async def main() -> None:
        assert await limiter.acquire_async()
        assert await limiter.release_async()
        empty_redis.freeze()
        waiting = asyncio.create_task(limiter.acquire_async())
        for _ in range(200):
            await asyncio.sleep(0.001)
        for _ in range(times):
            waiting.cancel()
            await asyncio.sleep(0)
        empty_redis.thaw()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await server.limiter("db", max_running=1).acquire_async(timeout=HANG / 2)

    asyncio.run(main())
    server.close()


def test_slot_is_lost_when_others_took_it_after_its_key_was_deleted(
    empty_redis: RedisServer, limits: Limits
) -> None:
    held = [slot(limits, who, TWO) for who in "ab"]
    empty_redis.cli("FLUSHALL")
    slot(limits, "c", TWO)

    assert sorted(limits.renew(held, ttl=LEASE)) == [False, True]


class Dying(RedisLimits):
    """Dies as soon as it has asked."""

    def _run(self, script: Script, scope: str, *values: object) -> Any:
        super()._run(script, scope, *values)
        raise KeyboardInterrupt


def test_slot_of_a_process_that_died_at_once_is_listed(empty_redis: RedisServer) -> None:
    with closing(RedisDriver(empty_redis.url)) as driver:
        with pytest.raises(KeyboardInterrupt):
            ask(Dying(driver), "a", TWO)

        [report] = RedisLimits(driver).read()
        assert [one.running for one in report.usage] == [1]


@pytest.mark.parametrize("value", ["garbage", b"\x91\x01", b"\x80"], ids=repr)
def test_value_that_is_not_ours_is_written_over(
    empty_redis: RedisServer, limits: Limits, value: str | bytes
) -> None:
    empty_redis.cli("SET", "mpy:limit:{s}:rate:", value)

    assert [wait > 0.0 for wait in waits(limits, "ab", RATE)] == [False, True]


def test_key_of_another_type_is_an_error_and_stays(
    empty_redis: RedisServer, limits: Limits
) -> None:
    empty_redis.cli("LPUSH", "mpy:limit:{s}:rate:", "x")

    with pytest.raises(NameRefused, match="holds a list, not what is kept there"):
        ask(limits, "a", RATE)
    assert ask(limits, "a", TWO).wait == 0.0


def test_refused_key_among_threads_that_ask_together_fails_alone(
    empty_redis: RedisServer, limits: Limits
) -> None:
    empty_redis.cli("LPUSH", "mpy:limit:{s}:rate:7", "x")
    keeper = SlotKeeper(lambda: limits, lambda: LEASE)

    def enter(number: int) -> object:
        rule = Rule(name="rate", key=str(number), interval=60.0)
        try:
            who, token = f"who {number}", f"token {number}"
            return keeper.enter("s", who, token, [rule], together=True)[0].wait
        except NameRefused as error:
            return str(error)

    answers = together(40, enter)

    assert "holds a list, not what is kept there" in str(answers.pop(7))
    assert answers == [0.0] * 39
    with pytest.raises(NameRefused, match="holds a list, not what is kept there"):
        limits.enter_all([entrant("a", RATE), entrant("b", Rule(name="rate", key="7"))])


def test_limiter_may_be_used_by_a_log_handler(empty_redis: RedisServer) -> None:
    server = Server(Config(broker="memory://log-handler", lock=empty_redis.url))
    alerts: list[str] = []
    done = threading.Event()

    class Alerts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            with server.limiter("alerts", "100/s"):
                alerts.append(record.getMessage())

    def work() -> None:
        with server.limiter("smtp", "100/s"):  # its first connection is warned of
            done.set()

    logger, handler = logging.getLogger("machinery_py"), Alerts()
    logger.addHandler(handler)
    try:
        threading.Thread(target=work, daemon=True).start()
        assert done.wait(HANG)
    finally:
        logger.removeHandler(handler)

    assert "append-only" in alerts[0]
    server.close()

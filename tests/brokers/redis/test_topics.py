"""Topics in Redis: restarts, lost replies, and what others put into a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.brokers.redis.topics import RedisSubscription
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.errors import BrokerUnavailable, NameRefused, PublishUnknown
from machinery_py.testing.conformance.topics import LONG, SHORT, taken
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer

KEY = "mpy:topic:{t}"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def broker(server: RedisServer) -> Iterator[RedisBroker]:
    driver = RedisDriver(server.url)
    yield RedisBroker(driver)
    driver.close()


@pytest.fixture
def subscription(broker: RedisBroker) -> Iterator[RedisSubscription]:
    subscription = broker.subscribe("t")
    yield subscription
    subscription.close()


def test_subscription_survives_a_restart_that_loses_the_stream(
    server: RedisServer, broker: RedisBroker, subscription: RedisSubscription
) -> None:
    broker.broadcast("t", [b"1", b"2"], ttl=LONG)
    assert taken(subscription, 2) == [b"1", b"2"]
    server.stop()
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match="reading a topic"):
            subscription.read(1.0)
    with pytest.raises(BrokerUnavailable, match="sending to a topic"):
        broker.broadcast("t", [b"lost"], ttl=LONG)
    server.start()

    broker.broadcast("t", [b"3"], ttl=LONG)

    assert taken(subscription, 1) == [b"3"]
    assert subscription.missed == 0


def test_broadcast_whose_reply_is_lost_is_not_repeated(server: RedisServer) -> None:
    with Proxy(server.port) as proxy:
        driver = RedisDriver(proxy.through(server.url))
        broker = RedisBroker(driver)
        subscription = broker.subscribe("t")
        broker.broadcast("t", [b"1"], ttl=LONG)
        proxy.drop_next_reply()

        with pytest.raises(PublishUnknown):
            broker.broadcast("t", [b"2"], ttl=LONG)

        assert taken(subscription, 2) == [b"1", b"2"]
        assert subscription.read(SHORT) == []
        subscription.close()
        driver.close()


def test_idle_subscription_asks_once_a_second(
    server: RedisServer, subscription: RedisSubscription
) -> None:
    assert subscription.read(0.0) == []
    server.cli("CONFIG", "RESETSTAT")

    assert subscription.read(0.8) == []

    assert "cmdstat_xread:calls=1," in str(server.cli("INFO", "commandstats"))


def test_stream_lives_as_long_as_its_last_record(server: RedisServer, broker: RedisBroker) -> None:
    def life() -> int:
        return int(str(server.cli("PTTL", KEY)))

    broker.broadcast("t", [b"x"], ttl=20.0)
    assert 10_000 < life() <= 20_000
    broker.broadcast("t", [b"x"], ttl=1.0)
    assert 10_000 < life() <= 20_000
    broker.broadcast("t", [b"x"], ttl=1e9)
    assert 3_000_000 < life() <= 3_600_000


def test_entries_of_others_are_skipped_or_handed_out(
    server: RedisServer, broker: RedisBroker, subscription: RedisSubscription
) -> None:
    server.cli("XADD", KEY, "*", "x", "no record")
    server.cli("XADD", KEY, "*", "r", b"\xff", "u", "never")
    server.cli("XADD", KEY, "*", "r", b"for long", "u", "9" * 5000)
    server.cli("XADD", KEY, "99999999999999-7", "r", b"of a clock ahead", "u", "-1")
    broker.broadcast("t", [b"ours"], ttl=LONG)
    assert taken(subscription, 4) == [b"\xff", b"for long", b"of a clock ahead", b"ours"]


def test_key_of_another_type_is_named(
    server: RedisServer, broker: RedisBroker, subscription: RedisSubscription
) -> None:
    server.cli("SET", KEY, "x")
    with pytest.raises(NameRefused, match=KEY):
        broker.broadcast("t", [b"x"], ttl=LONG)
    with pytest.raises(NameRefused):
        subscription.read(0.0)
    server.cli("DEL", KEY)
    broker.broadcast("t", [b"x"], ttl=LONG)
    assert taken(subscription, 1) == [b"x"]


@pytest.mark.parametrize("since", [0.0, 60.0])
@pytest.mark.parametrize("end", ["DEL", "XDEL", "stays"])
def test_stream_whose_last_id_was_ahead_makes_no_reader_deaf(
    server: RedisServer, broker: RedisBroker, since: float, end: str
) -> None:
    server.cli("XADD", KEY, "1000000000000-7", "r", "old", "u", "1")
    subscription = broker.subscribe("t", since=since)
    tomorrow = f"{(int(time.time()) + 86400) * 1000}-8"
    server.cli("XADD", KEY, tomorrow, "r", "1")  # as by a server's clock that is ahead
    assert taken(subscription, 1) == [b"1"]
    if end == "DEL":  # as when it expires
        server.cli("DEL", KEY)
    elif end == "XDEL":
        server.cli("XDEL", KEY, "1000000000000-7", tomorrow)
    assert subscription.read(SHORT) == []

    for number in (b"2", b"3"):
        broker.broadcast("t", [number], ttl=LONG)

    assert taken(subscription, 2) == [b"2", b"3"]
    assert subscription.missed == 0
    later = broker.subscribe("t")
    broker.broadcast("t", [b"4"], ttl=LONG)
    assert taken(later, 1) == taken(subscription, 1) == [b"4"]
    for one in (later, subscription):
        one.close()

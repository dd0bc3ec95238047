"""Paused queues in particular stores: blocked sleepers in Redis, old files in SQLite."""

from __future__ import annotations

import pathlib
import threading

import pytest

from machinery_py.brokers.base import Delivery
from machinery_py.brokers.redis import consumer as redis_consumer
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.brokers.redis.consumer import RedisConsumer
from machinery_py.brokers.sqlite.broker import SQLiteBroker
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.keys import queue_keys
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.errors import PublishRefused
from machinery_py.testing.conformance.leases import bodies, done, message, put
from machinery_py.testing.waiting import HANG, wait_until
from tests.stores.redis.case import Drivers, clock, open_driver
from tests.support.servers import RedisServer
from tests.support.sqlite_versions import make_first_version

__all__ = ["clock", "open_driver"]

QUEUES = pytest.mark.parametrize("queues", [["q"], ["q", "r"], ["r", "q"]], ids="-".join)


def calls(driver: RedisDriver) -> int:
    """How many commands the server has carried out."""
    text = driver.ask(b"INFO", b"stats", doing="counting").decode()
    return int(text.partition("total_commands_processed:")[2].split()[0])


def blocked(driver: RedisDriver) -> int:
    text = driver.ask(b"INFO", b"clients", doing="counting").decode()
    return int(text.partition("blocked_clients:")[2].split()[0])


@QUEUES
def test_a_sleeper_does_not_spin_at_a_paused_queue_that_is_full(
    open_driver: Drivers, queues: list[str]
) -> None:
    driver = open_driver()
    broker = RedisBroker(driver)
    put(broker, *[b"%d" % number for number in range(100)])
    broker.put([message(b"high", priority=9)], token="")
    broker.pause("q")
    consumer = broker.consume(queues, worker="w")
    consumer.receive(5, 0)
    before = calls(driver)

    assert consumer.receive(5, 1.5) == []

    assert (
        calls(driver) - before < 200
    )  # a claim is 20 commands or so, with those inside the script
    assert driver.ask(b"LLEN", b"q", doing="counting") == 100
    broker.close()


@QUEUES
def test_blocked_client_is_woken_when_its_queue_is_resumed(
    open_driver: Drivers, queues: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_consumer, "BLOCK", HANG * 2)
    monkeypatch.setattr(redis_consumer, "LINK_TIMEOUT", HANG * 3)
    driver = open_driver()
    broker = RedisBroker(driver)
    consumer = RedisBroker(open_driver()).consume(queues, worker="w")
    others = blocked(driver)
    found: list[Delivery] = []
    waiter = threading.Thread(target=lambda: found.extend(consumer.receive(5, HANG)))
    waiter.start()
    wait_until(lambda: blocked(driver) > others, what="asleep at the open queue")
    prefix = queue_keys("q")[1].encode()
    # Pausing wakes it, and then it sleeps elsewhere: it has noted itself where `resume` finds it.
    broker.pause("q")
    wait_until(
        lambda: driver.ask(b"SCARD", prefix + b"v", doing="looking") == 1,
        what="noted beside the paused queue",
    )
    put(broker, b"a", b"b")
    wait_until(lambda: blocked(driver) > others, what="asleep beside the paused queue")
    assert driver.ask(b"LLEN", b"q", doing="counting") == 2

    broker.resume("q")

    waiter.join(HANG / 2)
    assert bodies(found) == [b"a", b"b"]
    assert driver.ask(b"EXISTS", prefix + b"u", doing="looking") == 0
    consumer.close()


def test_message_of_a_dead_blocked_client_returns_to_the_head(
    open_driver: Drivers,
) -> None:
    driver = open_driver()
    broker = RedisBroker(driver)
    consumer = broker.consume(["q", "r"], worker="w")
    assert isinstance(consumer, RedisConsumer)
    put(broker, b"1", b"2", b"3")
    # What BLMOVE does, just before the pause: the claim behind it comes after.
    arrivals = f"{queue_keys('q')[1]}i:{consumer.session}".encode()
    assert driver.ask(b"LMOVE", b"q", arrivals, b"LEFT", b"RIGHT", doing="moving") == b"1"
    broker.pause("q")

    assert consumer.receive(5, 0) == []

    assert driver.ask(b"LRANGE", b"q", b"0", b"-1", doing="looking") == [b"1", b"2", b"3"]
    broker.resume("q")
    found = consumer.receive(5, 0)
    assert [(one.body, one.count, one.strikes) for one in found] == [
        (b"1", 1, 0),
        (b"2", 1, 0),
        (b"3", 1, 0),
    ]
    broker.close()


def test_claim_with_a_lost_reply_is_delivered_though_paused(
    open_driver: Drivers,
) -> None:
    broker = RedisBroker(open_driver())
    consumer = broker.consume(["q", "r"], worker="w")
    put(broker, b"1", b"2")
    assert bodies(consumer.receive(1, 0)) == [b"1"]
    consumer._lost.append((1, 1e12))  # the number of that claim
    broker.pause("q")

    found = consumer.receive(5, 0, ("r", "q"))

    assert bodies(found) == [b"1"]  # it was claimed before, and nobody else would ever get it
    assert consumer.dispose(done(*found)) == [True]
    broker.close()


def test_a_full_server_can_be_paused_and_resumed() -> None:
    with RedisServer() as server:
        driver = RedisDriver(server.url)
        broker = RedisBroker(driver)
        consumer = broker.consume(["q", "r"], worker="w")
        put(broker, b"1")
        driver.ask(b"CONFIG", b"SET", b"maxmemory", b"1mb", doing="filling")
        with pytest.raises(PublishRefused):
            put(broker, b"2")

        broker.pause("q")
        assert consumer.receive(5, 0.05) == []
        broker.resume("q")

        assert bodies(consumer.receive(5, 0.05)) == [b"1"]
        broker.close()
        driver.close()


def test_a_pause_survives_the_death_of_the_server() -> None:
    with RedisServer(appendonly=True) as server:
        driver = RedisDriver(server.url)
        broker = RedisBroker(driver)
        put(broker, b"1")
        broker.pause("q")
        server.kill()
        server.start()

        consumer = broker.consume(["q"], worker="w")
        assert broker.paused() == {"q"}
        assert consumer.receive(5, 0) == []
        broker.resume("q")
        assert bodies(consumer.receive(5, 0)) == [b"1"]
        broker.close()
        driver.close()


def test_file_of_the_first_version_is_migrated_for_pausing(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "machinery.db"
    make_first_version(path)
    driver = SQLiteDriver(path)
    broker = SQLiteBroker(driver)
    put(broker, b"1")
    broker.pause("q")
    consumer = broker.consume(["q"], worker="w")
    assert consumer.receive(5, 0) == []
    broker.resume("q")
    assert bodies(consumer.receive(5, 0)) == [b"1"]
    broker.close()
    driver.close()

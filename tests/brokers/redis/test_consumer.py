"""The sessions of a consumer, and what the file of a dead one says of its receipts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from machinery_py.backends.base import FENCED, SETTLED
from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.brokers.base import Delivery, Disposal, Message
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.brokers.redis.consumer import KIND, began_by, series_of
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.session_files import host_file
from machinery_py.stores.base import Settlement
from machinery_py.stores.redis import RedisStore

MESSAGE = Message(uuid="u", name="n", queue="q", body=b"x")


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_receipts_of_a_dead_session_are_found_by_queue() -> None:
    file = host_file(KIND)
    for number, queue in ((1, "q"), (2**32 + 1, "q"), (2**53 - 1, "r"), (1, "r")):
        file.begins((number, series_of(queue)))

    q, r, s = began_by(file.key, ["q", "r", "s"], ["q", "r", "s"]) or ()

    assert sorted(q) == ["1", str(2**32 + 1)]
    assert sorted(r) == ["1", str(2**53 - 1)]
    assert s == []
    assert began_by(file.key, ["r"], ["q", "r"]) == [r]


def test_a_run_of_an_unknown_queue_makes_the_file_worth_nothing() -> None:
    file = host_file(KIND)
    file.begins((1, series_of("q")))
    file.begins((2, series_of("another")))

    assert began_by(file.key, ["q"], ["q", "r"]) is None


@pytest.fixture
def driver(redis_url: str) -> Iterator[RedisDriver]:
    driver = RedisDriver(redis_url)
    yield driver
    driver.close()


def at_next_now(driver: RedisDriver, happens: Callable[[], object]) -> None:
    """Let something happen while an argument is made: when it asks for the time."""
    now = driver.now

    def once() -> str:
        driver.now = now  # type: ignore[method-assign] - it happens once
        happens()
        return now()

    driver.now = once  # type: ignore[method-assign]


def empty(driver: RedisDriver) -> None:
    """As a server that restarts without its data; receipts are counted from 1 again."""
    driver.ask(b"FLUSHALL", doing="emptying")


def test_claim_and_its_receipts_are_of_one_session(driver: RedisDriver) -> None:
    broker = RedisBroker(driver)
    consumer = broker.consume(["q"], worker="w")

    def lose_session() -> None:
        empty(driver)
        assert not consumer.beat()
        broker.put([MESSAGE], token="")

    at_next_now(driver, lose_session)
    found = consumer.receive(1, 0) or consumer.receive(1, 0)

    assert consumer.dispose([Disposal(delivery=one) for one in found]) == [True]


def test_end_of_a_delivery_is_of_its_own_session(driver: RedisDriver) -> None:
    broker = RedisBroker(driver)
    store = RedisStore(broker, RedisBackend(driver))
    broker.put([MESSAGE], token="")
    session = store.open_session(["q"], worker="w")
    (old,) = session.receive(1, 0)

    def receive_anew() -> None:
        empty(driver)
        assert not session.beat()
        broker.put([MESSAGE], token="")
        new.extend(session.receive(1, 0))

    for end in (
        lambda: session.consumer.dispose([Disposal(delivery=old)]) == [False],
        lambda: session.settle([Settlement(delivery=old, uuid="u", name="n")]) == [FENCED],
    ):
        new: list[Delivery] = []
        at_next_now(driver, receive_anew)
        assert end()
        assert session.consumer.holds(new) == [True]
        assert session.settle([Settlement(delivery=new[0], uuid="u", name="n")]) == [SETTLED]

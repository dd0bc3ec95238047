"""Sessions of a consumer: claims while another one starts, and the file of a dead one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from machinery_py.brokers.base import Disposal, Message
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.brokers.redis.consumer import KIND, RedisConsumer, began_by, series_of
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.connection import RedisConnection
from machinery_py.connections.session_files import host_file


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


def test_claim_while_a_session_starts_can_be_ended(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = RedisDriver(redis_url)
    broker = RedisBroker(driver)
    consumer = broker.consume(["q"], worker="w")
    assert isinstance(consumer, RedisConsumer)
    broker.put([Message(uuid="u", name="n", queue="q", body=b"x")], token="")
    driver.ask(b"DEL", f"{consumer.keys[0][1]}s".encode(), doing="forgetting all sessions")
    open_link, began = consumer._open_link, []

    def beat_and_open_link() -> RedisConnection:
        if not began:
            began.append(consumer.beat())
        return open_link()

    monkeypatch.setattr(consumer, "_open_link", beat_and_open_link)

    deliveries = consumer.receive(1, 0.0) or consumer.receive(1, 0.0)

    assert began == [False]
    assert consumer.dispose([Disposal(delivery=one) for one in deliveries]) == [True]
    consumer.close()
    broker.close()
    driver.close()

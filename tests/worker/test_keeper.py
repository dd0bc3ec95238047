"""The keeper beats for processes that live and are silent, and for no others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from machinery_py import Config, Server
from machinery_py.brokers.base import WorkerInfo
from machinery_py.config.urls import SCHEMES
from machinery_py.stores.open import FAMILIES, Family, add_family
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.control.keeper import Keeper, ToldProcess
from machinery_py.worker.control.signs import nested
from tests.support.freezing import stands_still
from tests.support.servers import RedisServer

LEASE = 9.0  # seconds; a third and a quarter of it are round
FACTS = {
    "session": "s",
    "queues": ["q"],
    "config": {},
    "lease": LEASE,
    "stall_timeout": 30.0,
}


def told(**facts: object) -> str:
    return json.dumps([FACTS | facts])


def due(process: ToldProcess, *steps: float) -> list[bool]:
    """Whether a beat is due after each of these times."""
    return [bool(process.due(step)) for step in steps]


@pytest.fixture
def process() -> ToldProcess:
    kept = ToldProcess(os.getpid())
    kept.hear(told())
    return kept


def test_process_that_gives_signs_is_not_beaten_for(process: ToldProcess) -> None:
    for _ in range(20):
        assert due(process, 1.0, 1.0) == [False, False]
        process.hear(told())


def test_silent_process_is_beaten_for_each_quarter_of_a_lease(process: ToldProcess) -> None:
    assert due(process, 2.9, 0.1) == [False, True]
    assert due(process, 2.0, 0.25) == [False, True]
    assert process.is_kept

    process.hear(told())

    assert not process.is_kept
    assert due(process, 2.9, 0.1) == [False, True]


def test_process_that_stays_silent_loses_its_lease_in_the_end(process: ToldProcess) -> None:
    assert due(process, *[3.0] * 11) == [True] * 9 + [False] * 2
    assert not process.is_kept


def test_session_that_was_dropped_is_not_beaten_for(process: ToldProcess) -> None:
    process.hear(told(session="t"))

    assert [one.name for one in process.due(5.0)] == ["t"]

    process.hear("[]")
    assert due(process, 5.0, 5.0) == [False, False]


@pytest.mark.parametrize(
    "text", ["", "oops", "7", "[1]", '[{"config": {"broker": "redis://:secret@host"}}]', "[[]]"]
)
def test_line_that_is_no_sign_changes_nothing(
    process: ToldProcess, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    with caplog.at_level("DEBUG", "machinery_py"):
        process.hear(text)

    assert due(process, 3.0) == [True]
    assert "secret" not in caplog.text


def test_stopped_process_is_not_beaten_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            kept = ToldProcess(child.pid)
            kept.hear(told())
            assert due(kept, 3.0, 9.0) == [True, True]
            os.kill(child.pid, signal.SIGSTOP)
            wait_until(lambda: stands_still(child.pid), HANG)

            assert due(kept, 3.0, 3.0, 3.0) == [False] * 3

            os.kill(child.pid, signal.SIGCONT)
            wait_until(lambda: not stands_still(child.pid), HANG)
            assert due(kept, 3.0) == [True]
        finally:
            child.kill()


# With a store


@pytest.fixture
def server(empty_redis: RedisServer) -> Iterator[Server]:
    config = Config(broker=empty_redis.url, lease=LEASE, publish_timeout=1.0)
    with contextlib.closing(Server(config=config)) as server:
        yield server


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    keeper = Keeper()
    yield keeper
    keeper.close()


def only_worker(server: Server) -> WorkerInfo:
    (worker,) = server.broker.workers()
    return worker


def test_beats_say_that_the_worker_is_stalled_after_a_lease(server: Server, keeper: Keeper) -> None:
    consumer = server.broker.consume(["q"], worker="w")
    keeper.hear(os.getpid(), told(session=consumer.session, config=nested(server.config)))
    first = only_worker(server)

    keeper.check(LEASE / 3)
    second = only_worker(server)
    keeper.check(LEASE)

    assert first.beat_at < second.beat_at < only_worker(server).beat_at
    assert (second.stalled, only_worker(server).stalled) == (False, True)
    consumer.close()
    keeper.check(LEASE)
    assert server.broker.workers() == []
    assert not keeper.sessions()


def test_session_is_kept_while_its_store_is_away(
    server: Server, keeper: Keeper, empty_redis: RedisServer
) -> None:
    consumer = server.broker.consume(["q"], worker="w")
    keeper.hear(os.getpid(), told(session=consumer.session, config=nested(server.config)))
    keeper.check(LEASE / 3)
    beat_at = only_worker(server).beat_at

    empty_redis.freeze()
    keeper.check(LEASE / 4)
    empty_redis.thaw()
    assert [one.name for one in keeper.sessions()] == [consumer.session]
    keeper.check(LEASE / 4)

    assert only_worker(server).beat_at > beat_at
    consumer.close()


class FailingFamily(Family):
    def close(self) -> None:
        raise RuntimeError("already closed")


def test_broker_that_fails_to_close_does_not_end_the_keeper(
    keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    add_family("failing", f"{__name__}:FailingFamily")
    try:
        keeper.hear(os.getpid(), told(config={"broker": "failing://"}))
        keeper.check(LEASE / 3)
        keeper.hear(os.getpid(), "[]")

        keeper.check(0.0)
    finally:
        del FAMILIES["failing"], SCHEMES["failing"]

    assert "already closed" in caplog.text


def test_process_that_has_ended_is_forgotten(server: Server, keeper: Keeper) -> None:
    consumer = server.broker.consume(["q"], worker="w")
    keeper.hear(os.getpid(), told(session=consumer.session, config=nested(server.config)))
    beat_at = only_worker(server).beat_at

    keeper.forget(os.getpid())
    keeper.check(LEASE)

    assert only_worker(server).beat_at == beat_at
    consumer.close()


def test_settings_of_a_broker_are_told_as_a_file_has_them() -> None:
    config = Config.from_mapping(
        {"broker": "redis://:secret@host:1", "lease": 3.0, "redis": {"master_name": "m"}}
    )

    assert nested(config) == {
        "broker": "redis://:secret@host:1",
        "lease": 3.0,
        "redis": {"master_name": "m"},
    }
    assert Config.from_mapping(json.loads(json.dumps(nested(config)))) == config

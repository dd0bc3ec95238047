"""The Redis broker where a moment lies between two of its steps."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from machinery_py.brokers.base import Message
from machinery_py.brokers.redis import scripts
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.brokers.redis.messages import near
from machinery_py.clock import moment_of
from machinery_py.connections.redis.scripts import Script
from machinery_py.errors import NameRefused
from machinery_py.tasks.signature import Signature
from machinery_py.testing.clocks import ManualClock
from machinery_py.wire.signatures import encode_signature
from tests.stores.redis.case import Drivers, clock, open_driver

__all__ = ["clock", "open_driver"]


def test_stats_count_a_message_that_comes_due_meanwhile(
    open_driver: Drivers, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, other = RedisBroker(open_driver()), RedisBroker(open_driver())
    later = clock.now() + dt.timedelta(seconds=10)
    body = encode_signature(Signature(name="n", uuid="t", routing_key="mail"))
    broker.put([Message(uuid="t", name="n", queue="mail", body=body, eta=later)], token="")
    run = broker.driver.run

    def run_and_move(script: Script, *values: object, **options: Any) -> Any:
        reply = run(script, *values, **options)
        if script is scripts.STATS:
            clock.advance(11)
            other.mover.step()
        return reply

    monkeypatch.setattr(broker.driver, "run", run_and_move)
    counted = broker.stats()
    moved = broker.stats()

    assert [(one.waiting, one.delayed) for one in moved] == [(1, 0)]
    assert sum(one.waiting + one.delayed for one in counted) == 1


def test_stats_leave_what_is_due_and_tell_how_long_it_is(
    open_driver: Drivers, clock: ManualClock
) -> None:
    broker = RedisBroker(open_driver())
    due = clock.now() + dt.timedelta(seconds=5)
    messages = [
        Message(uuid=uuid, name="n", queue="mail", body=b"{}", eta=due, tenant="a") for uuid in "ab"
    ]
    broker.put(messages, token="")
    clock.advance(7)

    for _ in range(2):
        [line] = broker.stats()
        assert (line.waiting, line.delayed, line.oldest_at) == (2, 0, due)
    assert broker.waiting("mail") == 0


def fair(text: str) -> Message:
    return Message(uuid=text, name="n", queue="mail", body=text.encode(), tenant=text[0])


def test_go_messages_take_turns_as_one_tenant_of_a_fair_queue(open_driver: Drivers) -> None:
    driver = open_driver()
    broker = RedisBroker(driver)
    broker.put([fair(f"a{number}") for number in range(4)], token="")
    driver.ask(b"RPUSH", b"mail", *(b"g%d" % number for number in range(5)), doing="as Go")
    consumer = broker.consume(["mail"], worker="w")

    assert broker.waiting("mail") == 9
    found = [one.body.decode() for _ in range(9) for one in consumer.receive(1, 0)]

    assert [one for one in found if one[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert [one for one in found if one[0] == "g"] == ["g0", "g1", "g2", "g3", "g4"]
    assert {one[0] for one in found[:2]} == {one[0] for one in found[2:4]} == {"a", "g"}
    consumer.close()


def test_tenant_of_a_fair_queue_waits_for_one_turn_of_a_hundred_thousand(
    open_driver: Drivers,
) -> None:
    driver = open_driver()
    broker = RedisBroker(driver)
    consumer = broker.consume(["mail"], worker="w")
    broker.put([fair(chr(300 + number)) for number in range(50)], token="")
    assert len(consumer.receive(50, 0)) == 50
    for start in range(0, 100_000, 2000):
        broker.put([fair(f"a{number}") for number in range(start, start + 2000)], token="")
    assert len(consumer.receive(100, 0)) == 100

    broker.put([fair("b0"), fair("b1")], token="")

    assert b"b0" in [one.body for one in consumer.receive(2, 0)]
    assert b"b1" in [one.body for one in consumer.receive(3, 0)]
    lanes = driver.ask(b"ZRANGE", b"mpy:{mail}:x", b"0", b"-1", doing="looking")
    assert len(lanes) <= 3  # what is over is forgotten
    consumer.close()


def test_worker_that_knows_no_fair_queues_takes_nothing_from_one(open_driver: Drivers) -> None:
    driver = open_driver()
    broker = RedisBroker(driver)
    broker.put([fair("a1"), fair("b1")], token="")

    levels = driver.ask(b"ZREVRANGE", b"mpy:{mail}:l", b"0", b"-1", doing="as its claim")
    assert levels == [b"fair"]
    with pytest.raises(NameRefused):  # so it does not think the level empty, and forget it
        driver.ask(b"LPOP", b"mpy:{mail}:p:" + levels[0], doing="as its claim")

    assert len(broker.consume(["mail"], worker="w").receive(9, 0)) == 2


@pytest.mark.parametrize("score", [1e18, 1e300, float("inf")])
def test_moment_of_a_foreign_score_can_be_shown_in_any_time_zone(score: float) -> None:
    shown = moment_of(near(score)).astimezone(dt.timezone(dt.timedelta(hours=14)))
    assert shown.year == 9999

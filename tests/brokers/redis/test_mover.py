"""Due messages on their way from Go's delayed set to their queues."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

import pytest

from machinery_py.brokers.base import WAITING, Disposal, Fate, Message
from machinery_py.brokers.redis import scripts
from machinery_py.brokers.redis.broker import ROOM, RedisBroker
from machinery_py.brokers.redis.consumer import RedisConsumer
from machinery_py.brokers.redis.mover import MOVE
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.testing.clocks import ManualClock
from machinery_py.wire.signatures import encode_signature
from tests.stores.redis.case import Drivers, clock, open_driver

__all__ = ["clock", "open_driver"]

ETA = dt.timedelta(seconds=10)


def message(uuid: str, *, eta: dt.datetime | None = None, queue: str = "mail") -> Message:
    body = encode_signature(Signature(name="n", uuid=uuid, routing_key=queue, eta=eta))
    return Message(uuid=uuid, name="n", queue=queue, body=body, eta=eta)


@pytest.fixture
def broker(open_driver: Drivers) -> RedisBroker:
    return RedisBroker(open_driver())


@pytest.fixture
def consumer(broker: RedisBroker) -> Iterator[RedisConsumer]:
    consumer = broker.consume(["mail"], worker="w")
    yield consumer
    consumer.close()


def put_due(broker: RedisBroker, clock: ManualClock, count: int) -> None:
    """Put messages that are all due now."""
    eta = clock.now() + ETA
    broker.put([message(f"late{number}", eta=eta) for number in range(count)], token="")
    clock.advance(10)


def listed(broker: RedisBroker) -> int:
    """Messages on the list itself; `stats` and `pending` count what is due as well."""
    return broker.waiting("mail")


def test_fresh_message_passes_thousands_that_are_due_at_once(
    broker: RedisBroker, consumer: RedisConsumer, clock: ManualClock
) -> None:
    put_due(broker, clock, 3000)
    for _ in range(10):
        assert consumer.receive(50, timeout=1)
        assert listed(broker) <= 2 * MOVE

    broker.put([message("fresh")], token="")
    ahead = listed(broker)
    claims = [[one.body for one in consumer.receive(50, timeout=0)] for _ in range(ahead // 50 + 1)]

    assert message("fresh").body in [body for claim in claims for body in claim]


def test_fresh_message_passes_hundreds_that_have_waited_for_their_turn(
    broker: RedisBroker, consumer: RedisConsumer, clock: ManualClock
) -> None:
    broker.put([message(f"held{number}") for number in range(500)], token="")
    turn = clock.now() + ETA
    wait = [
        Disposal(delivery=one, fate=Fate.LATER, eta=turn, reason=WAITING)
        for one in consumer.receive(500, timeout=0)
    ]
    assert consumer.dispose(wait) == [True] * 500
    clock.advance(10)
    consumer.beat()
    broker.tend()

    broker.put([message("fresh")], token="")
    found = [one.body for _ in range(25) for one in consumer.receive(10, timeout=0)]

    assert message("fresh").body in found


def test_each_claim_moves_as_many_due_messages_as_it_takes(
    broker: RedisBroker, consumer: RedisConsumer, clock: ManualClock
) -> None:
    put_due(broker, clock, 3000)
    broker.put([message(f"early{number}") for number in range(2000)], token="")
    assert consumer.receive(50, timeout=0)
    before = listed(broker)

    for _ in range(10):
        assert len(consumer.receive(50, timeout=0)) == 50

    assert listed(broker) == before


def test_house_keeping_moves_to_a_long_list_only_what_has_waited_long(
    broker: RedisBroker, clock: ManualClock
) -> None:
    put_due(broker, clock, 2 * MOVE + 1)

    while broker.tend() == 0.0:
        assert listed(broker) <= ROOM
    assert listed(broker) == ROOM

    clock.advance(scripts.MOVE_PATIENCE / 1e6 + 1)
    while broker.tend() == 0.0:
        pass
    assert listed(broker) == 2 * MOVE + 1


def test_stats_count_what_is_due_as_waiting_wherever_it_is(
    broker: RedisBroker, clock: ManualClock
) -> None:
    put_due(broker, clock, 2 * ROOM)
    broker.put([message("later", eta=clock.now() + ETA)], token="")

    [stats] = broker.stats()

    assert (stats.waiting, stats.delayed) == (2 * ROOM, 1)
    assert listed(broker) == ROOM


def test_due_message_of_a_worker_goes_where_its_bytes_say(
    broker: RedisBroker, clock: ManualClock
) -> None:
    eta = clock.now() + ETA
    plain = Signature(name="n", uuid="1", routing_key="mail", eta=eta)
    signatures = [
        plain.replace(priority=7),
        plain.replace(uuid="2", args=[Arg.of({"UUID": "x", "RoutingKey": "other", "Priority": 9})]),
        plain.replace(uuid="3", routing_key="{tag}.mail", name='quo"ted'),
        plain.replace(
            uuid="5", args=[Arg.of({"x": 1, "Priority": 9, "Immutable": False, "RetryCount": 0})]
        ),
        plain.replace(uuid="4", on_success=(plain.replace(routing_key="other", priority=9),)),
    ]
    broker.put(
        [
            Message(
                uuid=one.uuid,
                name=one.name,
                queue=one.routing_key,
                body=encode_signature(one),
                eta=eta,
            )
            for one in signatures
        ],
        token="",
    )
    clock.advance(10)

    moved = [*broker.pending("mail", 10), *broker.pending("{tag}.mail", 10)]

    assert sorted((one.uuid, one.queue, one.priority) for one in moved) == [
        ("1", "mail", 7),
        ("2", "mail", 0),
        ("3", "{tag}.mail", 0),
        ("4", "mail", 0),
        ("5", "mail", 0),
    ]


def test_claim_finds_what_is_due_after_redis_forgot_the_scripts(
    broker: RedisBroker, consumer: RedisConsumer, clock: ManualClock
) -> None:
    put_due(broker, clock, 100)
    assert len(consumer.receive(50, timeout=1)) == 50

    broker.driver.ask(b"SCRIPT", b"FLUSH", doing="forgetting")

    assert len(consumer.receive(50, timeout=1)) == 50

"""The SQS broker passes the suites of brokers, on moto's server; what SQS cannot do is refused."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import secrets
from collections.abc import Sequence
from typing import Any

import pytest
from machinery_sqs.aws import connect, split
from machinery_sqs.broker import SQSBroker
from machinery_sqs.consumer import FREE

from machinery_py import Signature
from machinery_py.brokers.base import Broker, Consumer, Disposal, Fate, Message
from machinery_py.errors import (
    BrokerUnavailable,
    ConfigError,
    NameRefused,
    PublishRefused,
    StoreUnusable,
)
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.brokers import AWKWARD, BrokerConformance, OpenBroker
from machinery_py.testing.conformance.leases import bodies, done, message, put
from machinery_py.testing.waiting import together
from machinery_py.wire.signatures import encode_signature

SENDABLE = {name: body for name, body in AWKWARD.items() if len(body) < 1_000_000}

RECEIPTS = "SQS knows what was received, not what ran: test_receipts_beyond_the_first_five_…"
NOT_PROMISED = {
    "test_batch_is_put_whole_or_not_at_all": "a put is requests of ten: features.whole_batches",
    "test_message_run_by_a_dead_consumer_returns_with_a_strike": RECEIPTS,
    "test_each_death_is_a_strike": RECEIPTS,
    "test_message_not_run_by_a_dead_consumer_gets_no_strike": RECEIPTS,
    "test_message_only_held_gets_no_strike_however_many_die": RECEIPTS,
    "test_strike_is_for_the_queue_whose_message_ran": RECEIPTS,
    "test_claimed_suspect_that_did_not_run_keeps_its_strikes": RECEIPTS,
    "test_dead_letter_keeps_its_strikes": RECEIPTS,
    "test_consumer_that_was_given_up_goes_on_as_a_new_one": RECEIPTS,
}


@pytest.fixture
def clock(moto_clock: ManualClock) -> ManualClock:
    return moto_clock


@pytest.fixture
def broker(sqs: Any, clock: ManualClock) -> SQSBroker:
    return SQSBroker(sqs, prefix=f"t{secrets.token_hex(4)}-", lease=30.0, clock=clock)


class TestSQSBroker(BrokerConformance):
    lease = 30.0  # SQS itself takes back what is not renewed, and waits for no look

    @pytest.fixture
    def clock(self, moto_clock: ManualClock) -> ManualClock:
        return moto_clock

    @pytest.fixture
    def open_broker(self, sqs: Any, clock: ManualClock) -> OpenBroker:
        prefix = f"t{secrets.token_hex(4)}-"
        return lambda: SQSBroker(sqs, prefix=prefix, lease=self.lease, clock=clock)

    def crash_consumer(
        self,
        broker: Broker,
        consumer: Consumer,
        clock: ManualClock,
        survivors: Sequence[Consumer] = (),
    ) -> None:
        for _ in range(3):
            clock.advance(self.lease * 0.6)
            for survivor in survivors:
                assert survivor.beat()

    @pytest.fixture(autouse=True)
    def is_promised(self, request: pytest.FixtureRequest) -> None:
        if request.node.originalname in NOT_PROMISED:
            pytest.skip(NOT_PROMISED[request.node.originalname])

    @pytest.mark.parametrize("body", SENDABLE.values(), ids=SENDABLE)
    def test_bytes_are_read_back_unchanged(
        self, broker: Broker, consumer: Consumer, body: bytes
    ) -> None:
        super().test_bytes_are_read_back_unchanged(broker, consumer, body)

    def test_any_name_is_a_queue_name(self, broker: Broker) -> None:
        for name in ("mail:high", "日本", "a b", "", "x" * 80, "q-dead", "q-dead.fifo"):
            with pytest.raises(NameRefused, match="SQS takes up to 75 letters"):
                put(broker, b"a", queue=name)

    def test_all_messages_due_at_one_moment_are_delivered(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        eta = clock.now() + dt.timedelta(seconds=5)
        broker.put([message(b"%d" % number, eta=eta) for number in range(25)], token="")
        clock.advance(5.5)
        assert len(consumer.receive(100, 0)) == 25

    def test_two_consumers_never_hold_one_message(
        self, broker: Broker, open_broker: OpenBroker
    ) -> None:
        put(broker, *(b"%d" % number for number in range(45)))

        def drain(_: int) -> list[bytes]:
            consumer = broker.consume(["q"], worker="w")
            taken: list[bytes] = []
            while found := consumer.receive(3, 0):
                taken += bodies(found)
                assert all(consumer.dispose(done(*found)))
            return taken

        taken = sorted(itertools.chain(*together(3, drain)), key=int)
        assert taken == [b"%d" % number for number in range(45)]

    def test_purge_deletes_waiting_messages_only(
        self, broker: Broker, consumer: Consumer, clock: ManualClock
    ) -> None:
        put(broker, b"held", b"1", b"2")
        (held,) = consumer.receive(1, 0)
        put(broker, b"r", queue="r")

        assert (broker.purge("q"), broker.purge("q"), broker.purge("nobody")) == (2, 0, 0)

        assert consumer.dispose([Disposal(delivery=held, fate=Fate.BACK)]) == [True]
        assert bodies(consumer.receive(5, 0)) == [b"held"]
        assert broker.waiting("r") == 1


def test_receipts_beyond_the_first_five_are_strikes(broker: Broker, clock: ManualClock) -> None:
    put(broker, b"a")
    seen: list[tuple[int, int]] = []
    for _ in range(FREE + 2):
        (delivery,) = broker.consume(["q"], worker="w").receive(1, 0)
        seen.append((delivery.strikes, delivery.count))
        clock.advance(31.0)
    assert seen == [(max(0, receipt - FREE), receipt) for receipt in range(1, FREE + 3)]


def test_eta_beyond_what_sqs_delays_is_kept(broker: Broker, clock: ManualClock) -> None:
    put_of = message(b"late", eta=clock.now() + dt.timedelta(hours=1))
    broker.put([put_of], token="")
    consumer = broker.consume(["q"], worker="w")
    sent_at = clock.now()

    for _ in range(4):
        clock.advance(895.0)
        assert consumer.receive(5, 0) == []
        clock.advance(5.0)
    (delivery,) = consumer.receive(5, 0)

    assert (delivery.body, delivery.count) == (b"late", 1)
    assert delivery.sent_at is not None
    assert abs((delivery.sent_at - sent_at).total_seconds()) < 1.0


def of_group(group: str, text: str, queue: str = "q.fifo") -> Message:
    signature = Signature.of("note", text).replace(
        uuid=f"task_{text}", broker_message_group_id=group, routing_key=queue
    )
    return Message(uuid=signature.uuid, name="note", queue=queue, body=encode_signature(signature))


def test_fifo_queue_hands_out_one_of_a_group_in_order(broker: Broker, clock: ManualClock) -> None:
    sent = [of_group(group, f"{group}{n}") for n in range(3) for group in "ab"]
    assert broker.put(sent, token="t")
    consumer = broker.consume(["q.fifo"], worker="w")

    for turn in range(3):
        found = consumer.receive(10, 0)
        assert bodies(found) == [one.body for one in sent[2 * turn : 2 * turn + 2]]
        assert consumer.receive(10, 0) == []
        if turn == 0:
            assert consumer.beat()
            consumer.dispose([Disposal(delivery=one, fate=Fate.BACK) for one in found])
            found = consumer.receive(10, 0)
            assert bodies(found) == [one.body for one in sent[:2]]
        assert consumer.dispose(done(*found)) == [True, True]


def test_fifo_task_sent_again_within_five_minutes_is_kept(broker: Broker) -> None:
    again = of_group("a", "same")
    assert broker.put([again], token="") and broker.put([again], token="")
    assert broker.waiting("q.fifo") == 2


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (of_group("", "x"), "needs broker_message_group_id"),
        (of_group("g", "x", "q"), "keeps no order of group 'g'"),
        (message(b"no signature", queue="q.fifo"), "needs broker_message_group_id"),
        (message(b"x" * 1_100_000), "and queue 'q' takes"),
    ],
)
def test_message_that_the_queue_cannot_take_is_refused(
    broker: Broker, one: Message, words: str
) -> None:
    with pytest.raises(PublishRefused, match=words) as caught:
        broker.put([message(b"good"), one], token="")
    assert caught.value.permanent
    assert broker.waiting("q") == 0


def test_gos_message_is_delivered_as_it_is(broker: SQSBroker, sqs: Any) -> None:
    body = b'{"UUID":"task_1","Name":"add","SQSReceiptHandle":"old","Args":null}'
    put(broker, b"makes the queue")
    url = sqs.get_queue_url(QueueName=broker.queues.prefix + "q")["QueueUrl"]
    sqs.send_message(QueueUrl=url, MessageBody=body.decode())

    consumer = broker.consume(["q"], worker="w")
    first, delivery = consumer.receive(5, 0)

    assert (delivery.body, delivery.count, delivery.parks) == (body, 1, 0)
    assert len(str(delivery.receipt)) > 50 and delivery.receipt != first.receipt
    consumer.dispose([Disposal(delivery=delivery, fate=Fate.LATER)])
    (again,) = consumer.receive(5, 0)
    assert (again.body, again.parks) == (body, 1)  # no receipt of ours goes back


def test_queue_of_the_redrive_policy_has_the_dead_letters(
    sqs: Any, clock: ManualClock, broker: SQSBroker
) -> None:
    dead = sqs.create_queue(QueueName=f"{broker.queues.prefix}morgue")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=dead, AttributeNames=["QueueArn"])["Attributes"]
    policy = {"deadLetterTargetArn": arn["QueueArn"], "maxReceiveCount": "1"}
    attributes = {"RedrivePolicy": json.dumps(policy)}
    sqs.create_queue(QueueName=f"{broker.queues.prefix}q", Attributes=attributes)
    put(broker, b"buried by us", b"moved by SQS")
    consumer = broker.consume(["q"], worker="w")

    ours, _ = consumer.receive(2, 0)
    consumer.dispose([Disposal(delivery=ours, fate=Fate.DEAD, reason="failed", uuid="task_9")])
    clock.advance(31.0)
    assert consumer.receive(2, 0) == []

    found = {letter.body: (letter.reason, letter.uuid) for letter in broker.dead_letters(limit=9)}
    assert found == {b"buried by us": ("failed", "task_9"), b"moved by SQS": ("redrive", "")}


def test_failing_queue_does_not_withhold_what_was_claimed(broker: SQSBroker, sqs: Any) -> None:
    put(broker, b"a")
    consumer = broker.consume(["q", "r"], worker="w")
    sqs.delete_queue(QueueUrl=broker.queues.open("r").url)

    assert bodies(consumer.receive(5, 0)) == [b"a"]
    with pytest.raises(StoreUnusable, match="receiving from queue 'r': AWS answers"):
        consumer.receive(5, 0)


def test_put_that_stored_a_part_goes_on_from_there(broker: SQSBroker, sqs: Any) -> None:
    messages = [message(b"1"), message(b"2", queue="r")]
    url = broker.queues.open("r").url
    sqs.delete_queue(QueueUrl=url)

    with pytest.raises(PublishRefused) as caught:
        broker.put(messages, token="t")
    sqs.create_queue(QueueName=url.rpartition("/")[2])

    assert caught.value.left == frozenset({1})
    assert broker.put(messages, token="t")
    assert (broker.waiting("q"), broker.waiting("r")) == (1, 1)


def test_service_that_is_away_is_told_without_its_address(endpoint: str) -> None:
    client = connect("sqs", "eu-west-1", "http://127.0.0.1:1/secret", 1.0)
    with pytest.raises(BrokerUnavailable, match="opening queue 'q': EndpointConnectionError") as e:
        SQSBroker(client).put([message(b"a")], token="")
    assert "secret" not in str(e.value)


@pytest.mark.parametrize("url", ["sqs://key:secret@eu-west-1", "sqs://host:5000/a/b"])
def test_url_with_more_than_region_and_prefix_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected scheme://region/prefix") as caught:
        split(url)
    assert "secret" not in str(caught.value)

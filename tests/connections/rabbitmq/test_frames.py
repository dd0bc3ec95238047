"""Frames that we write and read ourselves equal pika's; confirms and acks come in batches."""

from __future__ import annotations

import datetime as dt
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pika
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pika import frame, spec

from machinery_py.brokers.rabbitmq.fetch import Fetch
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.connections.rabbitmq.frames import (
    ACK,
    NACK,
    OVERHEAD,
    AddressedMessage,
    DeliveryFields,
    Properties,
    Writer,
    acks,
    nacks,
    read_confirm,
)
from machinery_py.connections.rabbitmq.io_thread import AmqpConnection, AmqpConnectionLost, Channel
from machinery_py.connections.rabbitmq.io_thread import resolve as fill
from machinery_py.connections.rabbitmq.publisher import Batch, Confirmation, Confirms, Publisher
from machinery_py.testing.waiting import HANG
from tests.support.proxy import REPLIES, Proxy
from tests.support.servers import RabbitMQServer

MOST = 4096 - 8

shorts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
# Up to 1.3, pika reads an integer of 64 bits as unsigned; it writes one where 32 do not suffice.
LEAST = -(2**31) if pika.__version__.startswith("1.3.") else -(2**63)
values = st.one_of(
    st.integers(LEAST, 2**63 - 1),
    shorts,
    st.booleans(),
    st.binary(max_size=20),
    st.none(),
    st.lists(st.integers(-5, 5), max_size=3),
    st.dictionaries(shorts, st.integers(-5, 5), max_size=2),
)
message_bodies = st.one_of(
    st.binary(max_size=50), st.just(b"x" * (2 * MOST + 1)), st.just(b"y" * MOST)
)
messages = st.builds(
    AddressedMessage,
    exchange=shorts,
    key=shorts,
    body=message_bodies,
    headers=st.dictionaries(shorts, values, max_size=4),
    uuid=shorts,
    name=shorts,
    priority=st.integers(0, 255),
)


def by_pika(data: bytes) -> list[Any]:
    """All frames, as pika reads them."""
    frames: list[Any] = []
    while data:
        size, one = frame.decode_frame(data)
        assert one is not None
        frames.append(one)
        data = data[size:]
    return frames


@given(messages)
def test_pika_reads_the_message_that_was_written(message: AddressedMessage) -> None:
    method, header, *body = by_pika(b"".join(Writer(3, MOST).message(message, "7.1")))

    assert {one.channel_number for one in (method, header, *body)} == {3}
    said, properties = method.method, header.properties
    assert (said.NAME, said.exchange, said.routing_key) == (
        "Basic.Publish",
        message.exchange,
        message.key,
    )
    assert said.mandatory and not said.immediate
    assert header.body_size == len(message.body)
    assert b"".join(one.fragment for one in body) == message.body
    assert all(len(one.fragment) <= MOST for one in body)
    assert properties.headers == message.headers
    assert (properties.message_id or "", properties.type or "") == (message.uuid, message.name)
    assert (properties.priority, properties.delivery_mode) == (message.priority, 2)
    assert (properties.content_type, properties.correlation_id) == ("application/json", "7.1")


@given(messages)
def test_publish_frames_are_those_of_pika(message: AddressedMessage) -> None:
    properties = pika.BasicProperties(
        content_type="application/json",
        delivery_mode=2,
        priority=message.priority,
        headers=message.headers,
        message_id=message.uuid or None,
        type=message.name or None,
        correlation_id="1.0",
    )
    method = spec.Basic.Publish(exchange=message.exchange, routing_key=message.key, mandatory=True)
    expected = (
        frame.Method(9, method).marshal() + frame.Header(9, len(message.body), properties).marshal()
    )

    assert b"".join(Writer(9, 2**20).message(message, "1.0")).startswith(expected)


@pytest.mark.parametrize(
    "message",
    [
        AddressedMessage("", "k" * 256, b"", {}),
        AddressedMessage("", "q", b"", {}, uuid="\ud800"),
        AddressedMessage("", "q", b"", {"h": object()}),
        AddressedMessage("", "q", b"", {"h": 2**63}),
        AddressedMessage("", "q", b"", {}, priority=256),
    ],
    ids=["long", "surrogate", "type", "number", "priority"],
)
def test_headers_that_amqp_cannot_encode_are_refused(message: AddressedMessage) -> None:
    with pytest.raises(Exception):  # noqa: B017 - whatever it is, nothing is written
        Writer(1, MOST).message(message, "1")


def test_acknowledgements_are_those_that_pika_reads() -> None:
    done = by_pika(acks(5, [7, 2**40], up_to=4))
    back = by_pika(nacks(5, [3]))

    assert [
        (one.channel_number, one.method.NAME, one.method.delivery_tag, one.method.multiple)
        for one in done
    ] == [
        (5, "Basic.Ack", 4, True),
        (5, "Basic.Ack", 7, False),
        (5, "Basic.Ack", 2**40, False),
    ]
    assert [
        (one.method.NAME, one.method.delivery_tag, one.method.multiple, one.method.requeue)
        for one in back
    ] == [
        ("Basic.Nack", 3, False, True),
    ]


# Confirms


@given(st.integers(1, 2**63), st.booleans(), st.sampled_from([spec.Basic.Ack, spec.Basic.Nack]))
def test_confirms_are_read_as_pika_reads_them(number: int, multiple: bool, kind: Any) -> None:
    data = frame.Method(3, kind(delivery_tag=number, multiple=multiple)).marshal()
    payload = data[OVERHEAD - 1 :]

    assert payload.startswith((ACK, NACK)[kind is spec.Basic.Nack])
    assert read_confirm(data, OVERHEAD - 1) == (number, multiple)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_each_publish_ends_as_confirmed_in_any_batching(
    sizes: list[int], rng: random.Random
) -> None:
    confirms, batches = (
        Confirms(),
        [Batch(1, [AddressedMessage("", "", b"", {})] * (2 * size)) for size in sizes],
    )
    numbers: list[tuple[Batch, int]] = []
    for part in (0, 1):  # the chunks of several threads meet in the I/O thread
        for batch, size in zip(batches, sizes, strict=True):
            confirms.wrote(batch, part * size, size)
            numbers += [(batch, part * size + index) for index in range(size)]
    expected = {(id(batch), index): Confirmation.UNKNOWN for batch, index in numbers}
    open_numbers = set(range(1, len(numbers) + 1))
    while open_numbers:
        number, multiple = rng.choice(sorted(open_numbers)), rng.random() < 0.4
        end = rng.choice([Confirmation.CONFIRMED, Confirmation.REFUSED])
        said = {one for one in open_numbers if one <= number} if multiple else {number}
        open_numbers -= said
        for one in said:
            batch, index = numbers[one - 1]
            expected[id(batch), index] = end
        confirms.hear(number, end, multiple=multiple)
        assert {(id(batch), index): batch.ends[index] for batch, index in numbers} == expected

    assert all(batch.wait(0.0) for batch in batches)
    assert not confirms._runs


def test_a_returned_message_stays_returned_when_its_confirm_comes() -> None:
    confirms, batch = Confirms(), Batch(1, [AddressedMessage("", "", b"", {})] * 3)
    confirms.wrote(batch, 0, 3)

    batch.note(1, 1, Confirmation.RETURNED)
    confirms.hear(3, Confirmation.CONFIRMED, multiple=True)

    assert batch.ends == [Confirmation.CONFIRMED, Confirmation.RETURNED, Confirmation.CONFIRMED]
    assert batch.wait(0.0)


def test_batch_is_waited_for_while_the_server_answers() -> None:
    batch = Batch(1, [AddressedMessage("", "", b"", {})] * 2)
    batch.note(0, 0, Confirmation.CONFIRMED)

    assert not batch.wait(0.01)
    batch.fail(ValueError("gone"))
    assert not batch.wait(HANG)  # at once


# On a server


@pytest.fixture
def link(amqp_url: str) -> Iterator[AmqpConnection]:
    link = AmqpDriver(amqp_url).connect("test")
    yield link
    link.close()


@pytest.fixture
def theirs(amqp_url: str) -> Iterator[Any]:
    """A channel of pika's own, with a queue q."""
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    channel = connection.channel()
    channel.queue_declare("q", durable=True)
    yield channel
    connection.close()


def ready(channel: Any, queue: str = "q") -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


FOREIGN = [
    ("nothing", pika.BasicProperties(), b""),
    (
        "of every kind",
        pika.BasicProperties(
            content_type="text/plain",
            content_encoding="utf-8",
            headers={"a": [1, {"b": "c"}], "t": dt.datetime(2026, 1, 1)},
            delivery_mode=1,
            priority=7,
            correlation_id="c",
            reply_to="r",
            expiration="600000",
            message_id="m",
            timestamp=5,
            type="t",
            app_id="app",
        ),
        b"body",
    ),
    (
        "ours",
        pika.BasicProperties(
            content_type="application/json",
            headers={"n": 2**40, "small": -3, "text": "ü"},
            delivery_mode=2,
            priority=0,
            correlation_id="7.1",
            message_id="uuid",
            type="name",
        ),
        b"{}",
    ),
    ("no headers", pika.BasicProperties(message_id="uuid"), b"x" * 131_072),
    ("a large body", pika.BasicProperties(headers={}), b"y" * 400_000),
]


def test_deliveries_are_read_as_pika_reads_them(link: AmqpConnection, theirs: Any) -> None:
    for _, properties, body in FOREIGN:
        theirs.basic_publish("", "q", body, properties)
    ours = Fetch(link.channel(HANG), ["q"], len(FOREIGN), HANG).run(HANG)
    link.close()

    for one, (name, properties, body) in zip(ours, FOREIGN, strict=True):
        assert (one.body, one.redelivered) == (body, False), name
        assert (one.uuid, one.name) == (properties.message_id or "", properties.type or ""), name
        assert one.priority == (properties.priority or 0), name
        method, read, _ = theirs.basic_get("q", auto_ack=True)
        assert method.redelivered
        assert one.headers == (read.headers or {}), name


def test_deliveries_that_come_byte_by_byte_are_whole(
    amqp_url: str, theirs: Any, rabbitmq_server: RabbitMQServer, open_proxy: Callable[[int], Proxy]
) -> None:
    for number in range(5):
        theirs.basic_publish(
            "", "q", b"%d" % number * 20, pika.BasicProperties(headers={"n": number})
        )
    proxy = open_proxy(rabbitmq_server.port)
    link = AmqpDriver(proxy.through(amqp_url)).connect("test")
    try:
        channel = link.channel(HANG)
        proxy.chop(REPLIES)
        found = Fetch(channel, ["q"], 5, HANG).run(HANG)
        assert found
        for number, one in enumerate(found):
            assert (one.body, one.headers) == (b"%d" % number * 20, {"n": number})
    finally:
        link.close()


@given(st.integers(1, 12), st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_deliveries_settled_together_or_apart_are_gone_or_back(
    rabbitmq_server: RabbitMQServer, vhosts: Callable[[], str], count: int, rng: random.Random
) -> None:
    driver = AmqpDriver(f"{rabbitmq_server.url}")
    with driver.visit("testing") as channel:
        name = channel.rpc("queue_declare", queue="", exclusive=True, timeout=HANG).method.queue

        def publish(future: Future[Any]) -> None:
            for number in range(count):
                channel.raw.basic_publish("", name, b"%d" % number)
            fill(future, None)

        channel.ask(publish, HANG)
        taken = {}
        while len(taken) < count:
            taken |= {
                int(one.body): one.tag for one in Fetch(channel, [name], count, 1.0).run(HANG)
            }
        left, back = list(range(count)), set[int]()
        while left:
            part = rng.sample(left, rng.randint(1, len(left)))
            left = [number for number in left if number not in part]
            tags = [(number, rng.random() < 0.7) for number in part]
            back |= {number for number, is_done in tags if not is_done}
            _dispose(channel, [(taken[number], is_done) for number, is_done in tags])
            frame = channel.rpc("queue_declare", queue=name, passive=True, timeout=HANG)
            assert frame.method.message_count == len(back)
        found = Fetch(channel, [name], count + 1, 0.0).run(HANG)
        assert {int(one.body) for one in found} == back
        assert channel.is_open


def _dispose(channel: Channel, tags: list[tuple[int, bool]]) -> None:
    def work(future: Future[Any]) -> None:
        channel.dispose(tags)
        channel.raw.basic_qos(prefetch_count=0, callback=lambda _: fill(future, None))

    channel.ask(work, HANG)


def test_the_short_cut_is_taken_by_deliveries_to_subscribers(
    link: AmqpConnection, theirs: Any
) -> None:
    """If pika stops calling what is overridden, all works and is slow."""
    theirs.basic_publish("", "q", b"body", pika.BasicProperties(message_id="uuid"))
    channel = link.channel(HANG)

    def subscribe(future: Future[Any]) -> None:
        channel.raw.basic_consume(
            "q", lambda _, method, properties, body: fill(future, (method, properties, body))
        )

    method, properties, body = channel.ask(subscribe, HANG)

    assert (type(method), type(properties)) == (DeliveryFields, Properties)
    assert (properties.message_id, body) == ("uuid", b"body")
    assert (method.redelivered, method.routing_key) == (False, "q")


def test_the_short_cut_is_taken_by_confirms(
    link: AmqpConnection, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_pika = list[object]()
    monkeypatch.setattr(Publisher, "_on_confirm", lambda _, method: by_pika.append(method))
    publisher = Publisher(link, HANG)

    ends = publisher.publish([AddressedMessage("", "q", b"body", {})] * 3).ends

    assert (ends, by_pika) == ([Confirmation.CONFIRMED] * 3, [])


def test_threads_that_write_more_than_the_socket_takes_write_whole_frames(
    link: AmqpConnection, theirs: Any
) -> None:
    publisher, ends = Publisher(link, HANG), list[Confirmation]()

    def publish(thread: int) -> None:
        bodies = [bytes([thread]) * size for size in (10, 3_000_000, 10, 100_000)]
        ends.extend(publisher.publish([AddressedMessage("", "q", one, {}) for one in bodies]).ends)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)

    assert ends == [Confirmation.CONFIRMED] * 24
    found = [theirs.basic_get("q", auto_ack=True)[2] for _ in ends]
    for number in range(6):
        own = [body for body in found if body[0] == number]
        assert [len(body) for body in own] == [10, 3_000_000, 10, 100_000]
        assert all(body == bytes([number]) * len(body) for body in own)


def test_connection_that_ends_while_threads_write_fails_each_batch(
    link: AmqpConnection, theirs: Any
) -> None:
    publisher, begun = Publisher(link, HANG), threading.Barrier(5)
    failures = list[Exception | None]()

    def publish() -> None:
        begun.wait(HANG)
        while (batch := publisher.publish([AddressedMessage("", "q", b"x" * 5_000, {})])).is_over:
            pass
        failures.append(batch.failure)

    threads = [threading.Thread(target=publish) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait(HANG)
    publisher.publish([AddressedMessage("", "q", b"", {})])
    link.abort()
    for thread in threads:
        thread.join(HANG)

    assert [type(one) for one in failures] == [AmqpConnectionLost] * 4


def test_write_that_is_cut_off_ends_the_connection(
    link: AmqpConnection, theirs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, write = Publisher(link, HANG), Channel.write

    def cut_off(channel: Channel, pieces: Any) -> None:
        write(channel, pieces)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Channel, "write", cut_off)
        publisher.publish([AddressedMessage("", "q", b"body", {})])

    later = publisher.publish([AddressedMessage("", "q", b"its number is not known", {})])
    assert later.ends == [Confirmation.UNKNOWN]
    assert not publisher.is_open

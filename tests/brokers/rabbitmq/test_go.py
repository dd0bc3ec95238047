"""Go Machinery beside us: plain pika declares and publishes as Go's workers and senders do.

Go declares in this order: exchange, queue, binding, confirm.select. It gets a 406 when one of them
exists with other arguments.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from machinery_py import Config, Server
from machinery_py.brokers.base import Disposal, Fate, Message
from machinery_py.brokers.rabbitmq.broker import AMQPBroker
from machinery_py.config.config import AMQPConfig
from machinery_py.testing.conformance.fencing import body_of
from machinery_py.testing.waiting import HANG, wait_until

EXCHANGE, KEY, QUEUE = "machinery_exchange", "machinery_task", "machinery_tasks"


@pytest.fixture
def go(amqp_url: str) -> Iterator[BlockingChannel]:
    """A channel of a Go program."""
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    yield connection.channel()
    connection.close()


def declare(
    go: BlockingChannel, queue: str, key: str, *, kind: str = "direct", **arguments: Any
) -> None:
    go.exchange_declare(EXCHANGE, kind, durable=True, auto_delete=False, internal=False)
    go.queue_declare(
        queue, durable=True, auto_delete=False, exclusive=False, arguments=arguments or None
    )
    go.queue_bind(queue, EXCHANGE, key)


def go_worker(go: BlockingChannel, queue: str = QUEUE) -> None:
    declare(go, queue, KEY)
    go.basic_qos(prefetch_count=3, prefetch_size=0, global_qos=False)


def go_sends(go: BlockingChannel, uuid: str, key: str = KEY, *, priority: int = 0) -> None:
    declare(
        go, key, key
    )  # a sender on a direct exchange declares a queue that is named after the key
    go.basic_publish(
        EXCHANGE,
        key,
        body_of(uuid, queue=key),
        pika.BasicProperties(
            content_type="application/json",
            delivery_mode=2,
            priority=priority,
            headers={"trace": "1"},
        ),
    )


def go_sends_later(go: BlockingChannel, uuid: str, ms: int, key: str = KEY) -> None:
    name = f"delay.{ms}.{EXCHANGE}.{key}"
    declare(
        go,
        name,
        name,
        **{
            "x-dead-letter-exchange": EXCHANGE,
            "x-dead-letter-routing-key": key,
            "x-message-ttl": ms,
            "x-expires": 2 * ms,
        },
    )
    go.basic_publish(
        EXCHANGE,
        name,
        body_of(uuid, queue=key),
        pika.BasicProperties(content_type="application/json", delivery_mode=2, headers={}),
    )


def count(go: BlockingChannel, queue: str) -> int:
    return int(go.queue_declare(queue, passive=True).method.message_count)


@pytest.fixture
def server(amqp_url: str) -> Iterator[Server]:
    server = Server(Config(broker=amqp_url, result_backend="memory://"))
    yield server
    server.close()


@pytest.mark.parametrize("first", ["go", "ours"])
def test_go_worker_runs_our_messages(go: BlockingChannel, server: Server, first: str) -> None:
    add = server.register_task("add", lambda a, b: a + b)
    if first == "go":
        go_worker(go)
    add.send(1, 2)
    go_worker(go)

    method, properties, body = go.basic_get(QUEUE)

    assert method is not None
    assert (properties.content_type, properties.delivery_mode, properties.priority) == (
        "application/json",
        2,
        0,
    )
    assert b'"Name":"add"' in body
    go.basic_ack(method.delivery_tag)
    assert count(go, QUEUE) == 0


def test_our_tasks_leave_no_copy_in_gos_queue(go: BlockingChannel, server: Server) -> None:
    go_worker(go)
    go_sends(go, "task_go")
    wait_until(lambda: (count(go, KEY), count(go, QUEUE)) == (1, 1), HANG)

    server.register_task("add", lambda: 1).send()

    assert (count(go, KEY), count(go, QUEUE)) == (1, 2)


@pytest.mark.parametrize("later", [False, True])
def test_our_worker_runs_messages_from_go(go: BlockingChannel, server: Server, later: bool) -> None:
    ran: list[int] = []
    server.register_task("add", lambda: ran.append(1))

    with server.new_worker(concurrency=1):
        if later:
            go_sends_later(go, "task_go", 300)
        else:
            go_sends(go, "task_go")
        wait_until(lambda: ran, HANG)
        wait_until(
            lambda: (
                server.backend.get_states(["task_go"])
                and server.backend.get_state("task_go").is_finished
            ),
            HANG,
        )

    assert ran == [1]
    assert count(go, QUEUE) == 0


def test_a_go_senders_custom_route_reaches_our_worker_once(
    go: BlockingChannel, server: Server
) -> None:
    ran: list[int] = []
    server.register_task("add", lambda: ran.append(1))

    with server.new_worker(concurrency=1, queues=["mail"]):
        go_sends(
            go, "task_other"
        )  # to the default queue: Go's custom workers get a copy, ours do not
        go_sends(go, "task_mail", "mail")
        wait_until(
            lambda: (
                server.backend.get_states(["task_mail"])
                and server.backend.get_state("task_mail").is_finished
            ),
            HANG,
        )

    assert ran == [1]
    assert count(go, "mail") == 0


def _is_there(go: BlockingChannel, queue: str) -> bool:
    try:
        go.connection.channel().queue_declare(queue, passive=True)
    except pika.exceptions.ChannelClosedByBroker:
        return False
    return True


def test_task_routed_by_gos_binding_key_retries_on_default_queue(
    go: BlockingChannel, server: Server
) -> None:
    broker = server.broker
    assert isinstance(broker, AMQPBroker)

    broker.put([Message(uuid="task_1", name="add", queue=KEY, body=b"{}")], token="")

    go_worker(go)
    assert count(go, QUEUE) == 1
    assert not _is_there(go, KEY)


def test_our_delayed_task_reaches_a_go_worker(go: BlockingChannel, server: Server) -> None:
    go_worker(go)
    server.register_task("add", lambda: 1).options(delay=0.3).send()
    assert count(go, QUEUE) == 0

    wait_until(lambda: count(go, QUEUE) == 1, HANG)

    _, properties, _ = go.basic_get(QUEUE)
    assert properties is not None
    assert properties.delivery_mode == 2


def test_delayed_task_reaches_an_undeclared_queue(go: BlockingChannel, server: Server) -> None:
    broker = server.broker
    eta = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=0.2)
    broker.put([Message(uuid="task_1", name="add", queue="mail", body=b"{}", eta=eta)], token="")

    wait_until(lambda: count(go, "mail") == 1, HANG)


@pytest.mark.parametrize("first", ["go", "ours"])
def test_queue_arguments_are_gos(go: BlockingChannel, amqp_url: str, first: str) -> None:
    amqp = AMQPConfig(queue_declare_args={"x-max-priority": 10})
    server = Server(Config(broker=amqp_url, result_backend="memory://", amqp=amqp))
    if first == "go":
        declare(go, QUEUE, KEY, **{"x-max-priority": 10})
    server.register_task("add", lambda: 1).send()
    declare(go, QUEUE, KEY, **{"x-max-priority": 10})

    assert count(go, QUEUE) == 1
    server.close()


def test_headers_of_go_are_kept_when_a_message_goes_back(
    go: BlockingChannel, server: Server
) -> None:
    go_worker(go)
    go_sends(go, "task_go", priority=0)
    broker = server.broker
    consumer = broker.consume([QUEUE], worker="w")
    (delivery,) = consumer.receive(1, 5.0)

    consumer.dispose([Disposal(delivery=delivery, fate=Fate.LATER)])

    _, properties, _ = go.basic_get(QUEUE)
    assert properties is not None
    assert properties.headers["trace"] == "1"
    assert properties.headers["machinery_parks"] == 1

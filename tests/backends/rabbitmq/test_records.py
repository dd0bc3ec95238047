"""Schedules and keys of unique tasks in RabbitMQ: what stays, and what a lost reply does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from machinery_py import Config, Server
from machinery_py.backends.base import CONFLICT, SETTLED, Change, Rider
from machinery_py.backends.rabbitmq.backend import AMQPBackend
from machinery_py.backends.rabbitmq.records import claim_queue
from machinery_py.connections.rabbitmq.queue_records import QueueTransactionLost
from machinery_py.tasks.states import State
from machinery_py.testing.conformance.groups import state_of
from machinery_py.testing.waiting import HANG, wait_until
from tests.backends.rabbitmq.test_backend import Open, backend, open_backend
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQServer

__all__ = ["backend", "open_backend"]


@pytest.fixture
def channel(amqp_url: str) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    yield connection.channel()
    connection.close()


def claim(
    backend: AMQPBackend, expected: bytes | None, body: bytes | None, *, send: bool = False
) -> bool:
    change = Change(
        key="unique a 1" if send else "",
        states=(state_of("t"),) if send else (),
        outbox=(b"the message",) if send else (),
        riders=[Rider(name="a", expected=expected, body=body, life=100.0)],
    )
    return backend.apply([change]) == [SETTLED]


@pytest.mark.parametrize("life", [100.0, 0.0], ids=["claim", "record"])
def test_a_rider_whose_reply_is_lost_is_made_once(
    rabbitmq_server: RabbitMQServer,
    amqp_url: str,
    open_backend: Open,
    open_proxy: Callable[[int], Proxy],
    backend: AMQPBackend,
    life: float,
) -> None:
    proxy = open_proxy(rabbitmq_server.port)
    far = open_backend(proxy.through(amqp_url))
    assert far.claims(["a"]) == [None]
    wait_until(
        lambda: bool(far._transactions._free), HANG
    )  # the transaction before has given back its locks
    change = Change(
        key="k",
        states=(state_of("t"),),
        outbox=(b"the message",),
        riders=[Rider(name="a", expected=None, body=b"1", life=life)],
    )

    proxy.drop_next_reply(matching=b"the message")
    with pytest.raises(QueueTransactionLost):
        far.apply([change])

    wait_until(lambda: "t" in backend.get_states(["t"]), HANG)
    assert far.apply([change]) == [CONFLICT]
    assert [list(bodies) for _, bodies in backend.unsent(9, older_than=0.0)] == [[b"the message"]]
    assert backend.claims(["a"]) == [b"1" if life else None]
    assert dict(backend.records().bodies or {}) == ({} if life else {"a": b"1"})


def test_change_cut_off_before_its_commit_changes_nothing(
    amqp_url: str, open_backend: Open, backend: AMQPBackend
) -> None:
    assert claim(backend, None, b"1")
    dying = open_backend(amqp_url)

    ride = dying._ride

    def ride_and_die(rider: Rider) -> None:
        ride(rider)
        dying._transactions.link().close()

    dying._ride = ride_and_die  # type: ignore[method-assign]  # as its process would, in the middle of the transaction
    with pytest.raises(QueueTransactionLost):
        claim(dying, b"1", b"2", send=True)

    assert backend.claims(["a"]) == [b"1"]
    assert backend.get_states(["t"]) == {}
    assert backend.unsent(9, older_than=0.0) == []


def test_a_claim_that_is_gone_leaves_no_queue(
    backend: AMQPBackend, channel: BlockingChannel
) -> None:
    queue = claim_queue("a").queue
    assert claim(backend, None, b"1", send=True)
    assert channel.queue_declare(queue, passive=True).method.message_count == 1
    backend.release([("a", b"1")])

    assert backend.claims(["a"]) == [None]
    with pytest.raises(ChannelClosedByBroker, match="NOT_FOUND"):
        channel.queue_declare(queue, passive=True)


def test_unique_key_is_free_when_rabbitmq_lost_its_tasks_state(amqp_url: str) -> None:
    """Not what anybody wants: what docs/how-to/rabbitmq.md says."""
    server = Server(
        Config(broker="memory://unique-forgotten", result_backend=amqp_url, results_expire_in=2)
    )
    alone = server.task("alone", unique=True)(lambda: None)
    first = alone.send()

    wait_until(lambda: not alone.send().duplicate, HANG)

    assert server.backend.get_states([first.uuid]) == {}


def test_the_state_of_a_claims_task_is_written_with_it(backend: AMQPBackend) -> None:
    assert claim(backend, None, b"1", send=True)
    assert backend.get_state("t").state is State.PENDING
    assert not claim(backend, None, b"2", send=True)
    assert len(backend.unsent(9, older_than=0.0)) == 1

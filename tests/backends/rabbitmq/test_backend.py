"""Results in RabbitMQ: declared, written and read as by Go, and when server or network fails."""

from __future__ import annotations

import datetime as dt
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from machinery_py import Config, Server
from machinery_py.backends.base import ALREADY, FENCED, SETTLED, Change
from machinery_py.backends.rabbitmq.backend import AMQPBackend
from machinery_py.backends.rabbitmq.documents import (
    LOCKS,
    OUTBOX_LOCK,
    ResultQueues,
    decode_record,
    encode_record,
    lock_of,
    name_of,
)
from machinery_py.backends.transactional import Row
from machinery_py.connections.rabbitmq import queue_records as amqp_turns
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.connections.rabbitmq.queue_records import QueueTransactionLost
from machinery_py.errors import (
    BackendUnavailable,
    ConfigError,
    NameRefused,
    StateNotFound,
    StoreUnusable,
    Unsupported,
)
from machinery_py.tasks.signature import Arg, new_uuid
from machinery_py.tasks.states import State, TaskState
from machinery_py.testing.conformance.groups import arrival, arrive, ready, state_of, write
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.states import encode_state
from tests.support.proxy import REPLIES, REQUESTS, Proxy
from tests.support.servers import RabbitMQServer

EXCHANGE = "machinery_exchange"
GO_ARGUMENTS = {"x-message-ttl": 3_600_000, "x-expires": 3_600_000}
COMMIT = b"\x00\x5a\x00\x14"  # AMQP's class and method of tx.commit

Open = Callable[..., AMQPBackend]


@pytest.fixture
def open_backend() -> Iterator[Open]:
    """Opens backends on a URL, by real time."""
    opened: list[AMQPBackend] = []

    def open_backend(url: str, *, timeout: float = 5.0, expire_in: float = 3600.0) -> AMQPBackend:
        opened.append(AMQPBackend(AmqpDriver(url, timeout=timeout), expire_in=expire_in))
        return opened[-1]

    yield open_backend
    for backend in opened:
        backend.close()
        backend.driver.close()


@pytest.fixture
def backend(amqp_url: str, open_backend: Open) -> AMQPBackend:
    return open_backend(amqp_url)


@pytest.fixture
def go(amqp_url: str) -> Iterator[BlockingChannel]:
    """A channel of a Go program."""
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    yield connection.channel()
    connection.close()


def go_declares(go: BlockingChannel, queue: str, **other: Any) -> int:
    """Declare as each read and write of Go does, and return how many messages wait.

    Raises ChannelClosedByBroker if anything is different.
    """
    go.exchange_declare(EXCHANGE, "direct", durable=True, auto_delete=False, internal=False)
    frame = go.queue_declare(
        queue, durable=False, auto_delete=True, exclusive=False, arguments={**GO_ARGUMENTS, **other}
    )
    go.queue_bind(queue, EXCHANGE, queue)
    return int(frame.method.message_count)


def go_writes(go: BlockingChannel, queue: str, state: TaskState) -> None:
    go_declares(go, queue)
    go.basic_publish(
        EXCHANGE,
        queue,
        encode_state(state),
        pika.BasicProperties(content_type="application/json", delivery_mode=2),
    )


def go_reads(go: BlockingChannel, queue: str) -> dict[str, Any] | None:
    go_declares(go, queue)
    method, properties, body = go.basic_get(queue, auto_ack=False)
    if method is None:
        return None
    go.basic_ack(method.delivery_tag)
    assert properties.content_type == "application/json"
    assert properties.delivery_mode == 2
    found: dict[str, Any] = json.loads(body)
    return found


# The wire


def test_a_state_is_gos_document_in_gos_queue(backend: AMQPBackend, go: BlockingChannel) -> None:
    results = (Arg(type="int64", value=3),)
    created_at = dt.datetime(2026, 3, 4, 5, 6, 7, tzinfo=dt.UTC)
    write(
        backend,
        state_of("task_1", created_at=created_at),
        state_of("task_1", State.SUCCESS, results=results),
    )

    assert go_declares(go, "task_1") == 1
    with pytest.raises(ChannelClosedByBroker, match="inequivalent arg"):
        go.connection.channel().queue_declare(
            "task_1", auto_delete=True, arguments={"x-message-ttl": 3_600_000}
        )
    found = go_reads(go, "task_1")

    assert found is not None
    assert list(found) == [
        "TaskUUID",
        "TaskName",
        "State",
        "Results",
        "Error",
        "CreatedAt",
        "TTL",
        "machinery_py",
    ]
    del found["machinery_py"]
    assert found == {
        "TaskUUID": "task_1",
        "TaskName": "add",
        "State": "SUCCESS",
        "Results": [{"Type": "int64", "Value": 3}],
        "Error": "",
        "CreatedAt": "2026-03-04T05:06:07Z",
        "TTL": 0,
    }


def test_document_has_the_bytes_of_go() -> None:
    state = TaskState(
        task_uuid="task_1",
        task_name="add",
        state=State.SUCCESS,
        results=(Arg(type="int64", value=3),),
    )
    body = encode_record("task_1", Row(state=state, mark="m", epoch=7), 1)
    assert body.partition(b',"machinery_py":')[0] + b"}" == encode_state(state)


def test_item_written_by_go_is_read_and_stays(backend: AMQPBackend, go: BlockingChannel) -> None:
    results = (Arg(type="int64", value=7),)
    for state in (
        state_of("task_1"),
        TaskState(task_uuid="task_1", state=State.RECEIVED),
        TaskState(task_uuid="task_1", state=State.STARTED),
        TaskState(task_uuid="task_1", state=State.SUCCESS, results=results),
    ):
        go_writes(go, "task_1", state)

    for _ in range(2):
        found = backend.get_state("task_1")
        assert (found.state, found.task_name, found.results) == (State.SUCCESS, "add", results)
    assert backend.apply(
        [Change(key="task_1", mark="late", states=(state_of("task_1", State.FAILURE),))]
    ) == [FENCED]
    wait_until(lambda: go_declares(go, "task_1") == 4, HANG, "all are put back")
    assert [found["State"] for _ in range(4) if (found := go_reads(go, "task_1"))] == [
        "PENDING",
        "RECEIVED",
        "STARTED",
        "SUCCESS",
    ]


def test_a_go_worker_goes_on_with_a_task_of_ours(backend: AMQPBackend, go: BlockingChannel) -> None:
    write(backend, state_of("task_1", queue="mail"))
    go_writes(go, "task_1", TaskState(task_uuid="task_1", state=State.STARTED))
    assert (backend.get_state("task_1").state, backend.get_state("task_1").queue) == (
        State.STARTED,
        "mail",
    )

    write(backend, state_of("task_1", State.SUCCESS))

    assert go_declares(go, "task_1") == 1
    assert backend.get_state("task_1").state is State.SUCCESS


def test_pending_of_go_that_comes_late_fences_no_run(
    backend: AMQPBackend, go: BlockingChannel
) -> None:
    """Go sends a state and a task on two connections, and polls for the result at once."""
    [begun] = backend.begin([("task_1", 0)])
    go_reads(go, "task_1")
    go_writes(go, "task_1", state_of("task_1", State.PENDING))

    done = state_of("task_1", State.SUCCESS)
    change = Change(key="task_1", mark="ours", epoch=begun.epoch, states=(done,))

    assert backend.apply([change]) == [SETTLED]
    assert backend.get_state("task_1").state is State.SUCCESS
    assert backend.apply([msgspec.structs.replace(change, epoch=1)]) == [ALREADY]
    assert backend.apply([msgspec.structs.replace(change, epoch=1, mark="other")]) == [FENCED]


def test_result_read_by_go_is_gone(backend: AMQPBackend, go: BlockingChannel) -> None:
    write(backend, state_of("task_1", State.SUCCESS))
    assert go_reads(go, "task_1") is not None

    with pytest.raises(StateNotFound):
        backend.get_state("task_1")
    assert backend.get_states(["task_1"]) == {}


def test_member_ended_by_go_is_found_after_its_state_was_read(
    backend: AMQPBackend, go: BlockingChannel
) -> None:
    backend.init_group("group_1", ["task_1", "task_2"])
    done = TaskState(task_uuid="task_1", state=State.SUCCESS, results=(Arg(type="int64", value=1),))
    go_writes(go, "task_1", done)
    go_writes(go, "group_1", done)
    arrive(backend, arrival("group_1", "task_2", 2))
    assert go_declares(go, "group_1") == 2  # what Go compares with the number of members
    assert ready(backend) == {}  # that is Go's to settle, for a while

    assert go_reads(go, "task_1") is not None
    assert [state.results for state in backend.group_task_states("group_1")] == [done.results, ()]

    arrive(backend, arrival("group_1", "task_1", 2))
    arrive(backend, arrival("group_1", "task_2", 2))
    assert set(ready(backend)) == {"group_1"}


def test_a_chord_that_is_settled_is_so_for_go(backend: AMQPBackend, go: BlockingChannel) -> None:
    arrive(backend, arrival("group_1", "task_1", 1))
    with pytest.raises(ChannelClosedByBroker, match="no queue 'group_1_chord_triggered'"):
        go.connection.channel().queue_declare("group_1_chord_triggered", passive=True)

    assert backend.trigger_chord("group_1")

    go.queue_declare("group_1_chord_triggered", passive=True)  # Go asks like this
    go_declares(go, "group_1_chord_triggered")


def test_chord_that_go_settled_is_shown_as_settled(
    backend: AMQPBackend, go: BlockingChannel
) -> None:
    callback = b'{"UUID":"chord_1","Name":"sum"}'
    backend.init_group("group_1", ["task_1", "task_2"])
    arrive(backend, arrival("group_1", "task_1", 2, callback=callback))
    before = backend.get_group("group_1")
    go_writes(go, "chord_1", TaskState(task_uuid="chord_1"))

    after = backend.get_group("group_1")

    assert before is not None
    assert after is not None
    assert (before.chord_triggered, after.chord_triggered) == (False, True)


@pytest.mark.parametrize(
    "uuid", ["", "amq.gen", "machinery.results.outbox", "x" * 300, "\ud800", "ü" * 120]
)
def test_a_uuid_that_is_no_queues_name_is_a_uuid(backend: AMQPBackend, uuid: str) -> None:
    write(backend, TaskState(task_uuid=uuid))
    assert set(backend.get_states([uuid])) == {uuid}
    assert len(name_of(uuid).encode()) <= 200
    backend.purge_state(uuid)
    assert backend.get_states([uuid]) == {}


@pytest.mark.parametrize("arguments", [{}, {"x-expires": 60_000}, {"x-max-length": 5}])
def test_empty_foreign_queue_is_not_written_to(
    amqp_url: str, backend: AMQPBackend, arguments: dict[str, int]
) -> None:
    with AmqpDriver(amqp_url).visit("planting") as channel:
        channel.rpc(
            "queue_declare", queue="theirs", durable=True, arguments=arguments, timeout=HANG
        )
    for refused in (
        lambda: write(backend, TaskState(task_uuid="theirs")),
        lambda: backend.get_states(["theirs"]),
        lambda: backend.purge_state("theirs"),
    ):
        with pytest.raises(NameRefused, match="'theirs'"):
            refused()
    with AmqpDriver(amqp_url).visit("looking") as channel:
        found = channel.rpc("queue_declare", queue="theirs", passive=True, timeout=HANG)
    assert found.method.message_count == 0
    write(backend, TaskState(task_uuid="ours"))
    assert set(backend.get_states(["ours"])) == {"ours"}


def test_foreign_message_in_a_result_queue_is_not_dropped() -> None:
    for body in (b"no state", encode_state(state_of("another"))):
        with pytest.raises(NameRefused, match="holds what is no state of task"):
            decode_record("t", [body])


def test_a_result_that_looks_like_our_field_is_a_result() -> None:
    results = (Arg(type="json", value={"a": 1, "machinery_py": {"seq": 9}}),)
    tricky = TaskState(task_uuid="t", state=State.SUCCESS, results=results)
    for body in (encode_state(tricky), encode_record("t", Row(state=tricky), 1)):
        assert decode_record("t", [body]).state == tricky


def test_of_several_messages_the_newest_of_ours_counts() -> None:
    bodies = [
        encode_record("t", Row(state=state_of("t", State.SUCCESS), mark="new", epoch=2), 2),
        encode_record("t", Row(state=state_of("t", State.STARTED), mark="old", epoch=1), 1),
        b"",
    ]
    found = decode_record("t", bodies)
    assert found.state is not None
    assert (found.state.state, found.mark, found.epoch, found.seq) == (State.SUCCESS, "new", 2, 2)


# Its limits


def test_the_server_lets_states_expire(amqp_url: str, open_backend: Open) -> None:
    backend = open_backend(amqp_url, expire_in=1.0)
    write(backend, state_of("pending"))
    backend.init_group("g", ["done", "open"])
    arrive(backend, arrival("g", "done", 2))
    wait_until(lambda: not backend.get_states(["pending", "done"]), HANG, "they are gone")

    arrive(backend, arrival("g", "open", 2))

    assert set(ready(backend)) == {"g"}
    assert [state.task_uuid for state in backend.group_task_states("g")] == ["done", "open"]


def test_the_server_lets_one_state_expire_sooner(amqp_url: str, open_backend: Open) -> None:
    backend = open_backend(amqp_url)
    write(backend, state_of("brief", State.SUCCESS, keep_for=0.2), state_of("plain", State.SUCCESS))
    write(backend, state_of("waits", keep_for=0.2), state_of("long", State.SUCCESS, keep_for=9e9))
    wait_until(lambda: not backend.get_states(["brief"]), HANG, "it is gone")

    assert set(backend.get_states(["plain", "waits", "long"])) == {"plain", "waits", "long"}


def test_a_call_whose_result_cannot_be_kept_so_long_is_refused(amqp_url: str) -> None:
    server = Server(broker=amqp_url)
    kept = server.task("kept", result_expires=3600.0)(print)
    refused = r"kept: result_expires=3601 \(the amqp backend keeps no result for longer than "
    with pytest.raises(Unsupported, match=refused + r"results_expire_in, 3600 s\)"):
        kept.options(result_expires=3601).send()
    with pytest.raises(Unsupported, match=refused):
        (kept.signature() | kept.options(result_expires=3601).signature()).send()
    kept.send()


def test_another_expiry_is_refused_and_told(
    amqp_url: str, open_backend: Open, backend: AMQPBackend
) -> None:
    uuid = new_uuid()
    write(backend, state_of(uuid))
    other = open_backend(amqp_url, expire_in=60.0)
    other.get_state(
        uuid
    )  # reading declares nothing where nobody else can have a queue of this name
    arrive(other, arrival("g", "a", 1))

    with pytest.raises(
        StoreUnusable, match=r"inequivalent arg.*results_expire_in must be the same"
    ):
        arrive(backend, arrival("g", "b", 3))


def test_expiry_that_go_cannot_write_is_none(amqp_url: str) -> None:
    ResultQueues(2_147_483.0)
    with pytest.raises(
        ConfigError,
        match=r"results_expire_in: found 2200000 s \(results in RabbitMQ: at most 2147483\)",
    ):
        _ = Server(Config(broker=amqp_url, results_expire_in=2_200_000)).backend


def test_tasks_cannot_be_listed(amqp_url: str) -> None:
    server = Server(broker=amqp_url)
    assert server.backend.features == AMQPBackend.features
    with pytest.raises(Unsupported, match="AMQPBackend cannot list"):
        server.inspect.tasks()
    server.close()


# Faults


def finish(backend: AMQPBackend, mark: str = "m", *, outbox: bool = True) -> str:
    change = Change(
        key="t",
        mark=mark,
        states=(state_of("t", State.SUCCESS),),
        arrivals=(arrival("g", "t", 1),),
        outbox=(b"callback",) if outbox else (),
    )
    return backend.apply([change])[0].word


def test_a_change_whose_reply_is_lost_is_made_once(
    rabbitmq_server: RabbitMQServer,
    amqp_url: str,
    open_backend: Open,
    open_proxy: Callable[[int], Proxy],
    backend: AMQPBackend,
) -> None:
    proxy = open_proxy(rabbitmq_server.port)
    far = open_backend(proxy.through(amqp_url))
    write(far, state_of("t"))
    # What the transaction before has left to be given back is not to be the request that is met.
    wait_until(lambda: bool(far._transactions._free), HANG)

    proxy.drop_next_reply(matching=b"callback")
    with pytest.raises(QueueTransactionLost):
        finish(far)

    wait_until(lambda: backend.get_state("t").state is State.SUCCESS, HANG)
    assert finish(far) == ALREADY.word
    assert [(key, list(bodies)) for key, bodies in backend.unsent(9, older_than=0.0)] == [
        ("t", [b"callback"])
    ]
    assert set(ready(backend)) == {"g"}


def test_a_read_whose_reply_is_lost_is_repeated(
    rabbitmq_server: RabbitMQServer,
    amqp_url: str,
    open_backend: Open,
    open_proxy: Callable[[int], Proxy],
) -> None:
    proxy = open_proxy(rabbitmq_server.port)
    backend = open_backend(proxy.through(amqp_url))
    write(backend, state_of("t"))

    proxy.drop_next_reply(matching=COMMIT)
    assert backend.get_state("t").state is State.PENDING

    proxy.reset()
    assert backend.get_state("t").state is State.PENDING


def test_queue_transaction_cut_off_writes_nothing(
    amqp_url: str, open_backend: Open, backend: AMQPBackend
) -> None:
    other = open_backend(amqp_url)
    write(backend, state_of("t"))
    place = backend._queues.task("t")

    with (
        pytest.raises(QueueTransactionLost),
        backend._transactions.transaction([lock_of("t")], "dying") as transaction,
    ):
        transaction.read([place])
        transaction.drop(transaction.held(place))
        transaction.put(place, encode_record("t", Row(state=state_of("t", State.FAILURE)), 9))
        backend._transactions.link().abort()  # as when the process is killed
        assert finish(other) == SETTLED.word  # as soon as the server sees it

    assert backend.get_state("t").state is State.SUCCESS


def test_consumer_whose_connection_ended_is_fenced(
    rabbitmq_server: RabbitMQServer,
    amqp_url: str,
    open_backend: Open,
    open_proxy: Callable[[int], Proxy],
    backend: AMQPBackend,
) -> None:
    """What it writes reaches the server too late, if ever: by then the lock is somebody else's."""
    proxy = open_proxy(rabbitmq_server.port)
    far = open_backend(proxy.through(amqp_url), timeout=1.0)
    write(backend, state_of("t"))
    place = far._queues.task("t")

    with (
        pytest.raises(QueueTransactionLost),
        far._transactions.transaction([lock_of("t")], "sleeping") as transaction,
    ):
        transaction.read([place])
        proxy.black_hole(REQUESTS)
        proxy.black_hole(REPLIES)
        transaction.drop(transaction.held(place))
        transaction.put(place, encode_record("t", Row(state=state_of("t", State.FAILURE)), 9))
    proxy.reset()  # the server takes it for dead
    proxy.heal()

    assert finish(backend) == SETTLED.word
    assert far.get_state("t").state is State.SUCCESS


def test_a_lock_that_was_emptied_is_filled_again(
    amqp_url: str, backend: AMQPBackend, go: BlockingChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amqp_turns, "PATIENCE", 0.3)
    write(backend, state_of("t"))
    wait_until(lambda: bool(backend._transactions._free), HANG)
    go.queue_purge(lock_of("t"))

    with pytest.raises(BackendUnavailable, match=r"others have held 'machinery\.results\.lock"):
        backend.get_state("t")

    monkeypatch.setattr(amqp_turns, "PATIENCE", HANG)
    assert backend.get_state("t").state is State.PENDING


def test_deleted_lock_fences_its_holder_and_admits_the_next(
    amqp_url: str, backend: AMQPBackend, open_backend: Open, go: BlockingChannel
) -> None:
    # As when the process of the queue ends in the server.
    write(backend, state_of("t"))
    place, lock, seen = backend._queues.task("t"), lock_of("t"), list[State]()
    waiter = open_backend(amqp_url)
    thread = threading.Thread(target=lambda: seen.append(waiter.get_state("t").state))

    with (
        pytest.raises(QueueTransactionLost),
        backend._transactions.transaction([lock], "holding") as transaction,
    ):
        transaction.read([place])
        thread.start()
        wait_until(lambda: consumers(amqp_url, lock) == 2)
        go.queue_delete(lock)
        transaction.drop(transaction.held(place))
        wait_until(lambda: not transaction._channel.is_open)
    thread.join(HANG)

    assert seen == [State.PENDING]


def consumers(url: str, queue: str) -> int:
    connection = pika.BlockingConnection(pika.URLParameters(url))
    try:
        return int(connection.channel().queue_declare(queue, passive=True).method.consumer_count)
    finally:
        connection.close()


def test_spare_tokens_admit_no_other_caller(
    amqp_url: str, open_backend: Open, backend: AMQPBackend, go: BlockingChannel
) -> None:
    other = open_backend(amqp_url)
    inside = threading.Event()
    seen: list[bool] = []

    with backend._transactions.transaction([LOCKS[0]], "holding"):
        for _ in range(3):
            go.basic_publish("", LOCKS[0], b"")

        def enter() -> None:
            with other._transactions.transaction([LOCKS[0]], "waiting"):
                seen.append(inside.is_set())

        waiter = threading.Thread(target=enter)
        waiter.start()
        wait_until(
            lambda: other._transactions._link is not None and other._transactions._link.is_open,
            HANG,
        )
        assert not waiter.join(0.2)
        assert seen == []
        inside.set()
    waiter.join(HANG)
    assert seen == [True]


def test_a_server_that_is_short_of_memory_is_told_in_time(
    rabbitmq_server: RabbitMQServer, amqp_url: str, open_backend: Open
) -> None:
    backend = open_backend(amqp_url, timeout=1.0)
    write(backend, state_of("t"))
    try:
        rabbitmq_server.ctl("set_vm_memory_high_watermark", "absolute", "1")
        with pytest.raises(BackendUnavailable):
            write(backend, state_of("t", State.STARTED))
    finally:
        rabbitmq_server.ctl("set_vm_memory_high_watermark", "0.4")

    def writes() -> bool:
        try:
            return backend.apply([Change(key="t", states=(state_of("t", State.SUCCESS),))]) == [
                SETTLED
            ]
        except BackendUnavailable:
            return False

    wait_until(writes, HANG, "it takes messages again")


def test_one_connection_is_enough(
    rabbitmq_server: RabbitMQServer, amqp_url: str, backend: AMQPBackend
) -> None:
    for number in range(30):
        write(backend, state_of(f"t{number}"), state_of(f"t{number}", State.SUCCESS))
    listener = backend.listener()
    listener.watch(["t1"])

    vhost = amqp_url.rpartition("/")[2]
    lines = rabbitmq_server.ctl("list_connections", "--silent", "vhost").splitlines()

    assert [line.strip() for line in lines].count(vhost) == 1
    listener.close()


def test_a_task_that_go_ends_is_found_by_looking(backend: AMQPBackend, go: BlockingChannel) -> None:
    listener = backend.listener()
    listener.watch(["t", "u"])
    go_writes(go, "u", TaskState(task_uuid="u", state=State.SUCCESS))
    listener.wait(HANG * 2)
    assert backend.get_state("u").is_finished
    listener.unwatch(["t"])
    listener.close()


def test_the_lock_of_the_outboxes_comes_after_those_of_tasks() -> None:
    assert max(LOCKS) < OUTBOX_LOCK


def test_queues_of_the_version_before_break_nothing(
    backend: AMQPBackend, go: BlockingChannel
) -> None:
    """Schedules, claims, revocations, and the exchanges to which waiters and workers listened."""
    for exchange, kind in (("machinery.finished", "direct"), ("machinery.revocations", "fanout")):
        go.exchange_declare(exchange, kind, durable=True)
    names = ["schedules", "revoked.until", "claim.key", "lock.revoked", "lock.schedules"]
    for name in names:
        go.queue_declare(f"machinery.results.{name}", durable=True)
        go.basic_publish("", f"machinery.results.{name}", b"of the version before")
    go.queue_bind("machinery.results.revoked.until", "machinery.revocations")

    write(backend, state_of("t"))
    assert finish(backend) == SETTLED.word

    assert set(ready(backend)) == {"g"}
    assert backend.trigger_chord("g") is True
    for name in names:  # as they were: an old program may still use them
        frame = go.queue_declare(f"machinery.results.{name}", passive=True)
        assert frame.method.message_count == 1

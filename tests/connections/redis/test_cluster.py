"""One application in a Redis Cluster: its tag, its master, a slot that moves, its connections."""

from __future__ import annotations

import itertools
import logging
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import pytest
from redis import ResponseError
from redis.exceptions import MovedError

from machinery_py import Config, Server, State
from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.brokers.base import Message
from machinery_py.brokers.redis.broker import RedisBroker
from machinery_py.config.sections import RedisConfig
from machinery_py.connections.redis import discovery
from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.redis.cluster import ClusterDriver, is_refused_for_now
from machinery_py.connections.redis.discovery import set_timeout
from machinery_py.connections.redis.pool import PoolLimits
from machinery_py.connections.redis.tags import GUARD
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    ConfigError,
    MachineryError,
    PublishUnknown,
    StoreUnusable,
)
from machinery_py.locks.redis import RedisLock
from machinery_py.stores.redis import RedisStore
from machinery_py.tasks.signature import Signature
from machinery_py.testing.conformance.fencing import body_of, submit
from machinery_py.testing.conformance.leases import put
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.support.servers import HOST, RedisServer, ReplyError
from tests.support.servers import RedisCluster as ClusterServers

GOOD = {"appendonly": "yes", "maxmemory-policy": "noeviction"}
AS_IT_WAS = {"appendonly": "no", "maxmemory-policy": "noeviction"}
TAG = "{machinery}"
AWAY = "redis://127.0.0.1:1,127.0.0.1:2"


@pytest.fixture
def durable(empty_cluster: ClusterServers) -> Iterator[ClusterServers]:
    """The shared cluster, with masters that keep what they are given."""
    nodes = empty_cluster.masters
    for node in nodes:
        for name, value in GOOD.items():
            node.cli("CONFIG", "SET", name, value)
    yield empty_cluster
    for node in empty_cluster.nodes:
        for name, value in AS_IT_WAS.items():
            node.cli("CONFIG", "SET", name, value)


def server_with(cluster: ClusterServers, **options: object) -> Server:
    return Server(Config(broker=cluster.url, redis=RedisConfig(**options)))  # type: ignore[arg-type]


def connections(cluster: ClusterServers, name: str) -> int:
    return sum(str(node.cli("CLIENT", "LIST")).count(f" name={name} ") for node in cluster.nodes)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.message
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.endswith("connections.redis.client")
    ]


def message(body: bytes, queue: str = "q") -> Message:
    return Message(uuid="", name="", queue=queue, body=body)


@contextmanager
def moving(cluster: ClusterServers) -> Iterator[tuple[RedisServer, RedisServer]]:
    """Let the slot of the tag begin to move; yield its source and its target."""
    source = cluster.node_of(TAG)
    target = next(node for node in cluster.masters if node is not source)
    slot = int(str(source.cli("CLUSTER", "KEYSLOT", TAG)))
    target.cli("CLUSTER", "SETSLOT", slot, "IMPORTING", str(source.cli("CLUSTER", "MYID")))
    source.cli("CLUSTER", "SETSLOT", slot, "MIGRATING", str(target.cli("CLUSTER", "MYID")))
    try:
        yield source, target
    finally:
        for node in (source, target):
            node.cli("CLUSTER", "SETSLOT", slot, "STABLE")


# The tag


def test_all_keys_are_at_one_master(empty_cluster: ClusterServers) -> None:
    broker = RedisBroker(ClusterDriver(empty_cluster.url))
    queues = ["mail", "{mail}", "{mail}.low", "}", "{}", "a}b", "{machinery}x"]
    for queue in queues:
        broker.put([message(queue.encode(), queue)], token=queue)

    assert {one.queue: one.waiting for one in broker.stats()} == dict.fromkeys(queues, 1)
    owner = empty_cluster.node_of(TAG)
    keys = [str(key) for node in empty_cluster.masters for key in node.cli("KEYS", "*")]  # type: ignore[union-attr]
    assert {key for key in keys if not key.startswith(TAG)} == set()
    assert len(keys) == owner.cli("DBSIZE") > len(queues)
    broker.driver.close()


def test_applications_with_two_tags_see_nothing_of_each_other(
    empty_cluster: ClusterServers,
) -> None:
    servers = [Server(f"{empty_cluster.url}/0?tag={tag}") for tag in ("shop", "it's a b/ü")]
    for number, server in enumerate(servers):
        server.register_task("number", lambda number=number: number)
    with servers[0].new_worker(concurrency=1), servers[1].new_worker(concurrency=1):
        results = [server.send_task(Signature(name="number", uuid="task_1")) for server in servers]

        assert [one.get(timeout=HANG) for one in results] == [0, 1]
    for server in servers:
        assert [one.task_uuid for one in server.inspect.tasks()] == ["task_1"]
        server.close()


@pytest.mark.parametrize("tag", ["", "{a}", "a}"])
def test_impossible_tag_is_refused(tag: str) -> None:
    with pytest.raises(ConfigError, match="expected a name without { and }"):
        Server(f"redis://h1,h2/0?tag={tag}")


def test_tag_without_a_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="option 'tag' is for a cluster"):
        Server("redis://localhost/0?tag=shop").broker.features  # noqa: B018


@pytest.mark.parametrize("role", ["broker", "result_backend", "lock"])
def test_go_program_is_refused_beside_a_cluster(role: str) -> None:
    urls = {"broker": "memory://", role: AWAY}
    with pytest.raises(ConfigError, match="go_program: in a Redis Cluster"):
        Server(Config(**urls, go_program="mailer")).broker.features  # type: ignore[arg-type]  # noqa: B018


def test_key_that_holds_something_else_is_named(empty_cluster: ClusterServers) -> None:
    driver = ClusterDriver(empty_cluster.url)
    empty_cluster.node_of(TAG).cli("RPUSH", f"{TAG}task_1", "a", "b")
    empty_cluster.node_of(TAG).cli("SET", f"{TAG}mpy:queues", "a text")

    with pytest.raises(MachineryError, match="key 'task_1' holds a list"):
        RedisBackend(driver).get_group("task_1")
    with pytest.raises(StoreUnusable, match="key 'mpy:queues' holds a string"):
        RedisBroker(driver).consume(["q"], worker="w")
    driver.close()


SPOILT: dict[str, tuple[str, Callable[[RedisDriver], object]]] = {
    "waiting": ("q", lambda driver: RedisBroker(driver).waiting("q")),
    "pending": ("q", lambda driver: RedisBroker(driver).pending("q", 9)),
    "acquire": ("mpy:lock:{q}", lambda driver: RedisLock(driver).acquire("q", ttl=5.0)),
    "records": ("mpy:records", lambda driver: RedisBackend(driver).records()),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_key_is_told_as_one_redis_would(
    empty_cluster: ClusterServers, empty_redis: RedisServer, name: str
) -> None:
    key, call = SPOILT[name]
    owner = empty_cluster.node_of(TAG)
    told: list[tuple[object, str]] = []
    for node, prefix, driver in (
        (empty_redis, "", RedisDriver(empty_redis.url)),
        (owner, TAG, ClusterDriver(empty_cluster.url)),
    ):
        node.cli("RPUSH" if name == "acquire" else "SET", prefix + key, "a text")
        with pytest.raises(MachineryError) as caught:
            call(driver)
        text = str(caught.value).replace(f":{node.port}", "")
        told.append((caught.type, text))
        assert node.cli("KEYS", "*") == [prefix + key]
        driver.close()

    assert told[0] == told[1]


def test_the_guard_is_no_name_that_a_program_may_choose() -> None:
    with pytest.raises(ConfigError, match="queue"):
        Config(default_queue=GUARD.decode())


def test_queue_named_by_a_digit_stands_still_with_its_slot(empty_cluster: ClusterServers) -> None:
    driver = ClusterDriver(empty_cluster.url, timeout=0.3)
    broker = RedisBroker(driver)
    broker.put([message(b"1", "0")], token="first")
    with moving(empty_cluster) as (source, target):
        others = [key for key in source.cli("KEYS", f"{TAG}*") if key != f"{TAG}0"]  # type: ignore[union-attr]
        source.cli("MIGRATE", HOST, target.port, "", 0, 5000, "KEYS", *others)

        with pytest.raises(BrokerUnavailable, match="is on its way|has moved"):
            broker.put([message(b"2", "0")], token="second")
        assert source.cli("LRANGE", f"{TAG}0", 0, -1) == ["1"]
    driver.close()


def test_script_that_was_stopped_halfway_is_no_fault_of_the_program() -> None:
    error = ResponseError("Script attempted to access a non local key in a cluster node script: 1")
    driver = ClusterDriver(AWAY)

    assert is_refused_for_now(error)
    with pytest.raises(BrokerUnavailable, match="non local key"):
        driver.fail(error, doing="publishing", away=BrokerUnavailable)


# Nodes that refuse, or are away


def test_a_slot_that_is_on_its_way_stands_still(empty_cluster: ClusterServers) -> None:
    driver = ClusterDriver(empty_cluster.url, timeout=0.3)
    broker = RedisBroker(driver)
    submit(RedisStore(broker, RedisBackend(driver)), "a")
    with moving(empty_cluster) as (source, _):
        with pytest.raises(BrokerUnavailable, match="is on its way|has moved"):
            broker.put([message(b"x")], token="t")
        assert (source.cli("LLEN", f"{TAG}q"), source.cli("KEYS", f"{TAG}mpy:p:t")) == (1, [])
        # Otherwise a script that names a remaining key would begin and stop after its first write.
        half = f"redis.call('RPUSH', '{TAG}q', 'half'); redis.call('GET', '{TAG}gone')"
        with pytest.raises(ReplyError, match="non local key"):
            source.cli("EVAL", half, 1, f"{TAG}q")
        assert source.cli("RPOP", f"{TAG}q") == "half"

    assert broker.put([message(b"x")], token="t")
    assert [one.body for one in broker.pending("q", 9)] == [body_of("a"), b"x"]
    driver.close()


def test_a_slot_that_has_moved_is_followed(empty_cluster: ClusterServers) -> None:
    broker = RedisBroker(ClusterDriver(empty_cluster.url))
    source = empty_cluster.node_of(TAG)
    target = next(node for node in empty_cluster.masters if node is not source)
    consumer = broker.consume(["q"], worker="w")
    assert consumer.receive(1, 0.0) == []  # has a connection of its own to the source

    empty_cluster.move(TAG, target)
    try:
        put(broker, b"1", queue="q")

        assert [one.body for one in consumer.receive(1, HANG)] == [b"1"]
        consumer.close()
    finally:
        empty_cluster.move(TAG, source)
    broker.driver.close()


def test_idle_consumer_follows_a_slot_that_moves_away(empty_cluster: ClusterServers) -> None:
    broker, sender = (RedisBroker(ClusterDriver(empty_cluster.url)) for _ in range(2))
    source = empty_cluster.node_of(TAG)
    target = next(node for node in empty_cluster.masters if node is not source)
    consumer = broker.consume(["q"], worker="w")
    found: list[bytes] = []
    thread = threading.Thread(
        target=lambda: found.extend(one.body for one in consumer.receive(1, HANG))
    )
    thread.start()
    wait_until(lambda: "blmove" in str(source.cli("CLIENT", "LIST")), HANG, "a sleeping consumer")

    empty_cluster.move(TAG, target)
    try:
        put(sender, b"1", queue="q")
        thread.join(HANG)
        assert found == [b"1"]
        consumer.close()
    finally:
        empty_cluster.move(TAG, source)
    broker.driver.close()
    sender.driver.close()


def test_reader_of_a_topic_follows_a_slot_that_moved(empty_cluster: ClusterServers) -> None:
    reader, writer = (RedisBroker(ClusterDriver(empty_cluster.url)) for _ in range(2))
    source = empty_cluster.node_of(TAG)
    target = next(node for node in empty_cluster.masters if node is not source)
    subscription = reader.subscribe("t")
    assert subscription.read(0.0) == []

    empty_cluster.move(TAG, target)
    try:
        writer.append_records("t", [b"1"], 60.0)

        assert subscription.read(HANG) == [b"1"]
    finally:
        empty_cluster.move(TAG, source)
    subscription.close()
    reader.driver.close()
    writer.driver.close()


class FakeNode(socketserver.ThreadingTCPServer):
    """A node that answers CLUSTER SLOTS with `members` as the nodes of all slots, and OK else."""

    daemon_threads = True

    def __init__(self, *members: tuple[object, ...]) -> None:
        super().__init__((HOST, 0), FakeConnection)
        self.members = members

    @property
    def address(self) -> str:
        return f"{HOST}:{self.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join(HANG)
        self.server_close()


class FakeConnection(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(size + 2)[:-2])
            assert isinstance(self.server, FakeNode)
            slots = [(0, 16383, *self.server.members)]
            self.wfile.write(encoded(slots) if words[0] == b"CLUSTER" else b"+OK\r\n")


def encoded(value: object) -> bytes:
    if isinstance(value, list | tuple):
        return b"*%d\r\n" % len(value) + b"".join(map(encoded, value))
    if isinstance(value, str):
        return b"$%d\r\n%b\r\n" % (len(value), value.encode())
    return b"$-1\r\n" if value is None else b":%d\r\n" % value  # type: ignore[operator]


def test_node_that_knows_the_old_master_only_is_not_believed_for_ever(
    empty_cluster: ClusterServers,
) -> None:
    source = empty_cluster.node_of(TAG)
    target = next(node for node in empty_cluster.masters if node is not source)
    with FakeNode((HOST, source.port, "id")) as old:
        url = f"redis://{old.address},{HOST}:{source.port},{HOST}:{target.port}"
        broker = RedisBroker(ClusterDriver(url))
        broker.put([message(b"1")], token="first")

        empty_cluster.move(TAG, target)
        try:
            broker.put([message(b"2")], token="second")
            assert [one.body for one in broker.pending("q", 9)] == [b"1", b"2"]
        finally:
            empty_cluster.move(TAG, source)
        broker.driver.close()


def test_nodes_take_turns_to_name_a_master_that_does_not_answer(
    empty_cluster: ClusterServers,
) -> None:
    owner = empty_cluster.node_of(TAG)
    with FakeNode((HOST, 1, "id")) as one, FakeNode((HOST, 1, "id")) as two:
        url = f"redis://{one.address},{two.address},{HOST}:{owner.port}"
        driver = ClusterDriver(url)

        assert driver.ask(b"GET", b"x", doing="asking") is None
        driver.close()


def test_learned_node_that_is_no_node_any_more_is_left_out(
    empty_cluster: ClusterServers, empty_redis: RedisServer
) -> None:
    owner = empty_cluster.node_of(TAG)
    members = [(HOST, owner.port, "id"), (HOST, empty_redis.port, "id"), (HOST, owner.port, "id")]
    with FakeNode(*members) as node:
        driver = ClusterDriver(f"redis://{node.address}")
        assert driver.ask(b"GET", b"x", doing="asking") is None
        with pytest.raises(BackendUnavailable):
            driver.fail(MovedError(f"1 {HOST}:1"), doing="asking", away=BackendUnavailable)
    driver.close()  # the next call opens a connection, and asks the learned nodes

    for _ in range(3):
        assert driver.ask(b"GET", b"x", doing="asking") is None
    driver.close()


@pytest.mark.parametrize(
    "member", [("", "id"), ("?", "id"), (None, "id"), ("?", "id", ["ip", HOST]), (HOST, "id", [])]
)
def test_node_without_a_name_is_found(
    empty_cluster: ClusterServers, member: tuple[object, ...]
) -> None:
    name, *more = member
    with FakeNode((name, empty_cluster.node_of(TAG).port, *more)) as node:
        driver = ClusterDriver(f"redis://{node.address}")

        assert driver.ask(b"GET", b"x", doing="asking") is None
        driver.close()


def test_connection_that_was_opened_while_the_slot_moved_is_not_kept(
    empty_cluster: ClusterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = ClusterDriver(empty_cluster.url)
    source = empty_cluster.node_of(TAG)
    target = next(node for node in empty_cluster.masters if node is not source)
    driver.ask(b"GET", b"x", doing="asking")

    def moved_meanwhile(connection: object, timeout: float) -> None:
        set_timeout(connection, timeout)
        if empty_cluster.node_of(TAG) is source:
            empty_cluster.move(TAG, target)
            other = threading.Thread(target=lambda: driver.ask(b"GET", b"x", doing="asking"))
            other.start()
            other.join(HANG)

    monkeypatch.setattr(discovery, "set_timeout", moved_meanwhile)
    try:
        link = driver.open()
        assert driver.is_stale(link)
        link.close()
        assert driver.ask(b"GET", b"x", doing="asking") is None
    finally:
        monkeypatch.undo()
        empty_cluster.move(TAG, source)
    driver.close()


def test_connection_whose_node_refused_is_closed(empty_cluster: ClusterServers) -> None:
    driver = ClusterDriver(empty_cluster.url)
    link = driver.open()

    driver.after(MovedError(f"1 {HOST}:1"), link)

    assert driver._spare() is None
    with pytest.raises(OSError):
        link.exchange(driver.command(b"PING"))


def test_calls_that_may_fail_do_not_wait_for_a_master() -> None:
    driver = ClusterDriver(AWAY, timeout=HANG)
    began = time.monotonic()

    driver.unblock([b"1.life"])
    driver.unblock_while(lambda: b"1", doing="waking")
    with pytest.raises(BackendUnavailable):
        driver.ask(b"PING", doing="asking", patient=False)

    assert time.monotonic() - began < HANG


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("MOVED 12 host:7000", True),
        ("ASK 12 host:7000", True),
        ("MOVED 12 :7000", True),
        ("Error running script (call to f_1): @user_script:6: -MOVED 12 host:7000", True),
        ("TRYAGAIN Multiple keys request during rehashing of slot", True),
        ("user_script:1: the house has MOVED somewhere", False),
        ("no such key: TASK 12 x", False),
    ],
)
def test_refusals_are_told_from_other_errors(text: str, is_refused: bool) -> None:
    assert is_refused_for_now(ResponseError(text)) is is_refused


def test_a_cluster_that_is_away_is_told_as_one_redis_would() -> None:
    driver = ClusterDriver(AWAY, timeout=0.2)

    with pytest.raises(BrokerUnavailable, match="publishing"):
        RedisBroker(driver).put([message(b"x")], token="t")
    with pytest.raises(BackendUnavailable, match="reading states"):
        RedisBackend(driver).get_states(["a"])


@pytest.mark.parametrize("token", ["", "t"])
def test_a_lost_reply_is_told_and_a_repeat_doubles_nothing(
    empty_cluster: ClusterServers, token: str
) -> None:
    driver = ClusterDriver(empty_cluster.url, timeout=0.3)
    broker = RedisBroker(driver)

    def is_warm() -> bool:
        try:
            broker.put([message(b"first")], token="first")
        except (BrokerUnavailable, PublishUnknown):
            return False  # the timeout is short, and this machine is busy
        return True

    wait_until(is_warm)
    node = empty_cluster.node_of(TAG)

    node.freeze()
    try:
        with pytest.raises(PublishUnknown, match="publishing"):
            broker.put([message(b"second")], token=token)
    finally:
        node.thaw()
    driver.close()
    patient = RedisBroker(ClusterDriver(empty_cluster.url))
    if token:
        patient.put([message(b"second")], token=token)

    found = [one.body for one in patient.pending("q", 9)]
    assert found.count(b"second") <= 1
    # Else its replica took it for dead, and knows what it knows.
    if token and empty_cluster.node_of(TAG) is node:
        assert found == [b"first", b"second"]
    patient.driver.close()


def test_one_redis_is_no_cluster(redis_server: RedisServer) -> None:
    driver = ClusterDriver(redis_server.url)

    with pytest.raises(StoreUnusable, match="no node of a cluster"):
        RedisBackend(driver).get_states(["a"])


def test_one_redis_gets_scripts_and_commands_as_they_are(redis_server: RedisServer) -> None:
    driver = RedisDriver(redis_server.url)
    from machinery_py.brokers.redis.scripts import CLAIM

    assert driver.adapted(CLAIM) is CLAIM
    assert driver.command(b"GET", b"k") == b"*2\r\n$3\r\nGET\r\n$1\r\nk\r\n"
    assert b"\r\n$1\r\n0\r\n" in driver.packed_script(CLAIM, b"x")


# Settings


def test_the_master_of_the_tag_is_warned_of_once(
    durable: ClusterServers, caplog: pytest.LogCaptureFixture
) -> None:
    owner = durable.node_of(TAG)
    for node in durable.masters:
        node.cli("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    server = server_with(durable)
    server.register_task("note", lambda: None)

    with server.new_worker(concurrency=2):
        together(4, lambda _: server.send_task(Signature(name="note")))

    (text,) = warnings(caplog)
    assert text.startswith(f"Redis at 127.0.0.1:{owner.port}: maxmemory-policy is allkeys-lru")
    assert "maxmemory-policy is allkeys-lru" in server.broker.concerns()[0].text
    assert server.broker.concerns() == server.backend.concerns()
    server.close()


def test_cluster_is_refused_when_the_tags_master_would_lose_tasks(
    durable: ClusterServers, caplog: pytest.LogCaptureFixture
) -> None:
    strict = Server(Config(broker=durable.url, strict_durability=True))
    strict.send_task(Signature(name="nobody_runs_this"))
    assert strict.broker.concerns() == strict.backend.concerns() == []
    assert warnings(caplog) == []
    strict.close()

    bad = durable.node_of(TAG)
    bad.cli("CONFIG", "SET", "appendonly", "no")
    again = Server(Config(broker=durable.url, strict_durability=True))
    with pytest.raises(
        StoreUnusable, match=f"Redis at 127.0.0.1:{bad.port}: refused by strict_durability"
    ):
        again.send_task(Signature(name="nobody_runs_this"))
    again.close()


def test_delayed_tasks_are_under_the_key_that_was_chosen(empty_cluster: ClusterServers) -> None:
    key = "it's\\delayed {ü"
    server = server_with(empty_cluster, delayed_tasks_key=key)
    answer = server.register_task("answer", lambda: 42)
    answer.options(delay=3600.0).send()
    soon = answer.options(delay=0.1).send()
    node = empty_cluster.node_of(TAG)

    assert node.cli("ZCARD", TAG + key) == 2
    with server.new_worker(concurrency=1):
        assert soon.get(timeout=HANG) == 42
    assert node.cli("ZCARD", TAG + key) == 1
    assert server.broker.purge("machinery_tasks") == 1
    assert node.cli("EXISTS", TAG + key) == 0
    assert [one.state for one in server.inspect.tasks(state=State.SUCCESS)] == [State.SUCCESS]
    server.close()


def test_connections_are_counted_together(empty_cluster: ClusterServers) -> None:
    driver = ClusterDriver(empty_cluster.url, timeout=0.3, limits=PoolLimits(max_active=2))
    driver.ask(b"EXISTS", b"q", doing="asking")
    links = [driver.open(), driver.open()]

    with pytest.raises(
        BackendUnavailable,
        match=r"redis.max_active: 2 connections are in use \(raise it, or set redis.wait\)",
    ):
        driver.ask(b"EXISTS", b"q", doing="asking")

    for link in links:
        link.close()
    driver.ask(b"EXISTS", b"q", doing="asking")
    driver.close()


def test_one_connection_too_many_is_refused_at_once(empty_cluster: ClusterServers) -> None:
    driver = ClusterDriver(empty_cluster.url, timeout=HANG, limits=PoolLimits(max_active=1))
    link = driver.open()
    began = time.monotonic()

    with pytest.raises(BackendUnavailable, match="1 connections are in use"):
        driver.ask(b"EXISTS", b"q", doing="asking")

    assert time.monotonic() - began < HANG
    link.close()
    driver.close()


def test_a_worker_runs_within_its_connections(empty_cluster: ClusterServers) -> None:
    server = server_with(empty_cluster, max_active=6, wait=True, client_name="few")
    double = server.register_task("double", lambda n: 2 * n)
    most: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.01):
            most.append(connections(empty_cluster, "few"))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        with server.new_worker(concurrency=4):
            results = [double.send(number) for number in range(60)]
            assert [result.get(timeout=HANG) for result in results] == [
                2 * number for number in range(60)
            ]
    finally:
        over.set()
        looker.join(HANG)
    # The nodes are asked one after the other, and a question for the slots is one connection more.
    lasting = [min(pair) for pair in itertools.pairwise(most)]
    assert 2 <= max(lasting) <= 6
    server.close()


def test_a_shorter_poll_period_is_kept(empty_cluster: ClusterServers) -> None:
    server = server_with(empty_cluster, normal_tasks_poll_period=50)

    def sleeps() -> int:
        lines = str(empty_cluster.node_of(TAG).cli("INFO", "commandstats")).splitlines()
        return sum(
            int(line.partition("calls=")[2].partition(",")[0])
            for line in lines
            if "cmdstat_blmove:" in line
        )

    with server.new_worker(concurrency=1, queues=["a", "b"]) as worker:
        wait_until(lambda: worker.ready, HANG, "a worker that is ready")
        before, began = sleeps(), time.monotonic()
        wait_until(lambda: sleeps() > before + 20, HANG, "twenty sleeps")
        assert time.monotonic() - began < 19.0  # with the default a second each
    server.close()

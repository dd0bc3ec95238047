"""Foreign values on the same servers, under the name of a task, group or queue of ours.

They stay as they are, and one message suffers, not the others. The rule for names is tested in
tests/test_names.py and the conformance suite.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from machinery_py import Config, Server, Signature, group
from machinery_py.brokers.base import Message
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.errors import MachineryError, NameRefused, PublishRefused
from machinery_py.tasks.states import TaskState
from machinery_py.testing.conformance.application import App
from machinery_py.testing.waiting import HANG, wait_until
from tests.backends.memcached.case import tell
from tests.support.servers import MemcachedServer, RedisCluster, RedisServer

_numbers = itertools.count()

THEIRS = "theirs"  # the name under which the other program keeps something


class Neighbour:
    """Another program on the server. `plant`: keep something as THEIRS; `looks`: what is there."""

    def __init__(
        self, server: Server, plant: Callable[[], object], look: Callable[[], Any]
    ) -> None:
        self.app = App(server)
        self.plant = plant
        self.look = look


def body(**fields: object) -> bytes:
    arguments = [{"Type": "int64", "Value": 1}, {"Type": "int64", "Value": 2}]
    return json.dumps({"Name": "add", "Args": arguments, **fields}).encode()


def put(app: App, *bodies: bytes) -> None:
    queue = app.server.config.default_queue
    app.server.broker.put(
        [
            Message(uuid=json.loads(one)["UUID"], name="add", queue=queue, body=one)
            for one in bodies
        ],
        token="",
    )


def state_of(app: App, uuid: str) -> TaskState | None:
    return app.server.backend.get_states([uuid]).get(uuid)


def memory() -> str:
    return f"memory://names-{next(_numbers)}"


@contextlib.contextmanager
def on_redis(request: pytest.FixtureRequest, broker: str = "") -> Iterator[Neighbour]:
    redis: RedisServer = request.getfixturevalue("empty_redis")
    server = Server(Config(broker=broker or redis.url, result_backend=redis.url))
    yield Neighbour(
        server,
        lambda: redis.cli("SET", THEIRS, '{"their": "text"}'),
        lambda: (redis.cli("GET", THEIRS), redis.cli("TTL", THEIRS)),
    )


@contextlib.contextmanager
def on_redis_a_list(request: pytest.FixtureRequest) -> Iterator[Neighbour]:
    redis: RedisServer = request.getfixturevalue("empty_redis")
    yield Neighbour(
        Server(redis.url),
        lambda: redis.cli("RPUSH", THEIRS, "a", "b"),
        lambda: redis.cli("LRANGE", THEIRS, 0, -1),
    )


@contextlib.contextmanager
def on_a_cluster(request: pytest.FixtureRequest) -> Iterator[Neighbour]:
    cluster: RedisCluster = request.getfixturevalue("empty_cluster")
    theirs = f"{{machinery}}{THEIRS}"
    node = cluster.node_of(theirs)
    yield Neighbour(
        Server(cluster.url),
        lambda: node.cli("SET", theirs, "their text"),
        lambda: (node.cli("GET", theirs), node.cli("TTL", theirs)),
    )


@contextlib.contextmanager
def in_rabbitmq(request: pytest.FixtureRequest) -> Iterator[Neighbour]:
    url: str = request.getfixturevalue("amqp_url")
    driver = AmqpDriver(url)

    def plant() -> None:
        with driver.visit("planting") as channel:
            channel.rpc("queue_declare", queue=THEIRS, durable=True, timeout=HANG)
            for number in range(50):
                channel.link.tell(
                    lambda number=number: channel.raw.basic_publish("", THEIRS, b"%d" % number)
                )  # type: ignore[misc]
            channel.rpc("queue_declare", queue=THEIRS, durable=True, timeout=HANG)

    def look() -> int:
        with driver.visit("looking") as channel:
            frame = channel.rpc("queue_declare", queue=THEIRS, durable=True, timeout=HANG)
            return int(frame.method.message_count)

    yield Neighbour(Server(Config(broker=memory(), result_backend=url)), plant, look)
    driver.close()


@contextlib.contextmanager
def in_memcached(request: pytest.FixtureRequest) -> Iterator[Neighbour]:
    memcached: MemcachedServer = request.getfixturevalue("empty_memcached")
    server = Server(Config(broker=memory(), result_backend=memcached.url))
    yield Neighbour(
        server,
        lambda: tell(memcached, b"set theirs 0 0 5\r\ntheir"),
        lambda: tell(memcached, b"gets theirs"),
    )


PLACES = {
    "redis": on_redis,
    "redis list": on_redis_a_list,
    "redis results": lambda request: on_redis(request, memory()),
    "cluster": on_a_cluster,
    "rabbitmq results": in_rabbitmq,
    "memcached": in_memcached,
}


@pytest.fixture(params=PLACES)
def neighbour(request: pytest.FixtureRequest) -> Iterator[Neighbour]:
    with PLACES[request.param](request) as found:
        yield found
        found.app.close()


def test_foreign_key_under_a_uuid_stays_unchanged(neighbour: Neighbour) -> None:
    live_beside(neighbour)


def test_foreign_document_under_a_uuid_stays_unchanged(mongodb_url: str) -> None:
    neighbour = Neighbour(
        Server(mongodb_url),
        lambda: tasks.insert_one({"_id": THEIRS, "state": "PENDING", "owner": "billing"}),
        lambda: tasks.find_one({"_id": THEIRS}),
    )
    with pymongo.MongoClient[dict[str, Any]](mongodb_url) as client:
        tasks = client.get_default_database(default="machinery").tasks
        live_beside(neighbour)
    neighbour.app.close()


def live_beside(neighbour: Neighbour) -> None:
    app = neighbour.app
    neighbour.plant()
    before = neighbour.look()
    assert before

    with pytest.raises(NameRefused, match=THEIRS):
        app.add.options(uuid=THEIRS).send(1, 2)
    with app.running():
        put(app, body(UUID=THEIRS))
        wait_until(app.server.inspect.dead, what="a dead letter")
        put(app, body(UUID="first", OnSuccess=[json.loads(body(UUID=THEIRS))]))
        put(
            app,
            body(
                UUID="member",
                GroupUUID=THEIRS,
                GroupTaskCount=1,
                ChordCallback=json.loads(body(UUID="last")),
            ),
        )
        assert [app.add.send(1, 2).get(timeout=HANG) for _ in range(3)] == [3] * 3
        # Its end stands, or it has failed for what it cannot send: that depends on who keeps what.
        wait_until(
            lambda: (found := state_of(app, "first")) is not None and found.is_finished,
            what="the end of first",
        )
        assert [app.add.send(1, 2).get(timeout=HANG) for _ in range(3)] == [3] * 3

    letter = app.server.inspect.dead()[-1]
    assert letter.body == body(UUID=THEIRS)
    assert THEIRS in letter.error
    assert neighbour.look() == before
    reads: tuple[Callable[[], object], ...] = (
        lambda: app.server.backend.get_states([THEIRS]),
        lambda: app.server.backend.get_group(THEIRS),
    )
    for read in reads:
        try:
            read()  # or it finds nothing
        except MachineryError as error:
            assert f"'{THEIRS}'" in str(error)
    for purge in (app.server.backend.purge_state, app.server.backend.purge_group_meta):
        with contextlib.suppress(NameRefused):
            purge(THEIRS)
    assert neighbour.look() == before


def test_name_of_an_empty_queue_is_no_uuid(empty_redis: RedisServer) -> None:
    app = App(Server(empty_redis.url))
    with app.running(queues=["mail"]):
        assert app.add.options(queue="mail").send(1, 2).get(timeout=HANG) == 3
        with pytest.raises(NameRefused, match="mail"):
            app.add.options(uuid="mail").send(1, 2)
        assert empty_redis.cli("EXISTS", "mail") == 0
        assert app.add.options(queue="mail").send(1, 2).get(timeout=HANG) == 3
    app.close()


KEYS_OF_A_QUEUE = (
    "mail",
    "mpy:{mail}:n",
    "mpy:{mail}:a",
    "mpy:{mail}:s",
    "mpy:{mail}:l",
    "mpy:{mail}:z",
    "mpy:{mail}:d",
    "mpy:{mail}:v",
    "mpy:{mail}:t",
    "delayed_tasks",
    "mpy:revoked",
)


@pytest.mark.parametrize("key", KEYS_OF_A_QUEUE)
def test_a_key_that_others_have_taken_stops_no_other_queue(
    empty_redis: RedisServer, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(Server(Config(broker=empty_redis.url, lease=1.0)))
    kind = (
        ("SADD", key, "x")
        if empty_redis.cli("TYPE", key) != "set" and not key.endswith(":v")
        else ("SET", key, "x")
    )
    empty_redis.cli(*kind)
    waits = []  # a key that is needed for a message alone is not looked at before there is one
    with contextlib.suppress(PublishRefused):
        waits.append(app.add.options(queue="mail").send(1, 2))
    with caplog.at_level(logging.ERROR), app.running(queues=["mail", "machinery_tasks"]) as worker:
        assert [app.add.send(1, 2).get(timeout=HANG) for _ in range(3)] == [3] * 3
        if key not in ("mpy:{mail}:v", "mpy:{mail}:t", "mpy:{mail}:d"):
            wait_until(lambda: f"key {key!r} holds a set" in caplog.text, what="the key is named")
        later = app.add.options(delay=0.01) if key != "delayed_tasks" else app.add
        assert later.send(1, 2).get(timeout=HANG) == 3
        empty_redis.cli("DEL", key)
        waits.append(app.add.options(queue="mail").send(1, 2))
        assert [one.get(timeout=HANG) for one in waits] == [3] * len(waits)
        assert worker is not None
    app.close()


Read = Callable[[Server], object]


def the_queue(server: Server) -> object:
    return server.broker.pending("mail", 5)


def the_state(server: Server) -> object:
    return server.backend.get_states(["task"])


READERS: dict[str, tuple[str, Read]] = {
    "state": ("task", the_state),
    "states": ("task", lambda one: one.backend.get_states(["task", *map(str, range(999))])),
    "members": ("task", lambda one: one.backend.member_results("group", ["task"])),
    "fields": ("mpy:m:{task}", the_state),
    "group": ("group", lambda one: one.backend.get_group("group")),
    "waiting": ("mail", the_queue),
    "count": ("mail", lambda one: one.broker.waiting("mail")),
    "priorities": ("mpy:{mail}:l", the_queue),
    "delayed": ("delayed_tasks", lambda one: one.broker.delayed(5)),
    "parked": ("mpy:{mail}:z", lambda one: one.broker.delayed(5)),
    "purge": ("mpy:{mail}:z", lambda one: list(one.broker.purge_each("mail", print))),
    "dead letters": ("mpy:{mail}:e", lambda one: one.broker.dead_letters(limit=5)),
    "queues": ("mpy:queues", lambda one: one.broker.stats()),
    "listing": ("mpy:open", lambda one: one.inspect.tasks()),
    "finding": ("mpy:done", lambda one: one.backend.find("t")),
    "outboxes": ("mpy:outbox", lambda one: one.backend.unsent(5, older_than=0)),
    "schedules": ("mpy:records", lambda one: one.backend.records()),
    "limits": ("mpy:limits", lambda one: one.inspect.limits()),
    "topic": ("mpy:topic:{t}", lambda one: one.broker.subscribe("t", since=5.0)),
}
TEXTS = [name for name in READERS if name in ("state", "states", "members", "fields", "group")]


@pytest.mark.parametrize("reader", READERS)
def test_reader_names_the_key_that_others_have_taken(empty_redis: RedisServer, reader: str) -> None:
    server = Server(empty_redis.url)
    server.register_task("add", list)
    server.send_task(Signature(name="add", uuid="task", routing_key="mail"))
    key, read = READERS[reader]
    server.backend.get_states(["task"])
    empty_redis.cli("DEL", key)
    if reader in TEXTS:
        empty_redis.cli("SET", key, "their text")
    elif reader == "schedules":
        empty_redis.cli("RPUSH", key, "theirs")
    else:
        empty_redis.cli("HSET", key, "their", "field")

    with pytest.raises(MachineryError) as caught:
        read(server)

    assert repr(key) in str(caught.value)
    assert re.search("choose another|rename or delete", str(caught.value))
    server.close()


def test_listing_leaves_out_a_task_whose_key_others_have_taken(
    empty_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(empty_redis.url)
    server.register_task("add", list)
    for uuid in ("task", "other"):
        server.send_task(Signature(name="add", uuid=uuid, routing_key="mail"))
    empty_redis.cli("SET", "task", "their text")

    assert [one.task_uuid for one in server.inspect.tasks()] == ["other"]
    assert "'task' is no task or group of ours" in caplog.text
    server.close()


def test_a_worker_takes_up_a_queue_again_whose_key_is_put_right(empty_redis: RedisServer) -> None:
    app = App(Server(empty_redis.url))
    empty_redis.cli("SET", "mail", "their text")
    with app.running(queues=["mail"]):
        with pytest.raises(NameRefused, match="'mail' holds a string"):
            app.add.options(queue="mail").send(1, 2)
        assert empty_redis.cli("GET", "mail") == "their text"
        empty_redis.cli("DEL", "mail")
        assert app.add.options(queue="mail").send(1, 2).get(timeout=HANG) == 3
    app.close()


def test_group_with_a_foreign_key_blocks_no_other_callback(
    empty_redis: RedisServer,
) -> None:
    app = App(Server(empty_redis.url))
    empty_redis.cli("ZADD", "mpy:ready", 0, "bad")
    empty_redis.cli("SET", "mpy:g:{bad}", "their text")
    with app.running():
        flow = group(app.add.signature(1, 1), app.add.signature(2, 2)) | app.add.partial()
        assert flow.send().get(timeout=HANG) == 6
    app.close()


def test_delayed_messages_of_illegal_queues_become_dead_letters(
    empty_redis: RedisServer,
) -> None:
    app = App(Server(empty_redis.url))
    empty_redis.cli("SET", "config", "their text")
    bad = [
        body(UUID=f"bad_{n}", RoutingKey=name)
        for n, name in enumerate(["delayed_tasks", "mpy:revoked", "a\nb", "config"])
    ]
    for one in bad:
        empty_redis.cli("ZADD", "delayed_tasks", 1, one.decode())
    with app.running():
        assert app.add.options(delay=0.05).send(1, 2).get(timeout=HANG) == 3
        wait_until(lambda: len(app.server.inspect.dead()) == len(bad), what="dead letters")
    assert sorted(letter.body for letter in app.server.inspect.dead()) == sorted(bad)
    assert empty_redis.cli("GET", "config") == "their text"
    app.close()


@pytest.fixture
def running(tmp_path: Path, empty_redis: RedisServer) -> Iterator[list[App]]:
    """Applications on some stores, with a worker each."""
    apps = [
        App(Server(url))
        for url in (memory(), f"sqlite:///{tmp_path}/names.db?synchronous=normal", empty_redis.url)
    ]
    with contextlib.ExitStack() as stack:
        for app in apps:
            stack.enter_context(app.running())
            stack.callback(app.close)
        yield apps


@given(uuid=st.text(min_size=1, max_size=20), queue=st.text(min_size=1, max_size=20))
@example(uuid="mpy:{machinery_tasks}:z", queue="mpy:{machinery_tasks}:a")
@example(uuid="machinery_tasks", queue="TriggerChordMutex")
@example(uuid="mpy:ready", queue="mpy:open")
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_text_is_refused_at_send_or_works(running: list[App], uuid: str, queue: str) -> None:
    for app in running:
        with contextlib.suppress(NameRefused):
            assert (
                app.add.options(uuid=f"{uuid}", queue="machinery_tasks")
                .send(1, 2)
                .get(timeout=HANG)
                == 3
            )
        with contextlib.suppress(NameRefused):
            result = app.add.options(queue=queue).send(1, 2)
            if queue == app.server.config.default_queue:  # a worker serves it
                assert result.get(timeout=HANG) == 3
                continue
            assert len(app.server.broker.pending(queue, 5)) >= 1
            app.server.broker.purge(queue)
        assert app.add.send(1, 2).get(timeout=HANG) == 3

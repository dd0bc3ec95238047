"""Refusals of real servers: a lasting one fails with the server's words, a full store waits.

Nothing else fails or waits. Each application sends a refused task among good ones, which must have
their results though it is in their batch.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from machinery_py import (
    Config,
    PublishRefused,
    PublishUnknown,
    Server,
    Signature,
    TaskFailed,
    chain,
    group,
)
from machinery_py.config.config import AMQPConfig
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.tasks.states import State
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.fixtures import Vhosts
from tests.support.servers import RabbitMQServer, RedisServer

SMALL, LARGE = 200_000, 300_000  # bytes that RabbitMQ takes, and does not


class App:
    """An application with some tasks."""

    def __init__(self, broker: str, results: str, **more: Any) -> None:
        self.server = Server(
            Config(broker=broker, result_backend=results, lock="memory://refusals", **more)
        )
        self.ran: list[str] = []
        self.told: list[str] = []
        self.say = self.server.register_task("say", self._say)
        self.grow = self.server.register_task("grow", lambda size: "x" * size)
        self.tell = self.server.register_task("tell", self.told.append)

    def _say(self, word: str, *_: str) -> str:
        self.ran.append(word)
        return word[:10]

    def is_empty(self) -> bool:
        return not any(line.waiting or line.running for line in self.server.broker.stats())

    def dead(self) -> list[tuple[str, str]]:
        return [(letter.uuid, letter.reason) for letter in self.server.inspect.dead()]

    def check(self, first: Signature[Any], step: Signature[Any], words: str) -> None:
        """`step` behind `first` is refused, and nothing else."""
        bad = chain(first, step.catch(self.tell.partial())).send()
        good = [self.say.send(str(number)) for number in range(8)]
        with self.server.new_worker("w", 4) as worker:
            assert [one.get(timeout=HANG) for one in good] == [str(number) for number in range(8)]
            with pytest.raises(TaskFailed, match=words) as caught:
                bad.get(timeout=HANG)
            assert caught.value.uuid == bad.uuid
            assert bad.steps[0].get_state().state is State.SUCCESS
            wait_until(lambda: len(self.told) == 1 and self.is_empty())
            assert worker.ready
        assert self.dead() == [(bad.uuid, "refused")]


def results_of(
    kind: str, amqp_url: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> str:
    match kind:
        case "redis":
            return str(request.getfixturevalue("empty_redis").url)
        case "sqlite":
            return f"sqlite:///{tmp_path}/states.db"
        case _:
            return amqp_url


@pytest.fixture(params=["redis", "amqp"])
def app(request: pytest.FixtureRequest, amqp_url: str, tmp_path: pathlib.Path) -> Iterator[App]:
    app = App(amqp_url, results_of(request.param, amqp_url, tmp_path, request))
    yield app
    app.server.close()


@pytest.fixture(scope="module", autouse=True)
def small_messages(rabbitmq_server: RabbitMQServer) -> Iterator[None]:
    def limit(size: int) -> None:
        for call in (
            "application:set_env(rabbit, max_message_size, {})",
            "persistent_term:put(max_message_size, {})",
        ):
            rabbitmq_server.ctl(
                "eval", call.format(size) + "."
            )  # RabbitMQ 3 looks at the first, 4 at the second

    limit(SMALL)
    yield
    limit(134_217_728)


# RabbitMQ


def declare_otherwise(url: str, queue: str) -> None:
    """Make a queue that nobody can declare whose configuration says nothing of this limit."""
    with AmqpDriver(url).visit("declaring") as channel:
        channel.rpc(
            "queue_declare", queue=queue, durable=True, arguments={"x-max-length": 7}, timeout=HANG
        )


def test_a_step_to_a_queue_with_other_arguments_fails(app: App) -> None:
    declare_otherwise(app.server.config.broker, "other")
    app.check(
        app.say.signature("a"),
        app.say.options(queue="other").partial(),
        "'other'.*queue_declare_args",
    )
    with pytest.raises(PublishRefused, match="'other'.*queue_declare_args") as caught:
        app.say.options(queue="other").send("a")
    assert caught.value.permanent


def test_step_to_a_forbidden_queue_fails_and_can_be_replayed(
    app: App, rabbitmq_server: RabbitMQServer, vhosts: Vhosts
) -> None:
    vhost = app.server.config.broker.rpartition("/")[2]
    app.server.broker.declare(["machinery_tasks"])
    rabbitmq_server.ctl(
        "set_permissions", "-p", vhost, "guest", "^(?!secret).*", "^(?!secret).*", ".*"
    )
    app.check(
        app.say.signature("a"), app.say.options(queue="secret").partial(), "secret.*set_permissions"
    )

    rabbitmq_server.ctl("set_permissions", "-p", vhost, "guest", ".*", ".*", ".*")
    [letter] = app.server.inspect.dead()
    app.server.inspect.replay_dead([letter.id])
    with app.server.new_worker("w", 4, queues=["secret"]):
        assert app.server.result(letter.uuid).get(timeout=HANG) == "a"
    assert app.dead() == []


@pytest.mark.parametrize("results", ["redis", "sqlite"])
def test_a_step_over_max_message_size_fails(
    results: str, amqp_url: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    app = App(amqp_url, results_of(results, amqp_url, tmp_path, request))
    app.check(app.grow.signature(LARGE), app.say.partial(), "max_message_size = 200,000")
    [letter] = app.server.inspect.dead()
    assert "machinery retry" in letter.error
    app.server.close()


def test_a_result_over_max_message_size_fails_its_task(amqp_url: str) -> None:
    app = App(amqp_url, amqp_url)
    bad, good = app.grow.send(LARGE), [app.say.send(str(number)) for number in range(8)]
    with app.server.new_worker("w", 4) as worker:
        assert [one.get(timeout=HANG) for one in good] == [str(number) for number in range(8)]
        with pytest.raises(TaskFailed, match="the result cannot be stored: .*larger than"):
            bad.get(timeout=HANG)
        assert worker.ready
    assert app.dead() == [(bad.uuid, "unstorable")]
    app.server.close()


def test_too_large_message_is_refused_with_its_queue(amqp_url: str) -> None:
    app = App(amqp_url, "memory://refusals")
    with pytest.raises(PublishRefused, match="'machinery_tasks' has .* max_message_size") as caught:
        app.say.send("x" * LARGE)
    assert caught.value.permanent
    with pytest.raises(PublishRefused, match="max_message_size"):
        group(app.say.signature("x" * (LARGE if number == 2 else 1)) for number in range(5)).send()
    assert app.is_empty()
    app.server.close()


def test_first_group_with_a_too_large_member_is_unknown_at_once(
    amqp_url: str,
) -> None:
    app = App(amqp_url, "memory://refusals")
    with pytest.raises(PublishUnknown, match="max_message_size") as caught:
        group(app.say.signature("x" * (LARGE if number == 2 else 1)) for number in range(5)).send()
    assert caught.value.permanent
    app.server.close()


def tree(app: App, name: str, depth: int) -> Signature[Any]:
    """A task that sends three, each of which sends three, ..."""
    signature = app.say.signature(name)
    for number in range(3 if depth else 0):
        signature = signature.then(tree(app, f"{name}{number}", depth - 1))
    return signature


@pytest.mark.parametrize("kind", ["classic", "quorum"])
@pytest.mark.parametrize("results", ["redis", "amqp"])
def test_tasks_that_fill_their_own_queue_come_to_their_end(
    results: str, kind: str, amqp_url: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    arguments = {"x-max-length": 10, "x-overflow": "reject-publish"} | (
        {"x-queue-type": "quorum"} if kind == "quorum" else {}
    )
    app = App(
        amqp_url,
        results_of(results, amqp_url, tmp_path, request),
        amqp=AMQPConfig(queue_declare_args=arguments),
    )
    for number in range(4):
        app.server.send(tree(app, f"{number}:", 3))
    with app.server.new_worker("v", 2), app.server.new_worker("w", 2) as worker:
        wait_until(lambda: len(app.ran) >= 160 and app.is_empty(), timeout=2 * HANG)
        assert worker.ready
    assert len(app.ran) == len(set(app.ran)) == 160
    app.server.close()


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ({}, 0),
        ({"x-max-length": 10, "x-overflow": "reject-publish", "x-queue-type": "quorum"}, 0),
        ({"x-max-length": 10, "x-overflow": "reject-publish"}, 1),
        ({"x-max-length": 10, "x-queue-type": "quorum"}, 1),
    ],
)
def test_a_limit_that_loses_tasks_is_a_concern(arguments: dict[str, Any], count: int) -> None:
    app = App(
        "amqp://guest:guest@127.0.0.1:1/",
        "memory://refusals",
        amqp=AMQPConfig(queue_declare_args=arguments),
    )
    assert len(app.server.broker.concerns()) == count
    app.server.close()


# Redis


@pytest.fixture
def restricted(empty_redis: RedisServer) -> Iterator[str]:
    """The URL of a user who may not use the keys of the queue `secret`."""
    keys = [
        "machinery_tasks",
        "mpy:[^{]*",
        "mpy:{machinery_tasks}*",
        "task_*",
        "delayed_tasks",
        "group*",
        "mpy:{group*",
        "chord*",
    ]
    with redis.Redis.from_url(empty_redis.url) as client:
        client.execute_command(
            "ACL", "SETUSER", "bob", "on", ">bob", "+@all", "&*", *(f"~{key}" for key in keys)
        )
        yield empty_redis.url.replace("redis://", "redis://bob:bob@")
        client.execute_command("ACL", "DELUSER", "bob")


def test_a_step_to_a_queue_whose_keys_redis_does_not_give_fails(restricted: str) -> None:
    app = App(restricted, restricted)
    app.check(
        app.say.signature("a"),
        app.say.options(queue="secret").partial(),
        "check the keys in the user's ACL",
    )
    with pytest.raises(PublishRefused, match="queue secret: .*ACL") as caught:
        app.say.options(queue="secret").send("a")
    assert caught.value.permanent
    app.server.close()


def test_a_result_that_redis_never_takes_fails_its_task(empty_redis: RedisServer) -> None:
    app = App(empty_redis.url, empty_redis.url, max_result_size=8_000_000)
    with redis.Redis.from_url(empty_redis.url) as client:
        before = client.config_get("proto-max-bulk-len")["proto-max-bulk-len"]
        client.config_set("proto-max-bulk-len", 1024 * 1024)
        try:
            bad, good = app.grow.send(2_000_000), [app.say.send(str(number)) for number in range(8)]
            with app.server.new_worker("w", 4) as worker:
                assert [one.get(timeout=HANG) for one in good] == [
                    str(number) for number in range(8)
                ]
                with pytest.raises(TaskFailed, match="larger than proto-max-bulk-len"):
                    bad.get(timeout=HANG)
                assert worker.ready
            assert app.dead() == [(bad.uuid, "unstorable")]
        finally:
            client.config_set("proto-max-bulk-len", before)
    app.server.close()

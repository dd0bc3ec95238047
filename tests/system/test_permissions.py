"""The how-to pages' user rights are enough: each is read from its page, and an application runs."""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo.monitoring
import pytest

from machinery_py import (
    Config,
    DuplicateTask,
    Server,
    TaskFailed,
    Unsupported,
    chain,
    chord,
    current_task,
    group,
)
from machinery_py.brokers.base import Message
from machinery_py.testing.conformance.topics import taken
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.servers import RabbitMQServer, RedisCluster, RedisServer

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"


def documented(page: str, begin: str) -> list[str]:
    """The words of the page's command with this beginning; backslashes continue a line."""
    text = (HOW_TO / page).read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith(begin)]
    return shlex.split(line)


class Application:
    """Tasks on the two queues that the pages name."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.gate = threading.Event()
        self.ran: list[Any] = []
        self.add = server.task(self._add)
        self.total = server.register_task("total", self._total)
        self.retried = server.task("retried", retries=1, backoff=[0.01])(self._retried)
        self.fail = server.register_task("fail", self._fail)
        self.held = server.task("held", queue="mail", unique=True)(self._held)
        self.tick = server.register_task("tick", lambda: self.ran.append("tick"))

    def _add(self, a: int, b: int) -> int:
        current_task().progress(1, 2)
        return a + b

    _add.__name__ = "add"

    def _total(self, *numbers: int) -> int:
        return sum(numbers)

    def _retried(self) -> int:
        if current_task().attempt == 1:
            raise ValueError("once more")
        return current_task().attempt

    def _fail(self) -> None:
        raise ValueError("for good")

    def _held(self, number: int) -> int:
        assert self.gate.wait(HANG)
        return number

    def run(self) -> None:
        """Each thing that an application does, as far as its results can keep it."""
        server, add = self.server, self.add
        keeps = server.backend.features
        with server.new_worker(concurrency=3, queues=["machinery_tasks", "mail"]):
            assert add.send(1, 2).get(timeout=HANG) == 3
            assert self.retried.send().get(timeout=HANG) == 2
            with pytest.raises(TaskFailed):
                self.fail.send().get(timeout=HANG)
            late = add.options(delay=1.0).send(2, 2)
            assert chain(add.signature(1, 1), add.partial(5)).send().get(timeout=HANG) == 7
            assert group(add.signature(n, 1) for n in range(3)).send().get(timeout=HANG) == [
                1,
                2,
                3,
            ]
            assert (
                chord(group(add.signature(n, 1) for n in range(3)), self.total.partial())
                .send()
                .get(timeout=HANG)
                == 6
            )
            assert late.get(timeout=HANG) == 4
            if keeps.claims:
                self.hold()
            self.pause()
            self.bury()
            if keeps.schedules:
                self.schedule()
            self.look()
        self.listen()
        if keeps.revocations:
            self.revoke()
        server.inspect.purge("machinery_tasks")

    def hold(self) -> None:
        result = self.held.send(1)
        with pytest.raises(DuplicateTask):
            self.held.options(on_duplicate="reject").send(1)
        self.gate.set()
        assert result.get(timeout=HANG) == 1

    def pause(self) -> None:
        inspect = self.server.inspect
        inspect.pause("mail")
        assert self.server.broker.paused() == {"mail"}
        inspect.resume("mail")
        inspect.purge("mail")

    def bury(self) -> None:
        inspect = self.server.inspect
        self.server.broker.put(
            [Message(uuid="", name="", queue="mail", body=b"no signature")], token=""
        )
        wait_until(lambda: len(inspect.dead()) == 1, what="the dead letter")
        assert inspect.delete_dead([inspect.dead()[0].id]) == 1

    def schedule(self) -> None:
        schedules = self.server.schedules
        schedules.add("@daily", "nightly", self.tick.signature())
        schedules.run_now("nightly")
        wait_until(lambda: self.ran == ["tick"], what="the tick")
        schedules.remove("nightly")
        if self.server.config.lock_url:
            with self.server.lock("name", timeout=HANG):
                pass

    def look(self) -> None:
        inspect = self.server.inspect
        assert {one.queue for one in inspect.queues()} >= {"machinery_tasks", "mail"}
        assert len(inspect.workers()) == 1
        with contextlib.suppress(Unsupported):
            (failed,) = inspect.tasks(state="failed")
            assert inspect.task(failed.task_uuid[:20]).state == failed
            assert inspect.search(cursor=inspect.search(limit=1).cursor).tasks
            assert inspect.history()
            assert inspect.delete([one.task_uuid for one in inspect.tasks(state="done")])
            assert inspect.retry([failed.task_uuid]) == [failed.task_uuid]

    def listen(self) -> None:
        broker = self.server.broker
        subscription = broker.subscribe("news")
        broker.broadcast("news", [b"x"], ttl=HANG)
        assert taken(subscription, 1) == [b"x"]
        subscription.wake()
        subscription.close()

    def revoke(self) -> None:
        result = self.add.options(delay=HANG).send(1, 1)
        result.revoke()


def run_application(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    server = Server(config)
    try:
        with caplog.at_level(logging.DEBUG, "machinery_py"):
            Application(server).run()
    finally:
        server.close()
    said = [
        record.getMessage() for record in caplog.records if record.name.startswith("machinery_py")
    ]
    refused = [
        text
        for text in said
        if re.search("NOPERM|permission|ACCESS_REFUSED|\\b403\\b|not authorized", text)
    ]
    assert refused == []


# Redis


def allow(server: RedisServer, words: list[str]) -> None:
    assert server.cli(*words) == "OK"
    server.cli("ACL", "LOG", "RESET")


def refusals(server: RedisServer) -> list[str]:
    """What the server has refused since then."""
    rows: Any = server.cli("ACL", "LOG")
    return [f"{row[3]} {row[7]} for {row[9]}" for row in rows]


@pytest.fixture
def shop_redis(empty_redis: RedisServer) -> Iterator[RedisServer]:
    allow(empty_redis, documented("redis.md", "ACL SETUSER shop on"))
    yield empty_redis
    empty_redis.cli("ACL", "DELUSER", "shop")


def test_the_documented_acl_of_redis_is_enough(
    shop_redis: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    run_application(Config(broker=f"redis://shop:secret@127.0.0.1:{shop_redis.port}/0"), caplog)

    assert refusals(shop_redis) == []


def test_documented_acl_of_redis_forbids_other_keys(shop_redis: RedisServer) -> None:
    server = Server(f"redis://shop:secret@127.0.0.1:{shop_redis.port}/0")

    with pytest.raises(Exception, match=r"(?i)permission"):
        server.broker.driver.ask(b"GET", b"somebody:else", doing="testing")  # type: ignore[attr-defined]
    with pytest.raises(Exception, match=r"(?i)permission"):
        server.broker.driver.ask(b"FLUSHALL", doing="testing")  # type: ignore[attr-defined]


def test_doctor_is_content_with_the_documented_acl_of_redis(
    shop_redis: RedisServer, tmp_path: Path
) -> None:
    url = f"redis://shop:secret@127.0.0.1:{shop_redis.port}/0"
    (tmp_path / "shop.py").write_text(
        f"from machinery_py import Server\nserver = Server({url!r})\n"
    )

    done = subprocess.run(
        [sys.executable, "-m", "machinery_py", "doctor", "shop"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG,
    )

    assert "permission" not in done.stdout + done.stderr
    assert "broker" in done.stdout
    assert refusals(shop_redis) == []


def test_the_documented_acl_of_a_redis_cluster_is_enough(
    redis_cluster: RedisCluster, caplog: pytest.LogCaptureFixture
) -> None:
    redis_cluster.start()
    words = (
        documented("redis.md", "ACL SETUSER shop on")
        + documented("redis.md", "ACL SETUSER shop +cluster")[3:]
    )
    for node in redis_cluster.nodes:
        node.cli("FLUSHALL") if str(node.cli("ROLE")).startswith("['master'") else None
        allow(node, words)
    try:
        hosts = ",".join(f"{host}:{port}" for host, port in redis_cluster.addresses)
        run_application(Config(broker=f"redis://shop:secret@{hosts}/0"), caplog)

        assert [one for node in redis_cluster.nodes for one in refusals(node)] == []
    finally:
        for node in redis_cluster.nodes:
            node.cli("ACL", "DELUSER", "shop")


# RabbitMQ


@pytest.mark.parametrize("keeps_results", [False, True], ids=["messages", "messages and results"])
def test_the_documented_permissions_of_rabbitmq_are_enough(
    rabbitmq_server: RabbitMQServer, keeps_results: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rabbitmq_server.start()
    rabbitmq_server.ctl("add_vhost", "permissions")
    begin = (
        "rabbitmqctl set_permissions -p results"
        if keeps_results
        else "rabbitmqctl set_permissions -p messages"
    )
    user, *permissions = documented("rabbitmq.md", begin)[4:]
    rabbitmq_server.ctl("add_user", user, "secret")
    try:
        rabbitmq_server.ctl("set_permissions", "-p", "permissions", user, *permissions)
        url = f"amqp://{user}:secret@127.0.0.1:{rabbitmq_server.port}/permissions"
        run_application(
            Config(broker=url, result_backend=url if keeps_results else "memory://permissions"),
            caplog,
        )
    finally:
        rabbitmq_server.ctl("delete_user", user)
        rabbitmq_server.ctl("delete_vhost", "permissions")


# MongoDB

#: What this role allows a user, of all that a client can ask: MongoDB's manual, "built-in roles".
ROLES = {
    "readWrite": {
        "aggregate",
        "collStats",
        "count",
        "create",
        "createIndexes",
        "dbStats",
        "delete",
        "distinct",
        "drop",
        "dropIndexes",
        "explain",
        "find",
        "findAndModify",
        "getMore",
        "insert",
        "killCursors",
        "listCollections",
        "listIndexes",
        "update",
    },
}
ANYBODY = {
    "buildInfo",
    "endSessions",
    "hello",
    "ismaster",
    "isMaster",
    "ping",
    "saslStart",
    "saslContinue",
}
MORE = {
    "serverStatus",
    "getCmdLineOpts",
}  # asked for what they tell of durability; a refusal is no failure


def test_documented_role_of_mongodb_allows_each_command(
    mongodb_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Compare the commands sent with the role.

    They do not run under it: the servers that stand in for MongoDB have no roles.
    """
    sent: set[tuple[str, str]] = set()

    class Listener(pymongo.monitoring.CommandListener):
        def started(self, event: Any) -> None:
            sent.add((event.database_name, event.command_name))

        def succeeded(self, event: Any) -> None: ...
        def failed(self, event: Any) -> None: ...

    pymongo.monitoring.register(Listener())
    database = mongodb_url.rpartition("/")[2].partition("?")[0]
    (role,) = re.findall(
        r'role: "(\w+)", db: "shop"', (HOW_TO / "mongodb.md").read_text(encoding="utf-8")
    )

    run_application(Config(broker=mongodb_url), caplog)

    ours = {name for where, name in sent if where == database}
    assert {"insert", "find", "update", "delete"} <= ours <= ROLES[role] | ANYBODY
    assert {name for where, name in sent if where == "admin"} <= ANYBODY | MORE

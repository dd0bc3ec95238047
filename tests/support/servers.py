"""Private real servers for tests: on free local ports, each in its own folder, gone with the test.

    RedisServer          one Redis; append-only file, password, TLS with a private CA
    RedisSentinelTrio    a master, its replicas and three sentinels
    RedisCluster         three masters and three replicas
    RabbitMQServer       one node, with its own epmd
    RabbitMQCluster      three nodes that know each other, as one cluster
    MemcachedServer      one memcached
    PostgreSQLServer     one PostgreSQL, or a replica of one
    PgBouncerServer      one PgBouncer before it
    MongoServer          one mongod; NxServer stands in for it where it is not installed

    with RedisServer(appendonly=True) as redis:
        Server(redis.url)

A single one has start, stop, kill, restart, freeze, thaw and close, see `private`. Tests on one
machine share nothing. A test that needs a server begins with `require(RedisServer)`, which skips it
where none is installed.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Self

from machinery_py.testing.waiting import HANG, wait_until
from tests.support.private import (
    HOST,
    Private,
    PrivateServer,
    ServerBroken,
    ServerMissing,
    free_port,
    require,
)
from tests.support.private_mongo import MongoServer, NxServer
from tests.support.private_postgres import PgBouncerServer, PostgreSQLServer
from tests.support.private_redis import (
    RedisCluster,
    RedisSentinelTrio,
    RedisServer,
    Reply,
    ReplyError,
)

__all__ = [
    "MemcachedServer",
    "MongoServer",
    "NxServer",
    "PgBouncerServer",
    "PostgreSQLServer",
    "Private",
    "PrivateServer",
    "RabbitMQCluster",
    "RabbitMQServer",
    "RedisCluster",
    "RedisSentinelTrio",
    "RedisServer",
    "Reply",
    "ReplyError",
    "ServerBroken",
    "ServerMissing",
    "require",
]


class RabbitMQServer(PrivateServer):
    """One RabbitMQ node without plug-ins, which starts in three seconds.

    Durable queues survive `kill`, but for those just made.

    Attributes:
        node: the name of the Erlang node.
    """

    PROGRAMS: ClassVar[Mapping[str, str]] = {
        "rabbitmq-server": "rabbitmq-server",
        "epmd": "erlang-base",
    }

    def __init__(
        self,
        *,
        port: int | None = None,
        config: Mapping[str, str] | None = None,
        first: RabbitMQServer | None = None,
    ) -> None:
        """`first`: the node to join; it ends after this one. `config`: for rabbitmq.conf."""
        super().__init__(port=port)
        self.node = f"machinery{self.port}@localhost"
        self._cluster: str = first._cluster if first else self.node
        self._owns_epmd = first is None
        self._epmd: _Epmd = first._epmd if first else _Epmd()
        self._distribution = free_port()
        (self.folder / ".erlang.cookie").write_text(self._cluster.replace("@", ""))
        (self.folder / ".erlang.cookie").chmod(0o400)
        if first:
            peers = "cluster_formation.classic_config.nodes"
            joining = {f"{peers}.1": first.node, f"{peers}.2": self.node}
            config = (
                {"cluster_formation.peer_discovery_backend": "classic_config"}
                | joining
                | dict(config or {})
            )
        lines = {
            "cluster_name": self._cluster,
            "disk_free_limit.absolute": "1MB",
            "log.console": "true",
            "log.file": "false",
        }
        text = "".join(
            f"{name} = {value}\n" for name, value in (lines | dict(config or {})).items()
        )
        (self.folder / "rabbitmq.conf").write_text(text)
        (self.folder / "enabled_plugins").write_text("[].\n")
        (self.folder / "env.conf").touch()

    @property
    def url(self) -> str:
        """Of the virtual host "/"."""
        return f"amqp://guest:guest@{HOST}:{self.port}/"

    def ctl(self, *words: str) -> str:
        """Run `rabbitmqctl --quiet` and return what it prints; takes a second or two.

        Raises:
            ServerBroken: it failed; the text has what it said.
        """
        done = subprocess.run(
            [self.find("rabbitmqctl"), "--quiet", *words],
            cwd=self.folder,
            env=self.environment(),
            check=False,
            capture_output=True,
            text=True,
            timeout=2 * HANG,
        )
        if done.returncode:
            raise ServerBroken(
                f"rabbitmqctl {words} on {self}: "
                f"exit code {done.returncode}: {done.stderr or done.stdout}"
            )
        return done.stdout

    def close(self) -> None:
        super().close()
        if self._owns_epmd:
            self._epmd.close()

    def command(self) -> Sequence[str | Path]:
        return [self.find("rabbitmq-server")]

    def environment(self) -> dict[str, str]:
        folder = str(self.folder)
        return super().environment() | {
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": HOST,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_BASE": folder,
            "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
            "RABBITMQ_LOG_BASE": f"{folder}/logs",
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/env.conf",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} "
            "-start_epmd false",
            "ERL_EPMD_PORT": str(self._epmd.port),
            "ERL_EPMD_ADDRESS": HOST,
            # The script execs Erlang then, so that our child is the node itself.
            "RUNNING_UNDER_SYSTEMD": "1",
        }

    def _before(self) -> None:
        self._epmd.start()

    def _answers(self) -> bool:
        with socket.create_connection((HOST, self.port), HANG) as connection:
            connection.sendall(b"AMQP\0\0\x09\x01")
            return self._cluster.encode() in connection.recv(
                4096
            )  # connection.start has the cluster's name


class RabbitMQCluster(Private):
    """Three nodes; quorum queues have a member on each.

    Attributes:
        nodes: each can be killed and started again by itself.
    """

    PROGRAMS = RabbitMQServer.PROGRAMS

    def __init__(self) -> None:
        first = RabbitMQServer()
        self.nodes = [first, RabbitMQServer(first=first), RabbitMQServer(first=first)]

    @property
    def url(self) -> str:
        """The URLs of all nodes, with a semicolon between."""
        return ";".join(node.url for node in self.nodes)

    def start(self) -> Self:
        first, *others = self.nodes
        first.start()
        with ThreadPoolExecutor(len(others)) as starting:
            list(starting.map(RabbitMQServer.start, others))
        wait_until(
            lambda: first.ctl("eval", "length(nodes()).").strip() == "2",
            2 * HANG,
            "three nodes in one cluster",
        )
        return self

    def leader_of(self, queue: str, vhost: str = "/") -> RabbitMQServer:
        """The node on which a quorum queue's leader is now, as a running node knows it."""
        running = next(node for node in self.nodes if node.is_running)
        lines = running.ctl(
            "list_queues", "-p", vhost, "--no-table-headers", "name", "leader"
        ).splitlines()
        leaders = dict(line.split("\t") for line in lines)
        return next(node for node in self.nodes if node.node == leaders[queue])

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.close()


class _Epmd(PrivateServer):
    """Erlang's table of node names: the system's own would outlive the node that starts it."""

    PROGRAMS: ClassVar[Mapping[str, str]] = {"epmd": "erlang-base"}

    def command(self) -> Sequence[str | Path]:
        return [self.find("epmd"), "-port", str(self.port), "-address", HOST]

    def _answers(self) -> bool:
        with socket.create_connection((HOST, self.port), HANG) as connection:
            connection.sendall(b"\0\x01n")  # NAMES_REQ
            return connection.recv(4) == self.port.to_bytes(4, "big")


class MemcachedServer(PrivateServer):
    """One memcached. A restart forgets everything."""

    PROGRAMS: ClassVar[Mapping[str, str]] = {"memcached": "memcached"}

    def __init__(self, *, port: int | None = None, megabytes: int = 64) -> None:
        super().__init__(port=port)
        self.megabytes = megabytes

    @property
    def url(self) -> str:
        return f"memcache://{HOST}:{self.port}"

    def flush(self) -> None:
        """Forget every key."""
        with (
            socket.create_connection((HOST, self.port), HANG) as connection,
            connection.makefile("rb") as stream,
        ):
            connection.sendall(b"flush_all\r\n")
            reply = stream.readline()
        assert reply == b"OK\r\n", reply

    def command(self) -> Sequence[str | Path]:
        words = ["-l", HOST, "-p", str(self.port), "-U", "0", "-m", str(self.megabytes)]
        words += ["-I", "1m" if self.megabytes > 1 else "512k"]  # an item may have half the memory
        words += ["-u", "root"] if os.geteuid() == 0 else []
        return [self.find("memcached"), *words]

    def _answers(self) -> bool:
        with (
            socket.create_connection((HOST, self.port), HANG) as connection,
            connection.makefile("rb") as stream,
        ):
            connection.sendall(b"stats\r\n")
            return stream.readline() == b"STAT pid %d\r\n" % self.pid

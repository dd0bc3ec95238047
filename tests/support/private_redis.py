"""Private Redis servers: one, three with sentinels, six as a cluster. Import from `servers`."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar, Self, TypeAlias, cast

from machinery_py.testing.waiting import HANG, wait_until
from tests.support.private import HOST, NotYet, Private, PrivateServer, free_port

Reply: TypeAlias = "str | int | list[Reply] | None"
"""What Redis answers: a text, a number, nothing, or several of them."""

SLOTS = 16_384
BUS = 10_000  # a cluster node listens for the others on its port plus this
_FAST_REPLICAS = {"repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}


class ReplyError(NotYet):
    """Redis answered with an error; `str(error)` is its text, the code first."""


class RedisServer(PrivateServer):
    """One Redis. Only with `appendonly`, answered writes survive a restart, even after `kill`.

    Attributes:
        ca_file: the certificate that a client must trust, with `tls`.
    """

    PROGRAMS: ClassVar[Mapping[str, str]] = {"redis-server": "redis-server"}

    def __init__(
        self,
        *,
        port: int | None = None,
        appendonly: bool = False,
        password: str = "",
        tls: bool = False,
        config: Mapping[str, str] | None = None,
    ) -> None:
        """`config`: other lines of redis.conf; `tls` needs openssl, and leaves no plain port."""
        super().__init__(port=port)
        self.password = password
        self.ca_file = make_certificates(self.folder, self.find("openssl")) if tls else None
        lines = {
            "bind": HOST,
            "port": str(self.port),
            "dir": str(self.folder),
            "save": '""',
            "databases": "64",
            "appendonly": "yes" if appendonly else "no",
            "maxmemory": "0",
            "maxmemory-policy": "noeviction",
        }
        if password:
            lines |= {"requirepass": password, "masterauth": password}
        if tls:
            lines |= {
                "port": "0",
                "tls-port": str(self.port),
                "tls-auth-clients": "no",
                "tls-ca-cert-file": str(self.ca_file),
            }
            lines |= {
                "tls-cert-file": str(self.folder / "server.crt"),
                "tls-key-file": str(self.folder / "server.key"),
            }
        self._config = self.folder / "redis.conf"
        self._config.write_text(
            "".join(f"{name} {value}\n" for name, value in (lines | dict(config or {})).items())
        )

    @property
    def url(self) -> str:
        """Of database 0."""
        scheme = "redis" if self.ca_file is None else "rediss"
        return f"{scheme}://{f':{self.password}@' if self.password else ''}{HOST}:{self.port}/0"

    def cli(self, *words: str | int | float | bytes) -> Reply:
        """Run one command on its own connection, and return its reply.

        For example `cli("CONFIG", "SET", "maxmemory", 1)`.

        Raises:
            ReplyError: Redis refused it.
            OSError: it does not listen, or did not answer in time.
        """
        with self._connect() as connection, connection.makefile("rwb") as stream:
            return _ask(cast(BinaryIO, stream), words)

    def _connect(self) -> socket.socket:
        connection = socket.create_connection((HOST, self.port), HANG)
        if self.ca_file is not None:
            context = ssl.create_default_context(cafile=str(self.ca_file))
            connection = context.wrap_socket(connection, server_hostname=HOST)
        if self.password:
            with connection.makefile("rwb") as stream:
                _ask(cast(BinaryIO, stream), ("AUTH", self.password))
        return connection

    def command(self) -> Sequence[str | Path]:
        return [self.find("redis-server"), self._config]

    def _answers(self) -> bool:
        # Another server may have taken the port in between: that it answers is not enough.
        return self.cli("PING") == "PONG" and f"process_id:{self.pid}\r" in str(
            self.cli("INFO", "server")
        )


class RedisSentinelTrio(Private):
    """A master with its replicas, and three sentinels of which two must agree.

    Attributes:
        name: of the master, for the sentinels.
        servers: the master as it was at the start, then its replicas.
        sentinels: three servers with the same methods.
    """

    PROGRAMS = RedisServer.PROGRAMS

    def __init__(
        self, *, replicas: int = 1, name: str = "mymaster", down_after: float = 0.5
    ) -> None:
        """The sentinels take a server for dead that has not answered for `down_after` seconds."""
        self.name = name
        master = RedisServer(config=_FAST_REPLICAS)
        follow = _FAST_REPLICAS | {"replicaof": f"{HOST} {master.port}"}
        self.servers = [master, *(RedisServer(config=follow) for _ in range(replicas))]
        watch = {
            "sentinel monitor": f"{name} {HOST} {master.port} 2",
            "sentinel down-after-milliseconds": f"{name} {down_after * 1000:.0f}",
            "sentinel failover-timeout": f"{name} 3000",
        }
        self.sentinels = [_Sentinel(config=watch) for _ in range(3)]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Of the sentinels."""
        return [(HOST, sentinel.port) for sentinel in self.sentinels]

    def start(self) -> Self:
        for server in [*self.servers, *self.sentinels]:
            server.start()
        self._look_each(0.1)
        wait_until(
            self._is_watched, 2 * HANG, "three sentinels that know each other and each replica"
        )
        # No longer: a sentinel demotes a promoted replica that was silent for four periods.
        self._look_each(1.0)
        return self

    def current_master(self) -> RedisServer:
        """The server that the first running sentinel names."""
        sentinel = next(one for one in self.sentinels if one.is_running)
        address = sentinel.cli("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
        return next(one for one in self.servers if [HOST, str(one.port)] == address)

    def failover(self) -> RedisServer:
        """Make a replica the master, with nobody dead, and return it when it is one."""
        before = self.current_master()
        self.sentinels[0].cli("SENTINEL", "FAILOVER", self.name)
        return self.wait_for_failover(before)

    def wait_for_failover(self, before: RedisServer) -> RedisServer:
        """Return the new master once sentinels name one besides `before` and it takes writes."""
        wait_until(
            lambda: self.current_master() is not before, 2 * HANG, f"another master than {before}"
        )
        after = self.current_master()
        wait_until(
            lambda: cast("list[Reply]", after.cli("ROLE"))[0] == "master",
            HANG,
            f"{after} to be a master",
        )
        return after

    def close(self) -> None:
        for server in [*self.sentinels, *self.servers]:
            server.close()

    def _look_each(self, seconds: float) -> None:
        """For each other and for replicas; the defaults are 2 and 10 s."""
        for sentinel in self.sentinels:
            sentinel.cli(
                "SENTINEL",
                "DEBUG",
                "publish-period",
                int(seconds * 1000),
                "info-period",
                int(seconds * 1000),
            )

    def _is_watched(self) -> bool:
        for sentinel in self.sentinels:
            facts = cast("list[str]", sentinel.cli("SENTINEL", "MASTER", self.name))
            known = dict(zip(facts[::2], facts[1::2], strict=True))
            if (known["num-other-sentinels"], known["num-slaves"]) != (
                "2",
                str(len(self.servers) - 1),
            ):
                return False
        return all(
            "master_link_status:up" in str(one.cli("INFO", "replication"))
            for one in self.servers[1:]
        )


class _Sentinel(RedisServer):
    def command(self) -> Sequence[str | Path]:
        return [*super().command(), "--sentinel"]


class RedisCluster(Private):
    """Three masters and a replica of each.

    Attributes:
        nodes: the masters as they were at the start, then their replicas in the same order.
    """

    PROGRAMS = RedisServer.PROGRAMS

    def __init__(self, *, node_timeout: float = 1.0) -> None:
        """A replica takes over from a master that has been silent for `node_timeout` seconds."""
        config = {
            **_FAST_REPLICAS,
            "cluster-enabled": "yes",
            "cluster-node-timeout": f"{node_timeout * 1000:.0f}",
        }
        self.nodes = [RedisServer(port=free_port(besides=BUS), config=config) for _ in range(6)]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [(HOST, node.port) for node in self.nodes]

    @property
    def url(self) -> str:
        """The addresses of all nodes, which makes it the URL of a cluster."""
        return "redis://" + ",".join(f"{host}:{port}" for host, port in self.addresses)

    @property
    def masters(self) -> list[RedisServer]:
        """The running nodes that are masters now."""
        return [
            node
            for node in self.nodes
            if node.is_running and str(node.cli("ROLE")).startswith("['master'")
        ]

    def start(self) -> Self:
        is_new = not any(node.log.exists() for node in self.nodes)
        for node in self.nodes:
            node.start()
        if is_new:
            self._join()
        wait_until(
            lambda: all(map(self._is_complete, self.nodes)),
            2 * HANG,
            "a cluster with all slots and replicas",
        )
        return self

    def node_of(self, key: str) -> RedisServer:
        """The master that has the key now, as the first running node knows it."""
        return self._node_of(key, next(one for one in self.nodes if one.is_running))

    def _node_of(self, key: str, node: RedisServer) -> RedisServer:
        owner = self.owner_at(node, key)
        if owner is None:
            raise LookupError(f"{node} knows no master of {key}")
        return owner

    def owner_at(self, node: RedisServer, key: str) -> RedisServer | None:
        """The master that has the key, as this node knows it; None while it knows none."""
        slot = cast(int, node.cli("CLUSTER", "KEYSLOT", key))
        ranges = cast("list[tuple[int, int, tuple[str, int]]]", node.cli("CLUSTER", "SLOTS"))
        ports = [master[1] for first, last, master, *_ in ranges if first <= slot <= last]
        return next((one for one in self.nodes if one.port in ports), None)

    def move(self, key: str, target: RedisServer, *, at_once: int = 10) -> None:
        """Give the slot of a key to another master, so many keys in a step, while clients go on.

        Returns when all nodes know of it.
        """
        source = self.node_of(key)
        if source is target:
            return
        slot = cast(int, source.cli("CLUSTER", "KEYSLOT", key))
        wait_until(self._agree_on_epoch, HANG, "nodes that know the newest epoch")
        ids = {node: str(node.cli("CLUSTER", "MYID")) for node in (source, target)}
        target.cli("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        source.cli("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        while keys := cast("list[str]", source.cli("CLUSTER", "GETKEYSINSLOT", slot, at_once)):
            source.cli("MIGRATE", HOST, target.port, "", 0, int(HANG * 1000), "KEYS", *keys)
        for node in (target, source):
            node.cli("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        running = [node for node in self.nodes if node.is_running]
        wait_until(
            lambda: all(self._node_of(key, node) is target for node in running),
            HANG,
            f"{target} to have slot {slot}",
        )

    def _agree_on_epoch(self) -> bool:
        """Whether all nodes know the newest epoch.

        A master gives itself the next one after the newest that it knows when it gets a slot. If
        another one has that too, or a higher one, then what it said before counts more than the
        new owner's claim: the nodes disagree for ever, or the new owner drops the keys it got.
        """
        epochs = {
            line
            for node in self.nodes
            if node.is_running
            for line in str(node.cli("CLUSTER", "INFO")).splitlines()
            if line.startswith("cluster_current_epoch:")
        }
        return len(epochs) == 1

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _join(self) -> None:
        masters, replicas = self.nodes[:3], self.nodes[3:]
        for epoch, node in enumerate(self.nodes, start=1):
            node.cli("CLUSTER", "SET-CONFIG-EPOCH", epoch)
            node.cli("CLUSTER", "MEET", HOST, self.nodes[0].port)
        for number, master in enumerate(masters):
            master.cli(
                "CLUSTER", "ADDSLOTS", *range(number * SLOTS // 3, (number + 1) * SLOTS // 3)
            )
        wait_until(
            lambda: all(len(_known_nodes(node)) == 6 for node in self.nodes),
            HANG,
            "six nodes that have met",
        )
        for master, replica in zip(masters, replicas, strict=True):
            replica.cli("CLUSTER", "REPLICATE", str(master.cli("CLUSTER", "MYID")))

    def _is_complete(self, node: RedisServer) -> bool:
        state, known, role = (
            str(node.cli("CLUSTER", "INFO")),
            _known_nodes(node),
            str(node.cli("INFO", "replication")),
        )
        return (
            "cluster_state:ok" in state
            and f"cluster_slots_ok:{SLOTS}" in state
            and [link for *_, link in known] == ["connected"] * 6
            and sum("slave" in flags for flags, _ in known) == 3
            and ("role:master" in role or "master_link_status:up" in role)
        )


def _known_nodes(node: RedisServer) -> list[tuple[str, str]]:
    """The flags and the link state of each node that this one knows, itself included."""
    lines = [line.split() for line in str(node.cli("CLUSTER", "NODES")).splitlines()]
    return [(line[2], line[7]) for line in lines if "handshake" not in line[2]]


def _ask(stream: BinaryIO, words: Sequence[str | int | float | bytes]) -> Reply:
    parts = [
        word if isinstance(word, bytes) else str(word).encode("utf-8", "surrogateescape")
        for word in words
    ]
    stream.write(
        b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)
    )
    stream.flush()
    return _read_reply(stream)


def _read_reply(stream: BinaryIO) -> Reply:
    line = stream.readline()
    kind, rest = line[:1], line[1:].rstrip().decode("utf-8", "surrogateescape")
    match kind:
        case b"+":
            return rest
        case b"-":
            raise ReplyError(rest)
        case b":":
            return int(rest)
        case b"$":
            return (
                None
                if rest == "-1"
                else stream.read(int(rest) + 2)[:-2].decode("utf-8", "surrogateescape")
            )
        case b"*":
            return None if rest == "-1" else [_read_reply(stream) for _ in range(int(rest))]
        case _:
            raise ConnectionError(
                f"reply of Redis begins with {line[:20]!r} (expected one of + - : $ *)"
            )


def make_certificates(folder: Path, openssl: str) -> Path:
    """Make ca.crt, and server.crt and server.key for 127.0.0.1 and localhost; return ca.crt.

    They are valid for two days.
    """
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    (folder / "server.ext").write_text(
        f"subjectAltName=IP:{HOST},DNS:localhost\nkeyUsage=critical,digitalSignature\n"
        "subjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n"
    )
    for words in (
        [
            "req",
            "-x509",
            *key,
            "-keyout",
            "ca.key",
            "-out",
            "ca.crt",
            "-days",
            "2",
            "-subj",
            "/CN=machinery_py test CA",
            "-addext",
            "keyUsage=critical,keyCertSign,cRLSign",
        ],
        ["req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost"],
        [
            "x509",
            "-req",
            "-in",
            "server.csr",
            "-CA",
            "ca.crt",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-out",
            "server.crt",
            "-days",
            "2",
            "-extfile",
            "server.ext",
        ],
    ):
        subprocess.run([openssl, *words], cwd=folder, check=True, capture_output=True, timeout=HANG)
    return folder / "ca.crt"

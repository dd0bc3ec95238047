"""Servers that the systems of a run share: where they are, what they have used, emptying them.

Linux only: it reads /proc.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import psycopg
from redis.exceptions import ResponseError

from benchmarks.peers.probes import PostgreSQLProbe, Probe
from benchmarks.peers.processes import HANG, TICKS, RoundFailed
from tests.support.private_postgres import PostgreSQLServer
from tests.support.servers import RabbitMQServer, RedisServer

SCRIPTS = ("cmdstat_eval", "cmdstat_evalsha", "cmdstat_fcall")

VHOST = """rabbit_vhost:delete(<<"{before}">>, <<"bench">>),
    rabbit_vhost:add(<<"{name}">>, <<"bench">>),
    rabbit_auth_backend_internal:set_permissions(
    <<"guest">>, <<"{name}">>, <<".*">>, <<".*">>, <<".*">>, <<"bench">>)."""


class Host(ABC):
    """The servers.

    Attributes:
        POLL: seconds between two looks at a queue.
        OF_SENDING: counters that are figures of sending one by one (send), and many (bulk).
        probe: looks at the queues.
        servers: variables that tell the scripts where the servers are.
    """

    POLL: ClassVar[float] = 0.01
    OF_SENDING: ClassVar[Mapping[str, Sequence[str]]]

    probe: Any

    @property
    @abstractmethod
    def servers(self) -> dict[str, str]: ...

    @abstractmethod
    def version(self) -> str:
        """Return what they are, with their versions."""

    @abstractmethod
    def counters(self) -> dict[str, float]:
        """Return what has been used so far, by the names of figures."""

    @abstractmethod
    def kept_bytes(self) -> float | None:
        """Return how large the data is; None: not measured."""

    @abstractmethod
    def clear(self) -> None:
        """Make them empty, with empty files behind them."""

    def close(self) -> None:
        self.probe.close()


class RedisHost(Host):
    """A Redis. With `rabbit`, RabbitMQ has the messages and Redis the results."""

    OF_SENDING: ClassVar[Mapping[str, Sequence[str]]] = {
        "send": ("redis cpu", "scripts"),
        "bulk": ("redis cpu",),
    }

    def __init__(self, redis: RedisServer, rabbit: RabbitMQServer | None = None) -> None:
        self.redis = redis
        self._rabbit = rabbit
        self._url = redis.url.rpartition("/")[0]
        self.probe: Probe = Probe(self._url, rabbit)
        self._vhosts = 0
        self._pause = threading.Event()

    def version(self) -> str:
        text = f"Redis {self.probe.ask('INFO', 'server')['redis_version']}"
        if self._rabbit is not None:
            text += f", RabbitMQ {self._rabbit.ctl('version').strip()}"
        return text

    @property
    def servers(self) -> dict[str, str]:
        found = {"PEERS_URL": self._url, "MACHINERY_URL": f"{self._url}/0"}
        if self._rabbit is not None:
            amqp = f"{self._rabbit.url}{self.probe.vhost}"
            found |= {"PEERS_AMQP": amqp, "MACHINERY_BROKER": amqp}
        return found

    def counters(self) -> dict[str, float]:
        """Return commands, also in scripts; socket reads; CPU in µs.

        `scripts` is the time in µs that scripts took, with the commands that they call.
        """
        counts = self.probe.ask("INFO", "commandstats")
        rabbit = {} if self._rabbit is None else {"rabbitmq cpu": 1e6 * _cpu(self._rabbit.pid)}
        commands = sum(
            line["calls"] for name, line in counts.items() if not name.startswith("cmdstat_info")
        )
        facts = {**self.probe.ask("INFO", "stats"), **self.probe.ask("INFO", "cpu")}
        return {
            "commands": commands,
            "scripts": float(sum(counts[name]["usec"] for name in SCRIPTS if name in counts)),
            "reads": facts["total_reads_processed"],
            "redis cpu": 1e6 * (facts["used_cpu_sys"] + facts["used_cpu_user"]),
            **rabbit,
        }

    def kept_bytes(self) -> float | None:
        """Return the bytes that Redis uses for keys; None where RabbitMQ has the messages."""
        if self._rabbit is not None:
            return None
        facts = {**self.probe.ask("INFO", "server"), **self.probe.ask("INFO", "memory")}
        version = tuple(map(int, facts["redis_version"].split(".")[:2]))
        # Redis counts the heap of its scripts since 7.4, and a collection makes that smaller.
        heap = facts["used_memory_vm_total"] if version >= (7, 4) else 0
        return float(
            facts["used_memory"] - facts["mem_clients_normal"] - facts["mem_aof_buffer"] - heap
        )

    def clear(self) -> None:
        self.probe.ask("FLUSHALL")
        if self._rabbit is not None:
            self._new_vhost(self._rabbit)
        deadline = time.monotonic() + HANG
        while True:
            try:
                self.probe.ask("BGREWRITEAOF")
                break
            except ResponseError:  # one is being written
                if time.monotonic() > deadline:
                    raise
                self._pause.wait(self.POLL)
        while (facts := self.probe.ask("INFO", "persistence"))["aof_rewrite_in_progress"] or facts[
            "aof_rewrite_scheduled"
        ]:
            if time.monotonic() > deadline:
                raise RoundFailed("Redis still writes its file anew")
            self._pause.wait(self.POLL)

    def _new_vhost(self, rabbit: RabbitMQServer) -> None:
        """Make a new vhost: nothing of the last one is left, whatever queues the system has."""
        before, self._vhosts = self.probe.vhost, self._vhosts + 1
        self.probe.vhost = f"bench{self._vhosts}"
        rabbit.ctl("eval", VHOST.format(name=self.probe.vhost, before=before))


class PostgreSQLHost(Host):
    """A PostgreSQL, with a new database for each system and drain.

    Args:
        size: bytes of the text that each task gets.
    """

    POLL: ClassVar[float] = 0.05  # a look counts rows
    OF_SENDING: ClassVar[Mapping[str, Sequence[str]]] = {
        "send": ("postgresql cpu",),
        "bulk": ("postgresql cpu",),
    }

    def __init__(self, server: PostgreSQLServer, size: int = 0) -> None:
        self._server = server
        self._size = size
        self._admin = psycopg.connect(server.url, autocommit=True)
        self._databases = 0
        self.clear()

    def version(self) -> str:
        row = self._admin.execute("SHOW server_version").fetchone()
        assert row is not None
        return f"PostgreSQL {str(row[0]).partition(' ')[0]}"

    @property
    def servers(self) -> dict[str, str]:
        return {
            "PEERS_URL": self._url,
            "MACHINERY_URL": self._url,
            "PEERS_BYTES": str(self._size),
        }

    def counters(self) -> dict[str, float]:
        """Return its CPU in µs: of its processes, and of those that have ended."""
        children = Path(f"/proc/{self._server.pid}/task/{self._server.pid}/children")
        running = [self._server.pid, *map(int, children.read_text().split())]
        ended = _fields(self._server.pid)[13:15]
        seconds = sum(map(_cpu, running)) + sum(map(int, ended)) / TICKS
        return {"postgresql cpu": 1e6 * seconds}

    def kept_bytes(self) -> float | None:
        name = f"bench{self._databases}"
        row = self._admin.execute("SELECT pg_database_size(%s)", (name,)).fetchone()
        assert row is not None
        return float(row[0])

    def clear(self) -> None:
        if self._databases:
            self.probe.close()
            self._execute(f"DROP DATABASE bench{self._databases} WITH (FORCE)")
        self._databases += 1
        self._execute(f"CREATE DATABASE bench{self._databases}")
        self._execute("CHECKPOINT")  # of what the last one has left to write
        place = self._server.url.rpartition("/")[0]
        self._url = f"{place}/bench{self._databases}"
        self.probe: PostgreSQLProbe = PostgreSQLProbe(self._url)

    def _execute(self, sql: str) -> None:
        self._admin.execute(sql.encode())

    def close(self) -> None:
        super().close()
        self._admin.close()


def _cpu(pid: int) -> float:
    """Seconds of CPU of a process; 0 if it has ended."""
    fields = _fields(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if fields else 0.0


def _fields(pid: int) -> list[str]:
    """Return what /proc has of a process, from its state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except FileNotFoundError:
        return []

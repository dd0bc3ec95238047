"""Looks at the queues of a system from outside, while it works."""

from __future__ import annotations

from typing import Any

import psycopg
from redis import Redis

from machinery_py import Server
from tests.support.servers import RabbitMQServer


class Probe:
    """Connections to Redis, and a way to RabbitMQ, if messages are there.

    Attributes:
        vhost: of RabbitMQ, in which the system has its queues.
    """

    def __init__(self, url: str, rabbit: RabbitMQServer | None = None) -> None:
        self._rabbit = rabbit
        self.vhost = "/"
        self._queue = Redis.from_url(f"{url}/0", decode_responses=True)
        self._results = Redis.from_url(f"{url}/1", decode_responses=True)
        self._server = Server(f"{url}/0")

    def ask(self, *words: str | int) -> Any:
        return self._queue.execute_command(*words)  # type: ignore[no-untyped-call]  # redis-py has no types for it

    def stored(self) -> int:
        """How many results there are, of a system that keeps them in a database of their own."""
        return int(self._results.dbsize())

    def groups(self, stream: str) -> int:
        """How many entries of a stream its group has not acknowledged or not read."""
        left = 0
        for reply in self.ask("XINFO", "GROUPS", stream):
            facts = (
                reply
                if isinstance(reply, dict)
                else dict(zip(reply[::2], reply[1::2], strict=True))
            )
            left += int(facts["pending"]) + int(facts["lag"] or 0)
        return left

    def queued(self, *queues: str) -> int:
        """Return how many messages of these RabbitMQ queues are not acknowledged. Takes a second.

        Messages that a worker holds count, too.
        """
        assert self._rabbit is not None
        lines = self._rabbit.ctl(
            "list_queues", "-p", self.vhost, "--no-table-headers", "name", "messages"
        ).splitlines()
        return sum(
            int(count)
            for name, _, count in (line.rpartition("\t") for line in lines)
            if name in queues
        )

    def machinery(self) -> int:
        return _left(self._server)

    def ceiling(self) -> int:
        workers = self.ask("SMEMBERS", "ceiling:workers")
        held = sum(int(self.ask("HLEN", f"ceiling:held:{worker}")) for worker in workers)
        arrived = sum(int(self.ask("LLEN", f"ceiling:arrivals:{worker}")) for worker in workers)
        return int(self.ask("LLEN", "ceiling")) + held + arrived

    def close(self) -> None:
        self._queue.close()
        self._results.close()
        self._server.close()


class PostgreSQLProbe:
    """A connection to the database that a system has its tables in."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)
        self._server = Server(url)

    def count(self, sql: str) -> int:
        """Return the number that the statement reads; 0, if its table is not there yet."""
        try:
            row = self._connection.execute(sql.encode()).fetchone()
        except psycopg.errors.UndefinedTable:
            return 0
        assert row is not None
        return int(row[0])

    def machinery(self) -> int:
        return _left(self._server)

    def close(self) -> None:
        self._connection.close()
        self._server.close()


def _left(server: Server) -> int:
    return sum(
        stats.waiting + stats.running + stats.delayed + stats.dead
        for stats in server.broker.stats()
    )

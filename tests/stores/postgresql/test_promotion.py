"""A primary that is lost, and its replica promoted; the URL names both."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import psycopg
import pytest

from machinery_py import AsyncResult, Config, Server, current_task
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.errors import MachineryError
from machinery_py.rows.postgresql import PostgreSQLRows
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.servers import PostgreSQLServer, require


class Pair:
    """A primary and its replica.

    Args:
        is_synchronous: whether a commit waits for the replica.
    """

    def __init__(self, stack: ExitStack, *, is_synchronous: bool) -> None:
        require(PostgreSQLServer)
        self.primary = stack.enter_context(PostgreSQLServer())
        self.replica = stack.enter_context(PostgreSQLServer(primary=self.primary))
        wait_until(lambda: self._ask(self.primary, "SELECT pid FROM pg_stat_replication"), HANG)
        if is_synchronous:
            self._ask(self.primary, "ALTER SYSTEM SET synchronous_standby_names = '*'")
            self._ask(self.primary, "SELECT pg_reload_conf()")
            look = "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
            wait_until(lambda: self._ask(self.primary, look), HANG)

    @property
    def url(self) -> str:
        """The replica is the first of them, and must be passed over."""
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in (self.replica, self.primary))
        return f"postgresql://postgres@{hosts}/postgres"

    def promote(self) -> None:
        """Kill the primary, and let the replica take over."""
        self.primary.kill()
        assert self._ask(self.replica, "SELECT pg_promote()") == [(True,)]

    def sender(self) -> int:
        """Return the process of the primary that sends to the replica."""
        [(pid,)] = self._ask(self.primary, "SELECT pid FROM pg_stat_replication")
        return int(pid)

    def is_level(self) -> bool:
        """Return whether the replica has all that the primary has."""
        look = "SELECT 1 FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_lsn()"
        return bool(self._ask(self.primary, look))

    @staticmethod
    def _ask(server: PostgreSQLServer, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(server.url, autocommit=True) as connection:
            cursor = connection.execute(sql.encode())
            return cursor.fetchall() if cursor.description else []


@pytest.fixture(params=[True], ids=["synchronous"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, is_synchronous=request.param)


def test_nothing_confirmed_is_lost_and_work_goes_on(pair: Pair) -> None:
    sent: list[AsyncResult[int]] = []
    enough = threading.Event()
    with psycopg.connect(pair.url, target_session_attrs="primary") as own:
        own.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    with closing(Server(Config(broker=pair.url, publish_timeout=2.0))) as server:

        @server.task
        def note(order: int) -> int:
            return order

        @server.task(transaction=True)
        def book(order: int) -> int:
            current_task().connection.execute("INSERT INTO orders VALUES (%s)", (order,))
            return order

        def send() -> None:
            for order in itertools.count():
                if enough.is_set():
                    return
                try:
                    sent.append((book if order % 2 else note).send(order))
                except MachineryError:
                    continue  # it may be there all the same

        with server.new_worker(concurrency=2):
            sender = threading.Thread(target=send)
            sender.start()
            try:
                wait_until(lambda: len(sent) > 50, HANG)
                pair.promote()
                before = len(sent)
                wait_until(lambda: len(sent) > before + 50, 2 * HANG)
            finally:
                enough.set()
                sender.join(HANG)
            ended = [one.get(timeout=2 * HANG) for one in sent]
    with psycopg.connect(pair.url, target_session_attrs="primary") as own:
        written = {id for (id,) in own.execute("SELECT id FROM orders")}
    assert {order for order in ended if order % 2} <= written
    assert sorted(set(ended)) == ended


@pytest.mark.parametrize("pair", [False], ids=["asynchronous"], indirect=True)
def test_no_number_is_given_twice(pair: Pair) -> None:
    with closing(PostgreSQLDriver(pair.url, timeout=2.0)) as driver:
        rows = PostgreSQLRows(driver)
        numbers = [rows.fences(1)]
        sender = pair.sender()
        os.kill(sender, signal.SIGSTOP)  # what the primary does from now on is lost with it
        numbers += [rows.fences(1) for _ in range(200)]
        os.kill(sender, signal.SIGKILL)
        pair.promote()

        def goes_on() -> bool:
            try:
                numbers.append(rows.fences(1))
            except MachineryError:
                return False
            return True

        wait_until(goes_on, HANG)
        numbers += [rows.fences(1) for _ in range(400)]
    assert sorted(set(numbers)) == numbers


@pytest.mark.parametrize("pair", [False], ids=["asynchronous"], indirect=True)
def test_task_whose_end_is_lost_runs_again(pair: Pair) -> None:
    """The replica has seen the claims, and not the ends. What goes on meanwhile runs once."""
    runs: list[int] = []
    may_end, may_go_on = threading.Event(), threading.Event()
    with closing(Server(Config(broker=pair.url, publish_timeout=2.0))) as server:

        @server.task
        def end(number: int) -> int:
            runs.append(number)
            assert may_end.wait(HANG)
            return number

        @server.task(transaction=True)
        def book(number: int) -> int:
            runs.append(number)
            assert may_end.wait(HANG)
            return number

        @server.task
        def go_on(number: int) -> int:
            runs.append(number)
            assert may_go_on.wait(2 * HANG)
            return number

        with server.new_worker(concurrency=6):
            ends = [end.send(0), end.send(1), book.send(2), book.send(3)]
            longer = [go_on.send(4), go_on.send(5)]
            wait_until(lambda: sorted(runs) == [0, 1, 2, 3, 4, 5], HANG)
            wait_until(pair.is_level, HANG)
            sender = pair.sender()
            os.kill(sender, signal.SIGSTOP)
            may_end.set()
            assert [one.get(timeout=HANG) for one in ends] == [0, 1, 2, 3]
            os.kill(sender, signal.SIGKILL)
            pair.promote()

            anew = [server.result(one.uuid) for one in ends]
            assert [one.get(timeout=2 * HANG) for one in anew] == [0, 1, 2, 3]
            may_go_on.set()
            assert [one.get(timeout=2 * HANG) for one in longer] == [4, 5]
    # One whose end had no reply yet is not undone: it was told again.
    again = [runs.count(number) for number in range(6)]
    assert again[4:] == [1, 1]
    assert set(again[:4]) <= {1, 2}

"""Broker, results and transactions behind a real PgBouncer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from machinery_py import Server, chord, current_task, group
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.errors import MachineryError
from machinery_py.rows.contract import Committed, Key, RowStep, Write
from machinery_py.rows.postgresql import PostgreSQLRows
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.servers import PgBouncerServer, PostgreSQLServer, require

IGNORING = {"ignore_startup_parameters": "options"}  # else it refuses them
STEP = RowStep(write={Key("kind", "a"): Write(body=b"1")})


@pytest.fixture(params=["transaction", "transaction ignoring", "session", "session ignoring"])
def pooler(
    request: pytest.FixtureRequest, postgresql_server: PostgreSQLServer
) -> Iterator[PgBouncerServer]:
    require(PgBouncerServer)
    postgresql_server.start()
    mode, _, ignores = request.param.partition(" ")
    settings = IGNORING if ignores else {}
    with PgBouncerServer(postgresql_server, mode=mode, settings=settings) as pooler:
        yield pooler


@pytest.fixture
def url(pooler: PgBouncerServer, postgresql_url: str) -> str:
    """A new database, by way of the pooler."""
    return pooler.url_of(postgresql_url)


def test_all_works_behind_a_pooler(url: str) -> None:
    with psycopg.connect(url) as own:
        own.execute("CREATE TABLE orders (id int)")
    with closing(Server(url)) as server:

        @server.task
        def add(a: int, b: int) -> int:
            return a + b

        @server.task
        def total(*numbers: int) -> int:
            return sum(numbers)

        @server.task(transaction=True)
        def book(order: int) -> str:
            current_task().connection.execute("INSERT INTO orders VALUES (%s)", (order,))
            return add.send(order, order).uuid

        with server.new_worker(concurrency=4):
            members = group(*(add.signature(number, 1) for number in range(20)))
            assert server.send(chord(members, total.partial())).get(timeout=HANG) == 210
            booked = [book.send(order) for order in range(10)]
            sent = [server.result(one.get(timeout=HANG)) for one in booked]
            assert [one.get(timeout=HANG) for one in sent] == list(range(0, 20, 2))
            with psycopg.connect(url, prepare_threshold=None) as own, server.transaction(own):
                own.execute("INSERT INTO orders VALUES (10)")
                last = add.send(1, 2)
            assert last.get(timeout=HANG) == 3

        with psycopg.connect(url) as own:
            found = own.execute("SELECT id FROM orders ORDER BY id").fetchall()
        assert found == [(number,) for number in range(11)]


def test_doctor_names_a_pooler_and_nobody_listens(url: str) -> None:
    with closing(PostgreSQLDriver(url)) as driver:
        listener = PostgreSQLRows(driver).listen()
        listener.watch(["x"])

        assert driver.is_pooled and not driver.ear.hears
        assert "a pooler" in driver.concerns()[-1].text
        listener.close()


def test_nothing_is_prepared_on_what_others_use(url: str) -> None:
    """A statement of the same name would be another one's, and carried out."""
    with closing(PostgreSQLDriver(url)) as driver:
        assert isinstance(PostgreSQLRows(driver).commit([STEP])[0], Committed)

        look = "SELECT name FROM pg_prepared_statements"
        assert driver.run(look, doing="looking") == []


def test_worker_goes_on_when_its_pooler_is_back(url: str, pooler: PgBouncerServer) -> None:
    with closing(Server(url)) as server:
        add = server.register_task("add", lambda a, b: a + b)
        with server.new_worker(concurrency=2):
            assert add.send(1, 2).get(timeout=HANG) == 3
            pooler.kill()
            pooler.start()

            def runs() -> bool:
                try:
                    return add.send(1, 2).get(timeout=HANG) == 3
                except MachineryError:
                    return False

            wait_until(runs, HANG)

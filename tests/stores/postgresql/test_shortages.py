"""A PostgreSQL whose disk is full, whose connections are taken, or that cannot vacuum."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path

import psycopg
import pytest

from machinery_py import AsyncResult, Config, Server, group
from machinery_py.errors import BrokerUnavailable, MachineryError
from machinery_py.events import ConnectionLost
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.support.disks import grow, small_disk
from tests.support.servers import PostgreSQLServer, require

LARGE = "x" * 20_000
Disk = tuple[str, Path]  # URL of the database, and where its small disk is


@pytest.fixture
def own_server() -> Iterator[PostgreSQLServer]:
    require(PostgreSQLServer)
    with closing(PostgreSQLServer(settings={"max_connections": "12"})) as server:
        yield server


@contextmanager
def small_tables(server: PostgreSQLServer) -> Iterator[Disk]:
    """A full one refuses a statement."""
    with small_disk(server.folder / "small", 16) as disk:
        (disk / "tables").mkdir()
        server.own(disk / "tables")
        server.start()
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute(f"CREATE TABLESPACE small LOCATION '{disk}/tables'".encode())
            admin.execute("CREATE DATABASE small TABLESPACE small")
        yield f"{server.url.rpartition('/')[0]}/small", disk
        server.stop()


@contextmanager
def small_log(server: PostgreSQLServer) -> Iterator[Disk]:
    """A full one ends the server, until there is room."""
    server.start()
    server.stop()
    log = server.folder / "data" / "pg_wal"
    old = log.rename(server.folder / "old")
    with small_disk(log, 40) as disk:  # two files of the log
        server.own(disk)
        subprocess.run(["cp", "-a", f"{old}/.", disk], check=True)
        yield server.start().url, disk
        server.stop()


@pytest.mark.parametrize("place", [small_tables, small_log])
def test_full_disk_refuses_and_loses_nothing(
    own_server: PostgreSQLServer, place: Callable[[PostgreSQLServer], AbstractContextManager[Disk]]
) -> None:
    with ExitStack() as stack:
        url, disk = stack.enter_context(place(own_server))
        server = stack.enter_context(closing(Server(Config(broker=url, publish_timeout=1.0))))
        note = server.register_task("note", lambda number, _: number)
        sent: list[AsyncResult[int]] = []
        worker = server.new_worker(concurrency=2)
        lost: list[ConnectionLost] = []
        errors: list[BaseException] = []
        server.events.subscribe(ConnectionLost, lost.append)
        with pytest.raises(MachineryError) as refused:
            for number in range(9_999):
                sent.append(note.send(number, LARGE))
        if place is small_tables:
            assert isinstance(refused.value, BrokerUnavailable)
            assert "no space is left on its disk" in str(refused.value)
            assert "CONTEXT" not in str(refused.value)
        worker.launch_async(errors.append)
        wait_until(lambda: lost or errors, HANG, "a worker that waits")

        grow(disk, 200)
        own_server.start()  # if its log was full

        assert [one.get(timeout=2 * HANG) for one in sent] == list(range(len(sent)))
        worker.quit()
        assert not errors


def test_too_many_connections_of_others_are_waited_for(own_server: PostgreSQLServer) -> None:
    own_server.start()
    with ExitStack() as stack:
        server = Server(Config(broker=own_server.url, publish_timeout=1.0))
        stack.enter_context(closing(server))
        add = server.register_task("add", lambda a, b: a + b)
        others = stack.enter_context(ExitStack())
        with pytest.raises(psycopg.OperationalError):
            while True:
                others.enter_context(closing(psycopg.connect(own_server.url)))

        with pytest.raises(BrokerUnavailable, match="too many clients already"):
            add.send(1, 2)
        worker = server.new_worker(concurrency=2)
        lost: list[ConnectionLost] = []
        errors: list[BaseException] = []
        server.events.subscribe(ConnectionLost, lost.append)
        worker.launch_async(errors.append)
        wait_until(lambda: lost or errors, HANG, "a worker that waits")
        others.close()

        assert add.send(1, 2).get(timeout=HANG) == 3
        worker.quit()
        assert not errors


def test_worker_shares_what_it_has_when_others_take_the_rest(own_server: PostgreSQLServer) -> None:
    own_server.start()
    with ExitStack() as stack:
        server = stack.enter_context(closing(Server(own_server.url)))
        add = server.register_task("add", lambda a, b: a + b)
        with server.new_worker(concurrency=2):
            assert add.send(1, 2).get(timeout=HANG) == 3
            with pytest.raises(psycopg.OperationalError):
                while True:
                    stack.enter_context(closing(psycopg.connect(own_server.url)))

            results = together(8, lambda number: add.send(number, 0).get(timeout=HANG))
        assert results == list(range(8))


def test_old_snapshot_does_not_make_claims_read_all_that_is_done(
    own_server: PostgreSQLServer,
) -> None:
    """What was settled since it began stays in the indexes, and each claim passes it."""
    own_server.start()
    with (
        psycopg.connect(own_server.url) as old,
        psycopg.connect(own_server.url, autocommit=True) as looker,
    ):
        with closing(Server(Config(broker=own_server.url, publish_timeout=HANG))) as server:
            noop = server.register_task("noop", lambda number: None)
            groups = [group(noop.signature(n) for n in range(1000)).send() for _ in range(10)]
            old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            old.execute("SELECT 1")
            with server.new_worker(concurrency=4):
                for one in groups:
                    one.get(timeout=4 * HANG)

        read = "SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE indexrelname = %s"
        [(found,)] = looker.execute(read, ("items_waiting",)).fetchall()
    assert 0 < found < 300 * 10_000  # claims of single tasks would read 5,000 each

"""A file that an older machinery_py wrote is used on: the real ones wrote version_9.sql, and 10."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py.clock import moment_of
from machinery_py.connections.sqlite import open as opening
from machinery_py.connections.sqlite import schema
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.connections.sqlite.schema import UPGRADES, VERSION
from machinery_py.errors import BrokerUnavailable, StoreUnusable
from machinery_py.limits import Rule
from machinery_py.locks.base import LockHolding
from machinery_py.rows.sqlite import SQLiteRows
from machinery_py.testing.waiting import wait_until

OLD = Path(__file__).with_name("version_9.sql")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    path = tmp_path / "machinery.db"
    with closing(sqlite3.connect(path)) as old:
        old.execute("PRAGMA journal_mode = WAL")
        old.executescript(OLD.read_text())
    server = Server(Config(broker=f"sqlite:///{path}", results_expire_in=10**9))
    yield server
    server.close()


def test_tasks_and_results_of_an_older_file_are_there(server: Server) -> None:
    @server.task
    def add(a: int, b: int) -> int:
        return a + b

    listed = [(one.task_name, one.state) for one in server.inspect.tasks(limit=9)]
    assert sorted(listed) == sorted(
        [("add", "SUCCESS"), ("fail", "FAILURE"), *[("add", "PENDING")] * 3]
    )
    uuids = [one.uuid for one in server.broker.get_pending_tasks("machinery_tasks")]
    with server.new_worker(concurrency=1):
        assert [server.result(uuid).get(timeout=30.0) for uuid in uuids] == [7, 15]
    assert [one.args[1].value for one in server.broker.get_delayed_tasks()] == [6]
    assert [one.name for one in server.schedules.list()] == ["nightly"]


def test_lock_of_an_older_file_is_held_by_its_token(server: Server) -> None:
    lock = server.app.stores.lock

    assert lock.acquire("held", ttl=9.0) is None
    with closing(sqlite3.connect(server.config.broker.removeprefix("sqlite:///"))) as file:
        (token,) = file.execute("SELECT body FROM rows WHERE kind = 'lock'").fetchone()
    held = LockHolding(
        name="held", token=token.decode(), fence=1, expires_at=server.app.clock.now()
    )
    assert lock.release(held)
    again = lock.acquire("held", ttl=9.0)
    assert again is not None and again.fence > 1


def test_fences_go_on_above_the_last_of_an_older_file(tmp_path: Path) -> None:
    path, last = tmp_path / "machinery.db", 2**51 + 7  # as after a clock that was set back
    with closing(sqlite3.connect(path)) as old, old:
        old.executescript(OLD.read_text())
        old.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'locks'", (last,))
        old.execute("DELETE FROM locks")

    with closing(Server(Config(broker=f"sqlite:///{path}"))) as server:
        held = server.app.stores.lock.acquire("held", ttl=9.0)
        assert held is not None and held.fence == last + 1
        with closing(server.app.stores.store.open_session(["machinery_tasks"], worker="w")) as one:
            first, second = one.receive(2, 0)
            assert held.fence < first.fence < second.fence < last + 9


def test_limits_of_an_older_file_count_on(server: Server) -> None:
    limits = server.app.stores.limits
    report = limits.read()

    assert [(one.scope, one.changed[0].limit) for one in report] == [("scope", 5)]
    assert [(one.key, one.running) for one in report[0].usage] == [("k", 1)]
    limits.change("scope", [])
    rules = [Rule(name="running", key="k", limit=1)]
    assert limits.enter("scope", "other", "token 2", rules, ttl=9.0).wait > 0


def test_older_program_cannot_lock_in_a_file_that_was_brought_up_to_date(tmp_path: Path) -> None:
    path = tmp_path / "machinery.db"
    with closing(sqlite3.connect(path)) as old:
        old.execute("PRAGMA journal_mode = WAL")
        old.executescript(OLD.read_text())
        assert old.execute("SELECT count(*) FROM locks").fetchone() == (1,)
        with closing(Server(Config(broker=f"sqlite:///{path}"))) as server:
            server.app.stores.lock.acquire("a", ttl=9.0)

        with pytest.raises(sqlite3.OperationalError, match="no such table: locks"):
            old.execute("INSERT INTO locks (name, token, expires_at) VALUES ('a', 't', 1)")


# In it: an ended task and a failed one; a chord of which one member has come in, and the other one
# is held by a consumer; three messages of two tenants; a late one; a dead letter; a paused queue; a
# revoked task; a claim, a schedule and a lock.
VERSION_10 = Path(__file__).with_name("version_10.sql")


@pytest.fixture
def former(tmp_path: Path) -> Iterator[Server]:
    path = tmp_path / "machinery.db"
    with closing(sqlite3.connect(path)) as old:
        old.execute("PRAGMA journal_mode = WAL")
        old.executescript(VERSION_10.read_text())
    server = Server(
        Config(broker=f"sqlite:///{path}", results_expire_in=10**9, fair_queues={"fair": "tenant"})
    )
    yield server
    server.close()


def test_all_that_version_10_kept_is_carried_over(former: Server) -> None:
    store = former.app.stores.store
    broker, backend = store.broker, store.backend
    lines = {one.queue: one for one in broker.stats()}

    assert [(one.waiting, one.delayed, one.dead) for one in lines.values()] == [
        (3, 0, 0),
        (1, 0, 0),
        (0, 1, 1),
        (0, 0, 0),
    ]
    assert broker.paused() == {"paused"}
    assert [one.uuid for one in broker.pending("fair", 9)] == ["a1", "b1", "a2"]
    assert [(one.uuid, one.priority) for one in broker.delayed(9)] == [("late", 3)]
    [dead] = broker.dead_letters(limit=9)
    assert (dead.uuid, dead.reason, dead.error) == ("dead_1", "unknown", "no such")
    assert [one.uuid for one in broker.take_dead([dead.id])] == ["dead_1"]
    assert backend.revoked(["gone", "else"]) == {"gone"}
    assert backend.claims(["key"]) == [b"claimed"]
    assert backend.records().bodies == {"nightly": b"{}"}
    assert broker.workers() == []
    counts = backend.finished_since(moment_of(0), step=10**10)
    assert [(one.queue, one.succeeded, one.failed) for one in counts] == [("machinery_tasks", 2, 1)]
    assert former.app.stores.lock.acquire("held", ttl=9.0) is None


def test_outboxes_of_version_10_are_carried_over(former: Server) -> None:
    with closing(sqlite3.connect(former.config.broker.removeprefix("sqlite:///"))) as old, old:
        old.executemany(
            "INSERT INTO outbox VALUES (?, ?, x'91c40131')", [("late", 2), ("early", 1)]
        )
    store = former.app.stores.store

    assert store.backend.unsent(9, older_than=5.0) == [("early", (b"1",)), ("late", (b"1",))]


def test_members_of_a_chord_that_version_10_began_are_kept(former: Server) -> None:
    with closing(SQLiteDriver(former.config.broker.removeprefix("sqlite:///"))) as driver:
        tasks = list(SQLiteRows(driver).list_all("task"))
    keepers = {row.key.id: row.kept_by for row in tasks if row.kept_by is not None}

    assert len(keepers) == 2
    [keeper] = set(keepers.values())
    assert keeper.kind == "chord open" and keeper.id.startswith("group_")


def test_chord_that_version_10_began_is_ended(former: Server) -> None:
    ended: list[tuple[int, ...]] = []
    former.register_task("add", _add)
    former.register_task("total", lambda *numbers: ended.append(numbers))
    with former.new_worker(concurrency=1):
        wait_until(lambda: bool(ended))

    assert ended == [(3, 7)]


def test_opener_of_an_older_file_is_told_why_it_waits(
    former: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = former.config.broker.removeprefix("sqlite:///")
    monkeypatch.setattr(opening, "PATIENCE", 0.0)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with (
            closing(SQLiteDriver(path, busy_timeout=0.0)) as driver,
            pytest.raises(BrokerUnavailable, match="carries over the file of an older"),
        ):
            SQLiteRows(driver).fences(1)
        other.execute("ROLLBACK")

    caplog.set_level("INFO", "machinery_py.connections.sqlite")
    former.app.stores.store.broker.stats()
    told = [one.getMessage().partition("schema ")[2] for one in caplog.records]
    assert told[0] == f"10 to {VERSION}: it is carried over; all others wait"
    assert told[1].startswith(f"10 to {VERSION}: done in ")


def test_upgrade_that_is_interrupted_is_made_by_the_next_program(
    former: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = former.config.broker.removeprefix("sqlite:///")
    steps = UPGRADES[10]
    with monkeypatch.context() as context:
        context.setitem(schema.UPGRADES, 10, (*steps[:-1], "SELECT no_such_function()"))
        with closing(SQLiteDriver(path)) as driver, pytest.raises(StoreUnusable):
            SQLiteRows(driver).fences(1)
    with closing(sqlite3.connect(path)) as old:
        assert old.execute("SELECT count(*) FROM messages").fetchone() == (5,)

    assert sum(one.waiting for one in former.app.stores.store.broker.stats()) == 4


def _add(a: int, b: int) -> int:
    return a + b


def test_program_of_version_10_finds_no_tables(former: Server) -> None:
    path = former.config.broker.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as old:
        assert old.execute("SELECT count(*) FROM messages").fetchone() == (5,)
        former.app.stores.store.broker.stats()

        with pytest.raises(sqlite3.OperationalError, match="no such table: messages"):
            old.execute("SELECT count(*) FROM messages")

"""A file that an older machinery_py wrote is used on: version_9.sql was written by the real one."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py.limits import Rule
from machinery_py.locks.base import LockHolding

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
            assert [found.fence - last for found in one.receive(2, 0)] == [2, 3]


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

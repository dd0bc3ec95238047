"""Transactions on the SQLite file, in one process and in several, forked and killed."""

from __future__ import annotations

import gc
import sqlite3
import threading
from pathlib import Path

import pytest

from machinery_py.brokers.sqlite.broker import SQLiteBroker
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.errors import BackendUnavailable, BrokerUnavailable
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.stores.sqlite.case import ADD_QUEUE, driver, integrity, message, path, queues
from tests.stores.sqlite.processes import Other
from tests.support.forking import forked

__all__ = ["driver", "path"]


def test_a_transaction_is_all_or_nothing(driver: SQLiteDriver) -> None:
    with pytest.raises(ZeroDivisionError), driver.transaction() as connection:
        connection.execute(ADD_QUEUE, ("a",))
        with driver.transaction() as inner:
            inner.execute(ADD_QUEUE, ("b",))
            assert queues(driver) == {"a", "b"}
        raise ZeroDivisionError

    assert queues(driver) == set()


def test_failed_inner_transaction_is_not_committed_when_caught(driver: SQLiteDriver) -> None:
    with pytest.raises(ZeroDivisionError), driver.transaction() as connection:
        connection.execute(ADD_QUEUE, ("a",))
        try:
            with driver.transaction():
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass

    assert queues(driver) == set()
    with driver.transaction() as connection:
        connection.execute(ADD_QUEUE, ("b",))
    assert queues(driver) == {"b"}


def test_hooks_run_after_the_commit_or_never(driver: SQLiteDriver) -> None:
    seen: list[set[str]] = []
    with driver.transaction() as connection:
        with driver.transaction():
            driver.after_commit(lambda: seen.append(queues(driver)))
        connection.execute(ADD_QUEUE, ("a",))
        assert seen == []
    with pytest.raises(ZeroDivisionError), driver.transaction():
        driver.after_commit(lambda: seen.append({"never"}))
        raise ZeroDivisionError
    with driver.transaction():
        pass

    assert seen == [{"a"}]


def test_reader_waits_for_no_writer(driver: SQLiteDriver) -> None:
    with driver.transaction() as connection:
        connection.execute(ADD_QUEUE, ("a",))
        assert together(1, lambda _: queues(driver)) == [set()]
    assert queues(driver) == {"a"}


def test_claims_do_not_wait_for_the_disk_and_the_rest_does(driver: SQLiteDriver) -> None:
    levels: list[int] = []
    for part in (driver.claiming, driver.transaction, driver.transaction, driver.claiming):
        with part() as connection:
            levels.append(connection.execute("PRAGMA synchronous").fetchone()[0])
    assert levels == [1, 2, 2, 1]


def test_a_file_that_stays_locked_is_unavailable_for_a_while(path: Path) -> None:
    driver = SQLiteDriver(path, busy_timeout=0.05)
    assert queues(driver) == set()
    hog = sqlite3.connect(path, isolation_level=None)
    hog.execute("BEGIN IMMEDIATE")

    with pytest.raises(BrokerUnavailable, match=r"another process has been writing for 0\.05 s"):
        SQLiteBroker(driver).put([message()], token="")
    with pytest.raises(BackendUnavailable), driver.transaction(BackendUnavailable):
        pass
    assert queues(driver) == set()

    hog.execute("COMMIT")
    hog.close()
    assert SQLiteBroker(driver).put([message()], token="") is True
    driver.close()


def test_writer_waits_for_the_writer_before(path: Path) -> None:
    driver = SQLiteDriver(path, busy_timeout=HANG)
    assert queues(driver) == set()
    hog = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    hog.execute("BEGIN IMMEDIATE")
    waiter = threading.Thread(target=lambda: SQLiteBroker(driver).put([message()], token=""))
    waiter.start()
    while waiter.is_alive():
        hog.execute("COMMIT") if hog.in_transaction else waiter.join(HANG)
    hog.close()

    assert len(SQLiteBroker(driver).pending("q", 5)) == 1
    driver.close()


def test_a_closed_driver_opens_again(driver: SQLiteDriver) -> None:
    broker = SQLiteBroker(driver)
    broker.put([message()], token="")
    driver.close()
    driver.close()

    assert len(broker.pending("q", 5)) == 1


# Processes


def test_many_processes_make_the_file_at_once(tmp_path: Path) -> None:
    script = """
heard()
for n in range(20):
    broker.put([Message(uuid='', name='', queue='q', body=b'')], token='')
"""
    path = tmp_path / "machinery.db"
    others = [Other(path, script) for _ in range(6)]
    for other in others:
        other.tell()

    assert [other.end() for other in others] == [0] * 6
    assert len(SQLiteBroker(SQLiteDriver(path)).pending("q", 1000)) == 120
    assert integrity(path) == "ok"


def test_writer_killed_in_a_transaction_leaves_all_or_nothing(path: Path) -> None:
    script = """
for n in range(10**9):
    messages = [Message(uuid=str(n), name='', queue='q', body=b'x' * 2000) for _ in range(20)]
    broker.put(messages, token=str(n))
    if n == 2: say('begun')
"""
    driver = SQLiteDriver(path)
    broker = SQLiteBroker(driver)
    for round_number in range(6):
        with Other(path, f"import random; random.seed({round_number})\n" + script) as other:
            assert other.line() == "begun"
            enough = 60 + 37 * round_number
            wait_until(lambda: len(broker.pending("q", 10**6)) > enough)  # noqa: B023 - called at once
            other.kill()
        counts: dict[str, int] = {}
        for one in broker.pending("q", 10**6):
            counts[one.uuid] = counts.get(one.uuid, 0) + 1
        assert set(counts.values()) == {20}
        broker.purge("q")
        with driver.transaction() as connection:
            connection.execute("DELETE FROM rows WHERE kind = 'token'")
        assert integrity(path) == "ok"
    driver.close()


def test_forked_child_opens_its_own_file_and_outlives_its_parent(tmp_path: Path) -> None:
    script = """
import threading
for n in range(5): broker.put([Message(uuid='', name='', queue='q', body=b'')], token='')
broker.pending('q', 1)
busy = True
def read():
    while busy: broker.pending('q', 10)
readers = [threading.Thread(target=read) for _ in range(3)]
for reader in readers: reader.start()
if os.fork() == 0:
    heard()  # the parent has ended and was the last that had the file open
    for n in range(5): broker.put([Message(uuid='', name='', queue='q', body=b'')], token='')
    say('child', len(broker.pending('q', 100)))
    os._exit(0)
broker.put([Message(uuid='', name='', queue='q', body=b'')], token='')
busy = False
for reader in readers: reader.join()
driver.close()
say('parent', os.listdir(os.path.dirname(sys.argv[1])))
os._exit(0)
"""
    path = tmp_path / "machinery.db"
    with Other(path, script) as other:
        parent = other.line()
        assert parent.startswith("parent")
        assert "machinery.db-wal" not in parent
        other.process.wait(60)
        other.tell()
        assert other.line() == "child 11"
    assert len(SQLiteBroker(SQLiteDriver(path)).pending("q", 100)) == 11
    assert integrity(path) == "ok"


def test_threads_that_write_while_others_fork_are_not_disturbed(driver: SQLiteDriver) -> None:
    broker = SQLiteBroker(driver)

    def work(index: int) -> None:
        if index:
            for number in range(30):
                broker.put([message(number)], token="")
            return
        for _ in range(10):
            forked(lambda: broker.put([message(99)], token=""))

    together(4, work)
    assert len(broker.pending("q", 1000)) == 100


def test_fork_waits_until_dropped_connections_are_closed(path: Path, driver: SQLiteDriver) -> None:
    # A child forked while another thread closes a connection would wait for ever for a lock in the
    # SQLite library.
    forking = threading.Event()

    def drop(index: int) -> None:
        while not forking.is_set():
            other = SQLiteDriver(path.with_name(f"dropped{index}.db"))
            SQLiteBroker(other).put([message()], token="")
            del other
            gc.collect(1)

    def work(index: int) -> None:
        if index:
            drop(index)
            return
        try:
            for _ in range(50):
                forked(lambda: SQLiteBroker(driver).put([message()], token=""))
        finally:
            forking.set()

    together(3, work, timeout=4 * HANG)
    assert len(SQLiteBroker(driver).pending("q", 1000)) == 50

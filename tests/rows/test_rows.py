"""The conformance suite of rows over each store of rows, and what is theirs alone."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NoReturn

import pytest

from machinery_py.bounds import STEP_BYTES
from machinery_py.clock import micros
from machinery_py.connections import session_files
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.rows.contract import Key, RowStep, StoredRow, Write
from machinery_py.rows.memory import MemoryRows
from machinery_py.rows.messages import Hold, Join, MessageRows, MessageStep, Push, queue_topic
from machinery_py.rows.sqlite import SQLiteRows
from machinery_py.rows.sqlite_messages import SQLiteHold
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.messages_rows import (
    LEASE,
    MessageRowsConformance,
    OpenMessageRows,
)
from machinery_py.testing.conformance.rows import SECOND, OpenRows, RowsConformance
from machinery_py.testing.waiting import wait_until


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class TestMemoryRows(RowsConformance):
    @pytest.fixture
    def open_rows(self, clock: ManualClock) -> OpenRows:
        rows = MemoryRows(clock)
        return lambda: rows

    def test_end_of_a_row_does_not_follow_the_clock_on_the_wall(self, clock: ManualClock) -> None:
        rows = MemoryRows(clock)
        key = Key("kind", "a")
        rows.commit([RowStep(write={key: Write(body=b"1", expires_in=SECOND)})])
        clock.set_back(-3600.0)

        assert rows.read([key]) != [None]

    def test_rows_that_are_over_go_while_others_come(self, clock: ManualClock) -> None:
        rows = MemoryRows(clock)
        for number in range(1000):
            write = Write(body=b"1", expires_in=SECOND)
            rows.commit([RowStep(write={Key("kind", str(number)): write})])
            clock.advance(0.1)

        assert len(rows._kinds["kind"]) < 20

    def test_row_that_is_written_often_is_noted_once(self, clock: ManualClock) -> None:
        rows, key = MemoryRows(clock), Key("kind", "a")
        for _ in range(1000):
            clock.advance(0.001)
            write = Write(body=b"1", expires_in=60 * SECOND)
            rows.change([key], lambda found, now, write=write: ({key: write}, None))
        assert len(rows._expiring) == 1

        clock.advance(59.999)
        assert rows.expire(10) is False and rows._kinds["kind"]
        clock.advance(0.001)
        assert rows.expire(10) is False and not rows._kinds["kind"]


class TestMemoryMessageRows(MessageRowsConformance):
    @pytest.fixture
    def open_rows(self, clock: ManualClock) -> OpenMessageRows:
        rows = MemoryRows(clock)
        return lambda: rows

    def test_hold_that_misses_its_beats_is_ended_at_a_later_look(self, clock: ManualClock) -> None:
        rows = MemoryRows(clock)
        hold = rows.open_hold(b"one", lease=10.0)
        clock.advance(11.0)
        rows.reap()
        assert len(rows.holds()) == 1
        assert hold.beat()
        clock.advance(11.0)
        rows.reap()
        assert len(rows.holds()) == 1  # its beat ended the suspicion
        clock.advance(10.0)
        rows.reap()

        assert rows.holds() == []
        assert hold.beat() is False


@pytest.fixture
def open_sqlite_rows(clock: ManualClock, tmp_path: Path) -> Iterator[Callable[[], SQLiteRows]]:
    with ExitStack() as drivers:

        def open_one() -> SQLiteRows:
            driver = SQLiteDriver(
                tmp_path / "machinery.db", clock=clock, synchronous="NORMAL", busy_timeout=30.0
            )
            drivers.callback(driver.close)
            return SQLiteRows(driver)

        yield open_one


class TestSQLiteMessageRows(MessageRowsConformance):
    @pytest.fixture
    def open_rows(self, open_sqlite_rows: OpenMessageRows) -> OpenMessageRows:
        return open_sqlite_rows

    def let_die(self, hold: Hold) -> None:
        assert isinstance(hold, SQLiteHold)
        hold.abandon()

    def hide(self, rows: MessageRows, hold: Hold) -> None:
        assert isinstance(rows, SQLiteRows)
        self.let_die(hold)
        session_files.remove(rows.driver.sessions_folder, hold.id)

    def test_bodies_of_joins_count_to_the_size_of_a_transaction(
        self, open_sqlite_rows: Callable[[], SQLiteRows]
    ) -> None:
        rows = open_sqlite_rows()
        half = Write(body=bytes(STEP_BYTES // 2))
        joins = [
            Join(set=Key("set", name), member="a", whole=2, ready=Key("ready", name),
                 write=half, beside={Key("beside", name): half})
            for name in "abc"
        ]  # fmt: skip
        statements: list[str] = []
        with rows.driver.transaction() as connection:
            connection.set_trace_callback(statements.append)
        statements.clear()
        rows.commit([MessageStep(joins=(join,)) for join in joins])

        assert statements.count("COMMIT") == 3

    def test_hold_that_died_before_the_clock_was_set_back_is_condemned(
        self, rows: MessageRows, hold: Hold, clock: ManualClock
    ) -> None:
        self.hide(rows, hold)
        clock.set_back(86_400.0)
        assert (rows.dead_holds(), rows.dead_holds()) == ([], [])
        clock.advance(LEASE + 1.0)

        assert rows.dead_holds() == []
        clock.advance(LEASE)
        assert rows.dead_holds() == [hold.id]


@pytest.mark.parametrize("how", ["promoted", "given back", "condemned"])
@pytest.mark.parametrize("store", ["memory", "sqlite"])
def test_message_that_comes_wakes_listeners_of_its_queue_alone(
    store: str, how: str, open_sqlite_rows: OpenMessageRows, clock: ManualClock
) -> None:
    rows = open_sqlite_rows() if store == "sqlite" else MemoryRows(clock)
    due = micros(clock.now()) + SECOND if how == "promoted" else 0
    rows.commit([MessageStep(pushes=(Push(queue="mail", body=b"", due=due),))])
    hold = rows.open_hold(b"", lease=10.0)
    hold.claim(["mail"], 1)
    ours, other = rows.listen(), rows.listen()
    ours.watch([queue_topic("mail")])
    other.watch([queue_topic("other")])

    match how:
        case "promoted":
            clock.advance(1.0)
            rows.promote()
        case "given back":
            hold.end()
        case _:
            if isinstance(hold, SQLiteHold):
                hold.abandon()
            clock.advance(11.0)
            rows.dead_holds()
            clock.advance(10.0)
            rows.reap()

    begun_at = time.monotonic()
    ours.wait(30.0)
    assert time.monotonic() - begun_at < 20.0
    begun_at = time.monotonic()
    other.wait(0.2)
    assert time.monotonic() - begun_at >= 0.2
    ours.close()
    other.close()


class TestSQLiteRows(RowsConformance):
    @pytest.fixture
    def open_rows(self, open_sqlite_rows: OpenRows) -> OpenRows:
        return open_sqlite_rows

    def test_decision_that_fails_writes_nothing(self, open_rows: OpenRows) -> None:
        rows, key = open_rows(), Key("kind", "a")

        def decide(found: Sequence[StoredRow | None], now: int) -> NoReturn:
            rows.commit([RowStep(write={key: Write(body=b"1")})])
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            rows.change([key], decide)

        assert rows.read([key]) == [None]

    def test_expired_rows_are_deleted_while_others_are_written(
        self, open_rows: OpenRows, clock: ManualClock, tmp_path: Path
    ) -> None:
        rows = open_rows()
        for number in range(1000):
            write = Write(body=b"1", expires_in=SECOND)
            rows.commit([RowStep(write={Key("kind", str(number)): write}, durable=False)])
        clock.advance(1.0)

        def count() -> int:
            rows.commit([RowStep(write={Key("other", "a"): Write(body=b"1")}, durable=False)])
            with closing(sqlite3.connect(tmp_path / "machinery.db")) as file:
                return int(file.execute("SELECT count(*) FROM rows").fetchone()[0])

        wait_until(lambda: count() == 1)

"""Rows in PostgreSQL: the contract, and what only a server shows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import psycopg
import pytest

from machinery_py.bounds import STEP_BYTES
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.errors import BackendUnavailable, Unsupported
from machinery_py.rows.contract import (
    NO_ROW,
    Committed,
    Conflict,
    Key,
    Repeated,
    Rows,
    StepResult,
    Write,
)
from machinery_py.rows.messages import CLOSED, Join, MessageStep, Push, Room, checked, waiting_at
from machinery_py.rows.postgresql import PostgreSQLRows, _Statement
from machinery_py.rows.postgresql_messages import raw, text_of
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.messages_rows import MessageRowsConformance, OpenMessageRows
from machinery_py.testing.conformance.rows import OpenRows, RowsConformance, body_of
from machinery_py.testing.waiting import HANG, together, wait_until


@pytest.fixture
def open_postgresql_rows(
    clock: ManualClock, postgres_url: str
) -> Iterator[Callable[[], PostgreSQLRows]]:
    with ExitStack() as drivers:

        def open_one() -> PostgreSQLRows:
            driver = PostgreSQLDriver(postgres_url, clock=clock, timeout=30.0)
            drivers.callback(driver.close)
            return PostgreSQLRows(driver)

        yield open_one


class TestPostgreSQLRows(RowsConformance):
    @pytest.fixture
    def open_rows(self, open_postgresql_rows: OpenRows) -> OpenRows:
        return open_postgresql_rows

    def test_step_in_a_callers_transaction_is_refused_in_words(self, rows: Rows) -> None:
        """Of other connections than those of psycopg; the rest is below."""
        with pytest.raises(Unsupported, match="cannot be part of your transaction: found object"):
            rows.on(object())


@pytest.fixture
def connection(postgres_url: str) -> Iterator[Connection]:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TEMPORARY TABLE orders (id int)")
        connection.commit()
        yield connection
        connection.rollback()


A, B = Key("kind", "a"), Key("kind", "b")
Connection = psycopg.Connection[tuple[object, ...]]
SEND = MessageStep(
    once=A, write={A: Write(body=b"1")}, pushes=(Push(queue="q", body=b"1"),), tell=("x",)
)


def orders(connection: Connection) -> int:
    return len(connection.execute("SELECT id FROM orders").fetchall())


class TestCallersTransaction:
    @pytest.fixture
    def rows(self, postgres_url: str) -> Iterator[PostgreSQLRows]:
        with closing(PostgreSQLDriver(postgres_url, timeout=30.0)) as driver:
            rows = PostgreSQLRows(driver)
            rows.read([A])  # so that the tables are there
            yield rows

    def test_step_is_true_when_the_caller_commits(
        self, rows: PostgreSQLRows, connection: Connection
    ) -> None:
        connection.execute("INSERT INTO orders VALUES (1)")
        [done] = rows.on(connection).commit([SEND])
        assert isinstance(done, Committed)
        assert rows.on(connection).read([A]) != [None]
        assert (rows.read([A]), rows.count_waiting("q")) == ([None], 0)

        connection.commit()
        assert (body_of(rows, A), rows.count_waiting("q"), orders(connection)) == (b"1", 1, 1)

    def test_step_is_never_true_if_the_caller_rolls_back(
        self, rows: PostgreSQLRows, connection: Connection
    ) -> None:
        connection.execute("INSERT INTO orders VALUES (1)")
        rows.on(connection).commit([SEND])
        connection.rollback()

        assert (rows.read([A]), rows.count_waiting("q"), orders(connection)) == ([None], 0, 0)

    def test_savepoint_that_is_rolled_back_takes_its_steps_along(
        self, rows: PostgreSQLRows, connection: Connection
    ) -> None:
        class Undone(Exception):
            pass

        with connection.transaction():
            rows.on(connection).commit([MessageStep(write={B: Write(body=b"2")})])
            with pytest.raises(Undone), connection.transaction():
                rows.on(connection).commit([SEND])
                raise Undone

        assert (rows.read([A]), body_of(rows, B), rows.count_waiting("q")) == ([None], b"2", 0)

    def test_row_that_the_caller_has_locked_is_not_waited_for(
        self, rows: PostgreSQLRows, connection: Connection
    ) -> None:
        rows.commit([MessageStep(write={A: Write(body=b"1"), B: Write(body=b"1")})])
        found = [row for row in rows.read([A, B]) if row is not None]
        rows.on(connection).commit([MessageStep(write={A: Write(body=b"2")})])

        rows.forget(found)
        assert (body_of(rows, A), body_of(rows, B)) == (b"1", None)
        connection.rollback()
        rows.forget(found)
        assert body_of(rows, A) is None

    def test_answer_that_is_no_leaves_the_transaction_as_it_is(
        self, rows: PostgreSQLRows, connection: Connection
    ) -> None:
        rows.commit([SEND])
        connection.execute("INSERT INTO orders VALUES (1)")
        within = rows.on(connection)

        assert within.commit([SEND]) == [Repeated()]
        assert within.commit([MessageStep(expect={A: NO_ROW})]) == [Conflict()]
        connection.commit()
        assert (orders(connection), rows.count_waiting("q")) == (1, 1)

    def test_row_that_another_makes_at_this_moment_is_seen(
        self, rows: PostgreSQLRows, connection: Connection, postgres_url: str
    ) -> None:
        with psycopg.connect(postgres_url) as other:
            rows.on(other).commit([SEND])
            connection.execute("INSERT INTO orders VALUES (1)")

            def send(index: int) -> object:
                if index == 0:
                    return rows.on(connection).commit([SEND])
                wait_until(lambda: bool(rows.driver.run(WAITING, doing="looking")), HANG)
                other.commit()
                return None

            done, _ = together(2, send)
        assert done == [Repeated()]
        connection.commit()
        assert (orders(connection), rows.count_waiting("q")) == (1, 1)

    def test_settings_of_the_connection_stay(
        self, rows: PostgreSQLRows, connection: Connection
    ) -> None:
        connection.execute("SET lock_timeout = '17s'")
        settings = connection.autocommit, connection.isolation_level, connection.prepare_threshold
        for _ in range(6):
            rows.on(connection).commit([SEND])

        assert connection.execute("SHOW lock_timeout").fetchone() == ("17s",)
        assert connection.execute("SHOW enable_seqscan").fetchone() == ("on",)
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
        after = connection.autocommit, connection.isolation_level, connection.prepare_threshold
        assert after == settings

    def test_row_changed_since_a_repeatable_read_began_is_an_error(
        self, rows: PostgreSQLRows, connection: Connection
    ) -> None:
        rows.commit([MessageStep(write={A: Write(body=b"1")})])
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        orders(connection)
        rows.commit([MessageStep(write={A: Write(body=b"2")})])

        with pytest.raises(BackendUnavailable, match="in your transaction: could not serialize"):
            rows.on(connection).commit([MessageStep(write={A: Write(body=b"3")})])

    def test_what_others_would_wait_for_is_refused(
        self, rows: PostgreSQLRows, connection: Connection
    ) -> None:
        within = rows.on(connection)
        orders(connection)
        for step in (
            MessageStep(takes=(waiting_at(1),)),
            MessageStep(room=(Room(queue="q", limit=1, adds=1),)),
            MessageStep(write={Key(CLOSED, "q"): Write(body=b"")}),
        ):
            with pytest.raises(Unsupported, match="others would wait for its end"):
                within.commit([step])
        with pytest.raises(Unsupported):
            within.expire(1)
        with pytest.raises(Unsupported):
            within.change([A], lambda found, now: ({}, None))

        assert orders(connection) == 0  # it goes on

    def test_autocommit_outside_of_a_block_is_refused(
        self, rows: PostgreSQLRows, postgres_url: str
    ) -> None:
        with psycopg.connect(postgres_url, autocommit=True) as connection:
            with pytest.raises(Unsupported, match="begin one: with connection.transaction"):
                rows.on(connection)
            with connection.transaction():
                rows.on(connection).commit([SEND])

        assert rows.count_waiting("q") == 1

    def test_whoever_waits_is_told_when_the_caller_commits(
        self, rows: PostgreSQLRows, connection: Connection
    ) -> None:
        rows.on(connection).commit([SEND])
        listener = rows.listen()
        listener.watch(["x"])  # behind the step, which could not know it
        listener.wait(HANG)
        connection.commit()

        wait_until(listener._waiter._event.is_set, HANG)
        listener.close()


#: Whether a transaction waits for another one.
WAITING = "SELECT 1 FROM pg_locks WHERE NOT granted"


class TestPostgreSQLMessageRows(MessageRowsConformance):
    @pytest.fixture
    def open_rows(self, open_postgresql_rows: OpenMessageRows) -> OpenMessageRows:
        return open_postgresql_rows

    def test_look_that_finds_nothing_writes_nothing(
        self, open_postgresql_rows: Callable[[], PostgreSQLRows]
    ) -> None:
        rows = open_postgresql_rows()
        hold = rows.open_hold(b"", lease=10.0)
        closed = Key(CLOSED, "closed")
        pushes = (Push(queue="closed", body=b"1"),)
        rows.commit([MessageStep(write={closed: Write(body=b"")}, pushes=pushes)])

        def transactions() -> object:
            return rows.driver.run("SELECT pg_snapshot_xmax(pg_current_snapshot())", doing="")

        before = transactions()
        for _ in range(3):
            assert hold.claim(["empty", "closed"], 5).found == []
            assert rows.expire(10) is False
        assert transactions() == before

    def test_steps_that_meet_in_one_batch_see_each_other(
        self, open_postgresql_rows: Callable[[], PostgreSQLRows]
    ) -> None:
        rows = open_postgresql_rows()
        a, b = Key("kind", "a"), Key("kind", "b")
        new = MessageStep(expect={a: NO_ROW}, write={a: Write(body=b"1")})
        steps = [
            new,
            MessageStep(expect={b: NO_ROW}, create={b: Write(body=b"2")}),
            new,
            MessageStep(create={a: Write(body=b"3"), b: Write(body=b"3")}),
            MessageStep(write={a: None}),
            new,
        ]

        done = rows.commit(steps)
        assert [type(one) for one in done] == [
            Committed, Committed, Conflict, Committed, Committed, Committed,
        ]  # fmt: skip
        assert [row and row.body for row in rows.read([a, b])] == [b"1", b"2"]

    def test_claim_waits_for_the_end_of_the_one_it_names_lost(
        self, open_postgresql_rows: Callable[[], PostgreSQLRows], postgres_url: str
    ) -> None:
        rows = open_postgresql_rows()
        rows.commit([MessageStep(pushes=(Push(queue="q", body=b"1"),))])
        hold = rows.open_hold(b"", lease=10.0)
        waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
        late = "SELECT id FROM machinery.claim(NULL, %s, %s::bytea[], 1, 1000, 1, NULL)"
        with psycopg.connect(postgres_url) as server:

            def work(index: int) -> list[bytes]:
                if index:
                    return [one.body for one in hold.claim(["q"], 1, number=2, lost=1).found]
                with psycopg.connect(postgres_url, autocommit=True) as other:
                    wait_until(lambda: other.execute(waits, ("%machinery.claim%",)).fetchall())
                server.commit()
                return []

            assert len(server.execute(late, (hold.id, [b"q"])).fetchall()) == 2
            assert together(2, work) == [[], [b"1"]]

    def test_hold_is_condemned_beside_a_step_without_an_end(
        self, open_postgresql_rows: Callable[[], PostgreSQLRows], postgres_url: str
    ) -> None:
        rows = open_postgresql_rows()
        rows.commit([MessageStep(pushes=tuple(Push(queue="q", body=b"%d" % n) for n in range(5)))])
        hold, heir = rows.open_hold(b"", lease=10.0), rows.open_hold(b"", lease=10.0)
        first, *_ = hold.claim(["q"], 5).found
        hold.begin_run(first.receipt)
        hold.abandon()
        with psycopg.connect(postgres_url) as hangs:
            lock = "SELECT 1 FROM machinery.items WHERE id = %s FOR UPDATE"  # as each step does
            hangs.execute(lock, (first.receipt.id,))

            assert (rows.condemn(hold.id, 100), rows.dead_holds()) == (4, [hold.id])
            found = heir.claim(["q"], 5).found
            assert [one.body for one in found] == [b"1", b"2", b"3", b"4"]
            hangs.rollback()
        assert (rows.reap(), rows.dead_holds()) == (1, [])
        [last] = heir.claim(["q"], 5).found
        assert (last.body, last.strikes) == (b"0", 1)

    def test_end_that_a_crash_of_the_server_undoes_gives_the_message_back(
        self, open_postgresql_rows: Callable[[], PostgreSQLRows], postgres_url: str
    ) -> None:
        """And no other: what the consumer has in hand, or has just been given, stays with it."""
        rows = open_postgresql_rows()
        rows.commit([MessageStep(pushes=tuple(Push(queue="q", body=b"%d" % n) for n in range(4)))])
        hold, heir = rows.open_hold(b"", lease=10.0), rows.open_hold(b"", lease=10.0)
        ended, runs, also = hold.claim(["q"], 3, number=1).found
        with psycopg.connect(postgres_url, autocommit=True) as server:
            server.execute("CREATE TEMPORARY TABLE before AS SELECT * FROM machinery.items")
            rows.commit([MessageStep(takes=(ended.receipt,))])
            with closing(rows.open_transaction()) as own:
                own.rows.commit([MessageStep(takes=(also.receipt,))])
                own.commit()
            server.execute("DELETE FROM machinery.items")
            server.execute("INSERT INTO machinery.items SELECT * FROM before")
            assert (hold.beat(), heir.claim(["q"], 1).found[0].body) == (True, b"3")
            assert heir.claim(["q"], 5).found == []

            server.execute(
                "SELECT pg_terminate_backend(pid, 30000) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )

        def beats() -> bool:
            try:
                return hold.beat()
            except BackendUnavailable:  # by a connection that was just used
                return False

        wait_until(beats, HANG)
        assert [one.body for one in heir.claim(["q"], 5).found] == [b"0", b"2"]
        assert hold.has([runs.receipt]) == [True]
        assert hold.beat()
        assert heir.claim(["q"], 5).found == []

        with psycopg.connect(postgres_url, autocommit=True) as server:
            server.execute("CREATE TEMPORARY TABLE before AS SELECT * FROM machinery.items")
            rows.commit([MessageStep(takes=(runs.receipt,))])
            server.execute(
                "INSERT INTO machinery.items SELECT * FROM before WHERE id = %s", (runs.receipt.id,)
            )
        rows.driver.is_pooled = True  # then nobody knows what the pooler has lost
        assert hold.beat()
        assert [one.body for one in heir.claim(["q"], 5).found] == [b"1"]

    def test_bodies_of_joins_count_to_the_size_of_a_statement(
        self, open_postgresql_rows: Callable[[], PostgreSQLRows]
    ) -> None:
        rows = open_postgresql_rows()

        def transactions() -> int:
            look = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
            return int(rows.driver.run(look, doing="looking")[0][0])

        write = Write(body=bytes(STEP_BYTES // 2))
        steps = [
            MessageStep(
                joins=(
                    Join(
                        set=Key("set", name), member="a", whole=2, ready=Key("ready", name),
                        write=write, beside={Key("beside", name): write},
                    ),
                )
            )
            for name in "abc"
        ]  # fmt: skip
        before = transactions()
        rows.commit(steps)

        assert transactions() == before + 3

    def test_deadlock_is_tried_again(
        self, open_postgresql_rows: Callable[[], PostgreSQLRows]
    ) -> None:
        """Steps of many threads that expect absent what others make, in batches."""
        handles = [open_postgresql_rows() for _ in range(4)]
        keys = [Key("kind", str(number)) for number in range(6)]

        def work(index: int) -> int:
            held = 0
            for turn in range(10):
                some = random.Random(f"{index} {turn}").sample(keys, 4)
                steps = [
                    MessageStep(expect={some[0]: NO_ROW}, write={some[1]: Write(body=b"")}),
                    MessageStep(expect={some[2]: NO_ROW}, write={some[3]: Write(body=b"")}),
                    MessageStep(write=dict.fromkeys(keys[:3])),
                ]
                held += sum(isinstance(one, Committed) for one in handles[index].commit(steps))
            return held

        assert sum(together(4, work)) >= 40

    def test_rows_that_nobody_should_have_made_are_made_without_a_look(
        self, open_postgresql_rows: Callable[[], PostgreSQLRows]
    ) -> None:
        """One that is there after all decides on its step alone, and the others are as ever."""
        rows = open_postgresql_rows()

        def send(name: str) -> MessageStep:
            row, token = Key("row", name), Key("token", name)
            return MessageStep(
                once=token,
                expect={row: NO_ROW},
                write={row: Write(body=b"1"), token: Write(body=b"", expires_in=1_000_000)},
                pushes=(Push(queue="q", body=name.encode()),),
            )

        def sends(*names: str) -> list[StepResult]:
            assert _Statement([checked(send(name)) for name in names]).makes_rows
            return rows.commit([send(name) for name in names])

        first = sends("a", "b")
        rows.commit([MessageStep(write={Key("row", "c"): Write(body=b"2")})])
        then = sends("a", "c", "d", "e")
        again = sends("d", "e")

        assert list(map(type, first + then + again)) == [
            Committed, Committed, Repeated, Conflict, Committed, Committed, Repeated, Repeated,
        ]  # fmt: skip
        made = [one for one in first + then if isinstance(one, Committed)]
        tokens = rows.read([Key("token", name) for name in "abde"])
        assert [one.version for one in made] == [row and row.version for row in tokens]
        assert rows.read([Key("token", "c")]) == [None]
        others = rows.read([Key("row", name) for name in "abcde"])
        assert [row and row.body for row in others] == [b"1", b"1", b"2", b"1", b"1"]
        claims = rows.open_hold(b"", lease=10.0).claim(["q"], 10)
        assert [one.body for one in claims.found] == [b"a", b"b", b"d", b"e"]

    @pytest.mark.parametrize(
        "step",
        [
            MessageStep(write={A: Write(body=b"")}),
            MessageStep(expect={A: NO_ROW}, create={A: Write(body=b"")}),
            MessageStep(expect={A: NO_ROW, B: NO_ROW}, write={A: Write(body=b"")}),
            MessageStep(expect={A: NO_ROW}, write={A: Write(body=b"", kept_by=B)}),
            MessageStep(
                expect={A: NO_ROW},
                write={A: Write(body=b"")},
                room=(Room(queue="q", limit=1, adds=0),),
            ),
            MessageStep(pushes=(Push(queue="q", body=b""),)),
        ],
    )
    def test_other_steps_look_first(self, step: MessageStep) -> None:
        assert not _Statement([checked(step)]).makes_rows


def test_names_are_read_as_they_were_written_and_a_strangers_can_be_shown() -> None:
    for name in ("½", "a\0b", "half \ud800"):
        assert text_of(raw(name)) == name
    assert text_of(b"mail\xff") == r"mail\xff"

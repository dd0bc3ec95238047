"""Tasks with `transaction=True`, against a real PostgreSQL: their end commits with their writes."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from machinery_py import Config, Context, Server, TaskFailed, current_task, group
from machinery_py.brokers.base import Fate
from machinery_py.errors import StateNotFound, Unsupported
from machinery_py.events import TaskEnded, TaskFenced, TaskSucceeded
from machinery_py.stores.base import Settlement
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.running.transactions import REPEATS
from tests.support.proxy import Proxy

QUEUE = "machinery_tasks"


def write(id: int) -> None:
    current_task().connection.execute("INSERT INTO orders VALUES (%s)", (id,))


class Shop:
    """A server, the rows that its tasks wrote, and what runs."""

    def __init__(self, url: str, own: str, *, publish_timeout: float = 10.0) -> None:
        self.server = Server(Config(broker=url, publish_timeout=publish_timeout))
        self.own, self.runs = own, 0

        @self.server.task
        def note(order: int) -> int:
            return order

        self.note = note

    def task(self, function: Callable[[int], Any], **options: Any) -> Any:
        """Register the function; it is called with the number of its run."""

        def book() -> Any:
            self.runs += 1
            return function(self.runs)

        return self.server.task("book", transaction=True, **options)(book)

    def run(self, function: Callable[[int], Any], **options: Any) -> Any:
        """Run a task to its end, and return its result."""
        book = self.task(function, **options)
        with self.server.new_worker(concurrency=1):
            return book.send().get(timeout=HANG)

    def orders(self) -> list[int]:
        with psycopg.connect(self.own) as connection:
            return [id for (id,) in connection.execute("SELECT id FROM orders ORDER BY id")]


@pytest.fixture
def url(postgres_url: str) -> str:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("DROP TABLE IF EXISTS orders")
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED)")
    return postgres_url


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    shop = Shop(url, url)
    with contextlib.closing(shop.server):
        yield shop


def test_writes_sends_and_end_are_one(shop: Shop) -> None:
    def book(run: int) -> str:
        write(run)
        sent = shop.note.send(7)
        assert (shop.orders(), shop.server.broker.waiting(QUEUE)) == ([], 0)
        with pytest.raises(Unsupported, match="runs after the commit"):
            sent.get(timeout=HANG)
        return sent.uuid

    note = shop.server.result(shop.run(book))
    assert shop.orders() == [1]
    with shop.server.new_worker(concurrency=1):
        assert note.get(timeout=HANG) == 7


def test_exception_rolls_all_back(shop: Shop) -> None:
    sent: list[str] = []

    def book(run: int) -> int:
        write(run)
        sent.append(shop.note.send(run).uuid)
        if run == 1:
            raise ValueError("not yet")
        return run

    assert shop.run(book, retries=1, backoff=[0.01]) == 2
    assert (shop.orders(), shop.runs) == ([2], 2)
    with pytest.raises(StateNotFound):
        shop.server.result(sent[0]).get_state()
    assert shop.server.result(sent[1]).get_state()


def test_end_of_a_chord_comes_with_the_writes(shop: Shop) -> None:
    book = shop.task(lambda run: (write(run), run)[1])
    workflow = (
        group(book.signature() for _ in range(3))
        | shop.server.task("total")(lambda *runs: sum(runs)).partial()
    )
    with shop.server.new_worker(concurrency=3):
        assert shop.server.send_chord(workflow).get(timeout=HANG) == 6

    assert shop.orders() == [1, 2, 3]


def test_callback_is_sent_by_the_commit(shop: Shop) -> None:
    book = shop.task(lambda run: (write(run), run)[1])
    chain = book.signature() | shop.note.partial()
    with shop.server.new_worker(concurrency=1):
        assert shop.server.send_chain(chain).get(timeout=HANG) == 1


def test_delivery_that_is_not_ours_rolls_back(shop: Shop, url: str) -> None:
    """Another worker has taken over: what this run wrote and sent is undone."""
    fenced: list[TaskFenced] = []
    shop.server.events.subscribe(TaskFenced, fenced.append)

    def book(run: int) -> int:
        write(run)
        shop.note.send(run)
        if run == 1:
            with psycopg.connect(url) as other:
                other.execute("UPDATE machinery.holds SET ended = true")
        return run

    assert shop.run(book) == 2
    assert (shop.orders(), shop.runs) == ([2], 2)
    wait_until(lambda: len(fenced) == 1, HANG)


def test_serialisation_failure_uses_no_try(shop: Shop, url: str) -> None:
    with psycopg.connect(url) as other:
        other.execute("INSERT INTO orders VALUES (0)")

    def book(run: int) -> int:
        mine = current_task().connection
        mine.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        mine.execute("SELECT * FROM orders")
        if run == 1:
            with psycopg.connect(url) as other:
                other.execute("UPDATE orders SET id = id + 10")
        mine.execute("UPDATE orders SET id = id + 1")
        return current_task().attempt

    assert shop.run(book) == 1
    assert shop.orders() == [11]
    assert shop.runs >= 2  # RECEIVED, written meanwhile, may be in the way once more


def test_deadlock_uses_no_try(shop: Shop, url: str) -> None:
    with psycopg.connect(url) as other:
        other.execute("INSERT INTO orders VALUES (1), (2)")
        other.execute("SET deadlock_timeout = '10min'")  # ours is the one that finds it
        other.commit()

        touch = "UPDATE orders SET id = id WHERE id = %s"

        def finish() -> None:
            other.execute(touch, (1,))
            other.commit()

        def book(run: int) -> int:
            mine = current_task().connection
            if run == 1:
                other.execute(touch, (2,))
                mine.execute(touch, (1,))
                thread = threading.Thread(target=finish)
                thread.start()
                waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND pid = %s"
                with psycopg.connect(url, autocommit=True) as looker:
                    pid = other.info.backend_pid
                    wait_until(lambda: bool(looker.execute(waits, (pid,)).fetchall()), HANG)
                threads.append(thread)
            mine.execute(touch, (2,))
            return current_task().attempt

        threads: list[threading.Thread] = []
        assert (shop.run(book), shop.runs) == (1, 2)
        threads[0].join(HANG)


def test_race_that_does_not_end_uses_a_try(shop: Shop) -> None:
    attempts: list[int] = []

    def book(run: int) -> None:
        attempts.append(current_task().attempt)
        raise psycopg.errors.SerializationFailure("again")

    with pytest.raises(TaskFailed, match="again"):
        shop.run(book)
    assert attempts == [1] * (REPEATS + 1)


def test_waiting_for_others_is_no_race(shop: Shop, url: str) -> None:
    """A message that has waited for a limit or a lock was delivered before."""

    def raced_once(run: int) -> int:
        if run == 1:
            raise psycopg.errors.SerializationFailure("again")
        return current_task().attempt

    book = shop.task(raced_once)
    result = book.send()
    with psycopg.connect(url) as other:
        other.execute("UPDATE machinery.items SET count = 50")
    with shop.server.new_worker(concurrency=1):
        assert (result.get(timeout=HANG), shop.runs) == (1, 2)


def close(connection: Any) -> None:
    connection.close()


def leave_open(connection: Any) -> None:
    kept.append(connection.transaction())
    kept[-1].__enter__()


def meet_another(connection: Any) -> None:
    raise psycopg.errors.AdminShutdown("of another database")


kept: list[Any] = []


@pytest.mark.parametrize("mistake", [close, leave_open, meet_another])
def test_mistake_of_the_function_is_no_race(shop: Shop, mistake: Callable[[Any], object]) -> None:
    with pytest.raises(TaskFailed):
        shop.run(lambda run: mistake(current_task().connection))
    assert (shop.runs, shop.orders()) == (1, [])


def test_connection_lost_in_the_function_uses_no_try(
    url: str, open_proxy: Callable[[int], Proxy]
) -> None:
    with psycopg.connect(url) as connection:
        proxy = open_proxy(connection.info.port)
    shop = Shop(proxy.through(url), url)

    def book(run: int) -> int:
        write(run)
        if run == 1:
            proxy.reset()
            write(100)
        return current_task().attempt

    with contextlib.closing(shop.server):
        assert (shop.run(book), shop.runs, shop.orders()) == (1, 2, [2])


def test_constraint_that_fails_at_the_commit_fails_the_task(shop: Shop) -> None:
    def book(run: int) -> None:
        write(7)
        write(7)
        shop.note.send(run)

    with pytest.raises(TaskFailed, match="duplicate key"):
        shop.run(book)
    assert (shop.orders(), shop.server.broker.waiting(QUEUE)) == ([], 0)


def test_error_that_the_function_hides_fails_the_task(shop: Shop) -> None:
    def book(run: int) -> None:
        write(run)
        with contextlib.suppress(psycopg.Error):
            current_task().connection.execute("SELECT 1 / 0")

    with pytest.raises(TaskFailed, match="current transaction is aborted"):
        shop.run(book)
    assert shop.orders() == []


def test_function_cannot_commit_by_itself(shop: Shop) -> None:
    def book(run: int) -> None:
        write(run)
        current_task().connection.commit()

    with pytest.raises(TaskFailed, match="commit"):
        shop.run(book)
    assert shop.orders() == []


def test_settings_of_a_run_are_not_those_of_the_next(shop: Shop) -> None:
    def book(run: int) -> str:
        mine = current_task().connection
        [(found,)] = mine.execute("SHOW statement_timeout").fetchall()
        mine.execute("SET statement_timeout = '17min'")
        mine.row_factory = dict_row
        return str(found)

    task = shop.task(book)
    with shop.server.new_worker(concurrency=1):
        # As often as psycopg takes to prepare a statement.
        assert [task.send().get(timeout=HANG) for _ in range(8)] == ["0"] * 8


@pytest.mark.parametrize("how", ["executed", "reset", "ended"])
def test_lost_reply_of_the_commit_is_asked_for(
    url: str, open_proxy: Callable[[int], Proxy], how: str
) -> None:
    with psycopg.connect(url) as connection:
        proxy = open_proxy(connection.info.port)
    shop = Shop(proxy.through(url), url)
    ends: list[TaskEnded | TaskFenced] = []
    for kind in (TaskEnded, TaskFenced):
        shop.server.events.subscribe(kind, ends.append)

    def book(run: int) -> int:
        write(run)
        if run == 1 and how == "executed":
            proxy.drop_next_reply(matching=b"COMMIT")
        elif run == 1 and how == "reset":
            proxy.reset()
        elif run == 1:
            pid = current_task().connection.info.backend_pid
            with psycopg.connect(url) as other:
                other.execute("SELECT pg_terminate_backend(%s)", (pid,))
        return current_task().attempt

    with contextlib.closing(shop.server):
        assert shop.run(book) == 1
        assert (shop.orders(), shop.runs) == (([1], 1) if how == "executed" else ([2], 2))
        wait_until(lambda: [type(one) for one in ends] == [TaskSucceeded], HANG)


def test_commit_that_does_not_end_is_asked_for(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """As of a server that stands still, or waits for a replica that is gone."""
    shop = Shop(url, url, publish_timeout=0.5)
    with psycopg.connect(url) as other:
        other.execute(
            "CREATE OR REPLACE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN PERFORM pg_advisory_xact_lock(1717); RETURN NULL; END';"
            "CREATE CONSTRAINT TRIGGER hang AFTER INSERT ON orders DEFERRABLE INITIALLY DEFERRED "
            "FOR EACH ROW EXECUTE FUNCTION hang()"
        )
        other.commit()
        other.execute("SELECT pg_advisory_xact_lock(1717)")
        book = shop.task(write)
        with contextlib.closing(shop.server), shop.server.new_worker(concurrency=1):
            booked = book.send()
            wait_until(lambda: "has locked what it changes" in caplog.text, HANG)
            assert not booked.get_state().is_finished
            other.rollback()  # now it is carried out

            assert booked.get(timeout=HANG) is None
    assert (shop.orders(), shop.runs) == ([1], 1)


def test_server_that_stands_still_before_the_commit_uses_no_try(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shop = Shop(url, url, publish_timeout=0.5)

    def book(run: int) -> int:
        write(run)
        if run == 1:
            stopped.append(current_task().connection.info.backend_pid)
            os.kill(stopped[0], signal.SIGSTOP)
        return current_task().attempt

    stopped: list[int] = []
    with contextlib.closing(shop.server), shop.server.new_worker(concurrency=1):
        try:
            booked = shop.task(book).send()
            wait_until(lambda: "is run again" in caplog.text, HANG)
        finally:
            os.kill(stopped[0], signal.SIGCONT)
        assert booked.get(timeout=HANG) == 1
    assert (shop.orders(), shop.runs) == ([2], 2)


def test_lock_that_the_end_waits_for_uses_no_try(
    shop: Shop, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a program of somebody else that works on the tables."""
    caplog.set_level(logging.INFO)
    wait = "ALTER FUNCTION machinery.commit_within SET lock_timeout = '%s'"

    def book(run: int) -> int:
        write(run)
        if run == 1:
            other.execute("SELECT 1 FROM machinery.rows WHERE kind = 'task' FOR UPDATE")
        return current_task().attempt

    shop.note.send(1)  # so that the tables are there
    with psycopg.connect(url) as admin, psycopg.connect(url) as other:
        admin.autocommit = True
        admin.execute((wait % "50ms").encode())
        try:
            with shop.server.new_worker(concurrency=1):
                booked = shop.task(book).send()
                wait_until(lambda: "is run again" in caplog.text, HANG)
                other.rollback()
                assert booked.get(timeout=HANG) == 1
        finally:
            admin.execute((wait % "5s").encode())
    assert shop.orders() == [shop.runs]


@pytest.mark.parametrize("notices", [True, False])
def test_transaction_that_was_idle_for_too_long_fails_the_task(url: str, notices: bool) -> None:
    """It would be so again."""
    shop = Shop(f"{url}?options=-c%20idle_in_transaction_session_timeout%3D100", url)

    def book(run: int) -> None:
        write(run)
        link = current_task().connection
        wait_until(lambda: select.select([link], [], [], 0.0)[0], HANG, "the end of it")
        if notices:
            link.execute("SELECT 1")

    with contextlib.closing(shop.server), pytest.raises(TaskFailed, match="idle-in-transaction"):
        shop.run(book)
    assert (shop.orders(), shop.runs) == ([], 1)


def test_connection_that_the_server_ended_is_replaced(shop: Shop, url: str) -> None:
    """It was used a moment ago, so nobody looks at it before the BEGIN."""
    book = shop.task(lambda run: current_task().attempt)
    end = (
        "SELECT count(pg_terminate_backend(pid, 30000)) FROM pg_stat_activity "
        "WHERE query = 'DISCARD ALL' AND state = 'idle'"
    )
    ended = 0
    with (
        shop.server.new_worker(concurrency=1),
        psycopg.connect(url, autocommit=True) as other,
    ):
        for _ in range(5):
            assert book.send().get(timeout=HANG) == 1
            [(number,)] = other.execute(end).fetchall()
            ended += number
        assert book.send().get(timeout=HANG) == 1
    assert ended


def test_time_limit_rolls_back(shop: Shop) -> None:
    over = threading.Event()

    def book(run: int) -> None:
        write(run)
        over.wait(HANG)

    with pytest.raises(TaskFailed, match="time limit"):
        shop.run(book, time_limit=0.5)
    over.set()
    assert shop.orders() == []


def test_time_limit_ends_the_statement(shop: Shop, url: str) -> None:
    """It waits for a lock that does not come; its own locks are free soon."""
    pids: list[int] = []

    def book(run: int) -> None:
        mine = current_task().connection
        pids.append(mine.info.backend_pid)
        write(run)
        mine.execute("SELECT pg_advisory_xact_lock(1717)")

    with psycopg.connect(url) as other:
        other.execute("SELECT pg_advisory_xact_lock(1717)")
        with pytest.raises(TaskFailed, match="time limit"):
            shop.run(book, time_limit=0.5)
        there = "SELECT 1 FROM pg_stat_activity WHERE pid = ANY(%s)"
        with psycopg.connect(url, autocommit=True) as looker:
            wait_until(lambda: not looker.execute(there, (pids,)).fetchall(), HANG)
    assert shop.orders() == []


def test_commit_that_does_not_come_is_rolled_back_by_the_server(url: str) -> None:
    """A host that is gone between its last step and the commit keeps nobody waiting."""
    with contextlib.closing(Shop(url, url).server) as server:
        store = server.app.store
        server.send_task(server.register_task("plain", lambda: 1).signature())
        session = store.open_session([QUEUE], worker="w")
        [delivery] = session.receive(1, HANG)
        transaction = store.open_transaction()
        end = Settlement(delivery=delivery, uuid="", name="plain", fate=Fate.DONE)
        assert transaction.settle(session, end) is not None
        waits = "SELECT 1 FROM machinery.items WHERE id = %s FOR UPDATE"
        with psycopg.connect(url) as other:
            other.execute("SET lock_timeout = '30s'")
            [(id,)] = other.execute("SELECT id FROM machinery.items").fetchall()
            assert other.execute(waits, (id,)).fetchall() == [(1,)]
        with pytest.raises(psycopg.Error):
            transaction.own.commit()
        transaction.own.close()
        session.close()


def test_worker_with_processes_runs_it_in_a_thread(
    shop: Shop, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOKING_URL", url)
    booking = importlib.import_module("tests.stores.postgresql.booking")
    with (
        contextlib.closing(booking.server),
        booking.server.new_worker("w", 1, pool="process"),
    ):
        assert booking.anywhere.send().get(timeout=HANG) != os.getpid()
        assert booking.book.send(7).get(timeout=HANG) == os.getpid()
    assert shop.orders() == [7]


def test_worker_of_such_tasks_alone_starts_no_process(url: str) -> None:
    """It could not: nothing names the module that a process would import."""
    with contextlib.closing(Server(url)) as server:
        book = server.task("book", transaction=True)(os.getpid)
        with server.new_worker(concurrency=1, pool="process"):
            assert book.send().get(timeout=HANG) == os.getpid()


@pytest.mark.parametrize(
    "options", [{"pool": "process"}, {"ack": "early"}, {"batch": 3}, {"transaction": 1}]
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="transaction="):
        Server("memory://").task("book", **{"transaction": True, **options})(lambda rows: None)


def test_coroutine_function_is_refused() -> None:
    async def book() -> None: ...

    with pytest.raises(ValueError, match="transaction=True and a coroutine function"):
        Server("memory://").task("book", transaction=True)(book)


def test_other_stores_fail_the_task() -> None:
    with contextlib.closing(Server("memory://")) as server:
        book = server.task("book", transaction=True)(lambda: None)
        with (
            server.new_worker(concurrency=1),
            pytest.raises(TaskFailed, match="MemoryRows: a step cannot be part"),
        ):
            book.send().get(timeout=HANG)


def test_handler_of_its_end_has_no_connection(shop: Shop) -> None:
    """The next task may be in a transaction on it."""
    found: list[object] = []

    @shop.server.on_success
    def look(ctx: Context, result: object) -> None:
        try:
            found.append(ctx.connection)
        except Unsupported as error:
            found.append(type(error))

    shop.run(write)
    assert found == [Unsupported]


def test_task_without_transaction_has_no_connection(shop: Shop) -> None:
    plain = shop.server.register_task("plain", lambda: current_task().connection)
    with shop.server.new_worker(concurrency=1), pytest.raises(TaskFailed, match="transaction=True"):
        plain.send().get(timeout=HANG)


#: A worker that kills itself before, or behind, the nth time that a task's connection waits.
KILLED = """
import os, signal, sys
from machinery_py import Server, current_task
from machinery_py.connections.postgresql.client import Link

url, number, where = sys.argv[1], int(sys.argv[2]), sys.argv[3]
waits, watched = 0, None
wait = Link.wait

def counted(self, *args, **kwargs):
    global waits
    if self is not watched:
        return wait(self, *args, **kwargs)
    waits += 1
    if waits == number and where == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    found = wait(self, *args, **kwargs)
    if waits == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

Link.wait = counted
server = Server(url)
server.register_task("note", lambda order: order)

@server.task("book", transaction=True)
def book():
    global watched
    watched = current_task().connection
    watched.execute("INSERT INTO orders VALUES (0)")
    server.get_registered_task("note").send(7)
    return "booked"

server.new_worker(concurrency=1, burst=True).launch()
print(waits)
"""


@pytest.mark.slow
def test_worker_killed_at_any_step_books_once(shop: Shop, url: str) -> None:
    """Whoever goes on finds all of it done, or nothing, and does the rest."""

    def work(number: int, where: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", KILLED, url, str(number), where],
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )

    def again(run: int) -> str:
        write(0)
        shop.note.send(7)
        return "booked"

    book = shop.task(again)
    book.send()
    done = work(0, "")
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) > 4, shop.orders(), shop.runs) == (True, [0], 0)

    for where in ("before", "behind"):
        for number in itertools.count(1):
            with psycopg.connect(url) as connection:
                connection.execute("DELETE FROM orders")
            result, runs = book.send(), shop.runs
            done = work(number, where)
            assert done.returncode in (0, -signal.SIGKILL), done.stderr
            is_there = shop.orders() == [0]

            shop.server.new_worker(concurrency=1, burst=True).launch()
            assert (result.get(timeout=HANG), shop.orders()) == ("booked", [0])
            assert shop.runs - runs == (not is_there), (number, where)
            assert shop.server.broker.waiting(QUEUE) == 0
            if done.returncode == 0:  # it has waited less often, which varies from run to run
                break
        assert number > 4, where

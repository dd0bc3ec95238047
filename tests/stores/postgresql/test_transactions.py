"""Sending in the user's transaction, against a real PostgreSQL: each rule of the how-to."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.rows import dict_row, tuple_row
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from machinery_py import AsyncResult, Config, Server, State, chord, group
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.errors import (
    BrokerUnavailable,
    DuplicateTask,
    QueueFull,
    StateNotFound,
    Unsupported,
)
from machinery_py.events import TaskSucceeded
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.servers import PostgreSQLServer

Connection = psycopg.Connection[tuple[Any, ...]]
QUEUE = "machinery_tasks"


class Shop:
    """A program whose orders and tasks are in one database."""

    def __init__(self, url: str, **config: Any) -> None:
        self.url = url
        self.server = server = Server(Config(broker=url, **config))

        @server.task
        def charge(order: int) -> int:
            return order

        @server.task
        def total(*cents: int) -> int:
            return sum(cents)

        @server.task(unique=True)
        def remind(order: int) -> int:
            return order

        self.charge, self.total, self.remind = charge, total, remind

    def waiting(self, queue: str = QUEUE) -> int:
        return self.server.broker.waiting(queue)

    def orders(self) -> list[int]:
        with psycopg.connect(self.url) as connection:
            return [id for (id,) in connection.execute("SELECT id FROM orders ORDER BY id")]


def order(connection: Connection, id: int) -> None:
    connection.execute("INSERT INTO orders VALUES (%s)", (id,))


@pytest.fixture
def url(postgres_url: str) -> str:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("DROP TABLE IF EXISTS orders")
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    return postgres_url


@pytest.fixture
def shop(url: str) -> Iterator[Shop]:
    shop = Shop(url)
    with contextlib.closing(shop.server):
        yield shop


@pytest.fixture
def connection(url: str) -> Iterator[Connection]:
    with psycopg.connect(url) as connection:
        yield connection
        connection.rollback()


class Undone(Exception):
    pass


def test_task_is_committed_with_the_order(shop: Shop, connection: Connection) -> None:
    with shop.server.transaction(connection):
        order(connection, 7)
        result = shop.charge.send(7)
        assert (shop.waiting(), shop.orders()) == (0, [])
    with pytest.raises(StateNotFound):
        result.get_state()
    connection.commit()

    assert (shop.waiting(), shop.orders()) == (1, [7])
    assert result.get_state().state is State.PENDING
    with shop.server.new_worker(concurrency=1):
        assert result.get(timeout=HANG) == 7


def test_task_is_rolled_back_with_the_order(shop: Shop, url: str) -> None:
    sent: list[AsyncResult[int]] = []
    with (
        pytest.raises(Undone),
        psycopg.connect(url) as connection,
        shop.server.transaction(connection),
    ):
        order(connection, 7)
        sent.append(shop.charge.send(7))
        raise Undone

    assert (shop.waiting(), shop.orders()) == (0, [])
    with pytest.raises(StateNotFound):
        sent[0].get_state()


def test_savepoint_takes_its_tasks_along(shop: Shop, connection: Connection) -> None:
    with shop.server.transaction(connection), connection.transaction():
        shop.charge.send(1)
        with pytest.raises(Undone), connection.transaction():
            shop.charge.send(2)
            raise Undone

    assert shop.waiting() == 1


def test_block_in_a_block_is_one_with_it(shop: Shop, connection: Connection) -> None:
    with shop.server.transaction(connection):
        with shop.server.transaction(connection):
            shop.charge.send(1)
        result = shop.charge.send(2)
        with pytest.raises(Unsupported, match="runs after the commit"):
            result.get(timeout=HANG)
        assert shop.waiting() == 0
    connection.commit()

    assert shop.waiting() == 2


def test_blocks_of_two_servers_are_apart(shop: Shop, connection: Connection) -> None:
    with contextlib.closing(Server("memory://")) as other:
        note = other.register_task("note", lambda: None)
        with shop.server.transaction(connection), other.transaction(connection):
            shop.charge.send(1)
            with pytest.raises(Unsupported, match="MemoryRows"):
                note.send()
    connection.commit()

    assert shop.waiting() == 1


def test_workflows_are_committed_whole(shop: Shop, connection: Connection) -> None:
    with shop.server.transaction(connection):
        workflow = chord(group(shop.charge.signature(n) for n in (1, 2)), shop.total.partial())
        total = shop.server.send_chord(workflow)
        chain = shop.server.send_chain(shop.charge.signature(5) | shop.total.partial(6))
        assert shop.waiting() == 0
    connection.commit()

    with shop.server.new_worker(concurrency=2):
        assert total.get(timeout=HANG) == 3
        assert chain.get(timeout=HANG) == 11


def test_result_in_the_block_is_refused(shop: Shop, connection: Connection) -> None:
    before = shop.charge.send(1)
    with shop.server.transaction(connection), shop.server.new_worker(concurrency=1):
        result = shop.charge.send(2)
        with pytest.raises(Unsupported, match="runs after the commit"):
            result.get(timeout=HANG)
        assert before.get(timeout=HANG) == 1  # of others it is not


def test_result_in_the_block_is_refused_to_coroutines(shop: Shop, url: str) -> None:
    async def wait() -> None:
        with psycopg.connect(url) as connection, shop.server.transaction(connection):
            result = shop.charge.send(2)
            with pytest.raises(Unsupported, match="runs after the commit"):
                await result.get_async(timeout=HANG)

    asyncio.run(wait())


@pytest.mark.parametrize("sent_before", [False, True])
def test_transaction_that_has_failed_takes_nothing(
    shop: Shop, connection: Connection, sent_before: bool
) -> None:
    with shop.server.transaction(connection):
        if sent_before:
            shop.charge.send(1)
        with pytest.raises(psycopg.errors.DivisionByZero):
            connection.execute("SELECT 1 / 0")
        with pytest.raises(BrokerUnavailable, match="transaction is aborted"):
            shop.charge.send(2)


def test_place_of_a_connection_is_asked_again(url: str, connection: Connection) -> None:
    """Behind a pooler the server under it may be restarted."""
    with contextlib.closing(PostgreSQLDriver(url)) as driver:
        driver.places.check(connection)
        driver.places._known[connection] = ("a server that was", "postgres", "started before")
        driver.places.check(connection)


def test_settings_are_forgotten_behind_a_pooler(url: str) -> None:
    with contextlib.closing(PostgreSQLDriver(url)) as driver:
        link = driver.begin()
        driver.is_pooled, link.row_factory, link.prepare_threshold = True, dict_row, 1  # type: ignore[assignment]
        driver.end(link)
        again = driver.begin()
        assert (again is link, again.row_factory) == (True, tuple_row)
        assert again.prepare_threshold is None
        driver.end(again)


def test_threads_do_not_inherit_the_block(shop: Shop, connection: Connection) -> None:
    refused: list[Exception] = []

    def send_in_its_context() -> None:
        try:
            shop.charge.send(2)
        except Unsupported as error:
            refused.append(error)

    with shop.server.transaction(connection):
        context = contextvars.copy_context()
        for work in (lambda: shop.charge.send(1), lambda: context.run(send_in_its_context)):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        assert shop.waiting() == 1
        assert "belongs to the thread" in str(refused[0])
        with pytest.raises(Unsupported, match="belongs to the thread"):
            asyncio.run(shop.charge.send_async(3))
    context.run(send_in_its_context)  # the block is over

    assert (shop.waiting(), len(refused)) == (2, 1)


def test_autocommit_outside_of_a_transaction_is_refused(shop: Shop, url: str) -> None:
    with (
        psycopg.connect(url, autocommit=True) as connection,
        shop.server.transaction(connection),
    ):
        with pytest.raises(Unsupported, match="in autocommit"):
            shop.charge.send(1)
        with connection.transaction():
            shop.charge.send(2)

    assert shop.waiting() == 1


def test_another_database_is_refused(
    shop: Shop, url: str, postgresql_server: PostgreSQLServer
) -> None:
    elsewhere = postgresql_server.new_database(f"d{os.urandom(4).hex()}")
    with psycopg.connect(elsewhere) as connection, shop.server.transaction(connection):
        with pytest.raises(Unsupported, match="is not the one at postgresql://"):
            shop.charge.send(1)
        assert connection.execute("SELECT 1").fetchone() == (1,)  # it goes on

    assert shop.waiting() == 0


def test_another_server_with_the_same_names_is_refused(shop: Shop) -> None:
    with PostgreSQLServer() as other:
        shop.waiting()
        with (
            psycopg.connect(other.url) as connection,
            shop.server.transaction(connection),
            pytest.raises(Unsupported, match="is not the one"),
        ):
            shop.charge.send(1)


def test_restart_of_the_server_does_not_make_it_another(
    shop: Shop, url: str, postgresql_server: PostgreSQLServer
) -> None:
    for _ in range(2):
        with psycopg.connect(url) as connection, shop.server.transaction(connection):
            shop.charge.send(1)
        postgresql_server.restart()
        wait_until(lambda: answers(shop), HANG)

    assert shop.waiting() == 2


def answers(shop: Shop) -> bool:
    with contextlib.suppress(BrokerUnavailable):
        shop.waiting()
        return True
    return False


@pytest.mark.parametrize("broker", ["memory://", "redis://127.0.0.1:1", "amqp://127.0.0.1:1"])
def test_other_stores_are_refused(url: str, connection: Connection, broker: str) -> None:
    config = Config(broker=broker, result_backend=broker if broker == "memory://" else url)
    with contextlib.closing(Server(config)) as server:
        note = server.register_task("note", lambda: None)
        with server.transaction(connection), pytest.raises(Unsupported, match="your transaction"):
            note.send()


def test_what_is_no_connection_is_refused(shop: Shop, url: str) -> None:
    with shop.server.transaction(object()), pytest.raises(Unsupported, match="found object"):
        shop.charge.send(1)

    async def send() -> None:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            with shop.server.transaction(connection):
                shop.charge.send(1)

    with pytest.raises(Unsupported, match="found AsyncConnection"):
        asyncio.run(send())


def test_first_task_of_a_queue_holds_nobody_up(
    shop: Shop, url: str, connection: Connection
) -> None:
    with shop.server.transaction(connection):
        shop.charge.options(queue="new").send(1)
        with contextlib.closing(Server(url)) as server:
            other = server.register_task("charge", lambda order: order)
            other.options(queue="new").send(2)  # while the first one is not committed
        assert shop.waiting("new") == 1
    connection.commit()

    assert shop.waiting("new") == 2


@pytest.mark.parametrize(
    "options", [{"unique": True, "on_duplicate": "replace"}, {"debounce": 60.0}]
)
def test_replacing_a_call_is_refused(
    shop: Shop, connection: Connection, options: dict[str, Any]
) -> None:
    """Whoever runs the other call would wait for the commit; the transaction goes on."""
    latest = shop.server.task("latest", **options)(lambda: 1)
    first = latest.send()
    with shop.server.transaction(connection):
        order(connection, 7)
        with pytest.raises(Unsupported, match="would replace .* in your transaction"):
            latest.send()
    assert _locked(shop, connection) == []
    connection.commit()

    assert (shop.orders(), first.get_state().state) == ([7], State.PENDING)


def test_task_that_is_there_is_refused(shop: Shop, connection: Connection) -> None:
    call = shop.charge.signature(7)
    result = shop.server.send_task(call)
    with (
        shop.server.transaction(connection),
        pytest.raises(Unsupported, match="is there already"),
    ):
        shop.server.send_task(call.replace(uuid=result.uuid))


def _locked(shop: Shop, connection: Connection) -> list[Any]:
    """Return the rows that the connection's transaction keeps from others."""
    with psycopg.connect(shop.url) as other:
        free = other.execute(
            "SELECT kind, id FROM machinery.rows FOR UPDATE SKIP LOCKED"
        ).fetchall()
        found = other.execute("SELECT kind, id FROM machinery.rows").fetchall()
    return [row for row in found if row not in free]


def test_senders_of_all_kinds_lock_nothing_of_others(shop: Shop, connection: Connection) -> None:
    """What workers change is free while the transaction is open."""
    with shop.server.new_worker(concurrency=1):
        over = shop.remind.send(1)
        over.get(timeout=HANG)
    joined, plain = shop.remind.send(2), shop.charge.send(1)
    with shop.server.transaction(connection):
        assert shop.remind.send(2).uuid == joined.uuid
        shop.remind.send(3)
        shop.charge.send(4)
        shop.server.send_group(group(shop.charge.signature(one) for one in (5, 6)))
        shop.server.send_chord(
            group(shop.charge.signature(one) for one in (7, 8)) | shop.total.partial()
        )
        shop.server.send_chain(shop.charge.signature(9) | shop.charge.partial())
    assert _locked(shop, connection) == []
    assert plain.get_state().state is State.PENDING
    connection.commit()


def test_what_is_locked_waits_alone(shop: Shop, url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A worker meets a lock at the end of a task: all others go on."""
    locked = shop.charge.send(0)
    with psycopg.connect(url) as other:
        other.execute(
            "SELECT 1 FROM machinery.rows WHERE kind = 'task' AND id = %s FOR UPDATE",
            (locked.uuid.encode(),),
        )
        with shop.server.new_worker(concurrency=4):
            others = [shop.charge.send(id) for id in range(1, 20)]
            assert [one.get(timeout=HANG) for one in others] == list(range(1, 20))
            assert locked.get_state().state is State.PENDING
            other.rollback()
            assert locked.get(timeout=HANG) == 0
    assert "no new tasks are taken" not in caplog.text


def test_worker_does_not_wait_for_the_key_of_an_open_transaction(
    shop: Shop, connection: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """It was taken when the task was over, and before its worker forgets it."""
    caplog.set_level("DEBUG", "machinery_py.unique")

    def take() -> None:
        with shop.server.transaction(connection):
            shop.remind.send(7)

    def take_elsewhere(_: TaskSucceeded) -> None:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join(HANG)

    shop.server.events.subscribe(TaskSucceeded, take_elsewhere)
    with shop.server.new_worker(concurrency=1):
        assert shop.remind.send(7).get(timeout=HANG) == 7
    assert "could not be removed" not in caplog.text
    connection.commit()

    assert shop.waiting() == 1


def test_full_queue_is_an_error_that_the_transaction_survives(
    url: str, connection: Connection
) -> None:
    shop = Shop(url, queue_limits={QUEUE: 1})
    with contextlib.closing(shop.server):
        shop.charge.send(1)
        with shop.server.transaction(connection):
            order(connection, 7)
            with pytest.raises(QueueFull):
                shop.charge.send(2)
        connection.commit()

        assert (shop.waiting(), shop.orders()) == (1, [7])


class TestUnique:
    def test_key_is_held_from_its_send_on(self, shop: Shop, connection: Connection) -> None:
        with shop.server.transaction(connection):
            first = shop.remind.send(7)
            again = shop.remind.send(7)
            with pytest.raises(DuplicateTask):
                shop.remind.options(on_duplicate="reject").send(7)
        connection.commit()

        assert (again.uuid, again.duplicate, shop.waiting()) == (first.uuid, True, 1)
        assert shop.remind.send(7).uuid == first.uuid

    def test_key_is_free_after_a_rollback(self, shop: Shop, connection: Connection) -> None:
        with shop.server.transaction(connection):
            first = shop.remind.send(7)
        connection.rollback()

        assert shop.remind.send(7).uuid != first.uuid

    def test_key_of_somebody_else_is_joined(self, shop: Shop, connection: Connection) -> None:
        first = shop.remind.send(7)
        with shop.server.transaction(connection):
            assert shop.remind.send(7).uuid == first.uuid


class TestSQLAlchemy:
    @pytest.fixture
    def engine(self, url: str) -> Iterator[sa.Engine]:
        engine = sa.create_engine(url.replace("://", "+psycopg://"))
        yield engine
        engine.dispose()

    @pytest.mark.parametrize("kind", ["session", "connection"])
    def test_task_follows_the_transaction(self, shop: Shop, engine: sa.Engine, kind: str) -> None:
        with Session(engine) if kind == "session" else engine.connect() as work:
            with shop.server.transaction(work):
                work.execute(sa.text("INSERT INTO orders VALUES (1)"))
                shop.charge.send(1)
                with pytest.raises(Undone), work.begin_nested():
                    shop.charge.send(2)
                    raise Undone
            assert shop.waiting() == 0
            work.commit()
            with shop.server.transaction(work):
                shop.charge.send(3)
            work.rollback()

        assert (shop.waiting(), shop.orders()) == (1, [1])

    def test_autocommit_is_refused(self, shop: Shop, engine: sa.Engine) -> None:
        with (
            engine.connect().execution_options(isolation_level="AUTOCOMMIT") as work,
            shop.server.transaction(work),
            pytest.raises(Unsupported, match="in autocommit"),
        ):
            shop.charge.send(1)

    def test_async_session_sends_in_run_sync(self, shop: Shop, url: str) -> None:
        def place(session: Session, id: int) -> None:
            with shop.server.transaction(session):
                session.execute(sa.text("INSERT INTO orders VALUES (:id)"), {"id": id})
                shop.charge.send(id)

        async def work() -> None:
            engine = create_async_engine(url.replace("://", "+psycopg_async://"))
            async with AsyncSession(engine) as one, AsyncSession(engine) as other:
                await asyncio.gather(one.run_sync(place, 1), other.run_sync(place, 2))
                await one.commit()
                await other.rollback()
                with (
                    shop.server.transaction(one),
                    pytest.raises(Unsupported, match="run_sync gives"),
                ):
                    shop.charge.send(3)
                with (
                    shop.server.transaction(one.sync_session),
                    pytest.raises(Unsupported, match="not send_async"),
                ):
                    await shop.charge.send_async(3)
            await engine.dispose()

        asyncio.run(work())
        assert (shop.waiting(), shop.orders()) == (1, [1])

    def test_connection_of_another_library_is_refused(self, shop: Shop) -> None:
        engine = sa.create_engine("sqlite://")
        with (
            Session(engine) as session,
            shop.server.transaction(session),
            pytest.raises(Unsupported, match="psycopg 3, also by SQLAlchemy"),
        ):
            shop.charge.send(1)


DJANGO = """
import sys
import django
from django.conf import settings

url, name, host, port, user = sys.argv[1:]
settings.configure(
    DATABASES={"default": {"ENGINE": "django.db.backends.postgresql", "NAME": name, "HOST": host,
                           "PORT": port, "USER": user}},
    USE_TZ=True,
)
django.setup()

from django.db import connection, transaction
from machinery_py import Server, Unsupported

server = Server(url)
charge = server.register_task("charge", lambda order: order)

def order(id):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES (%s)", [id])
    charge.send(id)

with server.transaction():
    with transaction.atomic():
        order(1)
        try:
            with transaction.atomic():
                order(2)
                raise ValueError
        except ValueError:
            pass
        print(server.broker.waiting("machinery_tasks"))
    with transaction.atomic():
        order(3)
        transaction.set_rollback(True)
    try:
        charge.send(4)
    except Unsupported as error:
        print("transaction.atomic()" in str(error))
with server.transaction(connection), transaction.atomic():
    order(5)
print(server.broker.waiting("machinery_tasks"))
server.close()
"""


def test_django_sends_in_its_transactions(shop: Shop, url: str) -> None:
    with psycopg.connect(url) as connection:
        info = connection.info
        words = [url, info.dbname, info.host, str(info.port), info.user]
    done = subprocess.run(
        [sys.executable, "-c", DJANGO, *words],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )

    assert done.stdout == "0\nTrue\n2\n", done.stderr
    assert shop.orders() == [1, 5]


def test_without_a_connection_there_must_be_django() -> None:
    program = "from machinery_py import Server\nwith Server('memory://').transaction(): pass"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG, check=False
    )

    assert "ConfigError: server.transaction(): Django is not loaded" in done.stderr


#: Kills itself before, or behind, the nth time that the connection waits for the server.
KILLED = """
import os, signal, sys
import psycopg
from machinery_py import Server

url, id, number, where = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
server = Server(url)
charge = server.register_task("charge", lambda id: id)
remind = server.task("remind", unique=True)(lambda id: id)
waits = 0

class Killer(psycopg.Connection):
    def wait(self, *args, **kwargs):
        global waits
        waits += 1
        if waits == number and where == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return super().wait(*args, **kwargs)
        finally:
            if waits == number:
                os.kill(os.getpid(), signal.SIGKILL)

with Killer.connect(url) as connection, server.transaction(connection):
    waits = 0
    connection.execute("INSERT INTO orders VALUES (%s)", (id,))
    charge.send(id)
    remind.send(id)
print(waits)
"""


@pytest.mark.slow
def test_sender_killed_at_any_step_leaves_all_or_nothing(shop: Shop, url: str) -> None:
    def send(id: int, number: int, where: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", KILLED, url, str(id), str(number), where],
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )

    done = send(0, 0, "")
    assert done.returncode == 0, done.stderr
    steps = int(done.stdout)
    assert (steps > 4, shop.orders(), shop.waiting()) == (True, [0], 2)

    points = [*((number, "before") for number in range(1, steps + 1)), (steps, "behind")]
    for id, (number, where) in enumerate(points, 1):
        done = send(id, number, where)
        assert done.returncode == -signal.SIGKILL, done.stderr
    # The last step is the commit.
    wait_until(lambda: shop.orders() == [0, len(points)], HANG)
    assert shop.waiting() == 4

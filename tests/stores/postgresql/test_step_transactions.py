"""Steps with `transaction=True`, against a real PostgreSQL: one commit with their checkpoint."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import psycopg
import pytest

from machinery_py import Config, Server, TaskFailed, current_task
from machinery_py.backends.base import SETTLED, Keeping
from machinery_py.backends.rows import RowsBackend
from machinery_py.errors import StateNotFound, StepFailed, Unsupported
from machinery_py.rows.messages import MessageStep
from machinery_py.tasks.checkpoints import Checkpoint, digest_of, encode
from machinery_py.tasks.signature import Arg
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.states import encode_results
from machinery_py.worker.running.transactions import REPEATS
from tests.support.proxy import Proxy

QUEUE = "machinery_tasks"


def write(id: int) -> None:
    current_task().connection.execute("INSERT INTO orders VALUES (%s)", (id,))


class Shop:
    """A server, the rows that its steps wrote, and how often they were called."""

    def __init__(self, url: str, own: str, *, publish_timeout: float = 10.0) -> None:
        self.server = Server(Config(broker=url, publish_timeout=publish_timeout))
        self.own, self.calls = own, 0

        @self.server.task
        def note(order: int) -> int:
            return order

        self.note = note

    def flow(
        self, function: Callable[[int], Any], *, fails: int = 0, **options: Any
    ) -> Callable[[], Any]:
        """Register a task with one step, whose function gets the number of its call.

        Args:
            fails: so many runs of the task fail behind the step.
        """

        def book() -> Any:
            self.calls += 1
            return function(self.calls)

        def run() -> Any:
            task = current_task()
            found = task.step("book", transaction=True)(book)
            if task.attempt <= fails:
                raise ValueError("behind the step")
            return found

        return self.server.task("flow", **options)(run)

    def run(self, function: Callable[[int], Any], **options: Any) -> Any:
        """Run such a task to its end, and return its result."""
        flow: Any = self.flow(function, **options)
        with self.server.new_worker(concurrency=1):
            return flow.send().get(timeout=HANG)

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


def test_writes_sends_and_checkpoint_are_one(shop: Shop) -> None:
    def book(call: int) -> str:
        write(call)
        sent = shop.note.send(7)
        assert (shop.orders(), shop.server.broker.waiting(QUEUE)) == ([], 0)
        with pytest.raises(Unsupported, match="runs after the commit"):
            sent.get(timeout=HANG)
        return sent.uuid

    note = shop.server.result(shop.run(book, fails=1, retries=1, backoff=[0.01]))

    assert (shop.orders(), shop.calls) == ([1], 1)
    with shop.server.new_worker(concurrency=1):
        assert note.get(timeout=HANG) == 7


def test_step_that_raises_is_rolled_back(shop: Shop) -> None:
    sent: list[str] = []

    def book(call: int) -> int:
        write(call)
        sent.append(shop.note.send(call).uuid)
        if call == 1:
            raise ValueError("not yet")
        return call

    assert shop.run(book, retries=1, backoff=[0.01]) == 2
    assert (shop.orders(), shop.calls) == ([2], 2)
    with pytest.raises(StateNotFound):
        shop.server.result(sent[0]).get_state()


def test_value_that_cannot_be_kept_rolls_back(shop: Shop) -> None:
    with pytest.raises(TaskFailed, match="what it returned cannot be kept"):
        shop.run(lambda call: (write(call), object())[1])

    assert shop.orders() == []


def test_delivery_that_is_not_ours_rolls_back(shop: Shop, url: str) -> None:
    def book(call: int) -> int:
        write(call)
        shop.note.send(call)
        if call == 1:
            with psycopg.connect(url) as other:
                other.execute("UPDATE machinery.holds SET ended = true")
        return call

    assert shop.run(book) == 2
    assert (shop.orders(), shop.calls) == ([2], 2)


def test_checkpoint_that_is_there_rolls_back(shop: Shop) -> None:
    """Somebody has kept the step meanwhile: that value counts, and what we wrote is undone."""

    def book(call: int) -> int:
        write(call)
        backend, step = shop.server.backend, MessageStep()
        assert isinstance(backend, RowsBackend)
        five = Checkpoint(results=encode_results((Arg(type="int64", value=5),)))
        row = {"0:book": encode(msgspec.structs.replace(five, digest=digest_of((), {})))}
        backend.plan_checkpoints(Keeping(uuid=current_task().uuid, rows=row), step)
        backend.rows.commit([step])
        return call

    assert shop.run(book) == 5
    assert (shop.orders(), shop.calls) == ([], 1)


def test_serialisation_failure_makes_the_step_again(shop: Shop, url: str) -> None:
    with psycopg.connect(url) as other:
        other.execute("INSERT INTO orders VALUES (0)")

    def book(call: int) -> int:
        mine = current_task().connection
        mine.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        mine.execute("SELECT * FROM orders")
        if call == 1:
            with psycopg.connect(url) as other:
                other.execute("UPDATE orders SET id = id + 10")
        mine.execute("UPDATE orders SET id = id + 1")
        return current_task().attempt

    assert shop.run(book) == 1
    assert (shop.orders(), shop.calls) == ([11], 2)


def test_race_that_does_not_end_fails_the_step(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("machinery_py.worker.running.step_transactions.PAUSE", (0.0, 0.0))

    def book(call: int) -> None:
        raise psycopg.errors.SerializationFailure("again")

    with pytest.raises(TaskFailed, match="step 'book' failed: .*again"):
        shop.run(book)

    assert shop.calls == REPEATS + 1


@pytest.mark.parametrize("how", ["executed", "reset"])
def test_lost_reply_of_the_commit_is_asked_for(
    url: str, open_proxy: Callable[[int], Proxy], how: str
) -> None:
    with psycopg.connect(url) as connection:
        proxy = open_proxy(connection.info.port)
    shop = Shop(proxy.through(url), url)

    def book(call: int) -> int:
        write(call)
        if call == 1 and how == "executed":
            proxy.drop_next_reply(matching=b"COMMIT")
        elif call == 1:
            proxy.reset()
        return call

    with contextlib.closing(shop.server):
        made = 1 if how == "executed" else 2
        assert shop.run(book, fails=1, retries=1, backoff=[0.01]) == made
        assert (shop.orders(), shop.calls) == ([made], made)


def test_refused_commit_fails_the_step(shop: Shop) -> None:
    caught: list[StepFailed] = []

    def twice() -> None:
        write(7)
        write(7)
        shop.note.send(1)

    @shop.server.task
    def flow() -> str:
        try:
            current_task().step("book", transaction=True)(twice)
        except StepFailed as error:
            caught.append(error)
        return current_task().step("else", str, "else")

    with shop.server.new_worker(concurrency=1):
        assert flow.send().get(timeout=HANG) == "else"

    assert "duplicate key" in str(caught[0])
    assert (shop.orders(), shop.server.broker.waiting(QUEUE)) == ([], 0)


def test_caught_failure_is_kept_with_the_commit(shop: Shop) -> None:
    def fail() -> None:
        raise ValueError("no money")

    @shop.server.task(retries=1, backoff=[0.01])
    def flow() -> list[str]:
        task = current_task()
        try:
            task.step("fails", transaction=True)(fail)
        except StepFailed as error:
            failed = str(error)
        task.step("book", transaction=True)(write, 1)
        if task.attempt == 1:
            raise ValueError("behind the steps")
        return [failed, *shop.server.backend.checkpoints(task.uuid)]

    with shop.server.new_worker(concurrency=1):
        found = flow.send().get(timeout=HANG)

    assert "no money" in found[0]
    assert sorted(found[1:]) == ["0:book", "0:fails"]
    assert shop.orders() == [1]


def test_connection_is_that_of_the_step_alone(shop: Shop) -> None:
    @shop.server.task
    def flow() -> None:
        task = current_task()
        with pytest.raises(Unsupported, match="runs in no transaction"):
            task.connection  # noqa: B018 - it raises
        task.step("book", transaction=True)(write, 1)
        with pytest.raises(StepFailed, match="runs in no transaction"):
            task.step("plain", write, 2)

    with shop.server.new_worker(concurrency=1):
        flow.send().get(timeout=HANG)

    assert shop.orders() == [1]


def test_time_limit_ends_the_statement_of_a_step(shop: Shop, url: str) -> None:
    pids: list[int] = []

    def book(call: int) -> None:
        mine = current_task().connection
        pids.append(mine.info.backend_pid)
        write(call)
        mine.execute("SELECT pg_advisory_xact_lock(1717)")

    with psycopg.connect(url) as other:
        other.execute("SELECT pg_advisory_xact_lock(1717)")
        with pytest.raises(TaskFailed, match="time limit"):
            shop.run(book, time_limit=0.5)
        there = "SELECT 1 FROM pg_stat_activity WHERE pid = ANY(%s)"
        with psycopg.connect(url, autocommit=True) as looker:
            wait_until(lambda: not looker.execute(there, (pids,)).fetchall(), HANG)
    assert shop.orders() == []


def test_commit_that_does_not_come_is_rolled_back_by_the_server(shop: Shop, url: str) -> None:
    """A host that is gone between the checkpoint and the commit keeps nobody waiting."""
    store = shop.server.app.store
    sent = shop.note.send(1)
    session = store.open_session([QUEUE], worker="w")
    [delivery] = session.receive(1, HANG)
    transaction = store.open_transaction()
    keeping = Keeping(uuid=sent.uuid, rows={"0:book": encode(Checkpoint())})
    assert transaction.keep(session, delivery, keeping) is SETTLED
    waits = "SELECT 1 FROM machinery.items WHERE id = %s FOR UPDATE"
    with psycopg.connect(url) as other:
        other.execute("SET lock_timeout = '30s'")
        [(id,)] = other.execute("SELECT id FROM machinery.items").fetchall()
        assert other.execute(waits, (id,)).fetchall() == [(1,)]
    with pytest.raises(psycopg.Error):
        transaction.own.commit()
    transaction.own.close()
    session.close()
    assert shop.server.backend.checkpoints(sent.uuid) == {}


@pytest.mark.parametrize("stores", ["memory://", "sqlite:///a.db"])
def test_other_stores_refuse_it_before_the_call(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, stores: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(Shop(stores, "").server) as server:
        calls: list[int] = []

        @server.task(retries=3)
        def flow() -> None:
            current_task().step("book", transaction=True)(calls.append, 1)

        with (
            server.new_worker(concurrency=1),
            pytest.raises(
                TaskFailed, match=r"step 'book' with transaction=True needs .*postgresql:// URL"
            ),
        ):
            flow.send().get(timeout=HANG)
        assert calls == []


def test_task_process_refuses_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOKING_URL", url)
    booking = importlib.import_module("tests.stores.postgresql.booking")
    with (
        contextlib.closing(booking.server),
        booking.server.new_worker("w", 1, pool="process"),
        pytest.raises(TaskFailed, match="step 'book' with transaction=True needs .* in a process"),
    ):
        booking.flow.send(os.getpid()).get(timeout=HANG)


def test_option_that_is_none_is_refused() -> None:
    with contextlib.closing(Server("memory://")) as server:

        @server.task
        def flow() -> None:
            step: Any = current_task().step
            step("book", retry=3)

        with (
            server.new_worker(concurrency=1),
            pytest.raises(TaskFailed, match="unexpected keyword argument 'retry'"),
        ):
            flow.send().get(timeout=HANG)

"""The relay of an outbox: what happens to it when others do what they like."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from machinery_py import Config, Server, Signature
from machinery_py.contrib import outbox
from machinery_py.contrib.kept_calls import decode_kept
from machinery_py.contrib.outbox import LockedRows, OutboxTable, Relay
from machinery_py.contrib.sqlalchemy import Outbox
from machinery_py.errors import BackendUnavailable, BrokerUnavailable, QueueFull, Unsupported
from machinery_py.events import TaskSent
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.contrib.shop import Shop, database_of_a_shop, open_shop
from tests.support.servers import RedisServer

database, shop = database_of_a_shop, open_shop


def test_relay_that_lost_its_lock_publishes_nothing_again(
    postgresql_url: str, redis_url: str
) -> None:
    shop, other = Shop(postgresql_url, redis_url), Shop(postgresql_url, redis_url)
    shop.send(1, 2, 3)

    seen: list[str] = []

    def take_over(connection: Any, _: object, words: str, *__: object) -> None:
        seen.append(words)
        if "FOR UPDATE" in "".join(seen[:-1]):  # the last one before the rows are published
            process = connection.connection.driver_connection.info.backend_pid
            with other.engine.begin() as killing:
                killing.execute(sa.select(sa.func.pg_terminate_backend(process)))
            other.publish()  # and its relay ends

    event.listen(shop.engine, "after_cursor_execute", take_over)
    with pytest.raises(OperationalError):
        shop.outbox.relay().step()

    assert shop.run() == [1, 2, 3]
    shop.close()
    other.close()


def test_rows_of_a_relay_that_is_silent_go_to_another(
    postgresql_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "LOCK", 0.2)
    shop = Shop(postgresql_url, redis_url)
    shop.send(1, 2, 3)

    child = os.fork()
    if child == 0:
        silent = shop.again()
        event.listen(silent.engine, "after_cursor_execute", _stop_behind_the_lock)
        try:
            silent.outbox.relay().step()
        finally:
            os._exit(1)
    os.waitpid(child, os.WUNTRACED)
    try:
        shop.publish()
    finally:
        os.kill(child, signal.SIGCONT)
        os.waitpid(child, 0)

    assert shop.run() == [1, 2, 3]
    shop.close()


def _stop_behind_the_lock(*arguments: Any) -> None:
    if "FOR UPDATE" in arguments[2]:
        os.kill(os.getpid(), signal.SIGSTOP)


def test_no_row_is_begun_when_the_lock_is_over(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "LOCK", 0.0)
    shop.send(1, 2)

    assert shop.outbox.relay().step() == 0

    assert len(shop.rows()) == 2
    assert shop.run() == []


def test_claims_are_released_while_there_is_more_to_publish(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "FIRST_BATCH", 1)
    monkeypatch.setattr(outbox, "BATCH", 1)
    monkeypatch.setattr(outbox, "CLAIM_REST", 0.0)
    shop.send(1, 2, 3)
    keys = [decode_kept(row.body).key for row in shop.rows()]
    held: list[list[bool]] = []

    def look(_: TaskSent) -> None:
        claims = shop.server.backend.claims([f"outbox-{key}" for key in keys])
        held.append([claim is not None for claim in claims])

    shop.server.events.subscribe(TaskSent, look)
    shop.publish()

    assert held == [[True, False, False], [False, True, False], [False, False, True]]


def test_call_that_another_relay_may_be_sending_is_left(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RedisServer() as redis:
        results = f"sqlite:///{tmp_path}/results.db"
        shop = Shop(database, redis.url, result_backend=results)
        _cut_off_between_the_stores(shop, redis)
        relay = shop.outbox.relay()

        assert (relay.step(), len(shop.rows())) == (0, 1)
        assert shop.run() == []
        monkeypatch.setattr(outbox, "LEFT", 0.0)
        assert relay.step() == 1

        assert shop.run() == [1]
        shop.close()


def test_relay_finishes_its_own_call_at_once(database: str, tmp_path: Path) -> None:
    with RedisServer() as redis:
        results = f"sqlite:///{tmp_path}/results.db"
        shop = Shop(database, redis.url, result_backend=results)
        relay = _cut_off_between_the_stores(shop, redis)

        assert relay.step() == 1

        assert shop.run() == [1]
        shop.close()


def _cut_off_between_the_stores(shop: Shop, broker: RedisServer) -> outbox.Relay:
    """Send a call, and return a relay that has stored it and could not send it."""
    shop.send(1)
    relay = shop.outbox.relay()
    broker.stop()
    with pytest.raises(BrokerUnavailable):
        relay.step()
    broker.start()
    return relay


def test_handlers_of_sending_run_at_the_call_alone(shop: Shop) -> None:
    ran: list[str] = []

    @shop.server.around_send
    def around(_: Sequence[Signature[Any]]) -> Iterator[None]:
        ran.append("around_send")
        yield

    @shop.server.set_pre_publish_handler
    def before(_: Signature[Any]) -> None:
        ran.append("pre_publish")

    with Session(shop.engine) as session, session.begin():
        shop.outbox.send(session, shop.note.signature(1))
        shop.outbox.send(session, shop.alone.signature(2))
    shop.publish()

    assert ran == ["around_send", "pre_publish"] * 2
    assert shop.run() == [1, 2]


def test_unique_call_waits_for_its_store_without_a_lock(tmp_path: Path) -> None:
    with RedisServer() as redis:
        shop = Shop(f"sqlite:///{tmp_path}/shop.db", redis.url, publish_timeout=4 * HANG)

        def key(number: int) -> str:  # the relay asks for it when it has the lock
            redis.stop()
            return str(number)

        @shop.server.task(unique=key)
        def pay(number: int) -> None: ...

        with Session(shop.engine) as session, session.begin():
            shop.outbox.send(session, pay.signature(1))
        with pytest.raises(BackendUnavailable):
            shop.outbox.relay().step()

        assert len(shop.rows()) == 1
        shop.close()


def test_unique_call_without_result_backend_is_refused_at_once(tmp_path: Path) -> None:
    broker = f"sqlite:///{tmp_path}/tasks.db"
    shop = Shop(f"sqlite:///{tmp_path}/shop.db", broker, result_backend="null")

    with Session(shop.engine) as session, pytest.raises(Unsupported, match="keeps no keys"):
        shop.outbox.send(session, shop.alone.signature(1))
    shop.close()


def test_one_worker_relays_the_same_table_of_two_databases(shop: Shop, tmp_path: Path) -> None:
    other = Outbox(shop.server, f"sqlite:///{tmp_path}/other.db")
    other.create()
    shop.outbox.in_workers()
    other.in_workers()

    with shop.server.new_worker():
        shop.send(1)
        with Session(other.engine) as session, session.begin():
            result = other.send(session, shop.note.signature(2))
        assert result.get(timeout=HANG) == 2
        wait_until(lambda: sorted(shop.ran) == [1, 2])


class ListedRows(OutboxTable):
    """A table in memory, and how many rows it was asked for."""

    name = "listed"

    def __init__(self, rows: Sequence[bytes]) -> None:
        self.rows = dict(enumerate(rows))
        self.asked: list[int] = []

    def is_waiting(self) -> bool:
        return bool(self.rows)

    @contextmanager
    def take(self, limit: int, life: float) -> Iterator[LockedRows]:
        self.asked.append(limit)
        yield (batch := LockedRows(list(self.rows.items())[:limit]))
        for number in batch.done:
            del self.rows[number]

    def listen(self) -> Sequence[int]:
        return ()

    def heard(self) -> None: ...

    def text_of(self, error: Exception) -> str:
        return str(error)

    def close(self) -> None: ...


def test_no_more_rows_are_read_than_could_be_published(shop: Shop) -> None:
    shop.send(*range(20))
    table = ListedRows([row.body for row in shop.rows()])
    config = Config(broker="memory://", queue_limits={"machinery_tasks": 12})
    relay = Relay(Server(config), table)

    assert relay.step() == 8
    for _ in range(3):
        with pytest.raises(QueueFull):
            relay.step()

    assert len(table.rows) == 8
    assert table.asked == [8, 16, 4, 1]


def test_eager_task_writes_to_the_database_of_the_outbox(database: str) -> None:
    shop = Shop(database, "eager")
    orders = sa.Table("orders", sa.MetaData(), sa.Column("id", sa.Integer))
    orders.create(shop.engine)

    @shop.server.task
    def order(number: int) -> int:
        with shop.engine.begin() as connection:
            connection.execute(sa.insert(orders), {"id": number})
        return number

    with Session(shop.engine) as session, session.begin():
        result = shop.outbox.send(session, order.signature(1))
    shop.outbox.publish()

    assert result.get(timeout=HANG) == 1
    assert shop.rows() == []
    shop.close()


def test_commits_are_not_disturbed_by_relays_that_start(tmp_path: Path) -> None:
    kept = Outbox(Server("memory://"), f"sqlite:///{tmp_path}/shop.db")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def work(number: int) -> None:
        while len(relays) < 2000:
            if number:
                kept._wake()  # as after each commit
            else:
                relays.append(kept.relay())

    relays: list[Relay] = []
    try:
        together(3, work)
    finally:
        sys.setswitchinterval(interval)

    relays.clear()
    gc.collect()
    assert len(kept._relays) == 0

"""The outbox in real databases: what is committed runs once, what is rolled back never."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool, QueuePool

from machinery_py import Server, chain, chord, group
from machinery_py.contrib.outbox import outboxes_of
from machinery_py.contrib.sqlalchemy import Outbox
from machinery_py.errors import ArgumentError, ConfigError, ResultTimeout
from machinery_py.events import TaskSent
from machinery_py.testing.waiting import HANG, wait_until
from tests.contrib.shop import Shop, database_of_a_shop, kill, killed_by, open_shop
from tests.support.servers import RedisServer

SLOW_POLL = 3600.0


database, shop = database_of_a_shop, open_shop


def relay_killed(shop: Shop, point: str) -> None:
    """Publish, and die at this point."""
    seen: list[object] = []

    def on_statement(*args: Any) -> None:
        words = args[2]
        if (point == "locked" and "body" in words and words.startswith("SELECT")) or (
            point == "before-delete" and " IN (" in words
        ):
            kill()

    def on_sent(_: object) -> None:
        seen.append(_)
        if point == "in-batch" and len(seen) == 2:
            kill()

    other = shop.again()
    event.listen(
        other.engine,
        "before_cursor_execute" if point != "locked" else "after_cursor_execute",
        on_statement,
    )
    if point == "before-commit":
        event.listen(other.engine, "commit", kill)
    other.server.events.subscribe(TaskSent, on_sent)
    other.outbox.relay().step()
    kill()


@pytest.mark.parametrize("point", ["locked", "in-batch", "before-delete", "before-commit", "after"])
def test_relay_killed_at_any_point_runs_each_call_once(shop: Shop, point: str) -> None:
    with Session(shop.engine) as session:
        shop.outbox.send(session, shop.note.signature(0))
        session.rollback()
    shop.send(1, 2, 3)

    killed_by(lambda: relay_killed(shop, point))
    assert len(shop.rows()) == (0 if point == "after" else 3)
    shop.publish()

    assert shop.run() == [1, 2, 3]


def test_group_of_two_stores_comes_whole_after_a_crash(redis_url: str, tmp_path: Path) -> None:
    results = f"sqlite:///{tmp_path}/results.db"
    shop = Shop(f"sqlite:///{tmp_path}/shop.db", redis_url, result_backend=results)
    with Session(shop.engine) as session, session.begin():
        members = shop.outbox.send(session, group(*[shop.note.signature(one) for one in range(5)]))

    killed_by(lambda: relay_killed(shop, "before-delete"))
    shop.publish()

    assert shop.run() == [0, 1, 2, 3, 4]
    assert members.get(timeout=HANG) == [0, 1, 2, 3, 4]
    shop.close()


def test_sender_killed_before_its_commit_sends_nothing(shop: Shop) -> None:
    def send() -> None:
        other = shop.again()
        event.listen(other.engine, "commit", kill)
        other.send(1)

    killed_by(send)

    shop.send(2)
    shop.publish()
    assert shop.run() == [2]


def test_workflows_keep_the_ids_that_send_returned(shop: Shop) -> None:
    note, total = shop.note, shop.total
    with Session(shop.engine) as session, session.begin():
        one = shop.outbox.send(session, note.signature(1))
        line = shop.outbox.send(session, chain(note.signature(2), total.signature(3)))
        many = shop.outbox.send(session, group(note.signature(4), note.signature(5)))
        both = shop.outbox.send(
            session, chord(group(note.signature(6), note.signature(7)), total.signature())
        )
        assert shop.outbox.send(session, group()).results == []

    shop.publish()
    shop.run()

    assert one.get(timeout=HANG) == 1
    assert line.get(timeout=HANG) == 5
    assert many.get(timeout=HANG) == [4, 5]
    assert both.get(timeout=HANG) == 13
    assert sorted(shop.ran) == [1, 2, 4, 5, 6, 7]


def test_call_is_pending_until_it_is_published(shop: Shop) -> None:
    note = shop.note
    with Session(shop.engine) as session, session.begin():
        one = shop.outbox.send(session, note.signature(1))
        line = shop.outbox.send(session, chain(note.signature(2), shop.total.signature(3)))
        many = shop.outbox.send(session, group(note.signature(4), note.signature(5)))

    for result in (one, line, many):
        with pytest.raises(ResultTimeout):
            result.get(timeout=0.03)
    assert one.get_state().state == "PENDING"
    shop.publish()
    shop.run()

    assert (line.get(timeout=HANG), many.get(timeout=HANG)) == (5, [4, 5])
    assert one.get(timeout=HANG) == 1


def test_savepoint_that_is_rolled_back_takes_its_calls_along(shop: Shop) -> None:
    with Session(shop.engine) as session, session.begin():
        shop.outbox.send(session, shop.note.signature(1))
        inner = session.begin_nested()
        shop.outbox.send(session, shop.note.signature(2))
        inner.rollback()

    shop.publish()

    assert shop.run() == [1]


def test_commit_wakes_the_relay_at_once(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("machinery_py.contrib.outbox.POLL", SLOW_POLL)

    with shop.outbox.relay():
        for number in range(3):  # the first ones may have come before it waited
            shop.send(number)
            wait_until(lambda: not shop.rows(), what="an empty outbox")

    assert shop.run() == [0, 1, 2]


def test_commit_of_another_process_wakes_the_relay(
    postgresql_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("machinery_py.contrib.outbox.POLL", SLOW_POLL)
    shop, other = Shop(postgresql_url, redis_url), Shop(postgresql_url, redis_url)

    with shop.outbox.relay():
        for number in range(3):
            other.send(number)  # another Outbox: in this process it wakes no relay of ours
            wait_until(lambda: not shop.rows(), what="an empty outbox")

    assert shop.run() == [0, 1, 2]
    shop.close()
    other.close()


def test_several_relays_publish_in_order_and_nothing_twice(shop: Shop) -> None:
    sent = [uuid for first in range(0, 300, 30) for uuid in shop.send(*range(first, first + 30))]
    others = [shop.again(), shop.again()]
    published: list[str] = []
    for one in (shop, *others):
        one.server.events.subscribe(TaskSent, lambda event: published.append(event.signature.uuid))

    with others[0].outbox.relay(), others[1].outbox.relay():
        shop.publish()

    assert published == sent
    assert shop.run() == list(range(300))
    for one in others:
        one.close()


def test_row_that_another_relay_has_is_not_passed(postgresql_url: str, redis_url: str) -> None:
    shop = Shop(postgresql_url, redis_url)
    shop.send(1, 2, 3)
    table, relay = shop.outbox.table, shop.outbox.relay()

    with shop.engine.begin() as other:
        other.execute(sa.select(table.c.id).where(table.c.id == 2).with_for_update())
        assert [relay.step(), relay.step()] == [1, 0]
        assert [row.id for row in shop.rows()] == [2, 3]
    assert relay.step() == 2

    assert shop.run() == [1, 2, 3]
    shop.close()


def test_relay_publishes_no_row_of_another_application(database: str, redis_url: str) -> None:
    ours = Shop(database, redis_url, application="ours")
    theirs = Shop(database, redis_url, application="theirs")
    theirs.send(1)
    ours.send(2)

    with ours.outbox.relay():
        wait_until(lambda: [row.application for row in ours.rows()] == ["theirs"])

    assert ours.run() == [2]
    theirs.publish()
    assert theirs.run() == [1]
    ours.close()
    theirs.close()


def test_row_that_cannot_be_published_is_set_aside(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.send(1)
    with shop.engine.begin() as connection:
        row = dict(connection.execute(sa.select(shop.outbox.table)).one()._mapping)
        connection.execute(sa.insert(shop.outbox.table), {**row, "id": 2, "body": b"secret"})
        connection.execute(sa.insert(shop.outbox.table), {**row, "id": 3})

    with shop.outbox.relay(), caplog.at_level(logging.ERROR):
        wait_until(lambda: len(shop.rows()) == 1)

    [left] = shop.rows()
    assert (left.id, left.body, left.failed_at is None) == (2, b"secret", False)
    assert "malformed" in left.error
    assert "row 2 of outbox machinery_outbox is set aside" in caplog.text
    assert "secret" not in caplog.text
    assert shop.run() == [1]  # row 3 bore the key of row 1


def test_full_queue_is_waited_for_and_keeps_the_order(database: str, redis_url: str) -> None:
    shop = Shop(database, redis_url, queue_limits={"machinery_tasks": 2})
    shop.send(1, 2, 3, 4)

    with shop.outbox.relay():
        wait_until(lambda: len(shop.rows()) == 2)
        assert all(row.failed_at is None for row in shop.rows())
        while shop.rows():
            shop.run()

    assert shop.run() == [1, 2, 3, 4]
    shop.close()


def test_store_that_is_away_is_waited_for(database: str, caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer() as redis:
        shop = Shop(database, redis.url)
        redis.stop()
        shop.send(1)
        with shop.outbox.relay(), caplog.at_level(logging.WARNING):
            wait_until(lambda: "nothing is published now" in caplog.text)
            with Session(shop.engine) as session:  # nobody else is kept waiting
                session.execute(sa.text("CREATE TABLE orders (id INTEGER)"))
                session.commit()
            redis.start()
            wait_until(lambda: not shop.rows())
        assert shop.run() == [1]
        shop.close()


def test_unique_call_is_sent_once_and_a_duplicate_is_dropped(shop: Shop) -> None:
    with Session(shop.engine) as session, session.begin():
        for _ in range(2):
            shop.outbox.send(session, shop.alone.signature(1))

    killed_by(lambda: relay_killed(shop, "before-delete"))
    shop.publish()

    assert shop.run() == [1]


def test_pool_of_one_connection_is_enough(postgresql_url: str, redis_url: str) -> None:
    shop = Shop(postgresql_url, redis_url)
    shop.engine = sa.create_engine(
        postgresql_url, poolclass=QueuePool, pool_size=1, max_overflow=0, pool_timeout=HANG
    )
    shop.outbox = Outbox(shop.server, shop.engine)

    with shop.outbox.relay():
        for number in range(3):
            shop.send(number)
        wait_until(lambda: not shop.rows())

    assert shop.run() == [0, 1, 2]
    shop.close()


def test_two_phase_commit_is_published(postgresql_url: str, redis_url: str) -> None:
    shop = Shop(postgresql_url, redis_url)
    with Session(shop.engine, twophase=True) as session:
        shop.outbox.send(session, shop.note.signature(1))
        session.prepare()
        assert shop.rows() == []
        session.commit()

    shop.publish()

    assert shop.run() == [1]
    shop.close()


def test_async_session_sends_with_its_transaction(shop: Shop) -> None:
    url = shop.database.replace("sqlite:", "sqlite+aiosqlite:")
    engine = create_async_engine(url, poolclass=NullPool)
    outbox = Outbox(shop.server, engine)

    async def send() -> str:
        async with AsyncSession(engine) as session:
            await outbox.send_async(session, shop.note.signature(0))
            await session.rollback()
            result = await outbox.send_async(session, shop.note.signature(1))
            await session.commit()
            return str(result.uuid)

    uuid = asyncio.run(send())
    with outbox.relay():
        wait_until(lambda: not shop.rows())

    assert shop.run() == [1]
    assert shop.server.result(uuid).get(timeout=HANG) == 1


def test_worker_relays_by_one_line(shop: Shop) -> None:
    shop.outbox.in_workers()

    with shop.server.new_worker():
        results = shop.send(1, 2)
        wait_until(lambda: len(shop.ran) == 2)

    assert len(results) == 2


def test_scoped_session_sends_and_other_sessions_are_refused(shop: Shop) -> None:
    sessions = scoped_session(sessionmaker(shop.engine))
    shop.outbox.send(sessions, shop.note.signature(1))
    sessions.commit()
    sessions.remove()
    wrong: Any = shop.engine

    with pytest.raises(TypeError, match=r"not Engine .*send_async"):
        shop.outbox.send(wrong, shop.note.signature(2))

    shop.publish()
    assert shop.run() == [1]


def test_call_that_cannot_be_sent_is_refused_at_once(shop: Shop) -> None:
    with Session(shop.engine) as session:
        with pytest.raises(ArgumentError):
            shop.outbox.send(session, shop.note.signature(object()))  # type: ignore[arg-type]
        session.commit()

    assert shop.rows() == []


def test_delay_counts_from_the_call(shop: Shop) -> None:
    eta = dt.datetime.now(dt.timezone.utc) + dt.timedelta(hours=1)
    with Session(shop.engine) as session, session.begin():
        result = shop.outbox.send(session, shop.note.signature(1).replace(eta=eta))

    shop.publish()

    [state] = shop.server.backend.get_states([result.uuid]).values()
    assert state.eta == eta
    assert shop.run() == []


def test_table_can_be_declared_with_the_users_own(shop: Shop) -> None:
    metadata = sa.MetaData()
    outbox = Outbox(shop.server, shop.engine, metadata=metadata, table="mine")
    twin = Outbox(shop.server, shop.engine, metadata=metadata, table="mine")
    metadata.create_all(shop.engine)

    assert outbox.table is twin.table
    assert list(metadata.tables) == ["mine"]
    assert {shop.outbox, outbox, twin} <= {*outboxes_of(shop.server)}


def test_database_that_no_relay_can_use_is_refused(tmp_path: Path) -> None:
    server = Server(f"sqlite:///{tmp_path}/one.db")

    with pytest.raises(ConfigError, match="in memory"):
        Outbox(server, "sqlite://").relay()
    with pytest.raises(ConfigError, match="file of its own"):
        Outbox(server, f"sqlite:///{tmp_path}/one.db").relay()
    with pytest.raises(ConfigError, match="no outbox"):
        outboxes_of(Server("memory://"))


def test_mysql_keeps_more_than_64_kilobytes() -> None:
    from sqlalchemy.dialects import mysql
    from sqlalchemy.schema import CreateTable

    outbox = Outbox(Server("memory://"), "sqlite://")

    assert "body LONGBLOB NOT NULL" in str(
        CreateTable(outbox.table).compile(dialect=mysql.dialect())
    )

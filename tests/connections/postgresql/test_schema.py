"""The schema in PostgreSQL: made once, changed by `migrate`, read by people, used by roles."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from machinery_py import Config, Server, State, TaskFailed, chord, group
from machinery_py.brokers.base import Message
from machinery_py.brokers.rows import receipt_of
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.connections.postgresql.schema import OURS, Schema
from machinery_py.errors import QueueFull, StoreUnusable
from machinery_py.testing.waiting import HANG, wait_until
from tests.support.servers import PostgreSQLServer

Connection = psycopg.Connection[tuple[Any, ...]]


@pytest.fixture
def url(postgresql_server: PostgreSQLServer) -> str:
    """An empty database."""
    postgresql_server.start()
    return postgresql_server.new_database(f"d{os.urandom(4).hex()}").replace("+psycopg", "")


@pytest.fixture
def admin(url: str) -> Iterator[Connection]:
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


def versions(admin: Connection) -> list[tuple[object, ...]]:
    return admin.execute("SELECT version, oldest FROM machinery.schema_version").fetchall()


def total_of(*numbers: int) -> int:
    return sum(numbers)


def migrated(url: str, schema: Schema = OURS) -> tuple[int, int]:
    with closing(PostgreSQLDriver(url, schema=schema)) as driver:
        return driver.migrate()


@pytest.fixture
def later(tmp_path: Path) -> Callable[[str, int], Schema]:
    """Return the schema of a later version of the library: the tables of ours, and what it adds."""

    def later(sql: str, oldest: int) -> Schema:
        script = tmp_path / "next.sql"
        script.write_text(sql)
        return replace(OURS, tables=(*OURS.tables, script), oldest=oldest)

    return later


def test_tables_are_made_once(url: str, admin: Connection) -> None:
    assert migrated(url) == (0, OURS.version)
    assert migrated(url) == (OURS.version, OURS.version)
    assert versions(admin) == [(OURS.version, OURS.oldest)]


def test_script_for_others_makes_the_same_tables(url: str, admin: Connection) -> None:
    with closing(PostgreSQLDriver(url)) as driver:
        script = driver.migration()
        admin.execute(script.encode())
        assert (driver.migration(), driver.migrate()) == ("", (OURS.version, OURS.version))
    with closing(Server(url)) as server:
        add = server.register_task("add", lambda a, b: a + b)
        with server.new_worker(concurrency=1):
            assert add.send(1, 2).get(timeout=HANG) == 3


def test_running_fleet_goes_on_over_an_expanding_migration(
    url: str, admin: Connection, later: Callable[[str, int], Schema]
) -> None:
    """This version of the library works on the tables of the next one."""
    expand = later("ALTER TABLE machinery.items ADD COLUMN note text NOT NULL DEFAULT '';", 1)
    with closing(Server(url)) as server:
        add = server.register_task("add", lambda a, b: a + b)
        with server.new_worker(concurrency=1):
            assert add.send(1, 2).get(timeout=HANG) == 3
            assert migrated(url, expand) == (OURS.version, OURS.version + 1)
            assert add.send(3, 4).get(timeout=HANG) == 7
    with closing(Server(url)) as server:  # and one that begins now
        add = server.register_task("add", lambda a, b: a + b)
        with server.new_worker(concurrency=1):
            assert add.send(5, 6).get(timeout=HANG) == 11
    with closing(PostgreSQLDriver(url, schema=expand)) as driver:
        assert driver.run("SELECT count(note) FROM machinery.items", doing="testing") == [(0,)]
    assert migrated(url) == (OURS.version + 1, OURS.version + 1)  # it takes nothing back


def test_tables_that_this_version_cannot_work_with_are_refused(
    url: str, later: Callable[[str, int], Schema]
) -> None:
    migrated(url)
    contract = later("ALTER TABLE machinery.items DROP COLUMN claim;", OURS.version + 1)
    with closing(PostgreSQLDriver(url, schema=contract)) as driver:
        with pytest.raises(StoreUnusable, match="needs 2 .*machinery migrate APP"):
            driver.run("SELECT 1", doing="testing")  # the tables come first
        driver.migrate()
        driver.run("SELECT 1", doing="testing")
    with (
        closing(PostgreSQLDriver(url)) as driver,
        pytest.raises(StoreUnusable, match="works with version 2 or newer .*upgrade it"),
    ):
        driver.run("SELECT 1", doing="testing")


def test_migration_that_fails_changes_nothing(
    url: str, admin: Connection, later: Callable[[str, int], Schema]
) -> None:
    migrated(url)
    bad = later("ALTER TABLE machinery.items ADD COLUMN note text; SELECT 1 / 0;", 1)
    with pytest.raises(StoreUnusable, match="migrating: division by zero"):
        migrated(url, bad)
    assert versions(admin) == [(1, 1)]
    with pytest.raises(psycopg.errors.UndefinedColumn):
        admin.execute("SELECT note FROM machinery.items")


def test_migration_waits_for_a_lock_a_moment_at_a_time(
    url: str, admin: Connection, later: Callable[[str, int], Schema]
) -> None:
    """Behind one that waits for its lock all others wait: it lets them go on."""
    migrated(url)
    expand = later("ALTER TABLE machinery.items ADD COLUMN note text;", 1)
    done: list[tuple[int, int]] = []
    waits = (
        "SELECT query_start FROM pg_stat_activity WHERE wait_event_type = 'Lock' "
        "AND query LIKE '%ADD COLUMN note%' AND datname = current_database()"
    )
    with psycopg.connect(url) as user:
        user.execute("SELECT 1 FROM machinery.items FOR UPDATE")
        thread = threading.Thread(target=lambda: done.append(migrated(url, expand)))
        thread.start()
        seen: set[object] = set()

        def has_tried_again() -> bool:
            seen.update(admin.execute(waits).fetchall())
            return len(seen) > 1

        wait_until(has_tried_again, HANG)
        assert done == []
        user.rollback()
    thread.join(HANG)
    assert done == [(1, 2)]


def test_role_that_may_not_make_the_tables_is_told_what_to_grant(
    url: str, admin: Connection
) -> None:
    admin.execute("DROP ROLE IF EXISTS newcomer")
    admin.execute("CREATE ROLE newcomer LOGIN")
    name = admin.info.dbname
    grant = f'GRANT CREATE ON DATABASE "{name}" TO "newcomer"'
    with closing(PostgreSQLDriver(url.replace("postgres@", "newcomer@"))) as driver:
        with pytest.raises(StoreUnusable, match=grant):
            driver.run("SELECT 1", doing="testing")
        admin.execute(grant.encode())
        driver.run("SELECT 1", doing="testing")
    admin.execute("DROP SCHEMA machinery CASCADE")
    admin.execute(f'REVOKE CREATE ON DATABASE "{name}" FROM "newcomer"'.encode())


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_database_may_have_another_encoding(url: str, admin: Connection, encoding: str) -> None:
    """SQL_ASCII is what initdb chooses in the locale C."""
    name = f"{admin.info.dbname}_{encoding.lower()}"
    admin.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0".encode())
    with closing(Server(f"{url.rpartition('/')[0]}/{name}")) as server:
        echo = server.register_task("écho", lambda text: text)
        with server.new_worker(concurrency=1):
            assert echo.options(queue="machinery_tasks").send("½ →").get(timeout=HANG) == "½ →"


# Views


@pytest.fixture
def shop(url: str) -> Iterator[Server]:
    with closing(Server(url)) as server:

        @server.task
        def add(a: int, b: int) -> int:
            return a + b

        @server.task
        def fail(text: str) -> None:
            raise ValueError(text)

        @server.task(on_failure="dead_letter")
        def give_up() -> None:
            raise ValueError("cannot")

        yield server


def test_people_read_states_and_dead_letters(shop: Server, admin: Connection) -> None:
    add, fail, give_up = map(shop.get_registered_task, ("add", "fail", "give_up"))
    done = add.send(1, 2)
    odd = [fail.send(text) for text in ("no", "a \0 b", "back\\\\slash \0")]
    dead = give_up.send()
    with shop.new_worker("w", 1):
        assert done.get(timeout=HANG) == 3
        for one in (*odd, dead):
            with pytest.raises(TaskFailed):
                one.get(timeout=HANG)
    waits = add.options(queue="mail", delay=60.0).send(3, 4)

    look = "SELECT name, state, queue, error, results FROM machinery.tasks WHERE uuid = %s"
    assert admin.execute(look, (done.uuid,)).fetchall() == [
        ("add", "SUCCESS", "machinery_tasks", None, [3])
    ]
    assert admin.execute(look, (waits.uuid,)).fetchall() == [("add", "PENDING", "mail", None, None)]
    errors = [admin.execute(look, (one.uuid,)).fetchall()[0][3] for one in odd]
    assert errors == ["no", "a \ufffd b", "back\\\\slash \ufffd"]
    in_order = "SELECT created_at <= started_at AND started_at <= finished_at FROM machinery.tasks"
    one_task = f"{in_order} WHERE id = %s".encode()
    assert admin.execute(one_task, (done.uuid.encode(),)).fetchall() == [(True,)]
    letters = "SELECT uuid, name, queue, reason, error FROM machinery.dead_letters"
    [letter] = shop.broker.dead_letters(limit=9)
    assert admin.execute(letters).fetchall() == [
        (dead.uuid, "give_up", "machinery_tasks", letter.reason, letter.error)
    ]


def test_one_task_is_found_by_its_key(shop: Server, admin: Connection) -> None:
    shop.get_registered_task("add").send(1, 2)
    admin.execute("SET enable_seqscan = off")
    look = "EXPLAIN SELECT state FROM machinery.tasks WHERE id = 'task_1'"

    plan = "".join(str(line) for (line,) in admin.execute(look).fetchall())
    assert "rows_pkey" in plan and "id = " in plan.partition("Index Cond")[2]


def test_people_read_queues_as_the_broker_counts_them(shop: Server, admin: Connection) -> None:
    add = shop.get_registered_task("add")
    for queue in ("mail", "½"):
        add.options(queue=queue).send(1, 2)
    add.options(queue="mail", delay=60.0).send(1, 2)
    consumer = shop.broker.consume(["mail", "idle"], worker="w")
    consumer.receive(1, HANG)
    add.options(queue="mail").send(1, 2)
    shop.broker.pause("mail")
    shop.broker.bury(
        Message(uuid="u", name="n", queue="old", body=b""), queue="old", reason="r", error="e"
    )
    columns = "queue, waiting, running, late, dead, oldest_at, paused"
    found = admin.execute(f"SELECT {columns} FROM machinery.queues ORDER BY 1".encode()).fetchall()

    assert found == [
        (
            one.queue, one.waiting, one.running, one.delayed, one.dead, one.oldest_at, one.paused,
        )
        for one in shop.broker.stats()
    ]  # fmt: skip
    assert {"mail", "old", "idle", "½"} <= {str(row[0]) for row in found}
    consumer.close()


# Roles

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "postgresql-schema.md").read_text()


@pytest.fixture
def role_url(url: str, admin: Connection) -> Iterator[Callable[[str], str]]:
    """Return a URL of a role that has no more than what the page grants it."""
    migrated(url)

    def role_url(what: str) -> str:
        grants = PAGE.partition(f"-- for a role that {what}\n")[2].partition("```")[0]
        name = grants.rpartition(" TO ")[2].strip(" ;\n")
        if not admin.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", (name,)).fetchall():
            admin.execute(f"CREATE ROLE {name} LOGIN".encode())
        admin.execute(grants.encode())
        return url.replace("postgres@", f"{name}@")

    yield role_url
    admin.execute("DROP SCHEMA machinery CASCADE")


def test_role_that_sends_sends_all_that_is_documented(
    shop: Server, role_url: Callable[[str], str]
) -> None:
    with closing(Server(role_url("sends"))) as web:
        add = web.register_task("add", lambda a, b: a + b)
        total = web.register_task("total", total_of)
        once = web.task("once", unique=True)(lambda number: number)
        shop.register_task("total", total_of)
        shop.task("once", unique=True)(lambda number: number)
        first = once.send(1)
        assert once.send(1).uuid == first.uuid
        chords = chord(group(add.signature(n, n) for n in (1, 2)), total.partial())
        late = add.options(delay=0.01, priority=3).send(1, 2)
        results = [
            web.send_chord(chords),
            web.send_chain(add.signature(1, 2) | add.partial(3)),
            late,
            first,
            *web.send_group(group(add.signature(n, 0) for n in (7, 8))),
        ]
        with shop.new_worker(concurrency=2):
            assert [one.get(timeout=HANG) for one in results] == [6, 6, 3, 1, 7, 8]
            again = once.send(1)  # whose key is that of a task that is over
            assert again.get(timeout=HANG) == 1


def test_role_that_sends_sends_in_its_transaction(
    shop: Server, role_url: Callable[[str], str]
) -> None:
    address = role_url("sends")
    with closing(Server(address)) as web, psycopg.connect(address) as connection:
        add = web.register_task("add", lambda a, b: a + b)
        once = web.task("once", unique=True)(lambda number: number)
        with web.transaction(connection):
            add.send(1, 2)
            once.send(1)
        assert shop.broker.waiting("machinery_tasks") == 0
        connection.commit()
    assert shop.broker.waiting("machinery_tasks") == 2


def test_queue_limit_holds_for_a_role_that_sends(role_url: Callable[[str], str]) -> None:
    config = Config(broker=role_url("sends"), queue_limits={"machinery_tasks": 1})
    with closing(Server(config)) as web:
        add = web.register_task("add", lambda a, b: a + b)
        add.send(1, 2)
        with pytest.raises(QueueFull):
            add.send(3, 4)


def test_role_that_sends_does_nothing_else(shop: Server, role_url: Callable[[str], str]) -> None:
    task = shop.get_registered_task("add").send(1, 2)
    address = role_url("sends")
    with closing(Server(address)) as web:
        web.register_task("add", lambda a, b: a + b)
        refused: list[Callable[[], object]] = [
            lambda: web.broker.consume(["machinery_tasks"], worker="w"),
            lambda: web.broker.pending("machinery_tasks", 1),
            lambda: web.broker.purge("machinery_tasks"),
            lambda: web.broker.pause("machinery_tasks"),
            web.broker.stats,
            web.backend.list_states,
            lambda: web.backend.purge_state(task.uuid),
            lambda: web.backend.revoke([task.uuid]),
            lambda: web.lock("a").acquire(),
        ]
        for call in refused:
            with pytest.raises(StoreUnusable, match="has not the right"):
                call()
    assert task.get_state().state is State.PENDING


def test_functions_for_senders_check_what_they_are_given(
    shop: Server, role_url: Callable[[str], str], admin: Connection
) -> None:
    """Whoever has the role need not use our library."""
    task = shop.get_registered_task("add").send(1, 2)
    consumer = shop.broker.consume(["machinery_tasks"], worker="w")
    [delivery] = consumer.receive(1, HANG)
    receipt = receipt_of(delivery)
    row = {"s": 1, "op": "w", "kind": "task", "id": task.uuid, "b": 1}
    item = {"s": 1, "hold": receipt.hold, "id": receipt.id, "count": receipt.count, "op": "d"}
    push = {"s": 1, "id": receipt.id, "queue": "q", "priority": 0, "turn": 0, "due": 0}
    orders: list[tuple[bool, object, object, object]] = [
        (False, [row], None, None),
        (False, [row | {"wants": 5}], None, None),
        (False, [row | {"op": "d", "wants": 0}], None, None),
        (False, [row | {"op": None}], None, None),
        (False, [row | {"kind": None}], None, None),
        (False, [row | {"kind": "lock", "op": "c"}], None, None),
        (False, [row | {"kind": "claim", "op": "s"}], None, None),
        (False, [row | {"op": "c", "kept_kind": "task", "kept_id": task.uuid}], None, None),
        (True, [row | {"kind": "closed", "op": "c"}], None, None),
        (False, None, [item], None),
        (False, None, None, [push]),
        (False, None, None, [push | {"id": None, "priority": -(2**31)}]),
        (True, None, None, None),
    ]
    call = (
        "SELECT * FROM machinery.send(%s, NULL, 1, false, %s, %s::json, %s::json, %s::json, NULL, "
        "NULL, NULL, ARRAY['x'::bytea])"
    )
    with psycopg.connect(role_url("sends"), autocommit=True) as web:
        for within in (True, False):
            for closes, *lists in orders:
                words = [one and json.dumps(one) for one in lists]
                with pytest.raises(psycopg.errors.InsufficientPrivilege, match="may send, and no"):
                    web.execute(call, (within, closes, *words))
        for statement in (
            "SELECT * FROM machinery.read_sent(NULL, ARRAY['lock'], ARRAY['a'::bytea])",
            "SELECT * FROM machinery.rows",
            "SELECT body FROM machinery.items",
            "DELETE FROM machinery.items",
            "SELECT setval('machinery.numbers', 1)",
            "UPDATE machinery.schema_version SET oldest = 9",
            "SELECT * FROM machinery.tasks",
            "SELECT * FROM machinery.claim(NULL, 'h', ARRAY['q'::bytea], 1, 1, 1, NULL)",
            "CREATE TABLE machinery.more (id int)",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                web.execute(statement.encode())
        watch = "INSERT INTO machinery.watches (topic, channel, until) VALUES ('queue q', '', 1)"
        with pytest.raises(psycopg.errors.CheckViolation):
            web.execute(watch)  # pg_notify would refuse it: nobody could send to the queue
        [(before,)] = web.execute("SELECT at FROM machinery.connect(NULL)").fetchall()
        web.execute("SELECT machinery.connect(9223372036854775807)")  # numbers would run out
    [(number,)] = admin.execute("SELECT nextval('machinery.numbers')").fetchall()
    assert number < before + 2 * 86_400_000_000
    assert consumer.holds([delivery]) == [True]
    assert task.get_state().state is State.PENDING
    consumer.close()


def test_moment_of_a_sender_ends_nothing_that_is_there(
    shop: Server, role_url: Callable[[str], str], admin: Connection
) -> None:
    """By a moment ahead, what is kept for an hour would be over, and free to be written."""
    done = shop.get_registered_task("add").send(1, 2)
    with shop.new_worker(concurrency=1):
        assert done.get(timeout=HANG) == 3
    row = {"s": 1, "op": "w", "kind": "task", "id": done.uuid, "b": 1, "wants": 0}
    push = {"s": 1, "queue": "q", "b": 1, "priority": 0, "turn": 0, "due": 0}
    call = (
        "SELECT results FROM machinery.send(%s, %s, 1, false, false, %s::json, NULL, %s::json, "
        "NULL, NULL, NULL, ARRAY['forged'::bytea])"
    )
    with psycopg.connect(role_url("sends"), autocommit=True) as web:
        for within in (True, False):
            found = web.execute(call, (within, 2**61, json.dumps([row]), None)).fetchall()
            assert found == [([1],)]
            web.execute(call, (within, -(2**61), None, json.dumps([push])))
    view = "SELECT waiting, oldest_at < now() FROM machinery.queues WHERE queue = 'q'"
    assert admin.execute(view).fetchall() == [(2, True)]
    assert done.get_state().results[0].value == 3


def test_functions_for_senders_are_not_for_all(
    role_url: Callable[[str], str], admin: Connection
) -> None:
    role_url("sends")
    look = (
        "SELECT has_function_privilege('public', oid, 'EXECUTE') FROM pg_proc "
        "WHERE prosecdef AND proname <> 'connect'"
    )
    assert set(admin.execute(look.encode()).fetchall()) == {(False,)}


def test_role_that_looks_sees_the_views_and_no_more(
    shop: Server, role_url: Callable[[str], str], admin: Connection
) -> None:
    task = shop.get_registered_task("add").send(1, 2)
    admin.execute(
        "UPDATE machinery.rows SET expires_at = 1, kept_kind = 'chord open', kept_id = 'g' "
        "WHERE kind = 'task'"
    )
    shop.broker.pause("mail")
    with psycopg.connect(role_url("looks"), autocommit=True) as report:
        assert report.execute("SELECT uuid FROM machinery.tasks").fetchall() == []
        admin.execute(
            "INSERT INTO machinery.rows (kind, id, version, body) VALUES ('chord open', 'g', 1, '')"
        )
        assert report.execute("SELECT uuid FROM machinery.tasks").fetchall() == [(task.uuid,)]
        paused = "SELECT queue FROM machinery.queues WHERE paused"
        assert report.execute(paused).fetchall() == [("mail",)]
        assert report.execute("SELECT * FROM machinery.dead_letters").fetchall() == []
        for statement in (
            "SELECT * FROM machinery.rows",
            "SELECT * FROM machinery.items",
            f"SELECT machinery.send(false, NULL, 0, false, false{', NULL' * 7})",
            "SELECT * FROM machinery.read_sent(NULL, ARRAY['task'], ARRAY['a'::bytea])",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                report.execute(statement.encode())


def test_role_without_grants_is_told_where_they_are(
    role_url: Callable[[str], str], admin: Connection
) -> None:
    address = role_url("looks")
    admin.execute("REVOKE USAGE ON SCHEMA machinery FROM report")
    with (
        closing(PostgreSQLDriver(address)) as driver,
        pytest.raises(StoreUnusable, match="see: PostgreSQL schema, roles.*denied for schema"),
    ):
        driver.run("SELECT 1", doing="testing")

"""What goes wrong with a real PostgreSQL, and how it goes on."""

from __future__ import annotations

import datetime as dt
import os
import pathlib
import signal
import socket
import traceback
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from machinery_py import Config, Server
from machinery_py.connections.postgresql import listening
from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.connections.postgresql.durability import FACTS, ServerFacts, burdens, dangers
from machinery_py.errors import BackendUnavailable, ConfigError, MachineryError, StoreUnusable
from machinery_py.rows.contract import Committed, Gone, Key, RowStep, Write
from machinery_py.rows.messages import MessageStep, Push
from machinery_py.rows.postgresql import PostgreSQLRows
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.support.servers import PostgreSQLServer, require

A = Key("kind", "a")
DOCS = pathlib.Path(__file__).parents[3] / "docs" / "reference" / "postgresql-schema.md"
STEP = RowStep(write={A: Write(body=b"1")})


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgreSQLServer]:
    require(PostgreSQLServer)
    with PostgreSQLServer() as server:
        yield server


@pytest.fixture
def own_url(own_server: PostgreSQLServer) -> str:
    """A new database of a server that may be killed."""
    own_server.start()
    return own_server.new_database(f"d{os.urandom(4).hex()}")


def admin(url: str) -> psycopg.Connection:
    return psycopg.connect(url, autocommit=True)


def works(rows: PostgreSQLRows) -> bool:
    try:
        return isinstance(rows.commit([STEP])[0], Committed)
    except MachineryError:
        return False


def test_two_that_come_first_make_the_tables_once(own_url: str) -> None:
    def begin(_: int) -> bool:
        with closing(PostgreSQLDriver(own_url)) as driver:
            return works(PostgreSQLRows(driver))

    assert together(4, begin) == [True] * 4


def test_connection_that_the_server_ended_is_replaced(own_url: str) -> None:
    with closing(PostgreSQLDriver(own_url)) as driver, admin(own_url) as other:
        rows = PostgreSQLRows(driver)
        assert works(rows)
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'machinery_py' AND datname = current_database()"
        )

        wait_until(lambda: works(rows), HANG)


def test_call_to_a_frozen_server_has_a_timeout(own_server: PostgreSQLServer, own_url: str) -> None:
    with closing(PostgreSQLDriver(own_url, timeout=0.5)) as driver:
        rows = PostgreSQLRows(driver)
        assert works(rows)
        pids = [
            int(pid) for (pid,) in driver.run("SELECT pg_backend_pid()", doing="looking who it is")
        ]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(BackendUnavailable):
                rows.read([A])
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

        wait_until(lambda: works(rows), HANG)


def test_connections_notice_a_network_that_is_gone(own_url: str) -> None:
    def settings(link: psycopg.Connection[Any]) -> list[int]:
        tcp = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        with socket.socket(fileno=os.dup(link.fileno())) as one:
            alive = one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            found = [one.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in tcp]
        return [alive, *found]

    with closing(PostgreSQLDriver(own_url)) as driver, closing(driver.open()) as called:
        own = driver.begin()

        assert settings(called) == settings(own) == [1, 5, 2, 3, 10_000]
        driver.end(own)


@pytest.mark.parametrize("how", ["restart", "kill"])
def test_worker_goes_on_when_the_server_is_back(
    own_server: PostgreSQLServer, own_url: str, how: str
) -> None:
    with closing(Server(Config(broker=own_url, publish_timeout=2.0))) as server:
        add = server.register_task("add", lambda a, b: a + b)
        with server.new_worker(concurrency=2):
            assert add.send(1, 2).get(timeout=HANG) == 3
            if how == "kill":
                own_server.kill()
            own_server.restart()

            def runs() -> bool:
                try:
                    return add.send(1, 2).get(timeout=HANG) == 3
                except MachineryError:
                    return False

            wait_until(runs, HANG)


def test_listener_hears_again_after_a_crash(own_server: PostgreSQLServer, own_url: str) -> None:
    with closing(PostgreSQLDriver(own_url)) as driver:
        rows = PostgreSQLRows(driver)
        listener = rows.listen()
        listener.watch(["x"])
        own_server.kill()
        own_server.start()

        wait_until(lambda: driver.ear.hears and works(rows), HANG)
        listener.wait(HANG)
        rows.commit([MessageStep(tell=("x",))])
        wait_until(listener._waiter._event.is_set, HANG)
        listener.close()


def test_server_that_may_lose_what_it_confirms_is_named(
    own_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The tests' own server does: it does not flush."""
    with admin(own_url) as other:
        role = "ALTER ROLE postgres IN DATABASE {} SET synchronous_commit = off"
        other.execute(role.format(other.info.dbname).encode())
    with closing(Server(own_url)) as server:
        found = [one.text for one in server.broker.concerns()]
        assert [text.partition(" ")[0] for text in found] == ["fsync", "synchronous_commit"]
        assert found == [one.text for one in server.backend.concerns()]
        assert "synchronous_commit is off" in caplog.text
    with (
        closing(Server(Config(broker=own_url, strict_durability=True))) as server,
        pytest.raises(StoreUnusable, match="refused by strict_durability: fsync is off"),
    ):
        server.broker.stats()


def test_what_slows_a_server_down_is_named() -> None:
    facts = ServerFacts("on", "on", "local", notifications=0.75, oldest=3600.0)

    assert dangers(facts) == []
    texts = [one.text for one in burdens(facts, is_pooled=True)]
    assert "open for 60 min" in texts[0]
    assert "75% full" in texts[1]
    assert "a pooler" in texts[2]


def test_age_of_the_oldest_transaction_is_seen(own_url: str) -> None:
    with (
        closing(PostgreSQLDriver(own_url)) as driver,
        psycopg.connect(own_url) as other,
        admin(own_url) as look,
    ):
        works(PostgreSQLRows(driver))
        other.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        other.execute("SELECT 1")

        def age() -> float:
            return ServerFacts(*look.execute(FACTS).fetchall()[0]).oldest

        first = age()
        wait_until(lambda: age() > first, HANG)


def test_store_that_accepts_no_writes_is_unusable(own_url: str) -> None:
    with admin(own_url) as other, closing(PostgreSQLDriver(own_url)) as driver:
        assert works(PostgreSQLRows(driver))
        name = other.info.dbname
        other.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
    with (
        closing(PostgreSQLDriver(own_url)) as driver,
        pytest.raises(StoreUnusable, match="accepts no writes"),
    ):
        PostgreSQLRows(driver).commit([STEP])


def test_role_without_rights_is_told_what_is_missing(own_url: str) -> None:
    with admin(own_url) as other:
        other.execute("DROP ROLE IF EXISTS nobody")
        other.execute("CREATE ROLE nobody LOGIN")
    with (
        closing(PostgreSQLDriver(own_url.replace("postgres@", "nobody@"))) as driver,
        pytest.raises(StoreUnusable, match="may not make them"),
    ):
        PostgreSQLRows(driver).commit([STEP])


def test_role_with_the_rights_of_the_documentation_works(own_url: str) -> None:
    with closing(PostgreSQLDriver(own_url)) as driver, admin(own_url) as other:
        assert works(PostgreSQLRows(driver))
        other.execute("DROP ROLE IF EXISTS app")
        text = DOCS.read_text()
        grants = text.partition("-- for a role that works\n")[2].partition("```")[0]
        other.execute(f"CREATE ROLE app LOGIN; {grants}".encode())
    with closing(Server(own_url.replace("postgres@", "app@"))) as server:
        add = server.register_task("add", lambda a, b: a + b)
        with server.new_worker(concurrency=1):
            assert add.send(1, 2).get(timeout=HANG) == 3
            server.broker.tend()
            server.broker.pause("machinery_tasks")
            server.broker.purge("machinery_tasks")


def test_tables_of_a_later_version_are_refused(own_url: str) -> None:
    with closing(PostgreSQLDriver(own_url)) as driver:
        assert works(PostgreSQLRows(driver))
        driver.run("UPDATE machinery.schema_version SET version = 9, oldest = 9", doing="testing")
    with (
        closing(PostgreSQLDriver(own_url)) as driver,
        pytest.raises(StoreUnusable, match="upgrade it"),
    ):
        PostgreSQLRows(driver).commit([STEP])


@pytest.mark.parametrize(
    ("part", "reason"), [("postgres@", "refuses this user"), ("/d", "no such database")]
)
def test_name_that_is_not_there_is_no_outage(own_url: str, part: str, reason: str) -> None:
    url = own_url.replace(part, f"no{part}" if part.endswith("@") else f"/no_{part[1:]}")
    with closing(PostgreSQLDriver(url)) as driver, pytest.raises(StoreUnusable, match=reason):
        PostgreSQLRows(driver).commit([STEP])


def test_nobody_there_is_unavailable_and_hides_the_password() -> None:
    with (
        closing(PostgreSQLDriver("postgresql://u:secret@127.0.0.1:9/d", timeout=2.0)) as driver,
        pytest.raises(BackendUnavailable, match="connection refused") as raised,
    ):
        PostgreSQLRows(driver).commit([STEP])

    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("password", ["50%off-secret", "secret%", "secret%00"])
def test_bad_percent_is_refused_and_hides_the_password(password: str) -> None:
    """libpq would show it in an error, which stays in ours as its cause."""
    with pytest.raises(ConfigError, match="write %25") as raised:
        Server(f"postgresql://app:{password}@127.0.0.1:9/d").broker.waiting("q")

    assert "secret" not in "".join(traceback.format_exception(raised.value))


def test_child_has_connections_of_its_own(own_url: str) -> None:
    with closing(PostgreSQLDriver(own_url)) as driver:
        rows = PostgreSQLRows(driver)
        assert works(rows)
        child = os.fork()
        if not child:
            os._exit(0 if works(rows) else 1)

        assert os.waitpid(child, 0)[1] == 0
        assert works(rows)


def test_numbers_go_on_above_those_that_a_lost_server_gave(own_url: str) -> None:
    with closing(PostgreSQLDriver(own_url)) as driver:
        rows = PostgreSQLRows(driver)
        first = rows.fences(1)
        driver.run("SELECT setval('machinery.numbers', 1)", doing="going back, as a replica does")
    with closing(PostgreSQLDriver(own_url)) as driver:
        assert PostgreSQLRows(driver).fences(1) > first


def test_numbers_lost_a_moment_before_a_promotion_are_not_given_again(own_url: str) -> None:
    clock = ManualClock()
    with closing(PostgreSQLDriver(own_url, clock=clock)) as driver:
        rows = PostgreSQLRows(driver)
        last = rows.fences(1)
        back = "SELECT setval('machinery.numbers', %s)"
        driver.run(back, (last - 2000,), doing="going back, as a replica does")
    clock.advance(1.0)
    with closing(PostgreSQLDriver(own_url, clock=clock)) as driver:
        assert PostgreSQLRows(driver).fences(1) > last


def test_numbers_go_on_when_the_clock_is_set_back(own_url: str) -> None:
    clock = ManualClock()
    numbers: list[int] = []
    for change in (0.0, -86_400.0, 1.0):
        clock._start += dt.timedelta(seconds=change)
        with closing(PostgreSQLDriver(own_url, clock=clock)) as driver:
            numbers += [PostgreSQLRows(driver).fences(1) for _ in range(3)]
    assert sorted(set(numbers)) == numbers


def test_receipt_of_a_claim_that_a_crash_undid_is_refused(own_url: str) -> None:
    """Claims do not wait for the disk, and the same consumer may get the message again."""
    with closing(PostgreSQLDriver(own_url)) as driver:
        rows = PostgreSQLRows(driver)
        hold = rows.open_hold(b"", lease=10.0)
        rows.commit([MessageStep(pushes=(Push(queue="q", body=b"1"),))])
        [first] = hold.claim(["q"], 1, number=1).found
        undo = "UPDATE machinery.items SET state = 0, hold = NULL, claim = NULL, count = 0"
        driver.run(undo, doing="testing")
        [second] = hold.claim(["q"], 1, number=2).found

        assert hold.has([first.receipt, second.receipt]) == [False, True]
        assert rows.commit([MessageStep(takes=(first.receipt,))]) == [Gone()]
        assert rows.commit([MessageStep(held=(first.receipt,))]) == [Gone()]
        assert isinstance(rows.commit([MessageStep(takes=(second.receipt,))])[0], Committed)
        hold.end()


def test_listener_that_hears_nothing_any_more_is_replaced(
    own_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "RENEW", 0.1)
    look = (
        "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN machinery%' "
        "AND datname = current_database()"
    )
    with closing(PostgreSQLDriver(own_url, timeout=0.5)) as driver, admin(own_url) as other:

        def listeners() -> list[int]:
            return [pid for (pid,) in other.execute(look).fetchall()]

        listener = PostgreSQLRows(driver).listen()
        listener.watch(["x"])
        wait_until(listeners, HANG)
        [pid] = listeners()
        os.kill(pid, signal.SIGSTOP)  # as if the network dropped it without a word
        try:
            wait_until(lambda: len(listeners()) == 2 and driver.ear.hears, HANG)
        finally:
            os.kill(pid, signal.SIGCONT)
        listener.close()


def test_push_wakes_whoever_waits_in_another_process(own_url: str) -> None:
    with closing(PostgreSQLDriver(own_url)) as one, closing(PostgreSQLDriver(own_url)) as other:
        rows, listener = PostgreSQLRows(one), PostgreSQLRows(other).listen()
        listener.watch(["queue q"])
        rows.commit([MessageStep(pushes=(Push(queue="q", body=b"1"),))])

        wait_until(listener._waiter._event.is_set, HANG)
        listener.close()


def test_isolation_of_the_database_is_not_ours(own_url: str) -> None:
    with admin(own_url) as other:
        name = other.info.dbname
        level = "SET default_transaction_isolation = serializable"
        other.execute(f"ALTER DATABASE {name} {level}".encode())
    with closing(PostgreSQLDriver(own_url)) as driver:
        rows = PostgreSQLRows(driver)

        assert works(rows)
        assert driver.run("SHOW transaction_isolation", doing="looking") == [("read committed",)]

"""`machinery migrate`, as a user types it."""

from __future__ import annotations

import json
import os

import psycopg
import pytest

from machinery_py.connections.postgresql.schema import OURS
from tests.cli.app import App, app_in_a_folder
from tests.support.servers import PostgreSQLServer

app = app_in_a_folder


@pytest.fixture
def url(postgresql_server: PostgreSQLServer) -> str:
    """An empty database, whose password must not be shown."""
    postgresql_server.start()
    url = postgresql_server.new_database(f"d{os.urandom(4).hex()}").replace("+psycopg", "")
    return url.replace("postgres@", "postgres:secret@")


def test_tables_are_made_and_then_up_to_date(app: App, url: str) -> None:
    first = app.run("migrate", "tasks", MACHINERY_BROKER=url).stdout
    again = app.run("migrate", "tasks", MACHINERY_BROKER=url).stdout

    assert first.endswith(f": made, version {OURS.version}\n")
    assert again.endswith(f": up to date, version {OURS.version}\n")
    assert "secret" not in first + again
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT count(*) FROM machinery.tasks").fetchone() == (0,)


def test_sql_is_printed_and_not_run(app: App, url: str) -> None:
    script = app.run("migrate", "tasks", "--sql", MACHINERY_BROKER=url).stdout
    with psycopg.connect(url, autocommit=True) as connection:
        there = "SELECT to_regnamespace('machinery') IS NOT NULL"
        assert connection.execute(there).fetchone() == (False,)
        connection.execute(script.encode())
        assert connection.execute(there).fetchone() == (True,)

    assert app.run("migrate", "tasks", "--sql", MACHINERY_BROKER=url).stdout == "\n"


def test_other_stores_have_nothing_to_migrate(app: App) -> None:
    assert app.run("migrate", "tasks").stdout == "nothing to migrate\n"
    assert json.loads(app.run("migrate", "tasks", "--sql", "--json").stdout) == {"sql": []}

"""The outbox in Django's transactions: what is committed runs once, what is rolled back never."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import sqlalchemy

from tests.docs.pages import environment

HANG = 90.0  # seconds; a guard

PROGRAM = """
import os, signal, sys
import django
from django.conf import settings

engine, name, host, port, user, url, point = sys.argv[1:]
settings.configure(
    DATABASES={
        "default": {"ENGINE": engine, "NAME": name, "HOST": host, "PORT": port, "USER": user}
    },
    INSTALLED_APPS=["machinery_py.contrib.django", "machinery_py.contrib.django.outbox"],
    MACHINERY={"url": url},
    USE_TZ=True,
)
django.setup()

from django.core.management import call_command
from django.db import connection, transaction
from machinery_py import chord, group
from machinery_py.contrib.django import server
from machinery_py.contrib.django.outbox import outbox
from machinery_py.contrib.django.outbox.models import OutboxRow
from machinery_py.testing.waiting import wait_until

call_command("migrate", verbosity=0)
ran = []

@server.task
def note(number: int) -> int:
    ran.append(number)
    return number

@server.task
def total(*numbers: int) -> int:
    ran.append(sum(numbers))
    return sum(numbers)

with transaction.atomic():
    for number in range(3):
        outbox.send(note.signature(number))
    kept = outbox.send(chord(group(note.signature(10), note.signature(20)), total.partial()))
    with transaction.atomic():
        outbox.send(note.signature(98))
        transaction.set_rollback(True)
with transaction.atomic():
    outbox.send(note.signature(99))
    transaction.set_rollback(True)
assert kept.callback.get_state().state == "PENDING"

def die(execute, sql, params, many, context):
    if point == "locked" and "body" in sql and sql.startswith("SELECT"):
        execute(sql, params, many, context)
        os.kill(os.getpid(), signal.SIGKILL)
    if point == "before delete" and sql.startswith("DELETE") and " IN (" in sql:
        os.kill(os.getpid(), signal.SIGKILL)
    return execute(sql, params, many, context)

connection.close()
server.close()
child = os.fork()
if not child:
    with connection.execute_wrapper(die):
        outbox.publish()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
assert OutboxRow.objects.count() == 4
with outbox.relay():
    wait_until(lambda: not OutboxRow.objects.exists(), what="an empty outbox")
server.new_worker(concurrency=1, burst=True).launch()
print(sorted(ran), flush=True)

OutboxRow.objects.create(uuid="a", name="b", body=b"no call")
ran.clear()
with server.new_worker(concurrency=1):  # which has a relay
    with transaction.atomic():
        result = outbox.send(note.signature(7))
    print(result.get(timeout=60))
    aside = OutboxRow.objects.exclude(failed_at=None)
    wait_until(lambda: [row.uuid for row in aside.all()] == ["a"], what="the row set aside")
"""


@pytest.mark.parametrize("point", ["locked", "before delete"])
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_committed_calls_run_once_though_the_relay_is_killed(
    database: str, point: str, redis_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if database == "sqlite":
        words = ["django.db.backends.sqlite3", str(tmp_path / "shop.db"), "", "", ""]
    else:
        url = request.getfixturevalue("postgresql_url")
        words = words_of("django.db.backends.postgresql", url)

    done = run(PROGRAM, [*words, redis_url, point], tmp_path)

    assert done.stdout == "[0, 1, 2, 10, 20, 30]\n7\n", done.stderr


COUNTED = """
from django.db.backends.postgresql import base

class DatabaseWrapper(base.DatabaseWrapper):
    given = 0

    def get_new_connection(self, params):
        DatabaseWrapper.given += 1
        return super().get_new_connection(params)
"""

COUNTING = (
    PROGRAM[: PROGRAM.index("with transaction.atomic")]
    + """
from counted.base import DatabaseWrapper
from machinery_py.contrib import outbox as relays

relays.FIRST_BATCH = relays.BATCH = 1
for number in range(5):
    outbox.send(note.signature(number))
connection.close()
DatabaseWrapper.given = 0
with outbox.relay():
    wait_until(lambda: not OutboxRow.objects.exists(), what="an empty outbox")
print(DatabaseWrapper.given, flush=True)
"""
)


def test_relay_keeps_its_connection_and_listens_beside_the_pool(
    postgresql_url: str, redis_url: str, tmp_path: Path
) -> None:
    (tmp_path / "counted").mkdir()
    (tmp_path / "counted" / "base.py").write_text(COUNTED)

    done = run(COUNTING, [*words_of("counted", postgresql_url), redis_url, ""], tmp_path)

    assert done.stdout == "2\n", done.stderr  # this thread's, and the relay's


def words_of(engine: str, url: str) -> list[str]:
    """Return what the program reads of this database."""
    made = sqlalchemy.make_url(url)
    return [engine, made.database or "", made.host or "", str(made.port or ""), made.username or ""]


def run(program: str, words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )

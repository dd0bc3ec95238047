"""A consumer dies, and nobody sees what it ran: by its files, it was on another host."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from machinery_py import Config, Server
from machinery_py.brokers.base import Message
from machinery_py.testing.waiting import HANG
from tests.support.fixtures import url_of

ROOT = pathlib.Path(__file__).parents[2]

#: Takes two messages, says their strikes, runs the one that is named, and dies.
DYING = """
import os, sys
from machinery_py import Config, Server
from machinery_py.connections import session_files
session_files.HAS_LOCKS = sys.argv[1][:6] != "sqlite"  # its files lie beside the messages
broker = Server(Config(broker=sys.argv[1], result_backend="memory://", lease=1.0)).broker
consumer, found = broker.consume(["q"], worker="dying"), []
while len(found) < 2:
    broker.tend()
    consumer.beat()
    found += consumer.receive(2 - len(found), 0.2)
for one in found:
    if one.body == b"runs":
        consumer.run_begins(one)
print(*sorted((one.body.decode(), one.strikes) for one in found), flush=True)
os._exit(9)
"""


@pytest.mark.parametrize("store", ["redis", "amqp", "sqlite", "postgresql", "mongodb"])
def test_unseen_death_counts_from_the_second_run_on(
    store: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    url = url_of(store, tmp_path / "messages.db", request)
    server = Server(Config(broker=url, result_backend="memory://"))
    server.broker.put(
        [Message(uuid=name, name=name, queue="q", body=name.encode()) for name in ("runs", "held")],
        token="",
    )
    server.close()

    said = [die(url, tmp_path / f"host{number}") for number in range(4)]

    assert said == [f"('held', 0) ('runs', {strikes})" for strikes in (0, 0, 1, 2)]


def die(url: str, folder: pathlib.Path) -> str:
    folder.mkdir()
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    child = subprocess.run(
        [sys.executable, "-c", DYING, url],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * HANG,
    )
    assert child.returncode == 9, child.stderr
    return child.stdout.strip()

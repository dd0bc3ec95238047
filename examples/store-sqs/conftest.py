"""A private moto server in this process, whose SQS goes by the clock of the test."""

from __future__ import annotations

import datetime as dt
import itertools
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from machinery_py.testing.clocks import ManualClock

pytest.importorskip("moto")
pytest.importorskip("boto3")


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    """The address of the server; boto3 finds its credentials in the environment."""
    from moto.server import ThreadedMotoServer

    patch = pytest.MonkeyPatch()
    patch.setenv("AWS_ACCESS_KEY_ID", "testing")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()
    patch.undo()


@pytest.fixture(scope="session")
def sqs(endpoint: str) -> Iterator[Any]:
    from machinery_sqs.aws import connect

    client = connect("sqs", "eu-west-1", endpoint, 10.0)
    yield client
    client.close()


@pytest.fixture(scope="session")
def dynamodb(endpoint: str) -> Iterator[Any]:
    """A client of moto's DynamoDB, made to answer one request at a time.

    When a transaction fails, moto puts all tables back to where they were before it.
    """
    from machinery_sqs.aws import connect
    from moto.dynamodb.responses import DynamoHandler

    answer, one = DynamoHandler.call_action, threading.Lock()

    def alone(handler: Any) -> Any:
        with one:
            return answer(handler)

    patch = pytest.MonkeyPatch()
    patch.setattr(DynamoHandler, "call_action", alone)
    client = connect("dynamodb", "eu-west-1", endpoint, 10.0)
    yield client
    client.close()
    patch.undo()


@pytest.fixture
def empty_table(dynamodb: Any) -> Iterator[str]:
    """The prefix of a table that is emptied after the test; it is made once, to spare the time."""
    from moto.dynamodb.models import dynamodb_backends

    yield "t-"
    for table in dynamodb_backends["123456789012"]["eu-west-1"].tables.values():
        table.items.clear()


@pytest.fixture
def moto_clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """The time by which moto delays and hides messages; a long poll takes its own time."""
    from moto.sqs import models

    clock, steps = ManualClock(dt.datetime.now(dt.timezone.utc)), itertools.count(1)

    def millis() -> float:
        # A moment later each time: moto shows a message that is visible from now on after now.
        return clock.now().timestamp() * 1000.0 + next(steps) * 0.25e-3

    monkeypatch.setattr(models, "unix_time_millis", millis)
    return clock

"""Workers and senders are killed at every step with messages in RabbitMQ and states in each store that processes share.

`make chaos` tries every point over every backend (MACHINERY_TEST_FULL=1); else each point is tried over one, in turn.
What lies between two steps of a consumer is in tests/brokers/rabbitmq/test_consumer.py.
"""

from __future__ import annotations

import itertools
import os
import pathlib

import pytest

from machinery_py import Server, State
from tests.backends.memcached.case import empty_memcached
from tests.stores.mongodb.case import mongodb_server, mongodb_url
from tests.stores.rabbitmq.case import amqp_url, vhosts
from tests.system.crashing import REFUSAL_POINTS, SENDER_POINTS, TWO_STORE_POINTS, WORKER_POINTS
from tests.system.test_crash_points import (
    Stage,
    check_history,
    finish,
    survive_sender,
    survive_worker,
    survivor,
)
from tests.system.test_refusals import declare_otherwise

__all__ = ["amqp_url", "empty_memcached", "mongodb_server", "mongodb_url", "survivor", "vhosts"]

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
BACKENDS = ("redis", "sqlite", "mongodb", "memcache")
POINTS = (*WORKER_POINTS, *TWO_STORE_POINTS)

CELLS = (
    list(itertools.product(BACKENDS, POINTS, ("chord", "retry", "broken-chord")))
    if FULL
    else [(backend, point, "chord") for backend, point in zip(itertools.cycle(BACKENDS), POINTS)]
)
SENDS = (
    list(itertools.product(BACKENDS, SENDER_POINTS, ("task", "chain", "chord")))
    if FULL
    else [
        (backend, point, "chord")
        for backend, point in zip(BACKENDS, itertools.cycle(SENDER_POINTS))
    ]
)


@pytest.fixture
def stage(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, amqp_url: str, mongodb_url: str
) -> Stage:
    match request.param:
        case "redis":
            backend = request.getfixturevalue("empty_redis").url
        case "memcache":
            backend = request.getfixturevalue("empty_memcached").url
        case "sqlite":
            backend = f"sqlite:///{tmp_path}/states.db"
        case _:
            backend = mongodb_url
    return Stage(tmp_path, amqp_url, backend)


@pytest.mark.parametrize(("stage", "point", "shape"), CELLS, indirect=["stage"])
def test_a_worker_on_rabbitmq_that_is_killed_loses_and_doubles_nothing(
    stage: Stage, survivor: Server, shape: str, point: str
) -> None:
    survive_worker(stage, survivor, shape, point, certain=point in TWO_STORE_POINTS)


@pytest.mark.parametrize(("stage", "point", "shape"), SENDS, indirect=["stage"])
def test_a_sender_to_rabbitmq_that_is_killed_leaves_all_or_nothing(
    stage: Stage, survivor: Server, shape: str, point: str
) -> None:
    survive_sender(stage, survivor, shape, point)


REFUSALS = (*REFUSAL_POINTS, "inside-settle", "after-clear")


@pytest.mark.parametrize(
    ("stage", "point"),
    list(zip(itertools.cycle(("redis", "sqlite", "mongodb")), REFUSALS)),
    indirect=["stage"],
)
def test_a_worker_that_is_killed_while_a_message_is_refused_loses_nothing(
    stage: Stage, survivor: Server, point: str
) -> None:
    declare_otherwise(stage.broker, "refused")
    uuid = stage.run("send", "refused", "").stdout.strip()

    first = stage.run("worker", point)
    finish(stage, survivor)

    assert first.returncode == -9, first.stderr
    check_history(stage.calls(), "refused", point)
    state = survivor.result(uuid).get_state()
    assert (state.state, "queue 'refused'" in state.error) == (State.FAILURE, True)
    assert {(letter.uuid, letter.reason) for letter in survivor.inspect.dead()} == {
        (uuid, "refused")
    }

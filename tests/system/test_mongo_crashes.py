"""A worker, and a sender, are killed after each of their writes to MongoDB; another worker finishes what they have begun.

A settlement on one server is many writes, and each gap between two is a crash point (docs/explanation/mongodb-protocol.md). So it
is where MongoDB is one of two stores, which have steps between them as well. `make chaos` tries them all
(MACHINERY_TEST_FULL=1); otherwise one of each kind.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from machinery_py import Config, Server, Task
from machinery_py.connections.mongodb.client import MongoDriver
from machinery_py.stores import outbox as two_stores
from machinery_py.testing.waiting import wait_until
from tests.stores.mongodb.case import mongodb_server, mongodb_url
from tests.stores.rabbitmq.case import amqp_url, vhosts
from tests.system import crashing
from tests.system.crashing import TWO_STORE_POINTS, WORKER_POINTS
from tests.system.test_crash_points import (
    EXPECTED,
    HANG,
    Stage,
    check_states,
    nothing_left,
    survive_worker,
)

__all__ = ["amqp_url", "mongodb_server", "mongodb_url", "vhosts"]

SCRIPT = pathlib.Path(__file__).with_name("mongo_crashing.py")
ONE = "mongodb"
PAIRS = ("mongodb+redis", "amqp+mongodb", "redis+mongodb")  # broker and result backend

#: Writes to MongoDB that a worker makes for each of these shapes, and more.
CERTAIN = {ONE: 10, "mongodb+redis": 4, "amqp+mongodb": 2, "redis+mongodb": 4}

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))

#: Stores, shape, before or after the write is carried out, number of the write.
WRITES = (
    [
        # After the nth write is before the next one, but for what the server does in between: one shape is enough.
        *(
            (ONE, shape, "before", number)
            for shape in ("retry", "chord")
            for number in range(1, 16)
        ),
        *((ONE, "broken-chord", "before", number) for number in range(4, 15, 2)),
        *((ONE, "retry", "after", number) for number in range(1, 15, 2)),
        *(
            (pair, shape, "before", number)
            for pair in PAIRS
            for shape in ("retry", "chord")
            for number in range(1, 13)
        ),
        *((pair, "retry", "after", number) for pair in PAIRS for number in range(1, 9, 2)),
    ]
    if FULL
    else [
        (ONE, "retry", "before", 3),
        (ONE, "retry", "before", 6),
        (ONE, "retry", "before", 8),
        (ONE, "retry", "after", 3),
        (ONE, "chord", "before", 1),
        (ONE, "chord", "before", 5),
        (ONE, "chord", "before", 9),
        (ONE, "chord", "before", 10),
        (ONE, "broken-chord", "before", 8),
        *((pair, "retry", "before", number) for pair, number in zip(PAIRS, (4, 2, 4), strict=True)),
    ]
)
STEPS = (
    [
        *(
            (ONE, point, shape)
            for point, shape in (
                ("after-claim", "chord"),
                ("in-task", "delayed"),
                ("before-settle", "chain"),
                ("after-settle", "retry"),
                ("before-fire", "chord"),
                ("after-fire", "broken-chord"),
                ("after-tend", "chord"),
            )
        ),
        *itertools.product(
            PAIRS, (*WORKER_POINTS, *TWO_STORE_POINTS), ("retry", "chord", "broken-chord")
        ),
    ]
    if FULL
    else [
        (ONE, "after-claim", "chord"),
        (ONE, "after-settle", "retry"),
        (ONE, "before-fire", "chord"),
        ("mongodb+redis", "after-put", "retry"),
        ("mongodb+redis", "inside-fire", "chord"),
        ("amqp+mongodb", "inside-settle", "retry"),
        ("amqp+mongodb", "after-put", "chord"),
        ("redis+mongodb", "after-clear", "retry"),
        ("redis+mongodb", "inside-settle", "chord"),
    ]
)
SENDS = (
    [
        *((ONE, when, number) for when in ("before", "after") for number in range(1, 9)),
        *(
            (pair, when, number)
            for pair in PAIRS
            for when in ("before", "after")
            for number in range(1, 5)
        ),
    ]
    if FULL
    else [
        (ONE, "after", 1),
        (ONE, "before", 3),
        (ONE, "before", 5),
        ("mongodb+redis", "after", 1),
        ("amqp+mongodb", "before", 2),
    ]
)
#: After the claim, its state, its message, and all of it.
UNIQUE = (
    [(when, number) for when in ("before", "after") for number in range(1, 6)]
    if FULL
    else [
        ("before", 2),
        ("before", 3),
        ("after", 3),
    ]
)


@pytest.fixture
def stage(
    request: pytest.FixtureRequest,
    tmp_path: pathlib.Path,
    mongodb_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Stage:
    monkeypatch.setattr(MongoDriver, "intent_age", 0.3)
    monkeypatch.setattr(two_stores, "OUTBOX_AGE", 0.5)
    urls = {
        "mongodb": lambda: mongodb_url,
        "redis": lambda: request.getfixturevalue("empty_redis").url,
        "amqp": lambda: request.getfixturevalue("amqp_url"),
    }
    broker, _, backend = request.param.partition("+")
    return Stage(tmp_path, urls[broker](), urls[backend or broker]())


@pytest.fixture
def survivor(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("CRASH_LEDGER", str(stage.ledger))
    server = Server(Config(broker=stage.broker, result_backend=stage.backend, lease=2.0))
    for task in crashing.server.app.registry:
        server.app.registry.add(Task(task.name, task.function, task.settings, server))
    yield server
    server.close()


def run(stage: Stage, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.system.mongo_crashing", *words],
        env=stage.environment,
        cwd=SCRIPT.parents[2],
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )


def finish(stage: Stage, survivor: Server) -> None:
    nothing = nothing_left(survivor)
    with survivor.new_worker(concurrency=2):
        # What is between its first write and its last is in none of the places that are looked at, but in a deed.
        wait_until(
            lambda: nothing() and not unfinished(survivor) and nothing(),
            timeout=HANG,
            what="all is settled",
        )


def unfinished(server: Server) -> bool:
    driver = next(
        one.driver
        for one in (server.broker, server.backend)
        if isinstance(getattr(one, "driver", None), MongoDriver)
    )  # type: ignore[attr-defined]
    collections = (
        "machinery_tokens",
        "machinery_messages",
        "machinery_chords",
        "tasks",
        "machinery_claims",
    )
    return any(
        driver.run(
            lambda store, name=name: store[name].find_one({"deed_at": {"$gt": 0}}), doing="looking"
        )
        for name in collections
    )


@pytest.mark.parametrize(("stage", "shape", "when", "number"), WRITES, indirect=["stage"])
def test_a_worker_that_is_killed_at_any_write_loses_and_doubles_nothing(
    stage: Stage,
    survivor: Server,
    request: pytest.FixtureRequest,
    shape: str,
    when: str,
    number: int,
) -> None:
    sent = stage.run("send", shape, "")
    assert sent.returncode == 0, sent.stderr

    first = run(stage, "worker", shape, str(number), when)
    finish(stage, survivor)

    killed = stage.calls()["killed"]
    assert killed or number > CERTAIN[request.node.callspec.params["stage"]]
    assert first.returncode == (-9 if killed else 0), first.stderr
    for function, count in EXPECTED[shape].items():
        # Two slots, and what the second of them was doing at that moment.
        assert (
            count
            <= stage.calls()[function]
            <= count + (4 if function in ("plain", "shaky", "broken") else 1)
        ), stage.calls()
    check_states(survivor, sent.stdout.strip(), shape)


@pytest.mark.parametrize(("stage", "point", "shape"), STEPS, indirect=["stage"])
def test_a_worker_that_is_killed_between_two_steps_loses_and_doubles_nothing(
    stage: Stage, survivor: Server, shape: str, point: str
) -> None:
    survive_worker(stage, survivor, shape, point, certain=point in TWO_STORE_POINTS, finish=finish)


@pytest.mark.parametrize(("stage", "when", "number"), SENDS, indirect=["stage"])
def test_a_sender_that_is_killed_at_any_write_leaves_all_or_nothing(
    stage: Stage, survivor: Server, when: str, number: int
) -> None:
    sent = run(stage, "send", "chord", str(number), when)
    assert sent.returncode in (0, -9), sent.stderr

    finish(stage, survivor)

    calls = stage.calls()
    assert {name: calls[name] for name in ("plain", "after")} in (
        {"plain": 5, "after": 1},
        {"plain": 0, "after": 0},
    ), calls
    if sent.returncode == 0:
        assert calls["plain"] == 5


@pytest.mark.parametrize(
    ("stage", "when", "number"), [(ONE, *write) for write in UNIQUE], indirect=["stage"]
)
def test_a_sender_of_a_unique_task_that_is_killed_at_any_write_has_sent_it_or_not(
    stage: Stage, survivor: Server, when: str, number: int
) -> None:
    first = run(stage, "unique", "a", str(number), when)
    assert first.returncode in (0, -9), first.stderr

    second = survivor.send(crashing.alone.signature("a"))
    finish(stage, survivor)

    assert stage.calls()["alone"] == 1
    assert second.get(timeout=HANG) == "a"
    assert second.duplicate is ((when, number) != ("before", 1))
    assert not survivor.send(crashing.alone.signature("a")).duplicate

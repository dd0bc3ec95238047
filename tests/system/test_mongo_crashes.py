"""A worker, and a sender, are killed after each of their writes to MongoDB; another worker finishes what they have begun.

A settlement on one server is many writes, and each gap between two is a crash point (docs/explanation/mongodb-protocol.md).
`make chaos` tries them all (MACHINERY_TEST_FULL=1); otherwise one of each kind.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

from machinery_py import Config, Server, Task
from machinery_py._drivers.mongo import MongoDriver
from machinery_py.testing.waiting import wait_until
from tests.stores.mongo_case import mongodb_server, mongodb_url
from tests.system import crashing
from tests.system.test_crash_points import EXPECTED, HANG, Stage, check_history, check_states, nothing_left

__all__ = ["mongodb_server", "mongodb_url"]

SCRIPT = pathlib.Path(__file__).with_name("mongo_crashing.py")
CERTAIN = 10  # writes that a worker makes for each of these shapes, and more

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))

#: Shape, before or after the write is carried out, number of the write.
WRITES = [
    # After the nth write is before the next one, but for what the server does in between: one shape is enough.
    *((shape, "before", number) for shape in ("retry", "chord") for number in range(1, 16)),
    *(("broken-chord", "before", number) for number in range(4, 15, 2)),
    *(("retry", "after", number) for number in range(1, 15, 2)),
] if FULL else [
    ("retry", "before", 3), ("retry", "before", 6), ("retry", "before", 8), ("retry", "after", 3),
    ("chord", "before", 1), ("chord", "before", 5), ("chord", "before", 9), ("chord", "before", 10),
    ("broken-chord", "before", 8),
]
STEPS = [
    ("after-claim", "chord"), ("in-task", "delayed"), ("before-settle", "chain"), ("after-settle", "retry"),
    ("before-fire", "chord"), ("after-fire", "broken-chord"), ("after-tend", "chord"),
] if FULL else [("after-claim", "chord"), ("after-settle", "retry"), ("before-fire", "chord")]
SENDS = [(when, number) for when in ("before", "after") for number in range(1, 9)] if FULL else [
    ("after", 1), ("before", 3), ("before", 5),
]
#: After the claim, its state, its message, and all of it.
UNIQUE = [(when, number) for when in ("before", "after") for number in range(1, 6)] if FULL else [
    ("before", 2), ("before", 3), ("after", 3),
]


@pytest.fixture
def stage(tmp_path: pathlib.Path, mongodb_url: str, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(MongoDriver, "deed_age", 0.3)
    return Stage(tmp_path, mongodb_url, mongodb_url)


@pytest.fixture
def survivor(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("CRASH_LEDGER", str(stage.ledger))
    server = Server(Config(broker=stage.broker, result_backend=stage.backend, lease=2.0))
    for task in crashing.server.engine.registry:
        server.engine.registry.add(Task(task.name, task.function, task.settings, server))
    yield server
    server.close()


def run(stage: Stage, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tests.system.mongo_crashing", *words], env=stage.environment,
                          cwd=SCRIPT.parents[2], capture_output=True, text=True, timeout=HANG, check=False)


def finish(stage: Stage, survivor: Server) -> None:
    nothing = nothing_left(survivor)
    with survivor.new_worker(concurrency=2):
        # What is between its first write and its last is in none of the places that are looked at, but in a deed.
        wait_until(lambda: nothing() and not unfinished(survivor) and nothing(), timeout=HANG, what="all is settled")


def unfinished(server: Server) -> bool:
    driver: MongoDriver = server.broker.driver  # type: ignore[attr-defined]
    collections = ("machinery_tokens", "machinery_messages", "machinery_chords", "tasks", "machinery_claims")
    return any(driver.run(lambda store, name=name: store[name].find_one({"deed_at": {"$gt": 0}}), doing="looking")  # type: ignore[misc]
               for name in collections)


@pytest.mark.parametrize(("shape", "when", "number"), WRITES)
def test_a_worker_that_is_killed_at_any_write_loses_and_doubles_nothing(
    stage: Stage, survivor: Server, shape: str, when: str, number: int
) -> None:
    sent = stage.run("send", shape, "")
    assert sent.returncode == 0, sent.stderr

    first = run(stage, "worker", shape, str(number), when)
    finish(stage, survivor)

    killed = stage.calls()["killed"]
    assert killed or number > CERTAIN
    assert first.returncode == (-9 if killed else 0), first.stderr
    for function, count in EXPECTED[shape].items():
        # Two slots, and what the second of them was doing at that moment.
        assert count <= stage.calls()[function] <= count + (4 if function in ("plain", "shaky", "broken") else 1), stage.calls()
    check_states(survivor, sent.stdout.strip(), shape)


@pytest.mark.parametrize(("point", "shape"), STEPS)
def test_a_worker_that_is_killed_between_two_steps_loses_and_doubles_nothing(
    stage: Stage, survivor: Server, shape: str, point: str
) -> None:
    sent = stage.run("send", shape, "")
    assert sent.returncode == 0, sent.stderr

    first = stage.run("worker", point)
    finish(stage, survivor)

    assert first.returncode == (-9 if stage.calls()["killed"] else 0), first.stderr
    check_history(stage.calls(), shape, point)
    check_states(survivor, sent.stdout.strip(), shape)


@pytest.mark.parametrize(("when", "number"), SENDS)
def test_a_sender_that_is_killed_at_any_write_leaves_all_or_nothing(
    stage: Stage, survivor: Server, when: str, number: int
) -> None:
    sent = run(stage, "send", "chord", str(number), when)
    assert sent.returncode in (0, -9), sent.stderr

    finish(stage, survivor)

    calls = stage.calls()
    assert {name: calls[name] for name in ("plain", "after")} in ({"plain": 5, "after": 1}, {"plain": 0, "after": 0}), calls
    if sent.returncode == 0:
        assert calls["plain"] == 5


@pytest.mark.parametrize(("when", "number"), UNIQUE)
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

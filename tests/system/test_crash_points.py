"""A real worker process is killed at every step between claim and acknowledgement; another one finishes its work.

What must hold in every cell: nothing is lost, nothing completes twice, every callback and every chord runs exactly once, and
a task runs a second time only if the first run may have begun.
"""

from __future__ import annotations

import collections
import itertools
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from machinery_py import Server, State, Task
from machinery_py.brokers.base import QueueStats
from machinery_py.testing.waiting import wait_until
from tests.backends.memcached.case import empty_memcached
from tests.stores.redis_cluster.case import empty_cluster, url_of
from tests.system import crashing
from tests.system.crashing import (
    CLUSTER_POINTS,
    SENDER_POINTS,
    SHAPES,
    TWO_STORE_POINTS,
    WORKER_POINTS,
)

__all__ = ["empty_cluster", "empty_memcached"]

SCRIPT = pathlib.Path(__file__).with_name("crashing.py")
HANG = 60.0  # seconds; a guard, nothing is measured with it

#: How often each function must have completed, and what the ledger may hold more of because of the kill.
EXPECTED: dict[str, dict[str, int]] = {
    "task": {"plain": 1, "after": 1},
    "retry": {"shaky": 2, "after": 1},
    "failure": {"broken": 1, "on_error": 1},
    "chain": {"plain": 1, "after": 2},
    "group": {"plain": 5},
    "chord": {"plain": 5, "after": 1},
    "broken-chord": {"plain": 1, "broken": 1, "on_error": 1},
    "delayed": {"plain": 1, "after": 1},
    "refused": {"plain": 1, "on_error": 1},
}
#: How many tasks there are in the end. A callback that was published twice would have a UUID of its own.
TASKS = {
    "task": 2,
    "retry": 2,
    "failure": 2,
    "chain": 3,
    "group": 5,
    "chord": 6,
    "broken-chord": 4,
    "delayed": 2,
}


class Stage:
    """The files of one cell, and the processes that use them."""

    def __init__(self, folder: pathlib.Path, broker: str, backend: str) -> None:
        self.ledger = folder / "ledger"
        self.broker = broker
        self.backend = backend

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "CRASH_BROKER": self.broker,
            "CRASH_BACKEND": self.backend,
            "CRASH_LEDGER": str(self.ledger),
            "PYTHONPATH": str(SCRIPT.parents[2]),
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(SCRIPT), *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )

    def calls(self) -> collections.Counter[str]:
        text = self.ledger.read_text() if self.ledger.exists() else ""
        return collections.Counter(line.split()[0] for line in text.splitlines())

    def server(self) -> Server:
        return Server(broker=self.broker, result_backend=self.backend)


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Stage:
    if request.param == "redis":
        url: str = request.getfixturevalue("empty_redis").url
        return Stage(tmp_path, url, url)
    if request.param == "cluster":
        nodes = url_of(request.getfixturevalue("empty_cluster"))
        return Stage(tmp_path, nodes, nodes)
    first = f"sqlite:///{tmp_path}/first.db"
    if request.param == "memcached":
        return Stage(tmp_path, first, request.getfixturevalue("empty_memcached").url)
    second = first if request.param == "one store" else f"sqlite:///{tmp_path}/second.db"
    return Stage(tmp_path, first, second)


def nothing_left(server: Server) -> Callable[[], bool]:
    def empty() -> bool:
        stats: list[QueueStats] = server.broker.stats()
        return not any(one.waiting or one.running or one.delayed for one in stats)

    def check() -> bool:
        # Twice: a callback may be on its way from the ready groups to its queue while we look at one and then the other.
        return (
            empty()
            and not server.backend.ready_groups(1)
            and not server.backend.unsent(1, older_than=0.0)
            and empty()
        )

    return check


@pytest.fixture
def survivor(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server in this process, with the same tasks, that nobody kills."""
    monkeypatch.setenv("CRASH_LEDGER", str(stage.ledger))
    server = stage.server()
    for task in crashing.server.app.registry:
        server.app.registry.add(Task(task.name, task.function, task.settings, server))
    yield server
    server.close()


def cells() -> Iterator[tuple[str, str, str]]:
    """Every shape at every point on one store; on two, and at the points between steps, the shapes with most steps."""
    for point in WORKER_POINTS:
        for shape in SHAPES:
            if not point.endswith("tend") or shape in ("retry", "chord"):
                yield "one store", point, shape
            if shape in ("retry", "chord"):
                yield "two stores", point, shape
            if shape in ("retry", "chain", "broken-chord", "chord"):
                yield "memcached", point, shape
            if shape in (
                "retry",
                "chain",
                "broken-chord",
                "chord",
                "delayed",
            ) and not point.startswith("inside"):
                yield "redis", point, shape  # its steps are scripts: there is no inside
    for point, stores in itertools.product(TWO_STORE_POINTS, ("two stores", "memcached")):
        yield stores, point, "retry" if stores == "two stores" else "chord"
    for point in CLUSTER_POINTS:
        yield "cluster", point, "broken-chord"
        if point in ("after-verdict", "after-publish"):
            yield "cluster", point, "retry"
    for point in ("after-claim", "inside-settle", "inside-fire"):
        yield "cluster", point, "chord"


@pytest.mark.parametrize(("stage", "point", "shape"), list(cells()), indirect=["stage"])
def test_a_worker_that_is_killed_loses_and_doubles_nothing(
    stage: Stage, survivor: Server, shape: str, point: str
) -> None:
    survive_worker(
        stage, survivor, shape, point, certain=point in (*CLUSTER_POINTS, *TWO_STORE_POINTS)
    )


def finish(_: Stage, survivor: Server) -> None:
    with survivor.new_worker(concurrency=2):
        wait_until(nothing_left(survivor), timeout=HANG, what="all messages are settled")


def survive_worker(
    stage: Stage,
    survivor: Server,
    shape: str,
    point: str,
    *,
    certain: bool,
    finish: Callable[[Stage, Server], None] = finish,
) -> None:
    """A worker is killed at that point (for sure, if `certain`), and the survivor ends what it has left."""
    sent = stage.run("send", shape, "")
    assert sent.returncode == 0, sent.stderr

    first = stage.run("worker", point)
    finish(stage, survivor)

    killed = stage.calls()["killed"]
    assert first.returncode == (-9 if killed else 0), first.stderr
    assert killed or not certain
    check_history(stage.calls(), shape, point)
    check_states(survivor, sent.stdout.strip(), shape)


def survive_sender(stage: Stage, survivor: Server, shape: str, point: str) -> None:
    """A sender is killed at that point: nothing was sent, or all of it."""
    sent = stage.run("send", shape, point)
    assert sent.returncode == -9

    finish(stage, survivor)

    calls = stage.calls()
    if point == "before-submit":
        assert set(calls) == {"killed"}
    else:
        assert {name: calls[name] for name in EXPECTED[shape]} == EXPECTED[shape]


def check_history(calls: collections.Counter[str], shape: str, point: str) -> None:
    """A run that the kill cut off, or whose result it kept from being stored, is repeated; nothing else is."""
    expected = EXPECTED[shape]
    # Two slots, and what the second of them was doing at that moment. A chord is fired when all of its members have been settled,
    # but for one that is broken: that is failed at once, while another member may be running.
    is_quiet = point in ("before-fire", "inside-fire") and shape != "broken-chord"
    slack = 4 if calls["killed"] and not is_quiet else 0
    for function, count in expected.items():
        assert count <= calls[function] <= count + slack, (function, calls)
    assert set(calls) <= {*expected, "killed"}


def check_states(server: Server, uuid: str, shape: str) -> None:
    if not server.backend.features.listing:
        # The members of a group; else the last task of the shape, which of a chord is the callback.
        states = (
            server.backend.group_task_states(uuid)
            if shape == "group"
            else [server.backend.get_state(uuid)]
        )
        assert {one.state for one in states} == {
            State.FAILURE if shape in ("broken-chord", "failure") else State.SUCCESS
        }
        return
    states = server.inspect.tasks(limit=100)
    assert all(state.is_finished for state in states), states
    assert len(states) == TASKS[shape], states
    if shape == "broken-chord":
        [callback] = [state for state in states if state.task_name == "after"]
        assert callback.state is State.FAILURE
        assert "broken" in callback.error
    elif shape == "failure":
        assert server.result(uuid).get_state().state is State.FAILURE
    else:
        assert {state.state for state in states} == {State.SUCCESS}
    assert not server.inspect.dead()


@pytest.mark.parametrize(
    ("stage", "shape"),
    [
        *itertools.product(
            ("one store", "two stores", "redis", "memcached"), ("task", "chain", "chord")
        ),
        ("cluster", "chord"),
    ],
    indirect=["stage"],
)
@pytest.mark.parametrize("point", SENDER_POINTS)
def test_a_sender_that_is_killed_leaves_all_or_nothing(
    stage: Stage, survivor: Server, shape: str, point: str
) -> None:
    survive_sender(stage, survivor, shape, point)

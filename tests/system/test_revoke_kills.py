"""A process that revokes a waiting task is killed at every step; workers find the task revoked or not, never half of it.

The steps, and who goes on after each, stand in machinery_py/revocation.py and docs/explanation/delivery-guarantees.md.
The task is a member of a chord and the first of a chain, and has an error callback: all of that follows from its end, once.
"""

from __future__ import annotations

import os
import pathlib

import pytest

from machinery_py import Server, State
from machinery_py.stores import outbox
from machinery_py.testing.waiting import wait_until
from tests.stores.mongodb.case import own_mongodb
from tests.stores.rabbitmq.case import amqp_url, vhosts
from tests.stores.redis_cluster.case import empty_cluster, url_of
from tests.system import crashing
from tests.system.crashing import (
    CLUSTER_POINTS,
    REVOKE_POINTS,
    REVOKED,
    TWO_STORE_POINTS,
    TX_POINTS,
)
from tests.system.test_crash_points import HANG, Stage, nothing_left, survivor

__all__ = ["amqp_url", "empty_cluster", "survivor", "vhosts"]

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))

#: Where Redis alone keeps all, a step is a script, and has no inside.
POINTS = {
    "sqlite": REVOKE_POINTS,
    "redis": tuple(point for point in REVOKE_POINTS if not point.startswith("inside")),
    "amqp+redis": (*REVOKE_POINTS, *TWO_STORE_POINTS),
    "amqp+sqlite": (*REVOKE_POINTS, *TWO_STORE_POINTS),
    "cluster": (*REVOKE_POINTS, *CLUSTER_POINTS),
    "mongodb": tuple(point for point in REVOKE_POINTS if not point.startswith("inside")),
    "amqp": (*REVOKE_POINTS, *TWO_STORE_POINTS, *TX_POINTS),
}
STORES = tuple(POINTS) if FULL else ("sqlite", "redis", "amqp+redis")
ALIKE = ("before-fire", "before-chord")  # the steps behind them have a point in front of them, too
CELLS = [
    (stores, point) for stores in STORES for point in POINTS[stores] if FULL or point not in ALIKE
]

UNTOUCHED = ("before-remember",)
REMEMBERED = ("after-remember", "before-fire")  # and not ended yet
WITHIN = ("inside-fire", *CLUSTER_POINTS, *TX_POINTS)  # one or the other, as the stores have it


@pytest.fixture(autouse=True)
def sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead one's outbox is published after half a second, not five."""
    monkeypatch.setattr(outbox, "OUTBOX_AGE", 0.5)


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Stage:
    broker, _, backend = request.param.partition("+")
    urls = {"sqlite": f"sqlite:///{tmp_path}/machinery.db"}
    for kind in {broker, backend or broker} - {"sqlite"}:
        match kind:
            case "amqp":
                urls[kind] = request.getfixturevalue("amqp_url")
            case "mongodb":
                urls[kind] = own_mongodb(request)
            case "cluster":
                urls[kind] = url_of(request.getfixturevalue("empty_cluster"))
            case _:
                urls[kind] = request.getfixturevalue(f"empty_{kind}").url
    return Stage(tmp_path, urls[broker], urls[backend or broker])


def killed_at(point: str, stage: Stage, survivor: Server) -> State:
    """How the task stands when whoever revoked it is dead."""
    survivor.send(crashing.revoked())

    done = stage.run("revoke", REVOKED, point)

    assert done.returncode == -9, (point, done.stderr)
    return survivor.backend.get_state(REVOKED).state


def let_workers_finish(stage: Stage, survivor: Server) -> list[str]:
    """What was called, but for the kill; each line once for each call."""
    with survivor.new_worker(concurrency=2):
        wait_until(nothing_left(survivor), timeout=HANG, what="all messages are settled")
    return sorted(
        line for line in stage.ledger.read_text().splitlines() if not line.startswith("killed")
    )


def check_revoked(stage: Stage, survivor: Server) -> None:
    calls = let_workers_finish(stage, survivor)
    broken, revoked, ran = calls
    assert (revoked, ran) == ("on_error revoked", "plain 2")
    assert broken.startswith("on_error chord member ")
    state = survivor.backend.get_state(REVOKED)
    assert (state.state, state.error) == (State.FAILURE, "revoked")
    check_all_over(survivor, {"plain": 1, "after": 0, "on_error": 2})


def check_all_over(survivor: Server, succeeded: dict[str, int]) -> None:
    if survivor.backend.features.listing:
        states = survivor.inspect.tasks(limit=100)
        assert all(state.is_finished for state in states), states
        for name, count in succeeded.items():
            assert (
                sum(state.task_name == name and state.state is State.SUCCESS for state in states)
                == count
            ), states
    assert not survivor.inspect.dead()


@pytest.mark.parametrize(("stage", "point"), CELLS, indirect=["stage"])
def test_a_revocation_that_is_killed_is_whole_or_not_there(
    stage: Stage, survivor: Server, point: str
) -> None:
    state = killed_at(point, stage, survivor)

    if point in UNTOUCHED:
        assert state is State.PENDING
        assert let_workers_finish(stage, survivor) == ["after 1", "after 1 2", "plain 1", "plain 2"]
        check_all_over(survivor, {"plain": 2, "after": 2, "on_error": 0})
        return
    if point not in WITHIN:
        assert state is (State.PENDING if point in REMEMBERED else State.FAILURE)
    check_revoked(stage, survivor)


REPEATED = CELLS if FULL else [("sqlite", "after-remember"), ("amqp+redis", "inside-fire")]


@pytest.mark.parametrize(("stage", "point"), REPEATED, indirect=["stage"])
def test_a_revocation_that_is_killed_may_be_repeated(
    stage: Stage, survivor: Server, point: str
) -> None:
    killed_at(point, stage, survivor)

    survivor.revoke([REVOKED])

    assert survivor.backend.get_state(REVOKED).state is State.FAILURE
    check_revoked(stage, survivor)

"""A process is killed at each step of a limited, debounced or batch task, and of a workflow's call.

The steps, and what a crash leaves: docs/explanation/limits.md, unique.md and workflows.md.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from pathlib import Path

import pytest

from machinery_py import Server, State, WorkflowError
from machinery_py.testing.waiting import wait_until
from tests.system import crashing_flows as flows
from tests.system.crashing_flows import (
    BATCH_POINTS,
    CANCEL_POINTS,
    DEBOUNCE_POINTS,
    LIMIT_POINTS,
    MOST,
    RETRY_POINTS,
)
from tests.system.stage import HANG, Stage, finish, python, stage, survivor

__all__ = ["python", "stage", "survivor"]

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
STORES = ("sqlite", "postgresql", "redis", *(("mongodb", "cluster") if FULL else ()))


def cells(points: tuple[str, ...], *more: tuple[str, str]) -> pytest.MarkDecorator:
    """Run the test at all points of SQLite and Redis, and at these of other stores."""
    rows = dict.fromkeys([*itertools.product(STORES, points), *more])
    return pytest.mark.parametrize(("stage", "point"), list(rows), indirect=["stage"])


@pytest.fixture(autouse=True)
def _flows(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.program = flows.__name__
    monkeypatch.setenv("CRASH_LEASE", "1")  # so long is the slot of a killed worker held


def lines(stage: Stage, word: str) -> list[list[str]]:
    rows = [line.split() for line in stage.ledger.read_text().splitlines()]
    return [row[1:] for row in rows if row[0] == word]


def check_killed(stage: Stage, *words: str) -> None:
    done = stage.run(*words)
    assert done.returncode == -9, (words, done.stderr)


def in_use(server: Server) -> list[tuple[int, int]]:
    reports = (one for scope in server.inspect.limits() for one in scope.usage)
    return [(one.running, one.waiting) for one in reports if one.running or one.waiting]


def most_at_once(stage: Stage) -> int:
    """Return how many runs overlapped; those of the dead process end with the line of its kill."""
    running: set[tuple[str, ...]] = set()
    most, is_killed = 0, False
    for line in stage.ledger.read_text().splitlines():
        word, *who = line.split()
        is_killed = is_killed or word == "killed"
        if is_killed:
            running = {one for one in running if one[1] == str(os.getpid())}
        if word == "begin" and (not is_killed or who[1] == str(os.getpid())):
            running.add(tuple(who))
            most = max(most, len(running))
        elif word == "end":
            running.discard(tuple(who))
    return most


@cells(LIMIT_POINTS, ("mongodb", "after-enter"), ("cluster", "after-end"))
def test_killed_worker_keeps_no_slot_and_no_place(
    stage: Stage, survivor: Server, point: str
) -> None:
    survivor.send(flows.limits())

    check_killed(stage, "serve", point)
    finish(survivor)

    states = survivor.inspect.tasks(limit=100)
    assert [one.state for one in states] == [State.SUCCESS] * 5
    assert most_at_once(stage) <= MOST
    begun = Counter(number for number, _ in lines(stage, "begin"))
    # Only what was cut off is run again: at most what held a slot.
    assert len(begun) == 5
    assert sum(begun.values()) <= 5 + MOST
    wait_until(lambda: not in_use(survivor), HANG, what="no slot is left")


@cells(DEBOUNCE_POINTS, ("mongodb", "after-free"))
def test_debounced_task_of_a_killed_worker_runs_with_its_last_arguments(
    stage: Stage, survivor: Server, point: str
) -> None:
    first, last = (
        survivor.send(flows.debounced.signature("doc", text)) for text in ("first", "last")
    )

    check_killed(stage, "serve", point)
    finish(survivor)

    ran = [text for (text,) in lines(stage, "debounced")]
    assert set(ran) == {"last"}
    assert len(ran) <= 2
    assert first.get_state().error_type == "Replaced"
    assert last.get_state().state is State.SUCCESS
    again = survivor.send(flows.debounced.signature("doc", "again"))
    assert not again.duplicate
    finish(survivor)
    assert again.get(timeout=HANG) == "again"


@cells(("before-take", "after-take"))
def test_killed_sender_of_a_debounced_task_has_replaced_the_first_or_not(
    stage: Stage, survivor: Server, point: str
) -> None:
    first = survivor.send(flows.debounced.signature("doc", "first"))

    check_killed(stage, "debounce", "doc", point)
    finish(survivor)

    is_replaced = point == "after-take"
    assert lines(stage, "debounced") == [["last" if is_replaced else "first"]]
    assert first.get_state().state is (State.FAILURE if is_replaced else State.SUCCESS)


@cells(BATCH_POINTS, ("mongodb", "before-end"), ("amqp+redis", "after-end"))
def test_each_call_of_a_killed_batch_has_its_own_end(
    stage: Stage, survivor: Server, point: str
) -> None:
    group = survivor.send(flows.batch())

    check_killed(stage, "serve", point)
    finish(survivor)

    states = survivor.backend.group_task_states(group.uuid)
    assert [one.state for one in states] == [State.SUCCESS, State.FAILURE, State.SUCCESS]
    assert [one.results[0].value for one in states if one.results] == ["A", "C"]
    assert "bad" in states[1].error
    ran = Counter(name for row in lines(stage, "batch") for name in row)
    assert ran.keys() == {"a", "bad", "c"}
    assert max(ran.values()) <= 2  # the second time alone, as suspects
    # The callback may have been running when its worker was killed.
    assert stage.calls()["on_error"] in ((1, 2) if point == "after-end" else (1,))


# Workflows: whoever cancels or retries dies between two writes, and then a worker dies at its part


WORKER_POINTS = ("in-task", "before-end", "after-end", "before-fire", "after-fire")


def pairs(points: tuple[str, ...]) -> pytest.MarkDecorator:
    """Kill the caller at each point, and a worker at each of its points in turn."""
    few = [
        (stores, point, at)
        for stores in STORES
        for point, at in zip(points, itertools.cycle(WORKER_POINTS))
    ]
    rows = [*few, *itertools.product(("redis",) * FULL, points, WORKER_POINTS)]
    return pytest.mark.parametrize(
        ("stage", "point", "at"), list(dict.fromkeys(rows)), indirect=["stage"]
    )


def retried(server: Server, uuid: str) -> bool:
    """Retry the workflow; False: the claim of the dead process still stands."""
    try:
        server.workflow(uuid).retry()
    except WorkflowError as error:
        assert "is being retried" in str(error)
        return False
    return True


@pairs(RETRY_POINTS)
def test_workflow_goes_on_when_its_retrier_and_a_worker_were_killed(
    stage: Stage, survivor: Server, request: pytest.FixtureRequest, point: str, at: str
) -> None:
    uuid = survivor.send(flows.flow()).workflow
    finish(survivor)
    assert survivor.workflow(uuid).state is State.FAILURE
    assert stage.calls() == {"fetch": 3, "on_error": 1}
    Path(f"{stage.ledger}.mended").touch()

    check_killed(stage, "retry", uuid, point)
    stage.run("worker", at)
    wait_until(lambda: retried(survivor, uuid), HANG, what="the retry")
    stage.run("worker", at)
    finish(survivor)

    assert survivor.workflow(uuid).state is State.SUCCESS
    calls = stage.calls()
    killed = calls["killed"] - 1  # workers
    assert killed > 0
    ran = Counter(row[0] for row in lines(stage, "fetch"))
    assert (ran["a"], ran["c"], ran["b"] >= 2) == (1, 1, True)
    merged = [" ".join(row) for row in lines(stage, "merge")]
    assert set(merged) == {"a b c", "a+b+c"}
    assert ran["b"] - 2 + len(merged) - 2 <= killed  # only what was cut off is run again
    assert calls["on_error"] == 1


@pairs(CANCEL_POINTS)
def test_workflow_ends_when_its_canceller_and_a_worker_were_killed(
    stage: Stage, survivor: Server, point: str, at: str
) -> None:
    uuid = survivor.send(flows.flow()).workflow

    check_killed(stage, "cancel", uuid, point)
    stage.run("worker", at)
    finish(survivor)
    survivor.workflow(uuid).cancel()
    finish(survivor)

    assert survivor.workflow(uuid).state is State.FAILURE
    assert {*stage.calls()} <= {"killed", "on_error"}
    assert 1 <= stage.calls()["on_error"] <= stage.calls()["killed"]
    assert all(one.is_finished for one in survivor.inspect.tasks(limit=100))

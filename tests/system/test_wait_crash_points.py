"""A real process is killed while a task suspends, or while somebody lets it go on.

No wake-up is lost, and none is doubled: what the task does behind its wait is done once.
"""

from __future__ import annotations

import itertools
import os

import pytest

from machinery_py import Server
from machinery_py.stores import outbox
from machinery_py.testing.waiting import wait_until
from tests.system import crashing
from tests.system.crashing import TWO_STORE_POINTS, WAIT_POINTS, WAKE_POINTS
from tests.system.stage import Stage, python, stage, survivor

__all__ = ["python", "stage", "survivor"]

HANG = 60.0  # seconds; a guard, nothing is measured with it
STORES = ("sqlite", "redis", "postgresql", "amqp+redis", "amqp+sqlite", "redis+sqlite")
FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))
TRIED = STORES if FULL else ("sqlite", "redis", "postgresql", "amqp+redis")


def cells(*points: str, put: bool = False) -> list[tuple[str, str]]:
    """Return stores with their points; `put`: also those between the steps of two stores."""
    found = [*itertools.product(TRIED, points)]
    if put:
        found += itertools.product([one for one in TRIED if "+" in one], TWO_STORE_POINTS)
    return found


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "OUTBOX_AGE", 0.5)


@pytest.mark.parametrize(("stage", "point"), cells(*WAIT_POINTS, put=True), indirect=["stage"])
@pytest.mark.parametrize("is_early", [True, False], ids=["before", "behind"])
def test_signal_wakes_a_task_whose_worker_was_killed(
    stage: Stage, survivor: Server, point: str, is_early: bool
) -> None:
    """The signal comes before the next worker, or when that has let the task wait."""
    sent = survivor.send(crashing.waits.signature())
    assert stage.run("worker", point).returncode == -9

    if is_early:
        assert survivor.signal(sent.uuid, "go", 7)
    with survivor.new_worker(concurrency=2):
        if not is_early:
            wait_until(lambda: "waits for" in sent.get_state().error, HANG, "the wait")
            assert survivor.signal(sent.uuid, "go", 7)
        assert sent.get(timeout=HANG) == 7
    assert stage.calls()["made"] == 1


@pytest.mark.parametrize(
    ("stage", "point"), cells(*WAIT_POINTS, *WAKE_POINTS, put=True), indirect=["stage"]
)
@pytest.mark.parametrize("deaths", [1, 2, 3])
def test_result_wakes_a_task_though_workers_were_killed(
    stage: Stage, survivor: Server, point: str, deaths: int
) -> None:
    """One after the other, at the first such point of each."""
    sent = survivor.send(crashing.asks.signature())
    killed = [stage.run("worker", point).returncode for _ in range(deaths)]
    assert killed[0] == -9

    with survivor.new_worker(concurrency=2):
        assert sent.get(timeout=HANG) == 7
    assert stage.calls()["made"] == 1
    assert 1 <= stage.calls()["answered"] <= deaths + 1  # an outbox may publish it twice


@pytest.mark.parametrize(("stage", "point"), cells(*WAKE_POINTS), indirect=["stage"])
def test_signal_of_a_sender_that_was_killed_is_given_once(
    stage: Stage, survivor: Server, point: str
) -> None:
    sent = survivor.send(crashing.waits.signature())
    assert stage.run("worker", "never").returncode == 0
    assert "waits for" in sent.get_state().error

    assert stage.run("signal", sent.uuid, point).returncode == -9

    with survivor.new_worker(concurrency=2):
        if point == "before-wake":
            assert survivor.signal(sent.uuid, "go", 7, key="once")
        assert sent.get(timeout=HANG) == 7
    assert stage.calls()["made"] == 1


@pytest.mark.parametrize(
    ("stage", "point"), cells(*WAIT_POINTS, *WAKE_POINTS, put=True), indirect=["stage"]
)
def test_wait_ends_at_its_deadline_though_a_worker_was_killed(
    stage: Stage, survivor: Server, point: str
) -> None:
    sent = survivor.send(crashing.times_out.signature())
    # A worker that is idle ends, perhaps before the timer is due.
    wait_until(lambda: stage.run("worker", point).returncode == -9, HANG, "the death")

    with survivor.new_worker(concurrency=2):
        assert sent.get(timeout=HANG) == 7
    assert stage.calls()["made"] == 1

"""A real process is killed around each write of a step; another one goes on behind what is kept.

A kept step is never made again, and one that is not kept is, with the same key. The task fails
once, so that its last run reads what two processes have kept.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import psycopg
import pytest

from machinery_py import Server, State
from tests.system import crashing
from tests.system.crashing import BOOK_POINTS, STEP_POINTS, STEPS
from tests.system.stage import Stage, finish, python, stage, survivor

__all__ = ["python", "stage", "survivor"]

#: Around the settlement of the run that fails, and those of any task.
OTHER_POINTS = ("after-claim", "before-settle", "inside-settle", "after-settle")
STORES = (
    "redis",
    "postgresql",
    "mongodb",
    "sqlite+sqlite",
    "redis+mongodb",
    "amqp+redis",
    "amqp+sqlite",
    "amqp+mongodb",
)


def cells() -> Iterator[tuple[str, str]]:
    """Yield what `make test` tries; with MACHINERY_TEST_FULL all points on all stores."""
    points = (*STEP_POINTS, *OTHER_POINTS)
    yield from itertools.product(("sqlite",), points)
    few = ("in-step-1", "before-step-1", "after-step-1")
    for stores in STORES:
        yield from itertools.product((stores,), points if FULL else few)


FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))


@pytest.mark.parametrize(("stage", "point"), list(cells()), indirect=["stage"])
def test_killed_flow_goes_on_behind_its_checkpoints(
    stage: Stage, survivor: Server, point: str
) -> None:
    sent = survivor.send(crashing.steps.signature())

    first = stage.run("worker", point)
    finish(survivor)

    killed = stage.calls()["killed"]
    assert first.returncode == (-9 if killed else 0), first.stderr
    assert killed or point.startswith("inside")  # only SQLite has an inside
    where, _, step = point.partition("-")
    again = {step} if killed and where in ("in", "before", "inside") else set()
    lines = stage.ledger.read_text().splitlines()
    for name in (f"step-{number}" for number in range(STEPS)):
        made = [line for line in lines if line.startswith(f"{name} ")]
        assert len(made) == (2 if name in again else 1)
        assert set(made) == {f"{name} {sent.uuid}:0:{name}"}
    state = sent.get_state()
    assert (state.state, [arg.value for arg in state.results]) == (State.SUCCESS, [STEPS])
    assert len(survivor.backend.checkpoints(sent.uuid)) == STEPS


@pytest.mark.parametrize("stage", ["postgresql"], indirect=True)
@pytest.mark.parametrize("point", BOOK_POINTS)
def test_killed_step_in_a_transaction_is_made_exactly_once(
    stage: Stage, survivor: Server, point: str
) -> None:
    with psycopg.connect(stage.broker, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS orders")
        connection.execute("CREATE TABLE orders (id int)")
        sent = survivor.send(crashing.books.signature())

        first = stage.run("worker", point)
        finish(survivor)

        orders = connection.execute("SELECT id FROM orders ORDER BY id").fetchall()
    assert first.returncode == -9, first.stderr
    where, _, step = point.partition("-")
    made = stage.calls()
    assert [made[f"book-{number}"] for number in range(STEPS)] == [
        1 if where == "after" or step != f"book-{number}" else 2 for number in range(STEPS)
    ]
    assert orders == [(number,) for number in range(STEPS)]
    state = sent.get_state()
    assert (state.state, [arg.value for arg in state.results]) == (State.SUCCESS, [STEPS])
    assert len(survivor.backend.checkpoints(sent.uuid)) == STEPS

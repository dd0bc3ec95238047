"""A real process is killed at every step of its work; another finishes it, on every store pair.

In every cell nothing is lost, nothing completes twice, every callback and chord runs exactly once,
and a task runs a second time only if the first run may have begun.

`make test` tries every point with every shape of work on one SQLite file, and on the others only
their own steps. `make chaos` (MACHINERY_TEST_FULL=1) tries the rest of each table as well.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator

import pytest

from machinery_py import Server, State
from tests.system import crashing
from tests.system.crashing import (
    AHEAD_POINTS,
    PUT_POINTS,
    REFUSAL_POINTS,
    REVOKE_POINTS,
    REVOKED,
    SENDER_POINTS,
    SHAPES,
    STAGED_POINTS,
    TWO_STORE_POINTS,
    TX_POINTS,
    WORKER_POINTS,
)
from tests.system.stage import (
    EXPECTED,
    HANG,
    Stage,
    check_history,
    check_states,
    finish,
    python,
    stage,
    survivor,
)
from tests.system.test_refusals import declare_otherwise

__all__ = ["python", "stage", "survivor"]

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))

#: Messages in RabbitMQ, and results in each store that processes share.
BESIDE_AMQP = ("amqp+redis", "amqp+sqlite", "amqp+mongodb", "amqp+memcached")
#: MongoDB as one of two stores.
BESIDE_MONGODB = ("mongodb+redis", "amqp+mongodb", "redis+mongodb")

Cell = tuple[str, str, str]  # stores, point, shape


def worker_cells() -> Iterator[Cell]:
    """Yield what `make test` tries: each point once for each way in which stores carry it out."""
    for point, shape in itertools.product(WORKER_POINTS, SHAPES):
        if shape in ("barrier", "replaced") and not point.endswith(("settle", "fire")):
            continue
        if not point.endswith("tend") or shape in ("retry", "chord"):
            yield "sqlite", point, shape
    for point, shape in itertools.product(WORKER_POINTS, ("retry", "chord")):
        yield "sqlite+sqlite", point, shape
        yield "sqlite+memcached", point, shape
        if not point.startswith("inside"):  # a step on these is a script, and has no inside
            yield "redis", point, shape
            yield "postgresql", point, shape
    for point in TWO_STORE_POINTS:
        yield "sqlite+sqlite", point, "retry"
        yield "sqlite+memcached", point, "chord"
    yield from (
        ("redis", "before-settle", "delayed"),
        ("redis", "before-fire", "broken-chord"),
        ("redis", "after-fire", "barrier"),
        ("redis", "before-settle", "replaced"),
        ("sqlite+sqlite", "inside-fire", "barrier"),
        ("sqlite+memcached", "inside-settle", "replaced"),
        ("redis", "after-fire", "broken-chord"),
        ("redis", "after-settle", "chain"),
        ("sqlite+memcached", "inside-fire", "broken-chord"),
        ("sqlite+memcached", "after-fire", "broken-chord"),
        ("sqlite+memcached", "inside-settle", "chain"),
        ("cluster", "after-claim", "chord"),
        ("cluster", "after-settle", "chord"),
        ("cluster", "after-fire", "broken-chord"),
        ("cluster", "before-settle", "retry"),
        ("amqp", "inside-settle", "chord"),
        ("amqp", "inside-settle", "broken-chord"),
        ("amqp", "after-settle", "retry"),
        ("amqp", "inside-fire", "chord"),
        ("amqp", "tx-before-end", "chord"),
        ("amqp", "tx-after-end", "retry"),
        ("mongodb", "after-claim", "chord"),
        ("mongodb", "after-settle", "retry"),
        ("mongodb", "before-fire", "chord"),
        ("mongodb+redis", "after-put", "retry"),
        ("mongodb+redis", "inside-fire", "chord"),
        ("amqp+mongodb", "inside-settle", "retry"),
        ("amqp+mongodb", "after-put", "chord"),
        ("redis+mongodb", "after-clear", "retry"),
        ("redis+mongodb", "inside-settle", "chord"),
    )
    for stores, point in zip(itertools.cycle(BESIDE_AMQP), (*WORKER_POINTS, *TWO_STORE_POINTS)):
        yield stores, point, "chord"


def all_worker_cells() -> Iterator[Cell]:
    yield from worker_cells()
    shapes = ("retry", "chain", "broken-chord", "chord")
    for point in WORKER_POINTS:
        yield from itertools.product(("sqlite+memcached",), [point], shapes)
        if not point.startswith("inside"):
            yield from itertools.product(("redis",), [point], (*shapes, "delayed"))
    points = (*WORKER_POINTS, *TWO_STORE_POINTS)
    for stores in (*BESIDE_AMQP, *BESIDE_MONGODB):
        yield from itertools.product([stores], points, ("retry", "chord", "broken-chord"))
    yield from itertools.product(("amqp",), (*WORKER_POINTS, *TX_POINTS), SHAPES)
    yield from (
        ("mongodb", "in-task", "delayed"),
        ("mongodb", "before-settle", "chain"),
        ("mongodb", "after-fire", "broken-chord"),
        ("mongodb", "after-tend", "chord"),
    )


def cells(few: Iterable[Cell], full: Iterable[Cell]) -> list[Cell]:
    return list(dict.fromkeys(full if FULL else few))


FEW = frozenset(worker_cells())


@pytest.mark.parametrize(
    ("stage", "point", "shape"), cells(worker_cells(), all_worker_cells()), indirect=["stage"]
)
def test_killed_worker_loses_and_doubles_nothing(
    stage: Stage, survivor: Server, request: pytest.FixtureRequest, shape: str, point: str
) -> None:
    stores = request.node.callspec.params["stage"]
    certain = point in TWO_STORE_POINTS or (stores == "amqp" and (stores, point, shape) in FEW)
    survive_worker(stage, survivor, shape, point, certain=certain)


def survive_worker(
    stage: Stage, survivor: Server, shape: str, point: str, *, certain: bool
) -> None:
    """Kill a worker at that point (for sure, if `certain`); the survivor finishes its work."""
    sent = survivor.send(SHAPES[shape]())

    first = stage.run("worker", point)
    finish(survivor)

    killed = stage.calls()["killed"]
    assert first.returncode == (-9 if killed else 0), first.stderr
    assert killed or not certain
    check_history(stage.calls(), shape, point)
    check_states(survivor, sent.uuid, shape)


#: What becomes of an early task whose worker dies there; None: it depends on the stores.
EARLY_POINTS = {
    "after-claim": State.SUCCESS,
    "before-start": State.SUCCESS,
    "after-start": State.FAILURE,
    "in-task": State.FAILURE,
    "before-settle": State.FAILURE,
    "inside-settle": None,
    "after-settle": State.SUCCESS,
}


@pytest.mark.parametrize(
    ("stage", "point"),
    [
        (stores, point)
        for stores in (
            "sqlite",
            "sqlite+sqlite",
            "postgresql",
            "redis",
            "cluster",
            "amqp",
            "mongodb",
            "amqp+redis",
        )
        for point in EARLY_POINTS
        if not point.startswith("inside") or stores in ("sqlite", "sqlite+sqlite", "amqp+redis")
    ],
    indirect=["stage"],
)
def test_early_task_of_a_killed_worker_is_called_at_most_once(
    stage: Stage, survivor: Server, point: str
) -> None:
    task = crashing.early.signature(1).then(crashing.after.partial())
    sent = survivor.send(task.catch(crashing.on_error.partial()))

    first = stage.run("worker", point)
    finish(survivor)

    assert first.returncode == -9, first.stderr
    calls, state = stage.calls(), sent.get_state()
    assert state.state in (
        (EARLY_POINTS[point],) if EARLY_POINTS[point] else (State.SUCCESS, State.FAILURE)
    )
    if state.state is State.SUCCESS:
        assert (calls["early"], calls["on_error"]) == (1, 0)
        assert calls["after"] >= 1  # late, and perhaps cut off
    else:
        assert state.error_type == "WorkerLost"
        assert calls["early"] <= 1
        assert (calls["on_error"], calls["after"]) == (1, 0)


#: Writes to MongoDB that a worker makes for each of these shapes, and more.
CERTAIN_WRITES = {"mongodb": 10, "mongodb+redis": 4, "amqp+mongodb": 2, "redis+mongodb": 4}

FEW_WRITES = (
    *(("mongodb", f"write-{number}-before", "retry") for number in (3, 6, 8)),
    ("mongodb", "write-3-after", "retry"),
    *(("mongodb", f"write-{number}-before", "chord") for number in (1, 5, 9, 10)),
    ("mongodb", "write-8-before", "broken-chord"),
    ("mongodb+redis", "write-4-before", "retry"),
    ("amqp+mongodb", "write-2-before", "retry"),
    ("redis+mongodb", "write-4-before", "retry"),
)


def all_writes() -> Iterator[Cell]:
    # After a write is before the next one, but for the server's own work: one shape is enough.
    for number, shape in itertools.product(range(1, 16), ("retry", "chord")):
        yield "mongodb", f"write-{number}-before", shape
    for number in range(4, 15, 2):
        yield "mongodb", f"write-{number}-before", "broken-chord"
    for number in range(1, 15, 2):
        yield "mongodb", f"write-{number}-after", "retry"
    for stores, number in itertools.product(BESIDE_MONGODB, range(1, 13)):
        yield stores, f"write-{number}-before", "retry"
        yield stores, f"write-{number}-before", "chord"
    for stores, number in itertools.product(BESIDE_MONGODB, range(1, 9, 2)):
        yield stores, f"write-{number}-after", "retry"


@pytest.mark.parametrize(
    ("stage", "point", "shape"), cells(FEW_WRITES, all_writes()), indirect=["stage"]
)
def test_worker_killed_at_a_write_loses_and_doubles_nothing(
    stage: Stage, survivor: Server, request: pytest.FixtureRequest, shape: str, point: str
) -> None:
    stores = request.node.callspec.params["stage"]
    certain = int(point.split("-")[1]) <= CERTAIN_WRITES[stores]
    survive_worker(stage, survivor, shape, point, certain=certain)


FEW_SENDS = (
    *itertools.product(
        ("sqlite", "sqlite+sqlite", "redis"), SENDER_POINTS, ("task", "chain", "chord")
    ),
    *itertools.product(("sqlite+memcached", "cluster", "amqp"), SENDER_POINTS, ("chord",)),
    *(
        (stores, point, "chord")
        for stores, point in zip(BESIDE_AMQP, itertools.cycle(SENDER_POINTS))
    ),
    *itertools.product(("redis",), STAGED_POINTS, ("group", "chord")),
    *itertools.product(("amqp+redis",), AHEAD_POINTS, ("task", "chain")),
    ("amqp+sqlite", "behind-message", "task"),
    ("amqp", "behind-message", "task"),
    *(("mongodb", f"write-{write}", "chord") for write in ("1-after", "3-before", "5-before")),
    ("mongodb+redis", "write-1-after", "chord"),
    ("amqp+mongodb", "write-2-before", "chord"),
)


def all_sends() -> Iterator[Cell]:
    yield from FEW_SENDS
    stores = ("sqlite+memcached", "amqp", *BESIDE_AMQP)
    yield from itertools.product(stores, SENDER_POINTS, ("task", "chain", "chord"))
    yield from itertools.product(("amqp", *BESIDE_AMQP), AHEAD_POINTS, ("task", "chain", "delayed"))
    for when in ("before", "after"):
        for number in range(1, 9):
            yield "mongodb", f"write-{number}-{when}", "chord"
        for pair, number in itertools.product(BESIDE_MONGODB, range(1, 5)):
            yield pair, f"write-{number}-{when}", "chord"


@pytest.mark.parametrize(
    ("stage", "point", "shape"), cells(FEW_SENDS, all_sends()), indirect=["stage"]
)
def test_killed_sender_has_sent_all_or_nothing(
    stage: Stage, survivor: Server, shape: str, point: str
) -> None:
    sender = stage.run("send", shape, point)
    finish(survivor)

    calls = stage.calls()
    killed = bool(calls.pop("killed", 0))
    assert sender.returncode == (-9 if killed else 0), sender.stderr
    if point in (*SENDER_POINTS, *STAGED_POINTS, *AHEAD_POINTS):
        assert killed
    if not calls:
        assert killed
        assert point not in ("after-submit", "after-commit", "after-carry", "behind-message")
    else:
        assert point not in ("before-submit", "after-stage", "after-staged")
        assert calls == EXPECTED[shape]


#: SQLite for messages, and the store of the key of a unique task.
KEYS_BESIDE_SQLITE = (
    *(f"sqlite+{kind}" for kind in ("sqlite", "redis")),
    *(f"sqlite+{kind}" for kind in ("mongodb", "cluster") if FULL),
)


@pytest.mark.parametrize(
    ("stage", "point"),
    [
        *itertools.product(KEYS_BESIDE_SQLITE, PUT_POINTS),
        *(
            ("mongodb", f"write-{number}-{when}")
            for number in range(1, 6)
            for when in ("before", "after")
            if FULL or (number, when) in ((2, "before"), (3, "before"), (3, "after"))
        ),
    ],
    indirect=["stage"],
)
def test_killed_sender_of_a_unique_task_has_sent_it_or_not(
    stage: Stage, survivor: Server, point: str
) -> None:
    first = stage.run("unique", "a", point)
    assert first.returncode == -9 or (first.returncode == 0 and point not in PUT_POINTS)

    second = survivor.send(crashing.alone.signature("a"))
    finish(survivor)

    assert stage.calls()["alone"] == 1
    assert second.get(timeout=HANG) == "a"
    assert second.duplicate is (point != "write-1-before")
    assert not survivor.send(crashing.alone.signature("a")).duplicate


@pytest.mark.parametrize(
    ("stage", "point"),
    list(
        zip(
            itertools.cycle(("amqp+redis", "amqp+sqlite", "amqp+mongodb")),
            (*REFUSAL_POINTS, "inside-settle", "after-clear"),
        )
    ),
    indirect=["stage"],
)
def test_worker_killed_while_a_message_is_refused_loses_nothing(
    stage: Stage, survivor: Server, point: str
) -> None:
    declare_otherwise(stage.broker, "refused")
    uuid = survivor.send(crashing.REFUSED["refused"]()).uuid

    first = stage.run("worker", point)
    finish(survivor)

    assert first.returncode == -9, first.stderr
    check_history(stage.calls(), "refused", point)
    state = survivor.result(uuid).get_state()
    assert (state.state, "queue 'refused'" in state.error) == (State.FAILURE, True)
    assert {(letter.uuid, letter.reason) for letter in survivor.inspect.dead()} == {
        (uuid, "refused")
    }


# Revoking: revocation.py lists its steps, and what finishes each. The task is a member of a chord
# and the first of a chain, and has an error callback: all of that follows from its end, once.

#: Where Redis or MongoDB alone keeps all, there is no inside of a step.
_WITHOUT_INSIDE = tuple(point for point in REVOKE_POINTS if not point.startswith("inside"))
REVOKE_CELLS: dict[str, tuple[str, ...]] = {
    "sqlite": REVOKE_POINTS,
    "redis": _WITHOUT_INSIDE,
    "amqp+redis": (*REVOKE_POINTS, *TWO_STORE_POINTS),
    "amqp+sqlite": (*REVOKE_POINTS, *TWO_STORE_POINTS),
    "cluster": _WITHOUT_INSIDE,
    "mongodb": _WITHOUT_INSIDE,
}
ALIKE = ("before-fire", "before-chord")  # the steps before them have a point behind them, too
FEW_REVOKES = [
    (stores, point)
    for stores in ("sqlite", "redis", "amqp+redis")
    for point in REVOKE_CELLS[stores]
    if point not in ALIKE
]
ALL_REVOKES = [(stores, point) for stores, points in REVOKE_CELLS.items() for point in points]

UNTOUCHED = ("before-remember",)
REMEMBERED = ("after-remember", "before-fire")  # and not ended yet
WITHIN = ("inside-fire",)  # one or the other, as the stores have it


def kill_revoker(point: str, stage: Stage, survivor: Server) -> State:
    """Return the state of the task when the process that revoked it is dead."""
    survivor.send(crashing.revoked())

    done = stage.run("revoke", REVOKED, point)

    assert done.returncode == -9, (point, done.stderr)
    return survivor.backend.get_state(REVOKED).state


def lines_of(stage: Stage) -> list[str]:
    """Return what was called, but for the kill; a line for each call."""
    lines = stage.ledger.read_text().splitlines()
    return sorted(line for line in lines if not line.startswith("killed"))


def check_revoked(stage: Stage, survivor: Server) -> None:
    finish(survivor)

    broken, revoked, ran = lines_of(stage)
    assert (revoked, ran) == ("on_error revoked", "plain 2")
    assert broken.startswith("on_error chord member ")
    state = survivor.backend.get_state(REVOKED)
    assert (state.state, state.error) == (State.FAILURE, "revoked")
    check_succeeded(survivor, {"plain": 1, "after": 0, "on_error": 2})


def check_succeeded(survivor: Server, succeeded: dict[str, int]) -> None:
    if survivor.backend.features.listing:
        states = survivor.inspect.tasks(limit=100)
        assert all(state.is_finished for state in states), states
        names = [state.task_name for state in states if state.state is State.SUCCESS]
        assert {name: names.count(name) for name in succeeded} == succeeded, states
    assert not survivor.inspect.dead()


@pytest.mark.parametrize(
    ("stage", "point"), ALL_REVOKES if FULL else FEW_REVOKES, indirect=["stage"]
)
def test_killed_revoker_has_revoked_all_or_nothing(
    stage: Stage, survivor: Server, point: str
) -> None:
    state = kill_revoker(point, stage, survivor)

    if point in UNTOUCHED:
        assert state is State.PENDING
        finish(survivor)
        assert lines_of(stage) == ["after 1", "after 1 2", "plain 1", "plain 2"]
        check_succeeded(survivor, {"plain": 2, "after": 2, "on_error": 0})
        return
    if point not in WITHIN:
        assert state is (State.PENDING if point in REMEMBERED else State.FAILURE)
    check_revoked(stage, survivor)


@pytest.mark.parametrize(
    ("stage", "point"),
    ALL_REVOKES if FULL else [("sqlite", "after-remember"), ("amqp+redis", "inside-fire")],
    indirect=["stage"],
)
def test_revocation_can_be_repeated_when_the_first_was_killed(
    stage: Stage, survivor: Server, point: str
) -> None:
    kill_revoker(point, stage, survivor)

    survivor.revoke([REVOKED])

    assert survivor.backend.get_state(REVOKED).state is State.FAILURE
    check_revoked(stage, survivor)

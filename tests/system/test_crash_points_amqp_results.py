"""As test_crash_points.py, with RabbitMQ for messages and results: what is killed is also killed in the middle of a turn."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import pytest

from machinery_py import Server
from machinery_py.testing.waiting import wait_until
from tests.stores.amqp_case import amqp_url, vhosts
from tests.system.crashing import SENDER_POINTS, SHAPES, TURN_POINTS, WORKER_POINTS
from tests.system.test_crash_points import EXPECTED, HANG, Stage, check_history, check_states, nothing_left, survivor

__all__ = ["amqp_url", "survivor", "vhosts"]

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))

#: What is killed always; the rest by `make chaos`.
FEW = frozenset({
    ("inside-settle", "chord"), ("after-settle", "retry"), ("inside-fire", "chord"), ("inside-settle", "broken-chord"),
    ("turn-before-end", "chord"), ("turn-after-end", "retry"),
})


@pytest.fixture
def stage(amqp_url: str, tmp_path: pathlib.Path) -> Stage:
    return Stage(tmp_path, amqp_url, amqp_url)


def cells() -> Iterator[tuple[str, str]]:
    for point in (*WORKER_POINTS, *TURN_POINTS):
        for shape in SHAPES:
            if FULL or (point, shape) in FEW:
                yield point, shape


@pytest.mark.parametrize(("point", "shape"), list(cells()))
def test_a_worker_that_is_killed_loses_and_doubles_nothing(stage: Stage, survivor: Server, shape: str, point: str) -> None:
    sent = stage.run("send", shape, "")
    assert sent.returncode == 0, sent.stderr

    first = stage.run("worker", point)
    with survivor.new_worker(concurrency=2):
        wait_until(nothing_left(survivor), timeout=HANG, what="all messages are settled")

    killed = stage.calls()["killed"]
    assert first.returncode == (-9 if killed else 0), first.stderr
    assert killed or (point, shape) not in FEW
    check_history(stage.calls(), shape, point)
    check_states(survivor, sent.stdout.strip(), shape)


@pytest.mark.parametrize("shape", ["task", "chain", "chord"] if FULL else ["chord"])
@pytest.mark.parametrize("point", SENDER_POINTS)
def test_a_sender_that_is_killed_leaves_all_or_nothing(stage: Stage, survivor: Server, shape: str, point: str) -> None:
    sent = stage.run("send", shape, point)
    assert sent.returncode == -9

    with survivor.new_worker(concurrency=2):
        wait_until(nothing_left(survivor), timeout=HANG, what="all messages are settled")

    calls = stage.calls()
    if point == "before-submit":
        assert set(calls) == {"killed"}
    else:
        assert {name: calls[name] for name in EXPECTED[shape]} == EXPECTED[shape]

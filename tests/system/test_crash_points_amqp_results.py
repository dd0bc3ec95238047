"""As test_crash_points.py, with RabbitMQ for messages and results: what is killed is also killed in the middle of a turn."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import pytest

from machinery_py import Server
from tests.stores.rabbitmq.case import amqp_url, vhosts
from tests.system.crashing import SENDER_POINTS, SHAPES, TX_POINTS, WORKER_POINTS
from tests.system.test_crash_points import Stage, survive_sender, survive_worker, survivor

__all__ = ["amqp_url", "survivor", "vhosts"]

FULL = bool(os.environ.get("MACHINERY_TEST_FULL"))

#: What is killed always; the rest by `make chaos`.
FEW = frozenset(
    {
        ("inside-settle", "chord"),
        ("after-settle", "retry"),
        ("inside-fire", "chord"),
        ("inside-settle", "broken-chord"),
        ("tx-before-end", "chord"),
        ("tx-after-end", "retry"),
    }
)


@pytest.fixture
def stage(amqp_url: str, tmp_path: pathlib.Path) -> Stage:
    return Stage(tmp_path, amqp_url, amqp_url)


def cells() -> Iterator[tuple[str, str]]:
    for point in (*WORKER_POINTS, *TX_POINTS):
        for shape in SHAPES:
            if FULL or (point, shape) in FEW:
                yield point, shape


@pytest.mark.parametrize(("point", "shape"), list(cells()))
def test_a_worker_that_is_killed_loses_and_doubles_nothing(
    stage: Stage, survivor: Server, shape: str, point: str
) -> None:
    survive_worker(stage, survivor, shape, point, certain=(point, shape) in FEW)


@pytest.mark.parametrize("shape", ["task", "chain", "chord"] if FULL else ["chord"])
@pytest.mark.parametrize("point", SENDER_POINTS)
def test_a_sender_that_is_killed_leaves_all_or_nothing(
    stage: Stage, survivor: Server, shape: str, point: str
) -> None:
    survive_sender(stage, survivor, shape, point)

"""Steps of an execution: those of the table, and no others."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from machinery_py import Server
from machinery_py.brokers.base import Delivery
from machinery_py.receipts import NO_RECEIPT
from machinery_py.registry.outcomes import Failed, Succeeded
from machinery_py.tasks.signature import Signature
from machinery_py.worker.running.execution import (
    BEGUN,
    CLAIMED,
    COMMITTED,
    SETTLED,
    STEPS,
    Execution,
    Stage,
    Transition,
)
from machinery_py.worker.running.hooks import WorkerHooks
from tests.test_architecture import modules, parsed

CALLS: dict[str, Callable[[Execution], bool]] = {
    "begin": lambda one: one.begin(),
    "settle": lambda one: one.settle(one.end_of_delivery()),
    "amend": lambda one: one.amend(one.end_of_delivery()),
    "pack": lambda one: one.pack(0),
    "commit": lambda one: one.commit(),
}
WAY_TO: dict[Stage, tuple[str, ...]] = {
    CLAIMED: (),
    BEGUN: ("begin",),
    SETTLED: ("settle", "pack"),
    COMMITTED: ("settle", "pack", "commit"),
}


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server("memory://")
    yield server
    server.close()


def held(server: Server, **more: Any) -> Execution:
    delivery = Delivery(body=b"", queue="q", receipt=NO_RECEIPT)
    signature: Signature[Any] = Signature(name="add").with_uuid().replace(**more)
    return Execution(server.app, WorkerHooks(), delivery, "w", signature)


@pytest.mark.parametrize(
    ("step", "stage"),
    list(itertools.product(STEPS, Stage)),
    ids=lambda one: one.verb if isinstance(one, Transition) else one.name,
)
def test_verb_does_what_the_table_says(server: Server, step: Transition, stage: Stage) -> None:
    execution = held(server)
    for verb in WAY_TO[stage]:
        assert CALLS[verb](execution)
    assert execution.stage is stage

    done = CALLS[step.verb](execution)

    assert done is (stage in step.before)
    after = stage if step.after is None or not done else step.after
    assert execution.stage is after


def test_settlement_that_is_not_packed_is_not_committed(server: Server) -> None:
    execution = held(server)
    execution.settle(execution.end_of_delivery())

    assert not execution.commit()


def test_begun_execution_is_not_settled_as_unbegun(server: Server) -> None:
    execution = held(server)
    execution.begin()

    assert not execution.hand_back()
    assert not execution.withdraw(is_over=False)
    assert execution.hand_back(started=True)


def test_end_that_came_too_late_leaves_no_trace(server: Server) -> None:
    callbacks: list[Signature[Any]] = [Signature(name=name).with_uuid() for name in ("good", "bad")]
    execution = held(server, on_success=callbacks[:1], on_error=callbacks[1:])
    assert execution.finish(Succeeded())

    assert not execution.finish(Failed(error="late"))

    assert [one.name for one in execution.sends] == ["good"]
    assert execution.settlement is not None
    assert [one.name for one in execution.settlement.send] == ["good"]


def test_stages_and_settlements_are_written_by_the_verbs_alone() -> None:
    written = {
        name
        for name, path in modules()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr in ("stage", "settlement", "carried", "sends")
    }
    assert [name for name in written if name.startswith("worker.")] == ["worker.running.execution"]

"""Results of groups and chains: as they end, with failures as values, found again, forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from machinery_py import ResultTimeout, Server, StateNotFound, TaskFailed, chain, group
from machinery_py.testing import Harness


class Bench:
    def __init__(self) -> None:
        self.server = Server("memory://")
        self.harness = Harness(self.server)
        self.half = self.server.task("half")(self._half)

    def _half(self, number: int) -> int:
        if number % 2:
            raise ValueError(f"{number} is odd")
        return number // 2

    def group(self, *numbers: int) -> Any:
        return group(self.half.signature(number) for number in numbers).send()

    def drain(self) -> None:
        self.harness.drain(raise_failures=False)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with bench.harness:
        yield bench
    bench.server.close()


def test_failures_come_as_values_when_they_do_not_propagate(bench: Bench) -> None:
    result, alone = bench.group(4, 3, 8), bench.half.send(5)
    bench.drain()

    two, failed, four = result.get(timeout=0, propagate=False)
    assert (two, four, type(failed), failed.error) == (2, 4, TaskFailed, "3 is odd")
    with pytest.raises(TaskFailed):
        result.get(timeout=0)
    error: Any = alone.get(timeout=0, propagate=False)
    assert error.error == "5 is odd"

    async def wait() -> Any:
        return [
            await bench.group(4).get_async(0.0, propagate=False),
            await alone.get_async(0.0, propagate=False),
        ]

    with pytest.raises(ResultTimeout):
        asyncio.run(wait())


def test_members_are_yielded_as_they_end(bench: Bench) -> None:
    first = bench.group(2)
    bench.drain()
    assert [one.get(timeout=0) for one in first.as_completed(timeout=0)] == [1]

    seen: list[str] = []
    result = bench.group(2, 3, 4)
    with pytest.raises(ResultTimeout):
        for one in result.as_completed(timeout=0):
            seen.append(one.uuid)
    assert seen == []
    bench.drain()
    assert {one.uuid for one in result.as_completed(timeout=0)} == {one.uuid for one in result}

    async def ended() -> list[str]:
        return [one.uuid async for one in result.as_completed(timeout=0)]

    assert len(asyncio.run(ended())) == 3


def test_group_is_found_again_in_another_process(bench: Bench) -> None:
    sent = bench.group(2, 4)
    found = bench.server.group_result(sent.uuid)
    assert found.progress() == (0, 2)
    bench.drain()

    assert found.get(timeout=0) == [1, 2]
    with pytest.raises(StateNotFound, match="no group group_1"):
        bench.server.group_result("group_1")
    with pytest.raises(StateNotFound):
        bench.server.group_result(sent.workflow)


def test_forgotten_results_are_gone_and_others_stay(bench: Bench) -> None:
    steps = chain(bench.half.signature(8), bench.half.partial()).send()
    members, other = bench.group(2, 4), bench.half.send(6)
    waiting = bench.half.options(delay=60).send(2)
    bench.drain()
    for result in (steps, members, waiting):
        result.forget()

    uuids = [*(one.uuid for one in steps.steps), *(one.uuid for one in members)]
    kept = bench.server.backend.get_states([*uuids, other.uuid, waiting.uuid])
    assert set(kept) == {other.uuid, waiting.uuid}

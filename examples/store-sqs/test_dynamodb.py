"""The DynamoDB backend passes the suite of backends, on moto's server."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from machinery_sqs.dynamodb import DynamoDBBackend

from machinery_py.backends.base import ALREADY, SETTLED, Backend, Change
from machinery_py.errors import StoreUnusable
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import State
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.groups import arrival, arrive, ready, state_of


class TestDynamoDBBackend(BackendConformance):
    MANY = 95  # items that are written as one

    @pytest.fixture
    def open_backend(self, dynamodb: Any, empty_table: str, clock: ManualClock) -> OpenBackend:
        return lambda: DynamoDBBackend(
            dynamodb, prefix=empty_table, expire_in=self.expire_in, clock=clock
        )

    def test_group_keeps_the_order_of_its_members(self, backend: Backend) -> None:
        members = [f"task_{number * 7 % 30:02}" for number in range(30)]
        backend.init_group("g", members)
        backend.apply([Change(key="", states=[state_of(one) for one in sorted(members)])])
        assert [state.task_uuid for state in backend.group_task_states("g")] == members

    def test_change_of_more_items_than_a_transaction_is_refused_whole(
        self, backend: Backend
    ) -> None:
        states = [state_of(f"t{number}") for number in range(101)]
        small = Change(key="s", mark="m", states=[state_of("s", State.SUCCESS)])

        with pytest.raises(StoreUnusable, match="101 items: DynamoDB writes up to 100") as caught:
            backend.apply([small, Change(key="batch", states=states)])

        assert caught.value.permanent
        assert set(backend.get_states(["s", *(f"t{number}" for number in range(101))])) == {"s"}
        assert backend.apply([small]) == [ALREADY]

    def test_result_above_the_size_of_an_item_is_refused(self, backend: Backend) -> None:
        state = state_of("t", State.SUCCESS, results=(Arg.of("x" * 420_000),))
        with pytest.raises(StoreUnusable, match="at most 400 KB") as caught:
            backend.apply([Change(key="t", states=[state])])
        assert caught.value.permanent

    def test_arrivals_of_a_group_that_is_over_are_not_counted(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        arrive(backend, arrival("g", "a", 2))
        clock.advance(dt.timedelta(days=8).total_seconds())
        assert backend.get_group("g") is None

        arrive(backend, arrival("g", "b", 2))

        assert ready(backend) == {}
        arrive(backend, arrival("g", "c", 2))
        assert set(ready(backend)) == {"g"}

    def test_large_batch_of_changes_is_written_in_parts(self, backend: Backend) -> None:
        changes = [Change(key=f"t{n}", states=[state_of(f"t{n}")]) for n in range(60)]
        assert backend.apply(changes) == [SETTLED] * 60
        assert len(backend.get_states([change.key for change in changes])) == 60

    @pytest.mark.parametrize("run", [-1, 0, 1])
    @pytest.mark.parametrize("current", [None, State.RETRY, State.SUCCESS])
    def test_only_legal_state_changes_are_stored(
        self, backend: Backend, current: State | None, run: int
    ) -> None:
        super().test_only_legal_state_changes_are_stored(backend, current, run)

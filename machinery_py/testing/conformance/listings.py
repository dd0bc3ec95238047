"""Promises of every backend that lists its states: order, pages, counts, deletion.

Part of BackendConformance.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from machinery_py.backends.base import Backend, Change
from machinery_py.backends.listings import Place
from machinery_py.clock import micros
from machinery_py.errors import Unsupported
from machinery_py.tasks.states import GroupMeta, State
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.changes import ChangeConformance
from machinery_py.testing.conformance.groups import MOMENT, arrival, arrive, listed, state_of, write


class ListingConformance(ChangeConformance):
    """Listings of states, and what is made with them."""

    MANY = 10_000  # states that are read and written at once

    def test_states_are_listed_newest_first(self, backend: Backend, clock: ManualClock) -> None:
        if not backend.features.listing:
            for ask in (
                backend.list_states,
                lambda: backend.find("t"),
                lambda: backend.finished_since(MOMENT),
            ):
                with pytest.raises(Unsupported):
                    ask()
            return
        for number, state in enumerate(
            (State.PENDING, State.SUCCESS, State.FAILURE, State.SUCCESS)
        ):
            clock.advance(1.0)
            write(backend, state_of(f"t{number}", state, task_name="mul" if number == 3 else "add"))
        clock.advance(1.0)
        middle = clock.now()
        write(backend, state_of("t0", State.STARTED))

        def names(**what: Any) -> list[str]:
            return [state.task_uuid for state in listed(backend, **what)]

        good = [State.SUCCESS]
        assert names() == ["t0", "t3", "t2", "t1"]
        assert names(limit=2) == ["t0", "t3", "t2", "t1"]
        assert (names(states=good), names(states=[State.PENDING])) == (["t3", "t1"], [])
        assert names(states=[State.STARTED, State.FAILURE]) == ["t0", "t2"]
        assert (names(name="mul"), names(name="add", states=good)) == (["t3"], ["t1"])
        assert names(since=middle) == ["t0"]
        assert names(since=middle - dt.timedelta(seconds=2.5)) == ["t0", "t3", "t2"]
        assert names(after=(micros(middle) - 1, "")) == ["t3", "t2", "t1"]
        assert len(backend.list_states(limit=2).found) == 2

    def test_rare_task_name_is_found_behind_many_others(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        if not backend.features.listing:
            return  # refused, as the test above has seen
        many = min(self.MANY, 2_500)
        ends = (State.SUCCESS, State.STARTED, State.SUCCESS)
        names = {"rare": "first", 'm\u00fcl "<&>': "second"}
        write(
            backend,
            *(state_of(uuid, State.SUCCESS, task_name=name) for name, uuid in names.items()),
        )
        clock.advance(1.0)
        # All changed at one moment: paging must neither skip one of them nor return it twice.
        write(
            backend,
            *(
                state_of(f"task_{number}", ends[number % 3], task_name="often")
                for number in range(many)
            ),
        )

        for name, uuid in names.items():
            assert [state.task_uuid for state in listed(backend, name=name)] == [uuid]
            both = [State.SUCCESS, State.FAILURE]
            assert [state.task_uuid for state in listed(backend, name=name, states=both)] == [uuid]
            assert listed(backend, name=name, states=[State.FAILURE]) == []
        often = [state.task_uuid for state in listed(backend, name="often", limit=2 * many)]
        assert sorted(often) == sorted(f"task_{number}" for number in range(many))
        assert len(listed(backend, limit=2 * many)) == many + 2

    def test_pages_meet_each_task_of_one_moment_once(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        if not backend.features.listing:
            return  # refused, as the test above has seen
        uuids = [f"{'Tt'[number % 2]}\u00e9{number}" for number in range(min(self.MANY, 1_000))]
        ends = (State.PENDING, State.SUCCESS, State.FAILURE)
        states = [state_of(uuid, ends[n % 3]) for n, uuid in enumerate(uuids)]
        backend.apply([Change(key="batch", states=states)])

        met: list[str] = []
        place: Place | None = None
        while True:
            page = backend.list_states(after=place, limit=99)
            met += [state.task_uuid for _, state in page.found]
            places = [place for place, _ in page.found]
            assert places == sorted(places, reverse=True)
            # One comes, and one that was met is sent again: both are before the pages that follow.
            clock.advance(1.0)
            write(backend, state_of(f"new {len(met)}"))
            backend.apply([Change(key=met[0], states=[state_of(met[0])], force=True)])
            if page.end is None:
                break
            place = page.end

        assert sorted(met) == sorted(uuids)

    def test_find_takes_the_prefix_literally(self, backend: Backend) -> None:
        if not backend.features.listing:
            return  # refused, as the test above has seen
        known = ("task_1a", "task_1b", "taskX1", "TASK_1", "a%b", "a*b", "ab", "a[b")
        write(backend, *map(state_of, known))

        assert sorted(backend.find("task_1", 5)) == ["task_1a", "task_1b"]
        assert len(backend.find("task_1", 1)) == 1
        assert (backend.find("a%"), backend.find("a*"), backend.find("a[")) == (
            ["a%b"],
            ["a*b"],
            ["a[b"],
        )
        assert backend.find("nobody") == []

    def test_finished_tasks_are_counted_per_queue(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        if not backend.features.listing:
            return  # refused, as the test above has seen
        write(backend, state_of("old", State.SUCCESS))
        clock.advance(60.0)
        moment = clock.now()
        clock.advance(10.5)
        good, bad = State.SUCCESS, State.FAILURE
        ends = (("q", good), ("q", bad), ("q", good), ("r", bad), ("r", State.RETRY))
        write(
            backend,
            *(
                state_of(f"t{number}", state, queue=queue)
                for number, (queue, state) in enumerate(ends)
            ),
        )

        def counted(since: dt.datetime, step: int) -> list[tuple[float, str, int, int]]:
            return [
                ((one.at - start).total_seconds(), one.queue, one.succeeded, one.failed)
                for one in backend.finished_since(since, step)
            ]

        start = dt.datetime.fromtimestamp(moment.timestamp() // 60 * 60, dt.timezone.utc)
        assert counted(moment, 60) == [(0, "q", 2, 1), (0, "r", 0, 1)]
        earlier = moment - dt.timedelta(seconds=90)
        assert counted(earlier, 60) == [(-60, "q", 1, 0), (0, "q", 2, 1), (0, "r", 0, 1)]
        assert sum(one.succeeded for one in backend.finished_since(earlier)) == 3
        assert backend.finished_since(moment + dt.timedelta(seconds=12)) == []

    def test_finished_states_are_deleted(self, backend: Backend, clock: ManualClock) -> None:
        if not backend.features.listing:
            with pytest.raises(Unsupported):
                write(backend, state_of("a", State.SUCCESS))
                backend.delete_finished(["a"])
            return
        year = 366 * 86400.0
        write(backend, state_of("a", State.SUCCESS), state_of("b", State.FAILURE, keep_for=year))
        write(backend, state_of("open", State.STARTED), state_of("other", State.SUCCESS))
        group = GroupMeta(group_uuid="g", task_uuids=["m", "n"])
        backend.apply([Change(key="g", groups=[group])])
        arrive(backend, arrival("g", "m", 2), arrival("g", "n", 2))

        assert set(backend.delete_finished(["a", "b", "open", "m", "n", "nobody"])) == {"a", "b"}
        assert {one.task_uuid for one in listed(backend)} == {"open", "other", "m", "n"}
        assert backend.delete_finished(["a"]) == []
        backend.apply([Change(key="g", fires="g")])
        assert set(backend.delete_finished(["m", "n"])) == {"m", "n"}
        write(backend, state_of("a"))  # sent again

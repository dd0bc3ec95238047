"""A suite for stores that list chords shared with Go whose Python members' workers have died."""

from __future__ import annotations

import math

import pytest

from machinery_py.backends.base import SETTLED, Backend, Change
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import OpenBackend
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.loops.go_groups import GoGroupPoller

GROUP = GroupMeta(group_uuid="group_1", task_uuids=("task_1", "task_2"))
LEFT = Arrival(group_uuid="group_1", task_uuid="", total=2, ok=True, callback=b"callback")
SOON, HARDLY = 31.0, 29.0  # seconds: after and before the time to look


def ended(member: str, *arrivals: Arrival, state: State = State.SUCCESS) -> Change:
    return Change(
        key=member,
        mark=member,
        states=(TaskState(task_uuid=member, state=state),),
        arrivals=arrivals,
    )


def arrival(member: str) -> Arrival:
    return Arrival(group_uuid="group_1", task_uuid=member, total=2, ok=True, callback=b"callback")


def look_until_idle(poller: GoGroupPoller) -> None:
    def is_idle() -> bool:
        if poller.due_in() == 0.0:
            poller.poll()
        return poller.due_in() == math.inf

    wait_until(is_idle, HANG, "nothing is watched")


class LeftBehind:
    """Needs `open_backend` and `clock`."""

    @pytest.fixture
    def backend(self, open_backend: OpenBackend) -> Backend:
        """A chord of which we have run a member."""
        backend = open_backend()
        changes = [Change(key="g", groups=(GROUP,)), ended("task_1", arrival("task_1"))]
        assert backend.apply(changes) == [SETTLED, SETTLED]
        return backend

    def test_incomplete_chord_is_polled_by_one_worker_at_a_time(
        self, backend: Backend, open_backend: OpenBackend, clock: ManualClock
    ) -> None:
        assert backend.partial_groups(9) == []
        clock.advance(SOON)
        assert backend.partial_groups(9) == [LEFT]
        assert open_backend().partial_groups(9) == []

        clock.advance(SOON)
        assert open_backend().partial_groups(9) == [LEFT]

        clock.advance(SOON)
        assert backend.partial_groups(9) == []  # it is not urgent any more
        clock.advance(SOON)
        assert backend.partial_groups(9) == [LEFT]

    def test_a_chord_is_not_looked_at_before_its_time(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        clock.advance(HARDLY)

        assert backend.partial_groups(9) == []

    @pytest.mark.parametrize("ok", [True, False])
    def test_a_chord_that_is_ready_is_not_looked_at(
        self, backend: Backend, clock: ManualClock, ok: bool
    ) -> None:
        last = Arrival(
            group_uuid="group_1", task_uuid="task_2", total=2, ok=ok, callback=b"callback"
        )
        backend.apply([ended("task_2", last)])
        clock.advance(SOON)

        assert backend.partial_groups(9) == []
        assert len(backend.ready_groups(9)) == 1

    def test_a_chord_that_is_settled_is_not_looked_at(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        assert backend.trigger_chord("group_1") is True
        clock.advance(SOON)

        assert backend.partial_groups(9) == []

    def test_a_chord_that_is_dropped_is_not_looked_at(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        backend.drop_partial(["group_1"])
        clock.advance(SOON)

        assert backend.partial_groups(9) == []

    def test_a_chord_that_is_purged_is_not_looked_at(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        backend.purge_group_meta("group_1")
        clock.advance(SOON)

        assert backend.partial_groups(9) == []

    @pytest.mark.parametrize("state", [State.SUCCESS, State.FAILURE])
    def test_another_worker_finds_that_go_has_ended_the_last_member(
        self, backend: Backend, clock: ManualClock, state: State
    ) -> None:
        backend.apply([ended("task_2", state=state)])  # as Go does it: nobody arrives
        assert backend.ready_groups(9) == []
        clock.advance(SOON)
        poller = GoGroupPoller(backend)

        poller.adopt()
        look_until_idle(poller)

        assert [one.failed_member for one in backend.ready_groups(9)] == [
            "" if state is State.SUCCESS else "task_2"
        ]

    def test_group_is_not_polled_while_members_end_here(self, backend: Backend) -> None:
        poller = GoGroupPoller(backend)
        poller.note([arrival("task_1")])
        wait_until(lambda: poller.due_in() == 0.0, HANG, "the poll is due")

        poller.note([arrival("task_1")])

        assert poller.due_in() > 0.0

    def test_one_look_is_enough_at_a_chord_that_is_not_over(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        clock.advance(SOON)
        poller = GoGroupPoller(backend)

        poller.adopt()
        assert poller.due_in() == 0.0
        poller.poll()

        assert poller.due_in() == math.inf
        assert backend.ready_groups(9) == []

    def test_a_chord_whose_document_is_gone_is_dropped(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        poller = GoGroupPoller(backend)
        backend.apply(
            [
                ended(
                    "task_9",
                    Arrival(
                        group_uuid="group_unknown",
                        task_uuid="task_9",
                        total=2,
                        ok=True,
                        callback=b"callback",
                    ),
                )
            ]
        )
        clock.advance(SOON)

        poller.adopt()
        look_until_idle(poller)

        clock.advance(1000.0)
        assert backend.partial_groups(9) == [LEFT]

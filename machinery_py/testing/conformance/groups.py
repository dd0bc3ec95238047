"""Promises of every backend about groups: order, arrivals, callbacks settled once.

Part of BackendConformance.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from machinery_py.backends.base import (
    ALREADY,
    FENCED,
    SETTLED,
    Backend,
    Change,
    ReadyGroup,
    outbox_of,
)
from machinery_py.backends.listings import Place
from machinery_py.errors import StateNotFound, Unsupported
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import together

#: Opens a backend on the test's store. Each call returns a new handle on it, like a second process.
OpenBackend = Callable[[], Backend]

MOMENT = dt.datetime(2024, 5, 6, 7, 8, 9, 123456, tzinfo=dt.timezone.utc)


def state_of(uuid: str, state: State = State.PENDING, **more: Any) -> TaskState:
    return TaskState(
        task_uuid=uuid,
        state=state,
        **{"task_name": "add", "created_at": MOMENT, "queue": "q", **more},
    )


def write(backend: Backend, *states: TaskState) -> None:
    for state in states:
        assert backend.apply([Change(key=state.task_uuid, states=(state,))]) == [SETTLED]


def listed(backend: Backend, *, limit: int = 1000, **what: Any) -> list[TaskState]:
    """Return all states that fit, in steps of so many."""
    found: list[TaskState] = []
    place: Place | None = what.pop("after", None)
    while True:
        step = backend.list_states(after=place, limit=limit, **what)
        found += [state for _, state in step.found]
        if step.end is None:
            return found
        place = step.end


def arrival(
    group: str, member: str, total: int, *, ok: bool = True, callback: bytes = b"callback"
) -> Arrival:
    return Arrival(group_uuid=group, task_uuid=member, total=total, ok=ok, callback=callback)


def arrived(one: Arrival) -> Change:
    state = State.SUCCESS if one.ok else State.FAILURE
    return Change(key=one.task_uuid, states=(state_of(one.task_uuid, state),), arrivals=(one,))


def arrive(backend: Backend, *arrivals: Arrival) -> None:
    for one in arrivals:
        backend.apply([arrived(one)])


def read_group(backend: Backend, uuid: str) -> GroupMeta:
    """Return the group's record, its members as a tuple, whatever sequence the store returns."""
    found = backend.get_group(uuid)
    assert found is not None
    return msgspec.structs.replace(found, task_uuids=tuple(found.task_uuids))


def ready(backend: Backend) -> dict[str, ReadyGroup]:
    return {group.group_uuid: group for group in backend.ready_groups(1000)}


class BackendCase:
    """Fixtures of a backend suite, to be overridden."""

    #: Seconds that finished states are kept; `open_backend` passes it on.
    expire_in: float = 3600.0

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Return the clock of the store."""
        return ManualClock()

    @pytest.fixture
    def open_backend(self, clock: ManualClock) -> OpenBackend:
        raise NotImplementedError(f"{type(self).__name__}: override the fixture open_backend")

    @pytest.fixture
    def backend(self, open_backend: OpenBackend) -> Iterator[Backend]:
        backend = open_backend()
        if not backend.features.keeps:
            with pytest.raises(Unsupported):
                backend.get_states(["task_1"])
            pytest.skip(f"backend {backend.features.name!r} keeps nothing, and says so when asked")
        yield backend
        backend.close()

    def expire(self, backend: Backend, clock: ManualClock) -> None:
        """Let every state expire that may."""
        clock.advance(self.expire_in + 1.0)
        clock.advance(max(1.0, backend.tend()))
        backend.tend()


class GroupConformance(BackendCase):
    """Groups and chords."""

    def test_group_keeps_the_order_of_its_members(self, backend: Backend) -> None:
        members = [f"task_{(number * 7919) % 1000:03}" for number in range(300)]
        backend.init_group("group_1", members)
        write(backend, *(state_of(member) for member in sorted(members)))

        group = backend.get_group("group_1")

        assert group is not None
        assert (list(group.task_uuids), group.chord_triggered) == (members, False)
        assert [state.task_uuid for state in backend.group_task_states("group_1")] == members
        assert backend.get_group("group_2") is None

    def test_group_is_created_once(self, backend: Backend) -> None:
        backend.init_group("group_1", ["a", "b"])
        backend.init_group("group_1", ["c"])

        group = backend.get_group("group_1")
        assert group is not None
        assert list(group.task_uuids) == ["a", "b"]

    def test_group_keeps_its_creation_time(self, backend: Backend) -> None:
        backend.apply(
            [
                Change(
                    key="g",
                    groups=(GroupMeta(group_uuid="g", task_uuids=("a",), created_at=MOMENT),),
                )
            ]
        )
        group = backend.get_group("g")
        assert group is not None
        assert abs((group.created_at - MOMENT).total_seconds()) < 0.001

    def test_group_is_created_after_a_member_has_ended(self, backend: Backend) -> None:
        arrive(backend, arrival("g", "a", 2))
        backend.init_group("g", ["a", "b"])
        arrive(backend, arrival("g", "b", 2))

        group = backend.get_group("g")
        assert group is not None
        assert list(group.task_uuids) == ["a", "b"]
        assert set(ready(backend)) == {"g"}

    def test_group_is_completed_when_every_member_has_finished(self, backend: Backend) -> None:
        backend.init_group("g", ["a", "b"])
        assert backend.group_completed("g") is False
        write(backend, state_of("a", State.SUCCESS), state_of("b", State.RETRY))
        assert backend.group_completed("g") is False
        write(backend, state_of("b", State.FAILURE, run=1))
        assert backend.group_completed("g") is True

    def test_results_for_a_callback_say_what_failed_and_how(self, backend: Backend) -> None:
        backend.init_group("g", ["a", "b"])
        results = (Arg(type="int64", value=1),)
        failed = state_of("b", State.FAILURE, error="no", error_type="builtins.ValueError")
        write(backend, state_of("a", State.SUCCESS, results=results), failed)

        first, second = backend.group_results("g")

        assert (first.task_uuid, first.state, list(first.results)) == ("a", "SUCCESS", [*results])
        assert (second.state, second.error) == ("FAILURE", "no")
        assert second.error_type == "builtins.ValueError"
        with pytest.raises(StateNotFound):
            backend.group_results("nobody")

    def test_unknown_task_and_group_are_not_found(self, backend: Backend) -> None:
        with pytest.raises(StateNotFound):
            backend.get_state("nobody")
        with pytest.raises(StateNotFound):
            backend.group_completed("nobody")
        with pytest.raises(StateNotFound):
            backend.group_task_states("nobody")
        backend.init_group("g", ["a"])
        with pytest.raises(StateNotFound, match="a"):
            backend.group_task_states("g")

    def test_group_is_ready_when_all_members_have_ended(self, backend: Backend) -> None:
        backend.init_group("g", ["a", "b", "c"])
        arrive(backend, arrival("g", "a", 3), arrival("g", "b", 3))
        assert ready(backend) == {}

        arrive(backend, arrival("g", "c", 3, callback=b"\x00call"))

        assert list(ready(backend)) == ["g"]
        assert backend.ready_groups(10)[0].failed_member == ""
        assert backend.ready_groups(10)[0].callback in (b"callback", b"\x00call")

    def test_member_that_arrives_twice_counts_once(self, backend: Backend) -> None:
        twice = arrival("g", "a", 2)
        backend.apply([Change(key="", arrivals=(twice, twice)), Change(key="", arrivals=(twice,))])
        backend.apply([Change(key="", arrivals=(twice,))])
        assert ready(backend) == {}

        arrive(backend, arrival("g", "b", 2))
        assert set(ready(backend)) == {"g"}

    def test_failed_member_makes_its_group_ready_at_once(self, backend: Backend) -> None:
        members = [arrival("g", uuid, 4, ok=uuid == "a") for uuid in "abc"]
        backend.apply([arrived(one) for one in members])

        assert ready(backend)["g"].failed_member == "b"

        arrive(backend, arrival("g", "d", 4, ok=False))
        assert ready(backend)["g"].failed_member == "b"

    def test_group_without_a_callback_is_never_ready(self, backend: Backend) -> None:
        arrive(backend, arrival("g", "a", 1, callback=b""))
        assert ready(backend) == {}

    def test_arrival_counts_for_its_group_only(self, backend: Backend) -> None:
        arrive(backend, arrival("g", "a", 2), arrival("h", "b", 2), arrival("i", "c", 1))
        assert set(ready(backend)) == {"i"}

    def test_ready_groups_returns_at_most_the_limit(self, backend: Backend) -> None:
        arrive(backend, *(arrival(f"g{number}", f"m{number}", 1) for number in range(5)))
        assert len(backend.ready_groups(3)) == 3
        assert len(backend.ready_groups(10)) == 5

    def test_group_is_settled_once(self, backend: Backend) -> None:
        backend.init_group("g", ["a"])
        arrive(backend, arrival("g", "a", 1))
        first = Change(key="g", fires="g", states=(state_of("callback"),))
        second = Change(
            key="g", fires="g", states=(state_of("callback", State.STARTED), state_of("other"))
        )

        assert backend.apply([first]) == [SETTLED]
        assert backend.apply([second]) == [FENCED]

        assert ready(backend) == {}
        group = backend.get_group("g")
        assert group is not None
        assert (list(group.task_uuids), group.chord_triggered) == (["a"], True)
        assert set(backend.get_states(["callback", "other"])) == {"callback"}
        assert backend.get_state("callback").state is State.PENDING

    def test_settled_group_is_never_ready_again(self, backend: Backend) -> None:
        arrive(backend, arrival("g", "a", 3, ok=False))
        assert backend.trigger_chord("g") is True

        arrive(backend, arrival("g", "b", 3), arrival("g", "c", 3, ok=False), arrival("g", "a", 3))

        assert ready(backend) == {}
        assert backend.trigger_chord("g") is False

    def test_one_of_32_threads_triggers_the_chord(
        self, backend: Backend, open_backend: OpenBackend
    ) -> None:
        handles = [open_backend() for _ in range(4)]
        backend.init_group("g", ["a"])

        assert sum(together(32, lambda index: handles[index % 4].trigger_chord("g"))) == 1

        for handle in handles:
            handle.close()

    def test_no_arrival_of_many_threads_is_lost(self, backend: Backend) -> None:
        together(16, lambda index: arrive(backend, arrival("g", f"m{index}", 17)))
        assert ready(backend) == {}
        arrive(backend, arrival("g", "m16", 17))
        assert set(ready(backend)) == {"g"}

    def test_fenced_change_makes_no_arrival(self, backend: Backend) -> None:
        write(backend, state_of("a", State.SUCCESS))
        late = Change(
            key="a",
            mark="late",
            states=(state_of("a", State.FAILURE), state_of("callback")),
            groups=(GroupMeta(group_uuid="h", task_uuids=("x",)),),
            arrivals=(arrival("g", "a", 1),),
            outbox=(b"m",),
        )

        assert backend.apply([late]) == [FENCED]

        assert ready(backend) == {}
        assert backend.get_states(["callback"]) == {}
        assert backend.get_group("h") is None
        assert outbox_of(backend).settled_by(["a"]) == [""]
        assert outbox_of(backend).unsent(9, older_than=0.0) == []

    def test_repeated_change_makes_no_arrival(self, backend: Backend) -> None:
        change = Change(
            key="a",
            mark="d1",
            states=(state_of("a", State.SUCCESS),),
            arrivals=(arrival("g", "a", 1),),
            outbox=(b"m",),
        )
        assert backend.apply([change]) == [SETTLED]
        assert backend.trigger_chord("g") is True
        outbox_of(backend).clear_outbox([("a", (b"m",))])

        assert backend.apply([change]) == [ALREADY]

        assert ready(backend) == {}
        assert outbox_of(backend).unsent(9, older_than=0.0) == []

    def test_purged_group_is_gone(self, backend: Backend) -> None:
        backend.init_group("g", ["a"])
        arrive(backend, arrival("g", "a", 1), arrival("h", "b", 1))

        backend.purge_group_meta("g")
        backend.purge_group_meta("nobody")

        assert backend.get_group("g") is None
        assert set(ready(backend)) == {"h"}
        assert backend.get_state("a").state is State.SUCCESS

    def test_group_is_kept_as_long_as_its_members(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        backend.init_group("g", ["a", "b"])
        write(backend, state_of("a", State.SUCCESS), state_of("b"))
        self.expire(backend, clock)
        assert (backend.get_group("g") is not None) is backend.features.keeps_unfinished

        write(backend, state_of("b", State.SUCCESS))
        clock.advance(self.expire_in * 0.9)
        backend.tend()
        assert backend.get_group("g") is not None

        self.expire(backend, clock)
        self.expire(backend, clock)
        assert backend.get_group("g") is None

    def test_member_results_are_kept_until_their_chord_is_settled(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        backend.init_group("g", ["a", "b"])
        for uuid in ("a", "b"):
            backend.apply([Change(key=uuid, states=(TaskState(task_uuid=uuid),))])
        done = TaskState(task_uuid="a", state=State.SUCCESS, results=(Arg(type="int64", value=1),))
        backend.apply([Change(key="a", states=(done,), arrivals=(arrival("g", "a", 2),))])
        self.expire(backend, clock)
        self.expire(backend, clock)

        if backend.features.keeps_unfinished:
            assert list(backend.get_states(["a"])["a"].results) == [Arg(type="int64", value=1)]
        arrive(backend, arrival("g", "b", 2))
        assert set(ready(backend)) == {"g"}
        assert list(backend.group_task_states("g")[0].results) == [Arg(type="int64", value=1)]
        assert backend.trigger_chord("g") is True

    def test_chord_gets_results_that_say_they_are_kept_briefly(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        later = {"long"} if backend.features.keeps_longer else set()
        members = ["brief", "long", "last"]
        backend.init_group("g", members)
        for uuid, life in (("brief", 0.2), ("long", 3.0)):
            done = state_of(uuid, State.SUCCESS, keep_for=life * self.expire_in)
            change = Change(key=uuid, states=(done,), arrivals=(arrival("g", uuid, 3),))
            assert backend.apply([change]) == [SETTLED]
        self.expire(backend, clock)
        arrive(backend, arrival("g", "last", 3))

        assert [state.task_uuid for state in backend.group_task_states("g")] == members
        assert backend.trigger_chord("g") is True

        clock.advance(0.3 * self.expire_in)
        backend.tend()
        assert set(backend.get_states(members)) == {"last"} | later
        self.expire(backend, clock)
        assert set(backend.get_states(members)) == later

    def test_group_that_waits_for_its_callback_does_not_expire(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        arrive(backend, arrival("g", "a", 1))
        self.expire(backend, clock)
        self.expire(backend, clock)

        assert set(ready(backend)) == {"g"}
        assert backend.trigger_chord("g") is True

    def test_plan_of_a_group_is_read_back(self, backend: Backend) -> None:
        plan = '{"name":"a \\"b\\" é","steps":[["t",1]]}'
        made_at = MOMENT.replace(microsecond=0)
        record = GroupMeta(group_uuid="flow", task_uuids=("a",), created_at=made_at, plan=plan)
        backend.apply([Change(key="flow", groups=(record,))])

        assert read_group(backend, "flow") == record

    def test_failed_chord_that_is_made_anew_goes_on_with_its_members(
        self, backend: Backend
    ) -> None:
        """This is how a workflow is retried: purged, made anew, its good members arrive again."""
        members = ("a", "b", "c")
        made_at = MOMENT.replace(microsecond=0)
        group = GroupMeta(group_uuid="g", task_uuids=members, created_at=made_at)
        backend.apply([Change(key="g", groups=(group,))])
        arrive(backend, arrival("g", "a", 3), arrival("g", "b", 3, ok=False))
        assert backend.trigger_chord("g") is True

        backend.purge_group_meta("g")
        good = (state_of("a", State.SUCCESS),)
        again = Change(
            key="g", groups=(group,), states=good, force=True, arrivals=(arrival("g", "a", 3),)
        )
        assert backend.apply([again]) == [SETTLED]
        assert read_group(backend, "g") == group
        backend.apply([Change(key="b", states=(state_of("b"),), force=True)])
        arrive(backend, arrival("g", "c", 3))
        assert ready(backend) == {}

        arrive(backend, arrival("g", "b", 3))
        assert ready(backend)["g"].failed_member == ""
        assert backend.trigger_chord("g") is True
        assert backend.trigger_chord("g") is False

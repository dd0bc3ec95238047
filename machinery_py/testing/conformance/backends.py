"""Promises of every backend: legal state changes, values, expiry and listeners.

    class TestMyBackend(BackendConformance):
        @pytest.fixture
        def open_backend(self, clock: ManualClock) -> OpenBackend:
            return lambda: MyBackend("my://localhost", clock=clock, expire_in=self.expire_in)

Other parts are in listings.py, changes.py and groups.py.
"""

from __future__ import annotations

import datetime as dt
import time
from typing import Any

import pytest

from machinery_py.backends.base import FENCED, SETTLED, Backend, Change, outbox_of
from machinery_py.clock import LONGEST
from machinery_py.errors import MachineryError
from machinery_py.tasks.signature import Arg, AttemptNumber, RunNumber, Signature
from machinery_py.tasks.states import LEGAL, State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.abilities import need_revocations
from machinery_py.testing.conformance.groups import MOMENT, OpenBackend, listed, state_of, write
from machinery_py.testing.conformance.listings import ListingConformance
from machinery_py.testing.waiting import HANG, together
from machinery_py.values.values import from_result

__all__ = ["BackendConformance", "OpenBackend"]

VALUES: list[tuple[str, Any]] = [
    ("bool", True),
    ("bool", False),
    ("string", ""),
    ("string", '日本 🎉 \x00 " \\ \u2028'),
    ("int", 2**63 - 1),
    ("int8", -128),
    ("int16", 32767),
    ("int32", -(2**31)),
    ("int64", 2**63 - 1),
    ("int64", -(2**63)),
    ("int64", 123456789012345678),
    ("uint", 2**64 - 1),
    ("uint8", 255),
    ("uint16", 65535),
    ("uint32", 2**32 - 1),
    ("uint64", 2**64 - 1),
    ("float32", 0.5),
    ("float64", 0.1),
    ("float64", 1.7976931348623157e308),
    ("float64", 5e-324),
    ("float64", -0.0),
    ("float64", 1e15),
    ("[]bool", [True, False]),
    ("[]string", ["", "ü"]),
    ("[]int64", [2**63 - 1, -1]),
    ("[]uint64", [2**64 - 1]),
    ("[]float64", [0.5, 1e300]),
    ("[]int64", []),
    ("json", None),
    ("json", {"a": [1, {"b": None}], "": "ü"}),
    ("json", []),
    ("json", "text"),
    ("py", {"$": "decimal", "v": "1.10"}),
]

ODD: list[Any] = [
    2**64,
    -(2**63) - 1,
    10**30,
    [10**30, "a"],
    {"a": {"b": [-(10**30)]}},
    "\ud800",
    {"\udfff": ["\ud800"]},
    [10**30, "\ud800"],
]

MARGIN = 0.001  # seconds; some stores round to milliseconds


def legal(current: State | None, run: int, state: State) -> bool:
    """Say whether `state` may follow `current`, `run` runs later.

    This states the rule of tasks/states.py a second time.
    """
    if current is None:
        return True
    if run < 0 or current.is_finished:
        return False
    if run == 0:
        return state in LEGAL[current] or state is current
    return state is not State.PENDING  # RETRY stays visible until the next run has begun


class BackendConformance(ListingConformance):
    """Tests of every promise in backends/base.py."""

    @pytest.mark.parametrize("run", [-1, 0, 1])
    @pytest.mark.parametrize("current", [None, *State])
    def test_only_legal_state_changes_are_stored(
        self, backend: Backend, current: State | None, run: int
    ) -> None:
        for following in State:
            uuid = f"task_{following}"
            if current is not None:
                write(backend, state_of(uuid, current, run=1, error="before"))
            after = state_of(uuid, following, run=1 + run, error="after")

            verdict = backend.apply([Change(key=uuid, mark=f"m{following}", states=(after,))])

            allowed = legal(current, run, following)
            assert verdict == [SETTLED if allowed else FENCED], following
            kept = backend.get_state(uuid)
            assert kept.error == ("after" if allowed else "before"), following
            assert (kept.state, kept.run) == ((following, 1 + run) if allowed else (current, 1)), (
                following
            )

    @pytest.mark.parametrize("final", [State.SUCCESS, State.FAILURE])
    def test_finished_state_is_final(self, backend: Backend, final: State) -> None:
        write(backend, state_of("t", final, error="first"))
        kept = backend.get_state("t")
        for following in State:
            for run in (0, 1, 99):
                change = Change(
                    key="t",
                    mark="other",
                    states=(state_of("t", following, run=run, error="second"),),
                )
                assert backend.apply([change]) == [FENCED]
        assert backend.get_state("t") == kept

    def test_state_change_keeps_name_creation_and_queue(self, backend: Backend) -> None:
        write(backend, state_of("t", task_name="add", created_at=MOMENT, queue="mail"))
        steps = (
            (State.RECEIVED, 0),
            (State.STARTED, 0),
            (State.RETRY, 0),
            (State.STARTED, 1),
            (State.SUCCESS, 1),
        )
        for step, run in steps:
            write(backend, TaskState(task_uuid="t", state=step, run=RunNumber(run)))
            kept = backend.get_state("t")
            assert (kept.state, kept.task_name, kept.queue) == (step, "add", "mail")
            assert abs((kept.created_at - MOMENT).total_seconds()) <= MARGIN

    def test_every_result_value_is_read_back_unchanged(self, backend: Backend) -> None:
        results = tuple(Arg(type=type_name, value=value) for type_name, value in VALUES)
        write(backend, state_of("t", State.SUCCESS, results=results))

        kept = backend.get_state("t").results

        assert [(arg.type, arg.value) for arg in kept] == VALUES
        assert [type(arg.value) for arg in kept] == [type(value) for _, value in VALUES]
        assert [repr(arg.value) for arg in kept] == [repr(value) for _, value in VALUES]

    @pytest.mark.parametrize("value", ODD, ids=ascii)
    def test_odd_result_is_kept_or_refused_in_words(self, backend: Backend, value: Any) -> None:
        results = Arg(type="json", value=value), Arg(type="int64", value=1)
        try:
            write(backend, state_of("t", State.SUCCESS, results=results))
        except MachineryError:
            assert backend.get_states(["t"]) == {}
        else:
            assert [arg.value for arg in backend.get_state("t").results] == [value, 1]

    @pytest.mark.parametrize("field", ["error", "error_type", "traceback", "worker", "root"])
    def test_text_with_half_a_surrogate_pair_is_written_out(
        self, backend: Backend, field: str
    ) -> None:
        write(backend, state_of("t", State.FAILURE, **{field: "\ud800 a"}))

        assert getattr(backend.get_state("t"), field) == r"\ud800 a"

    @pytest.mark.parametrize(
        "text",
        ["", "x" * 3000, "a\nb", "\x00", "a\ud800"],
        ids=["empty", "long", "control", "zero", "half"],
    )
    def test_text_that_can_be_no_uuid_is_no_task(self, backend: Backend, text: str) -> None:
        assert backend.get_states([text]) == {}
        assert backend.get_group(text) is None
        if backend.features.revocations:
            assert backend.revoked([text]) == set()
        if text and backend.features.listing:
            assert backend.find(text) == []

    def test_bytes_result_is_read_back_as_bytes(self, backend: Backend) -> None:
        value = bytes(range(256))
        write(backend, state_of("t", State.SUCCESS, results=(Arg(type="[]byte", value=value),)))

        (kept,) = backend.get_state("t").results
        assert (kept.type, from_result(kept.type, kept.value)) == ("[]byte", value)

    def test_every_state_field_is_read_back_unchanged(self, backend: Backend) -> None:
        later = MOMENT + dt.timedelta(seconds=5)
        state = TaskState(
            task_uuid="t",
            task_name="add ü",
            state=State.STARTED,
            error="bad \x00 thing",
            created_at=MOMENT,
            run=RunNumber(3),
            attempt=AttemptNumber(2),
            queue="mail",
            error_type="builtins.ValueError",
            traceback="Traceback\n",
            progress=(1.5, 4.0),
            started_at=MOMENT,
            finished_at=later,
            eta=later,
            worker="w@host",
            notes_json='{"step":"ü\\n"}',
        )
        write(backend, state)

        kept = backend.get_state("t")

        for name in state.__struct_fields__:
            value, found = getattr(state, name), getattr(kept, name)
            if isinstance(value, dt.datetime):
                assert found.tzinfo is not None
                assert abs((found - value).total_seconds()) <= MARGIN, name
            elif name == "results":
                assert list(found) == list(value)
            else:
                assert found == value, name
        assert type(kept.state) is State

    def test_unset_state_field_is_read_back_unset(self, backend: Backend) -> None:
        state = TaskState(task_uuid="t")
        write(backend, state)
        kept = backend.get_state("t")
        assert {
            name: getattr(kept, name) for name in state.__struct_fields__ if name != "results"
        } == {name: getattr(state, name) for name in state.__struct_fields__ if name != "results"}
        assert list(kept.results) == []

    def test_methods_with_gos_names_write_gos_states(self, backend: Backend) -> None:
        signature: Signature[object] = Signature(name="add", uuid="t", routing_key="mail")
        backend.set_state_pending(signature)
        created_at = backend.get_state("t").created_at
        steps = (
            (backend.set_state_received, State.RECEIVED),
            (backend.set_state_started, State.STARTED),
            (backend.set_state_retry, State.RETRY),
        )
        for step, state in steps:
            step(signature)
            assert backend.get_state("t").state is state
        backend.set_state_success(signature, [Arg.of(3)])
        backend.set_state_failure(signature, "too late")
        kept = backend.get_state("t")
        assert (kept.state, kept.task_name, kept.queue, kept.created_at) == (
            State.SUCCESS,
            "add",
            "mail",
            created_at,
        )
        assert [arg.value for arg in kept.results] == [3]
        backend.set_state_failure(signature.replace(uuid="f"), "boom")
        assert (backend.get_state("f").state, backend.get_state("f").error) == (
            State.FAILURE,
            "boom",
        )

    def test_only_finished_states_expire(self, backend: Backend, clock: ManualClock) -> None:
        write(backend, *(state_of(f"t{state}", state) for state in State))
        clock.advance(self.expire_in * 0.9)
        backend.tend()
        assert len(backend.get_states([f"t{state}" for state in State])) == len(State)

        self.expire(backend, clock)

        kept = backend.get_states([f"t{state}" for state in State])
        unfinished = {state for state in State if not state.is_finished}
        assert {state.state for state in kept.values()} == (
            unfinished if backend.features.keeps_unfinished else set()
        )

    def test_expired_state_is_gone_before_any_sweep(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        write(backend, state_of("old", State.SUCCESS))
        clock.advance(self.expire_in * 0.9)
        assert set(backend.get_states(["old"])) == {"old"}
        clock.advance(self.expire_in * 0.2)

        assert backend.get_states(["old"]) == {}
        if backend.features.listing:
            assert (listed(backend), backend.find("ol")) == ([], [])
        write(backend, state_of("old"))  # sent again
        assert backend.get_state("old").state is State.PENDING

    def test_state_expiry_counts_from_the_finish(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        write(backend, state_of("t"))
        clock.advance(self.expire_in * 0.9)
        write(backend, state_of("t", State.SUCCESS))
        clock.advance(self.expire_in * 0.9)
        backend.tend()
        assert backend.get_state("t").state is State.SUCCESS

    def test_finished_state_is_kept_as_long_as_it_says(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        brief, long = 0.2 * self.expire_in, 3.0 * self.expire_in
        later = {"long", "ages"} if backend.features.keeps_longer else set()
        write(backend, state_of("brief", State.SUCCESS, keep_for=brief))
        write(backend, state_of("plain", State.SUCCESS))
        write(backend, state_of("long", State.FAILURE, keep_for=long))
        write(backend, state_of("ages", State.SUCCESS, keep_for=LONGEST))
        clock.advance(brief * 1.1)
        uuids = ["brief", "plain", "long", "ages"]
        assert set(backend.get_states(uuids)) == {"plain", "long", "ages"}
        if backend.features.listing:
            assert backend.find("brief") == []

        self.expire(backend, clock)
        assert set(backend.get_states(uuids)) == later

        clock.advance(long)
        backend.tend()
        assert set(backend.get_states(uuids)) == later - {"long"}

    def test_revoked_task_is_remembered(self, backend: Backend) -> None:
        need_revocations(backend)
        write(backend, state_of("a"))
        backend.revoke(["a", "b"])
        backend.revoke(["b"])

        assert backend.revoked(["a", "b", "c"]) == {"a", "b"}
        assert backend.revoked([]) == set()
        assert backend.get_state("a").state is State.PENDING

    def test_revocation_is_kept_for_its_life(self, backend: Backend, clock: ManualClock) -> None:
        need_revocations(backend)
        backend.revoke(["year", "days"], 366 * 86400.0)
        backend.revoke(["days"], 86400.0)
        clock.advance(days=300)
        backend.tend()
        backend.revoke(["new"])

        assert backend.revoked(["year", "new"]) == {"year", "new"}

    def test_revocation_can_be_taken_back(self, backend: Backend, clock: ManualClock) -> None:
        need_revocations(backend)
        backend.revoke(["a", "b"])
        backend.revoke(["a"], 0.0)
        clock.advance(2.0)
        assert backend.revoked(["a", "b"]) == {"b"}

    def test_purged_state_is_gone(self, backend: Backend) -> None:
        write(backend, state_of("a", State.SUCCESS), state_of("b"))
        backend.purge_state("a")
        backend.purge_state("nobody")
        assert set(backend.get_states(["a", "b"])) == {"b"}
        write(backend, state_of("a", State.PENDING))

    def test_many_states_are_read_and_written_at_once(self, backend: Backend) -> None:
        uuids = [f"task_{number}" for number in range(self.MANY)]
        assert backend.get_states(uuids) == {}
        assert backend.apply([Change(key="batch", states=tuple(map(state_of, uuids)))]) == [SETTLED]
        assert list(backend.get_states([*uuids, "nobody"])) != []
        assert set(backend.get_states([*uuids, "nobody"])) == set(uuids)
        assert outbox_of(backend).settled_by(uuids) == [""] * self.MANY
        assert backend.get_states([]) == {}
        if backend.features.revocations:
            backend.revoke(uuids)
            assert backend.revoked(uuids) == set(uuids)

    def test_finished_task_wakes_its_listener(
        self, backend: Backend, open_backend: OpenBackend
    ) -> None:
        other = open_backend()
        listener = backend.listener()
        listener.watch(["a"])
        listener.watch(["b", "c"])
        for uuid, state in (("b", State.SUCCESS), ("a", State.FAILURE)):
            started = time.monotonic()

            def act(index: int, uuid: str = uuid, state: State = state) -> None:
                if index:
                    write(other, state_of(uuid, state))
                while not index and uuid not in backend.get_states([uuid]):
                    listener.wait(HANG * 2)

            together(2, act)
            assert time.monotonic() - started < HANG
        listener.close()
        other.close()

    def test_other_tasks_do_not_wake_a_listener(self, backend: Backend) -> None:
        listener = backend.listener()
        listener.watch(["a"])
        write(
            backend,
            state_of("a", State.STARTED),
            *(state_of(f"t{number}", State.SUCCESS) for number in range(20)),
        )
        started = time.monotonic()
        listener.wait(0.05)
        assert time.monotonic() - started >= 0.04
        listener.close()

    def test_wake_ends_the_wait_of_a_listener(self, backend: Backend) -> None:
        listener = backend.listener()
        listener.watch(["a"])
        started = time.monotonic()
        together(2, lambda index: listener.wake() if index else listener.wait(HANG * 2))
        listener.wake()
        listener.wait(HANG * 2)
        assert time.monotonic() - started < HANG
        listener.close()

    def test_second_handle_reads_the_same_states(self, open_backend: OpenBackend) -> None:
        one, two = open_backend(), open_backend()
        if one.features.keeps:
            write(one, state_of("a"))
            assert two.get_state("a").state is State.PENDING
        for handle in (one, two):
            handle.close()
            handle.close()

    def test_states_survive_a_restart(self, open_backend: OpenBackend) -> None:
        backend = open_backend()
        if backend.features.durable and backend.features.keeps:
            write(backend, state_of("a", State.SUCCESS, results=(Arg.of(7),)))
            backend.init_group("g", ["a"])
            backend.revoke(["r"])
            backend.close()
            backend = open_backend()
            assert [arg.value for arg in backend.get_state("a").results] == [7]
            assert backend.group_completed("g") is True
            assert backend.revoked(["r"]) == {"r"}
        backend.close()

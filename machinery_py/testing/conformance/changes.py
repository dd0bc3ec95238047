"""Promises of every backend about changes: verdicts, marks, epochs and outboxes.

Part of BackendConformance.
"""

from __future__ import annotations

import pytest

from machinery_py.backends.base import ALREADY, FENCED, SETTLED, Backend, Change, outbox_of
from machinery_py.errors import Unsupported
from machinery_py.fences import Fence
from machinery_py.tasks.signature import FIRST_RUN, RunNumber
from machinery_py.tasks.states import State
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.groups import GroupConformance, OpenBackend, state_of, write
from machinery_py.testing.waiting import together


class ChangeConformance(GroupConformance):
    """Accepted and refused changes."""

    def test_repeated_change_is_told_from_another_deliverys(self, backend: Backend) -> None:
        def change(mark: str) -> Change:
            return Change(key="t", mark=mark, states=(state_of("t", State.SUCCESS, worker=mark),))

        assert backend.apply([change("one")]) == [SETTLED]
        assert backend.apply([change("one")]) == [ALREADY]
        assert backend.apply([change("two")]) == [FENCED]
        assert backend.apply([change("")]) == [FENCED]
        assert outbox_of(backend).settled_by(["t", "nobody"]) == ["one", ""]
        assert backend.get_state("t").worker == "one"

    @pytest.mark.parametrize("state", [State.RETRY, State.SUCCESS, State.FAILURE])
    def test_repeated_change_writes_nothing(self, backend: Backend, state: State) -> None:
        change = Change(key="t", mark="one", states=(state_of("t", state),), outbox=(b"m",))
        assert backend.apply([change]) == [SETTLED]
        outbox_of(backend).clear_outbox([("t", (b"m",))])

        assert backend.apply([change]) == [ALREADY]
        assert outbox_of(backend).unsent(9, older_than=0.0) == []

        backend.apply([Change(key="t", states=(state_of("t", State.STARTED),))])
        assert backend.apply([change]) == [ALREADY]

    def test_one_of_many_threads_finishes_a_task(self, backend: Backend) -> None:
        write(backend, state_of("t"))

        def finish(index: int) -> str:
            state = state_of("t", State.SUCCESS, worker=str(index))
            return backend.apply([Change(key="t", mark=str(index), states=(state,))])[0].word

        words = together(16, finish)
        assert sorted(words) == ["fenced"] * 15 + ["settled"]
        assert backend.get_state("t").worker == str(words.index("settled"))

    def test_each_change_of_a_batch_sees_those_before_it(self, backend: Backend) -> None:
        write(backend, state_of("old", State.SUCCESS))
        changes = [
            Change(key="t", mark="1", states=(state_of("t", State.SUCCESS),)),
            Change(key="t", mark="2", states=(state_of("t", State.FAILURE),)),
            Change(key="old", mark="3", states=(state_of("old", State.RETRY),)),
            Change(key="t", mark="1", states=(state_of("t", State.SUCCESS),)),
            Change(key="u", mark="4", states=(state_of("u", State.STARTED),)),
        ]
        assert backend.apply(changes) == [SETTLED, FENCED, FENCED, ALREADY, SETTLED]
        assert backend.apply([]) == []
        assert backend.get_state("t").state is State.SUCCESS

    def test_state_of_the_key_alone_decides_a_change(self, backend: Backend) -> None:
        write(backend, state_of("done", State.SUCCESS, worker="first"))
        change = Change(
            key="t",
            mark="m",
            states=(state_of("t", State.SUCCESS), state_of("done", State.PENDING)),
        )

        assert backend.apply([change]) == [SETTLED]

        assert (backend.get_state("done").state, backend.get_state("done").worker) == (
            State.SUCCESS,
            "first",
        )

    def test_two_states_of_one_task_are_applied_in_order(self, backend: Backend) -> None:
        states = (state_of("t", State.SUCCESS), state_of("t", State.PENDING))
        assert backend.apply([Change(key="batch", states=states)]) == [SETTLED]
        assert backend.get_state("t").state is State.SUCCESS

    def test_forced_change_overwrites_a_finished_state(self, backend: Backend) -> None:
        write(backend, state_of("t", State.FAILURE, error="boom"))

        replay = state_of("t", State.PENDING, error="", run=1, task_name="new")
        assert backend.apply([Change(key="batch", states=(replay,), force=True)]) == [SETTLED]

        kept = backend.get_state("t")
        assert (kept.state, kept.run, kept.error, kept.task_name) == (State.PENDING, 1, "", "new")

    def test_later_delivery_fences_an_earlier_one(self, backend: Backend) -> None:
        if not backend.features.conditional:
            with pytest.raises(Unsupported):
                outbox_of(backend).begin([("t", FIRST_RUN)])
            return
        write(backend, state_of("t"))
        (one,), (two,) = (
            outbox_of(backend).begin([("t", FIRST_RUN)]),
            outbox_of(backend).begin([("t", FIRST_RUN)]),
        )
        assert 0 < one.epoch < two.epoch
        assert (one.finished, two.finished, list(one.outbox)) == (False, False, [])
        assert backend.get_state("t").state is State.PENDING

        def change(epoch: Fence, mark: str) -> Change:
            return Change(
                key="t",
                mark=mark,
                epoch=epoch,
                states=(state_of("t", State.RETRY),),
                outbox=(b"m",),
            )

        assert backend.apply([change(one.epoch, "1")]) == [FENCED]
        assert outbox_of(backend).unsent(5, older_than=0.0) == []
        assert backend.apply([change(two.epoch, "2")]) == [SETTLED]
        assert backend.apply([change(two.epoch, "2")]) == [ALREADY]
        assert backend.apply([change(one.epoch, "1")]) == [FENCED]

    def test_finished_run_is_not_begun_again(self, backend: Backend) -> None:
        if not backend.features.conditional:
            return  # refused, as the test above has seen
        write(backend, state_of("retried", State.RETRY), state_of("next", State.STARTED, run=1))
        write(backend, state_of("waiting", message=b"-"))
        success = state_of("done", State.SUCCESS)
        backend.apply([Change(key="done", mark="m", states=(success,), outbox=(b"1", b"\x002"))])

        names = [
            ("done", FIRST_RUN),
            ("retried", FIRST_RUN),
            ("retried", RunNumber(1)),
            ("next", FIRST_RUN),
            ("next", RunNumber(1)),
            ("unknown", FIRST_RUN),
            ("waiting", FIRST_RUN),
        ]
        begun = outbox_of(backend).begin(names)

        assert [one.finished for one in begun] == [True, True, False, True, False, False, False]
        assert list(begun[0].outbox) == [b"1", b"\x002"]
        assert [list(one.outbox) for one in begun[1:]] == [[]] * 6
        assert all(one.epoch > 0 for one in begun if not one.finished)
        assert backend.get_state("waiting").message == b"-"
        assert backend.get_states(["unknown"]) == {}

    def test_outbox_is_kept_until_it_is_cleared(self, backend: Backend, clock: ManualClock) -> None:
        backend.apply(
            [Change(key="a", mark="m", states=(state_of("a", State.SUCCESS),), outbox=(b"1", b"2"))]
        )
        clock.advance(10.0)
        backend.apply(
            [Change(key="b", mark="m", states=(state_of("b", State.SUCCESS),), outbox=(b"3",))]
        )
        clock.advance(10.0)

        found = {key: list(outbox) for key, outbox in outbox_of(backend).unsent(9, older_than=15.0)}
        assert found == {"a": [b"1", b"2"]}
        assert {key for key, _ in outbox_of(backend).unsent(9, older_than=5.0)} == {"a", "b"}
        pages = [outbox_of(backend).unsent(1, older_than=5.0, skip=skip) for skip in range(3)]
        assert [key for page in pages for key, _ in page] in (["a", "b"], ["b", "a"])
        assert outbox_of(backend).unsent(9, older_than=25.0) == []

        outbox_of(backend).clear_outbox([("a", [b"1", b"2"]), ("nobody", [b"1"])])
        assert [key for key, _ in outbox_of(backend).unsent(9, older_than=0.0)] == ["b"]

    def test_outbox_is_found_though_the_clock_was_ahead(
        self, backend: Backend, clock: ManualClock
    ) -> None:
        clock.set_back(-86400.0)
        backend.apply([Change(key="a", mark="m", states=(state_of("a", State.SUCCESS),))])
        clock.set_back(86400.0)
        backend.apply(
            [Change(key="b", mark="m", states=(state_of("b", State.SUCCESS),), outbox=(b"1",))]
        )
        clock.advance(10.0)

        assert [key for key, _ in outbox_of(backend).unsent(9, older_than=5.0)] == ["b"]

    def test_late_clear_leaves_the_outbox_of_the_next_run(
        self, backend: Backend, open_backend: OpenBackend, clock: ManualClock
    ) -> None:
        """Run 0 publishes its retry and is suspended; run 1 ends; then run 0 clears its outbox."""
        other = open_backend()
        first, second = (b"the retry", b"\x00"), (b"the callback",)
        backend.apply(
            [Change(key="t", mark="1", states=(state_of("t", State.RETRY),), outbox=first)]
        )
        other.apply(
            [
                Change(
                    key="t", mark="2", states=(state_of("t", State.SUCCESS, run=1),), outbox=second
                )
            ]
        )

        outbox_of(backend).clear_outbox([("t", first)])

        clock.advance(1.0)
        assert [list(outbox) for outbox in outbox_of(other).outboxes(["t"])] == [list(second)]
        assert [
            (key, list(outbox)) for key, outbox in outbox_of(other).unsent(9, older_than=0.0)
        ] == [("t", list(second))]
        outbox_of(other).clear_outbox([("t", second)])
        assert [list(outbox) for outbox in outbox_of(backend).outboxes(["t"])] == [[]]
        assert outbox_of(backend).unsent(9, older_than=0.0) == []
        other.close()

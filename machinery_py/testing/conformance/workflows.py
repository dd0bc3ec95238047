"""Promises of every pair of stores about workflows of a running application, with real workers.

    class TestMyStore(WorkflowConformance):
        @pytest.fixture
        def server(self) -> Server:
            return Server("my://localhost")

A second Server in this process with the same URLs must open the same stores. LinkedConformance is
the part for `eager`. Tests of single tasks are in tasks.py, of chains in chains.py.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from machinery_py import (
    ChordResult,
    GroupResult,
    Signature,
    State,
    TaskFailed,
    WorkflowError,
    chain,
    chord,
    current_task,
    group,
)
from machinery_py.testing.conformance.abilities import need_revocations
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.callbacks import CallbackConformance
from machinery_py.testing.conformance.chains import ChainConformance
from machinery_py.testing.conformance.workers import WorkerConformance
from machinery_py.testing.waiting import HANG, wait_until

__all__ = ["App", "LinkedConformance", "WorkflowConformance"]


class LinkedConformance(ChainConformance, CallbackConformance):
    """Chains, groups, chords, and their nesting."""

    # Groups

    def test_group_results_are_in_the_order_of_members(self, app: App) -> None:
        result = group(app.add.signature(i, i) for i in range(20)).send()
        assert result.get(timeout=HANG) == [2 * i for i in range(20)]

    def test_group_result_holds_a_result_per_member(self, app: App) -> None:
        members = group(app.add.signature(1, 1), app.note.signature(), app.pair.signature("a", 1))
        result = app.server.send_group(members, send_concurrency=10)
        assert type(result) is GroupResult
        assert result.get(timeout=HANG) == [2, None, ("a", 1)]
        assert [one.get(timeout=HANG) for one in result] == [2, None, ("a", 1)]
        assert len(result) == 3
        states = app.server.backend.group_task_states(result.uuid)
        assert [state.task_uuid for state in states] == [one.uuid for one in result]

    def test_group_of_one_member_runs(self, app: App) -> None:
        assert group(app.add.signature(1, 1)).send().get(timeout=HANG) == [2]
        assert (group(app.add.signature(1, 1)) | app.add.partial(1)).send().get(timeout=HANG) == 3

    def test_group_with_a_failed_member_raises_its_error(self, app: App) -> None:
        result = app.server.send_group(group(app.add.signature(1, 1), app.fail.signature("member")))
        with pytest.raises(TaskFailed, match="member") as caught:
            result.get(timeout=HANG)
        assert caught.value.uuid == result[1].uuid
        assert result[0].get(timeout=HANG) == 2

    # Chords

    def test_chord_callback_gets_all_results_in_order(self, app: App) -> None:
        sums = group(app.add.signature(1, 1), app.add.signature(5, 5))
        assert (sums | app.multiply.partial()).send().get(timeout=HANG) == 20

        echo = app.echo.signature([1, 2])
        members = group(app.pair.signature("a", 1), app.note.signature(), echo)
        app.calls.clear()
        app.server.send_chord(chord(members, app.note.partial("cb")), 10).get(timeout=HANG)
        assert app.calls[-1] == ("cb", "a", 1, [1, 2])

    def test_chord_result_has_group_and_callback(self, app: App) -> None:
        members = group(app.add.signature(1, 1), app.add.signature(2, 2))
        result = app.server.send_chord(chord(members, app.add.partial()))
        assert (type(result), type(result.group)) == (ChordResult, GroupResult)
        assert result.get(timeout=HANG) == 6
        assert result.group.get(timeout=HANG) == [2, 4]
        assert result.callback.get(timeout=HANG) == 6

    def test_large_chord_runs(self, app: App) -> None:
        members = group(app.add.signature(i, 1) for i in range(self.LONG))
        collected = chord(members, app.total.partial(), collect=True).send()
        assert collected.get(timeout=HANG) == sum(range(1, self.LONG + 1))
        counted = chord(members, app.count.partial("x")).send()
        assert counted.get(timeout=HANG) == self.LONG + 1

    def test_chord_callback_can_get_one_list(self, app: App) -> None:
        members = group(app.add.signature(1, 1), app.note.signature(), app.pair.signature("a", 1))
        chord(members, app.note.partial("cb"), collect=True).send().get(timeout=HANG)
        ((tag, found),) = [call for call in app.calls if call]
        assert tag == "cb"
        assert [found[0], found[1], list(found[2])] == [2, None, ["a", 1]]

    def test_immutable_chord_callback_gets_no_results(self, app: App) -> None:
        members = [app.add.signature(1, 1), app.add.signature(2, 2)]
        callback = app.note.partial("cb").replace(immutable=True)
        chord(group(*members), callback).send().get(timeout=HANG)
        # Immutable on a member does not affect the chord: Go takes the members' results anyway.
        immutable = [member.replace(immutable=True) for member in members]
        chord(group(*immutable), app.note.partial("cb")).send().get(timeout=HANG)
        assert app.calls == [("cb",), ("cb", 2, 4)]

    def test_chord_callback_runs_once_when_members_retry(self, app: App) -> None:
        @app.server.task(retries=2, backoff=[0.0])
        def flaky(value: int) -> int:
            if current_task().attempt < 3:
                raise ConnectionError("away")
            return value

        result = chord(group(flaky.signature(i) for i in range(5)), app.note.partial("cb")).send()
        result.get(timeout=HANG)
        app.wait_until_idle()
        assert app.calls == [("cb", 0, 1, 2, 3, 4)]

    def test_chord_callback_has_callbacks(self, app: App) -> None:
        members = group(app.add.signature(1, 1), app.add.signature(2, 2))
        callback = app.add.partial().then(app.note.partial("then"))
        assert chord(members, callback).send().get(timeout=HANG) == 6
        app.wait_until_idle()
        assert app.calls == [("then", 6)]

    def test_chord_with_a_failed_member_fails(self, app: App) -> None:
        callback = app.note.partial("never").catch(app.note.partial("caught"))
        members = group(app.add.signature(1, 1), app.fail.signature("member"))
        result = app.server.send_chord(chord(members, callback))
        with pytest.raises(TaskFailed, match="member") as caught:
            result.get(timeout=HANG)

        ((error, _),) = app.wait_for("caught")
        assert caught.value.uuid == result.group[1].uuid
        assert result.callback.get_state().state is State.FAILURE
        assert "member" in error
        assert result.group[1].uuid in error
        assert not [call for call in app.calls if "never" in call]

    def test_chord_of_failed_members_calls_on_error_once(self, app: App) -> None:
        callback = app.note.partial("never").catch(app.note.partial("caught"))
        result = chord(group(app.fail.signature(str(i)) for i in range(10)), callback).send()
        with pytest.raises(TaskFailed):
            result.get(timeout=HANG)
        assert len(app.wait_for("caught")) == 1

    # Nesting

    def test_group_can_be_a_step_of_a_chain(self, app: App) -> None:
        two = group(app.add.partial(10), app.add.partial(20))
        result = app.server.send_chain(
            app.add.signature(1, 1) | two | app.add.partial() | app.add.partial(1)
        )
        assert result.get(timeout=HANG) == (2 + 10) + (2 + 20) + 1
        assert [step.get(timeout=HANG) for step in result.steps] == [2, [12, 22], 34, 35]

    def test_chain_can_end_in_a_group(self, app: App) -> None:
        two = group(app.add.partial(10), app.add.partial(20))
        assert (app.add.signature(1, 1) | two).send().get(timeout=HANG) == [12, 22]

    def test_members_of_a_group_can_be_chains(self, app: App) -> None:
        members = group(
            app.add.signature(1, 1) | app.add.partial(10),
            app.add.signature(2, 2) | app.add.partial(20) | app.add.partial(0),
        )
        assert members.send().get(timeout=HANG) == [12, 24]
        assert (members | app.multiply.partial()).send().get(timeout=HANG) == 12 * 24

    def test_member_of_a_group_can_contain_a_chord(self, app: App) -> None:
        inner = group(app.add.signature(1, 1), app.add.signature(2, 2)) | app.add.partial()
        members = group(inner, app.add.signature(5, 5))
        assert members.send().get(timeout=HANG) == [6, 10]
        assert (members | app.multiply.partial()).send().get(timeout=HANG) == 60

    def test_chord_can_follow_a_chord(self, app: App) -> None:
        one = app.add.partial()
        result = (
            app.add.signature(1, 1)
            | group(app.add.partial(1), app.add.partial(2))
            | one
            | group(app.add.partial(1), app.add.partial(2), app.add.partial(3))
            | one
        ).send()
        assert result.get(timeout=HANG) == 3 * 7 + 6

    def test_failure_before_a_group_fails_the_chord_behind_it(self, app: App) -> None:
        callback = app.add.partial().catch(app.note.partial("caught"))
        result = app.server.send_chain(
            app.fail.signature("first")
            | group(app.add.partial(1), app.add.partial(2))
            | callback
            | app.note.partial("never")
        )
        with pytest.raises(TaskFailed, match="first") as caught:
            result.get(timeout=HANG)

        assert len(app.wait_for("caught")) == 1
        assert caught.value.uuid == result.steps[0].uuid
        app.wait_for_state(result.steps[2].uuid, State.FAILURE)
        assert not [call for call in app.calls if "never" in call]

    def test_failure_inside_a_member_fails_the_chord(self, app: App) -> None:
        callback = app.note.partial("never").catch(app.note.partial("caught"))
        members = group(
            app.add.signature(1, 1),
            app.fail.signature("first") | app.add.partial(1) | app.add.partial(2),
        )
        result = app.server.send_chord(chord(members, callback))
        with pytest.raises(TaskFailed, match="first"):
            result.get(timeout=HANG)

        assert len(app.wait_for("caught")) == 1
        assert result.callback.get_state().state is State.FAILURE
        assert not [call for call in app.calls if "never" in call]

    def test_failure_of_an_inner_chord_fails_the_outer_one(self, app: App) -> None:
        inner = group(app.add.signature(1, 1), app.fail.signature("deep")) | app.add.partial()
        callback = app.note.partial("never").catch(app.note.partial("caught"))
        result = app.server.send_chord(chord(group(inner, app.add.signature(5, 5)), callback))
        with pytest.raises(TaskFailed, match="deep"):
            result.get(timeout=HANG)

        assert len(app.wait_for("caught")) == 1
        assert result.callback.get_state().state is State.FAILURE

    # Everything else

    def test_impossible_workflow_is_refused_when_it_is_made(self, app: App) -> None:
        task = app.add.partial()
        for make in (
            chain,
            lambda: chord(cast(Any, task), task),
            lambda: chord([task], task, on_failure=cast(Any, "never")),
        ):
            with pytest.raises(WorkflowError):
                make()
        with pytest.raises(WorkflowError, match=r"use server.send_chain"):
            (Signature.of("add", 1, 1) | Signature.of("add", 1)).send()

    def test_workflow_made_by_hand_is_sent_by_the_server(self, app: App) -> None:
        add: Any = Signature.of
        two = group(add("add", 1, 1), add("add", 2, 2))
        assert app.server.send_chain(chain(add("add", 1, 1), add("add", 1))).get(timeout=HANG) == 3
        assert app.server.send_group(two).get(timeout=HANG) == [2, 4]
        assert app.server.send_chord(chord(two, add("add"))).get(timeout=HANG) == 6

    def test_workflow_can_be_sent_twice(self, app: App) -> None:
        two = group(app.add.partial(1), app.add.partial(2))
        steps = app.add.signature(1, 1) | two | app.add.partial()
        first, second = steps.send(), steps.send()
        assert (first.get(timeout=HANG), second.get(timeout=HANG)) == (7, 7)
        assert first.uuid != second.uuid

    def test_workflows_can_be_awaited(self, app: App) -> None:
        async def use() -> tuple[Any, ...]:
            two = group(app.add.signature(1, 1), app.add.signature(2, 2))
            chained = await (app.add.signature(1, 1) | app.add.partial(1)).send_async()
            grouped = await two.send_async()
            gathered = await app.server.send_chord_async(chord(two, app.add.partial()))
            return tuple(await asyncio.gather(chained, grouped, gathered.get_async(timeout=HANG)))

        assert asyncio.run(use()) == (3, [2, 4], 6)


class WorkflowConformance(LinkedConformance, WorkerConformance):
    """All suites: single tasks, workers, workflows."""

    def test_chord_ends_at_once_when_a_member_fails(self, app: App) -> None:
        callback = app.note.partial("never").catch(app.note.partial("caught"))
        members = group(app.wait.signature("slow"), app.fail.signature("member"))
        result = app.server.send_chord(chord(members, callback))
        with pytest.raises(TaskFailed, match="member"):
            result.get(timeout=HANG)
        wait_until(
            lambda: any(call[-1] == "caught" for call in app.calls),
            what="on_error while a member still runs",
        )
        assert not result.group[0].is_finished()

        app.gate("slow").set()
        assert result.group[0].get(timeout=HANG) == "slow"
        assert len(app.wait_for("caught")) == 1
        assert not [call for call in app.calls if "never" in call]

    def test_group_ends_at_once_when_a_member_fails(self, app: App) -> None:
        members = group(app.wait.signature("slow"), app.fail.signature("member"))
        result = app.server.send_group(members)
        with pytest.raises(TaskFailed, match="member"):
            result.get(timeout=HANG)
        assert result.is_finished()
        assert not result[0].is_finished()

    def test_unfinished_chain_has_no_result(self, app: App) -> None:
        result = app.server.send_chain(chain(app.wait.signature("gate"), app.note.partial("last")))
        wait_until(lambda: ("wait", "gate") in app.calls)
        assert result.touch() is None
        assert not result.is_finished()
        app.gate("gate").set()
        result.get(timeout=HANG)
        assert result.is_finished()

    @pytest.mark.parametrize("shape", ["chain", "chord", "chord in a chain", "chains in a group"])
    def test_last_result_of_a_chain_exists_from_the_start(self, idle: App, shape: str) -> None:
        """Use `server.result(uuid)` as in another process, without the steps before it."""

        def flow(first: Signature[Any]) -> Any:
            match shape:
                case "chain":
                    return chain(first, idle.echo.partial(), idle.echo.partial())
                case "chord":
                    return chord(group(first, idle.echo.signature("x")), idle.count.partial())
                case "chord in a chain":
                    members = group(first, idle.echo.signature("y"))
                    return chain(
                        idle.note.signature("x"), members, idle.count.partial(), idle.echo.partial()
                    )
                case _:
                    return chain(
                        group(chain(first, idle.echo.partial()), idle.echo.signature("x")),
                        idle.count.partial(),
                    )

        good = flow(idle.wait.signature("open")).send()
        bad = flow(idle.fail.signature("boom")).send()
        ends = [idle.server.result(flow.uuid) for flow in (good, bad)]
        assert [end.get_state().state for end in ends] == [State.PENDING] * 2
        assert [end.is_finished() for end in ends] == [False] * 2

        with idle.running():
            with pytest.raises(TaskFailed, match="fail task_.* failed: boom"):
                ends[1].get(timeout=HANG)
            with pytest.raises(TaskFailed, match="boom"):
                bad.get(timeout=HANG)
            idle.gate("open").set()
            assert ends[0].get(timeout=HANG) == good.get(timeout=HANG)
            assert ends[0].get(timeout=HANG) == ("open" if shape == "chain" else 2)

    def test_replayed_step_continues_its_chain(self, app: App) -> None:
        @app.server.task
        def shaky(number: int) -> int:
            app.calls.append(("shaky", number))
            if len(app.calls) == 1:
                raise ValueError("once")
            return number

        result = chain(shaky.signature(7), app.echo.partial()).send()
        with pytest.raises(TaskFailed, match="once"):
            app.server.result(result.uuid).get(timeout=HANG)
        app.wait_until_idle()
        assert app.server.inspect.retry([result.steps[0].uuid]) == [result.steps[0].uuid]

        assert app.server.result(result.uuid).get(timeout=HANG) == 7
        assert app.server.backend.get_state(result.uuid).task_name == "echo"

    def test_revoked_step_ends_its_chain(self, app: App) -> None:
        need_revocations(app.server.backend)
        result = app.server.send_chain(chain(app.wait.signature("gate"), app.note.partial("never")))
        result.revoke()
        app.gate("gate").set()
        with pytest.raises(TaskFailed, match="revoked"):
            result.get(timeout=HANG)
        app.wait_until_idle()
        assert not [call for call in app.calls if "never" in call]

    def test_two_workers_run_one_chord(self, app: App) -> None:
        other = app.another()
        with other.running():
            for _ in range(3):
                members = group(app.add.signature(i, 1) for i in range(100))
                result = chord(members, app.total.partial(), collect=True).send()
                assert result.get(timeout=HANG) == sum(range(1, 101))
        other.server.close()

    def test_each_of_many_chords_calls_back_once(self, app: App) -> None:
        results = [
            chord(group(app.echo.signature(i) for _ in range(3)), app.note.partial("cb", i)).send()
            for i in range(50)
        ]
        for result in results:
            result.get(timeout=HANG)
        app.wait_until_idle()
        assert sorted(app.calls) == [("cb", i, i, i, i) for i in range(50)]

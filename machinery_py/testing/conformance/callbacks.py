"""Promises of every pair of stores about what follows groups and workflows as a whole."""

from __future__ import annotations

from typing import Any, cast

import pytest

from machinery_py import (
    ArgumentError,
    GroupResult,
    Replace,
    State,
    TaskFailed,
    chain,
    chord,
    current_task,
    group,
)
from machinery_py.testing.conformance.application import App, AppCase
from machinery_py.testing.waiting import HANG, wait_until


class CallbackConformance(AppCase):
    """Groups behind groups, empty groups, callbacks of whole workflows, failed members."""

    def test_members_behind_a_group_get_all_its_results(self, app: App) -> None:
        two = group(app.add.signature(1, 1), app.add.signature(2, 2))
        three = group(app.add.partial(1), app.multiply.partial(10), app.note.partial("x"))
        result = app.server.send_chain(two | three | app.count.partial())
        assert result.get(timeout=HANG) == 2
        assert [step.get(timeout=HANG) for step in result.steps] == [[2, 4], [7, 80, None], 2]
        assert [call for call in app.calls if call] == [("x", 2, 4)]

        assert (two | group(app.add.partial(1))).send().get(timeout=HANG) == [7]

    def test_failed_group_fails_the_group_behind_it(self, app: App) -> None:
        two = group(app.add.signature(1, 1), app.fail.signature("first"))
        behind = group(app.note.partial("never"), app.note.partial("never"))
        flow = chain(two, behind, app.note.partial("never")).catch(app.note.partial("caught"))
        result = app.server.send_chain(flow)
        with pytest.raises(TaskFailed, match="first"):
            result.get(timeout=HANG)
        with pytest.raises(TaskFailed, match="first"):
            app.server.result(result.uuid).get(timeout=HANG)
        assert len(app.wait_for("caught")) == 1
        behind_it = cast("GroupResult[Any]", result.steps[1])
        states = app.server.backend.get_states([one.uuid for one in behind_it])
        assert [state.state for state in states.values()] == [State.FAILURE] * 2
        assert not [call for call in app.calls if "never" in call]

    def test_whole_workflows_have_callbacks(self, app: App) -> None:
        two = group(app.add.signature(1, 1), app.add.signature(2, 2))
        inner = chain(app.add.partial(0), group(app.add.partial(1), app.add.partial(2)))
        done = inner | app.note.partial("done")
        assert two.then(done, app.note.partial("too")).send().get(timeout=HANG) == [2, 4]
        wait_until(lambda: len([call for call in app.calls if call]) == 2)
        assert sorted(call for call in app.calls if call) == [("done", 7, 8), ("too", 2, 4)]

        app.calls.clear()
        assert (two | app.add.partial()).then(done).send().get(timeout=HANG) == 6
        wait_until(lambda: app.calls)
        assert app.calls == [("done", 7, 8)]

        app.calls.clear()
        app.add.signature(1, 5).then(done).send().get(timeout=HANG)
        wait_until(lambda: app.calls)
        assert app.calls == [("done", 7, 8)]

    @pytest.mark.parametrize("at", range(4))
    def test_failure_is_caught_once_wherever_it_happens(self, app: App, at: int) -> None:
        def step(number: int) -> Any:
            return app.fail.partial("boom") if number == at else app.note.partial()

        flow = chain(step(0), group(step(1), step(2) | app.note.partial()), step(3))
        caught = chain(group(app.note.partial("a"), app.note.partial("b")), app.note.partial("end"))
        flow.catch(caught).send()
        app.wait_for("end")
        errors = [call for call in app.calls if call[-1:] in (("a",), ("b",))]
        assert len(errors) == 2
        assert all("boom" in call[0] for call in errors)

    def test_error_callback_learns_which_task_failed(self, app: App) -> None:
        found: list[Any] = []

        def learn(*args: Any) -> None:
            found.append((current_task().failed, args))

        told = app.server.register_task("learn", learn)
        alone = (
            app.fail.signature("alone").catch(told.partial("x"), told.signature().fixed()).send()
        )
        members = group(app.add.signature(1, 1), app.fail.signature("member"))
        whole = (members | app.note.partial()).catch(told.partial("y")).send()
        grouped = cast("GroupResult[Any]", whole.steps[0])
        for result in (alone, whole):
            with pytest.raises(TaskFailed):
                result.get(timeout=HANG)
        app.wait_until_idle()
        told.send().get(timeout=HANG)

        by_args = {args[1:] or args: failed for failed, args in found}
        for key, uuid in (("x",), alone.uuid), (("y",), grouped[1].uuid):
            failed = by_args[key]
            assert (failed.task, failed.uuid) == ("fail", uuid)
            assert failed.error_type.endswith("ValueError")
        assert len(found) == 4
        assert found[-1] == (None, ())
        assert [failed.error for failed, args in found if args == () and failed] == [""]

    @pytest.mark.parametrize("on_failure", ["skip", "collect"])
    def test_chord_goes_on_without_failed_members(self, app: App, on_failure: Any) -> None:
        members = group(
            app.add.signature(1, 1),
            app.fail.signature("alone"),
            app.fail.signature("front") | app.add.partial(1) | app.add.partial(2),
            group(app.add.signature(1, 1), app.fail.signature("deep")) | app.add.partial(),
            app.add.signature(5, 5),
        )
        result = app.server.send_chord(
            chord(members, app.note.partial("cb"), on_failure=on_failure)
        )
        assert result.get(timeout=HANG) is None
        app.wait_until_idle()
        ((_, *found),) = [call for call in app.calls if call[:1] == ("cb",)]
        assert [one for one in found if isinstance(one, int)] == [2, 10]
        failures = found[1:-1] if on_failure == "collect" else []
        for failure, text in zip(failures, ("alone", "front", "deep"), strict=bool(failures)):
            assert text in failure.error
        if failures:
            assert [one.uuid for one in failures] == [one.uuid for one in result.group][1:4]
        assert len(result.group.get(timeout=HANG)) == len(found)

        listed = chord(members, app.echo.partial(), collect=True, on_failure=on_failure).send()
        assert len(listed.get(timeout=HANG)) == len(found)

    def test_failure_in_front_of_a_tolerant_group_fails_it(self, app: App) -> None:
        members = group(app.add.partial(1), app.add.partial(2))
        callback = app.note.partial("never").catch(app.note.partial("caught"))
        behind = chord(members, callback, on_failure="skip")
        result = (app.fail.signature("front") | behind).send()
        with pytest.raises(TaskFailed, match="front"):
            result.get(timeout=HANG)
        ((error, _),) = app.wait_for("caught")
        assert "never ran" in error
        assert app.server.result(result.uuid).get_state().state is State.FAILURE

    def test_empty_group_is_over_at_once(self, app: App) -> None:
        none = group(app.add.signature(i, i) for i in range(0))
        assert app.server.send_group(none).get(timeout=HANG) == []
        assert chord(none, app.count.partial()).send().get(timeout=HANG) == 0
        assert chord(none, app.echo.partial(), collect=True).send().get(timeout=HANG) == []
        assert (app.add.signature(1, 1) | none | app.count.partial()).send().get(timeout=HANG) == 0
        assert (app.add.signature(1, 1) | none).send().get(timeout=HANG) == []
        assert (none | none | group(app.count.partial())).send().get(timeout=HANG) == [0]
        app.server.send_group(none.then(app.note.partial("then")))
        assert app.wait_for("then") == [("then",)]
        assert group(none, app.add.signature(1, 1)).send().get(timeout=HANG) == [[], 2]

    def test_groups_nest(self, app: App) -> None:
        flow: Any = app.add.signature(1, 1)
        for _ in range(5):
            flow = group(flow, app.add.signature(1, 1) | group(app.add.partial(1)))
        expected: Any = 2
        for _ in range(5):
            expected = [expected, [3]]
        assert flow.send().get(timeout=HANG) == expected
        assert chord(flow, app.echo.partial(), collect=True).send().get(timeout=HANG) == expected

    def test_map_and_chunks_make_groups(self, app: App) -> None:
        assert app.echo.map(["a", "b"]).send().get(timeout=HANG) == ["a", "b"]
        assert app.add.starmap([(1, 2), (3, 4)]).send().get(timeout=HANG) == [3, 7]
        assert (app.echo.map([]) | app.count.partial()).send().get(timeout=HANG) == 0
        assert app.echo.map([]).send().get(timeout=HANG) == []

        pairs = [(number, number) for number in range(5)]
        chunks = app.add.chunks(pairs, 2)
        assert chunks.send().get(timeout=HANG) == [[0, 2], [4, 6], [8]]
        total = chord(app.add.chunks(pairs, 9), app.total.partial())
        assert total.send().get(timeout=HANG) == 20
        fetched = app.fetch.chunks([("a",), ("b",)], 2).send()
        assert fetched.get(timeout=HANG) == [["fetch a", "fetch b"]]
        with pytest.raises(ArgumentError, match="of a chunk have different arguments"):
            app.add.chunks([(1, 2), (1, 2, 3)], 2)
        app.calls.clear()
        halves = app.server.send_group(app.fail.chunks([("one",), ("two",)], 2))
        with pytest.raises(TaskFailed, match="one"):
            halves.get(timeout=HANG)
        assert app.calls == [("fail", "one")]

    @pytest.mark.parametrize("shape", ["task", "chain", "chord", "group", "nothing"])
    def test_task_is_replaced_by_a_workflow(self, app: App, shape: str) -> None:
        flows: dict[str, Any] = {
            "task": app.add.signature(1, 2),
            "chain": app.add.signature(1, 1) | app.add.partial(1),
            "chord": chord(app.echo.map([1, 2]), app.add.partial()),
            "group": app.echo.map([1, 2]),
            "nothing": group(),
        }

        def give_way(_: int) -> Any:
            raise Replace(flows[shape])

        task = app.server.register_task("give_way", give_way)
        value = {"group": [1, 2], "nothing": []}.get(shape, 3)
        alone = task.signature(0).then(app.note.partial("then")).send()
        assert alone.get(timeout=HANG) == value
        wait_until(lambda: ("then", value) in app.calls)
        inside = group(app.echo.signature(0) | task.partial(), app.echo.signature(7))
        whole = (inside | app.note.partial("end")).send()
        assert whole.get(timeout=HANG) is None
        assert ("end", value, 7) in app.calls

    @pytest.mark.parametrize("at", [0, 1, 2, "group"])
    def test_failure_of_the_workflow_fails_the_task_it_replaces(self, app: App, at: object) -> None:
        def step(number: int) -> Any:
            return app.fail.signature("boom").fixed() if number == at else app.note.partial()

        def give_way() -> None:
            if at == "group":
                raise Replace(group(app.fail.signature("boom") for _ in range(2)))
            raise Replace(chain(step(0), group(step(1), app.note.partial()), step(2)))

        task = app.server.register_task("give_way", give_way)
        first = task.signature().catch(app.note.partial("caught"))
        result = app.server.send_chain(first | app.note.partial("never"))
        with pytest.raises(TaskFailed, match="boom"):
            app.server.result(result.steps[0].uuid).get(timeout=HANG)
        with pytest.raises(TaskFailed, match="boom"):
            app.server.result(result.uuid).get(timeout=HANG)
        assert len(app.wait_for("caught")) == 1
        assert not [call for call in app.calls if "never" in call]

    def test_fixed_step_gets_no_results(self, app: App) -> None:
        first = app.add.signature(1, 1).then(app.note.partial("kept"))
        result = (first | app.add.signature(2, 2).fixed()).send()
        assert result.get(timeout=HANG) == 4
        app.wait_until_idle()
        assert app.calls == [("kept", 2)]
        two = group(app.add.signature(1, 1), app.add.signature(2, 2))
        assert (two | app.add.signature(3, 3).fixed()).send().get(timeout=HANG) == 6

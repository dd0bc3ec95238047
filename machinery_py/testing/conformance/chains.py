"""Promises of every pair of stores about chains, also of `eager`. Part of LinkedConformance."""

from __future__ import annotations

from typing import Any

import pytest

from machinery_py import ChainResult, TaskFailed, chain, chord, current_task, group
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.endings import EndingConformance
from machinery_py.testing.waiting import HANG


class ChainConformance(EndingConformance):
    """Chains: values passed between steps, and the end of a failed chain."""

    LONG = 1000  # steps of a very long chain, members of a large chord

    def test_step_gets_the_previous_result_as_last_argument(self, app: App) -> None:
        result = (app.add.signature(1, 1) | app.add.partial(5, 5) | app.multiply.partial(4)).send()
        assert result.get(timeout=HANG) == 48

        noted = chain(app.pair.signature("a", 1), app.note.partial("first"))
        app.server.send_chain(noted).get(timeout=HANG)
        assert app.calls == [("first", "a", 1)]

    def test_step_without_a_result_adds_no_argument(self, app: App) -> None:
        steps = chain(app.note.signature("x"), app.note.partial("y"), app.count.partial())
        steps.send().get(timeout=HANG)
        assert app.calls == [("x",), ("y",)]

    def test_immutable_step_gets_no_previous_result(self, app: App) -> None:
        first, note = app.add.signature(1, 1), app.note
        none = chain(first, note.partial("a"), pass_results=False)
        # Go's Immutable on a step means: the result of this step is not passed on.
        second = first.replace(immutable=True) | app.add.partial(2, 3) | note.partial("b")
        last = first | note.partial("c").replace(immutable=True)
        for steps in (none, second, last):
            steps.send().get(timeout=HANG)
        assert app.calls == [("a",), ("b", 5), ("c", 2)]

    def test_ignored_result_is_passed_on_and_not_stored(self, app: App) -> None:
        quiet = app.server.task("quiet", ignore_result=True)(lambda *numbers: sum(numbers))
        chained = (quiet.signature(1, 1) | quiet.partial(5) | app.add.partial(1)).send()
        quiet.signature(3).then(app.note.partial("callback")).send()
        members = group(quiet.signature(1), quiet.signature(2) | quiet.partial(4))
        collected = chord(members, app.total.partial(), collect=True).send()
        alone = group(quiet.signature(1), quiet.signature(2)).send()

        assert chained.get(timeout=HANG) == 8
        assert [step.get(timeout=HANG) for step in chained.steps] == [None, None, 8]
        assert collected.get(timeout=HANG) == 7
        assert alone.get(timeout=HANG) == [None, None]
        app.wait_until_idle()
        assert app.calls == [("callback", 3)]

    def test_trace_context_reaches_each_step_and_chord_callback(self, app: App) -> None:
        @app.server.task
        def trace(*_: Any) -> str:
            return str(current_task().headers.get("traceparent"))

        first = trace.options(headers={"traceparent": "00-first"})
        steps = first.signature() | trace.partial() | trace.partial()
        assert steps.send().get(timeout=HANG) == "00-first"
        traces = [f"00-{index}" for index in range(3)]
        members = [trace.options(headers={"traceparent": one}).signature() for one in traces]
        assert (group(members) | trace.partial()).send().get(timeout=HANG) in traces

    def test_chain_of_one_step_runs(self, app: App) -> None:
        assert chain(app.add.signature(1, 1)).send().get(timeout=HANG) == 2

    def test_every_step_of_a_chain_has_a_result(self, app: App) -> None:
        result = app.server.send_chain(chain(app.add.signature(1, 1), app.add.partial(5)))
        assert result.get(timeout=HANG) == 7
        assert type(result) is ChainResult
        assert [step.get(timeout=HANG) for step in result.steps] == [2, 7]
        assert result.uuid == result.steps[-1].uuid

    def test_chain_of_a_hundred_steps_runs(self, app: App) -> None:
        steps = [app.add.signature(0, 1), *(app.add.partial(1) for _ in range(99))]
        assert chain(*steps).send().get(timeout=HANG) == 100

    def test_very_long_chain_runs(self, app: App) -> None:
        steps = [app.add.signature(0, 1), *(app.add.partial(1) for _ in range(self.LONG - 1))]
        assert chain(*steps).send().get(timeout=HANG) == self.LONG

    def test_chain_ends_at_its_failed_step(self, app: App) -> None:
        result = app.server.send_chain(
            chain(app.add.signature(1, 1), app.fail.partial("broken"), app.note.partial("never"))
        )
        with pytest.raises(TaskFailed, match="broken") as caught:
            result.get(timeout=HANG)

        app.wait_until_idle()
        assert app.calls == [("fail", "broken")]
        assert caught.value.uuid == result.steps[1].uuid
        assert result.is_finished()
        assert result.steps[0].get(timeout=HANG) == 2

    def test_steps_of_a_chain_keep_their_callbacks(self, app: App) -> None:
        first = app.add.signature(1, 1).then(app.note.partial("mine"))
        chain(first, app.fail.partial("x").catch(app.note.partial("caught"))).send()
        app.wait_until_idle()
        assert sorted(app.calls) == [("fail", "x"), ("mine", 2), ("x", "caught")]

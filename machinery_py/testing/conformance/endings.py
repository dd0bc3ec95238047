"""Promises of every pair of stores about how a task ends, also of `eager`."""

from __future__ import annotations

import pytest

from machinery_py import Retry, RetryTaskLater, TaskFailed, current_task
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.tasks import TaskConformance
from machinery_py.testing.waiting import HANG


class EndingConformance(TaskConformance):
    """Tasks that say how they are to be tried again."""

    def test_retry_counts_and_takes_new_arguments(self, app: App) -> None:
        @app.server.task(retries=2)
        def climb(step: int, *, by: int = 1) -> int:
            app.calls.append((step, by, current_task().attempt))
            raise Retry(delay=0.0, args=(step + by,), kwargs={"by": 2}) from OSError(f"at {step}")

        result = climb.send(0)
        with pytest.raises(TaskFailed, match="OSError: at 3"):
            result.get(timeout=HANG)
        assert app.calls == [(0, 1, 1), (1, 2, 2), (3, 2, 3)]
        assert result.get_state().attempt == 3

    def test_retry_with_wrong_arguments_fails_at_once(self, app: App) -> None:
        @app.server.task(retries=2)
        def climb(step: int) -> None:
            app.calls.append((step,))
            raise Retry(delay=0.0, args=("one", 2))

        with pytest.raises(TaskFailed, match="a retry with these arguments: climb"):
            climb.send(1).get(timeout=HANG)
        assert app.calls == [(1,)]

    def test_task_is_tried_until_it_works(self, app: App) -> None:
        @app.server.task(retries=None, backoff=[0.0], dont_retry_on=KeyError)
        def stubborn(tries: int, end: str) -> int:
            app.calls.append((end,))
            if current_task().attempt < tries:
                raise ValueError("not yet")
            if end == "missing":
                raise KeyError(end)
            return current_task().attempt

        assert stubborn.send(7, "ok").get(timeout=HANG) == 7
        with pytest.raises(TaskFailed, match="missing"):
            stubborn.send(3, "missing").get(timeout=HANG)
        with pytest.raises(TaskFailed, match="not yet"):
            stubborn.options(retries=1).send(7, "counted").get(timeout=HANG)
        found = [app.calls.count((end,)) for end in ("ok", "missing", "counted")]
        assert found == [7, 3, 2]

    def test_postponed_task_fails_at_its_limit(self, app: App) -> None:
        @app.server.task
        def busy() -> None:
            app.calls.append(())
            raise RetryTaskLater("busy", 0.0, limit=2)

        with pytest.raises(TaskFailed, match="postponed 2 times"):
            busy.send().get(timeout=HANG)
        assert len(app.calls) == 3

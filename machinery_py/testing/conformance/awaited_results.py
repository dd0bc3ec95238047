"""Promises of every pair of stores that keeps signals, about tasks that wait for results."""

from __future__ import annotations

import datetime as dt
from typing import Any, Final

import pytest

from machinery_py import Replace, State, TaskFailed, chain, current_task, group
from machinery_py.backends.base import FENCED, SETTLED
from machinery_py.bounds import SIGNALS_BYTES
from machinery_py.errors import SignalTimeout
from machinery_py.tasks.mailboxes import FAILED, RESULT, decode, record_of
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.lost_worker import LostWorker, LostWorkerCase
from machinery_py.testing.waiting import HANG, wait_until


class Press:
    """Tasks that are waited for."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.render: Final = app.server.register_task("render", self._render)
        self.broken: Final = app.server.register_task("broken", self._broken)

    def _render(self, page: int) -> str:
        self.app.calls.append(("render", page))
        return f"page {page}"

    def _broken(self) -> None:
        self.app.calls.append(("broken",))
        raise ValueError("no paper")


class AwaitedResultConformance(LostWorkerCase):
    """Tasks that wait for others, on threaded workers and on lost ones."""

    @pytest.fixture
    def press(self, idle: App) -> Press:
        return Press(idle)

    def test_task_waits_for_the_result_of_another(self, app: App, press: Press) -> None:
        @app.server.task
        def flow() -> list[Any]:
            task = current_task()
            app.calls.append(("run",))
            return [task.wait_for(press.render.signature(page)) for page in (7, 8)]

        result = flow.send()
        assert result.get(timeout=HANG) == ["page 7", "page 8"]
        assert app.calls == [("run",), ("render", 7), ("run",), ("render", 8), ("run",)]
        app.wait_until_idle()
        assert not app.server.inspect.dead()

    def test_coroutine_waits_for_a_result_of_its_type(self, app: App) -> None:
        @app.server.task
        def numbered(first: int) -> tuple[int, dt.date]:
            return first, dt.date(2026, 11, 29)

        @app.server.task
        async def flow() -> bool:
            return await current_task().wait_for_async(numbered.signature(1)) == (
                1,
                dt.date(2026, 11, 29),
            )

        assert flow.send().get(timeout=HANG)

    def test_task_waits_for_workflows(self, app: App) -> None:
        add = app.add

        @app.server.task
        def nothing() -> None: ...

        @app.server.task
        def flow() -> list[Any]:
            task = current_task()
            return [
                task.wait_for(add.signature(1, 2) | add.partial(10)),
                task.wait_for(group(add.signature(n, n) for n in range(3))),
                task.wait_for(group([])),
                task.wait_for(chain(add.signature(1, 1), add.signature(2, 2), pass_results=False)),
                task.wait_for(group(nothing.signature(), add.signature(1, 2))),
                task.wait_for(nothing.signature()),
            ]

        assert flow.send().get(timeout=HANG) == [13, [0, 2, 4], [], 4, [None, 3], None]

    def test_failure_of_the_other_task_is_final(self, app: App, press: Press) -> None:
        @app.server.task(retries=3)
        def flow() -> None:
            app.calls.append(("run",))
            current_task().wait_for(press.broken.signature())

        with pytest.raises(TaskFailed, match="task broken task_.* failed: ValueError: no paper"):
            flow.send().get(timeout=HANG)
        assert app.calls == [("run",), ("broken",), ("run",)]

    def test_failure_that_is_caught_is_so_in_every_run(self, app: App, press: Press) -> None:
        @app.server.task(retries=1, backoff=[0.0])
        def flow(workflow: bool) -> list[str]:
            task, broken = current_task(), press.broken.signature()
            try:
                task.wait_for(broken | app.add.partial(1) if workflow else broken)
            except TaskFailed as error:
                app.calls.append((error.error, error.error_type))
            if task.attempt == 1:
                raise OSError("again")
            return [task.wait_for(press.render.signature(1))]

        for workflow in (False, True):
            app.calls.clear()
            assert flow.send(workflow).get(timeout=HANG) == ["page 1"]
            caught = [call for call in app.calls if call == ("no paper", "ValueError")]
            assert len(caught) >= 3
            assert app.calls.count(("broken",)) == 1

    def test_failed_group_is_told_once(self, app: App, press: Press) -> None:
        @app.server.task
        def flow() -> list[Any]:
            task, broken = current_task(), press.broken
            try:
                task.wait_for(group(broken.signature() for _ in range(3)))
            except TaskFailed as error:
                return [error.error, task.wait_for(app.add.signature(1, 2))]
            return []

        text, number = flow.send().get(timeout=HANG)
        assert text.startswith("chord member broken task_")
        assert text.endswith(" failed: no paper")
        assert number == 3

    def test_result_after_the_deadline_is_nobody_elses(self, app: App) -> None:
        @app.server.task
        def slow() -> str:
            app.gate("open").wait(HANG)
            return "late"

        @app.server.task
        def flow() -> list[Any]:
            task = current_task()
            try:
                task.wait_for(slow.signature(), timeout=0.2)
            except SignalTimeout as error:
                app.gate("open").set()
                return [str(error), task.wait_for(slow.signature()), task.wait_for("go")]
            return []

        result = flow.send()
        wait_until(lambda: app.server.inspect.task(result.uuid).waits_for, what="the last wait")
        app.server.signal(result.uuid, "go", 7)
        assert result.get(timeout=HANG) == ["the result of slow did not come in time", "late", 7]

    def test_result_that_cannot_be_kept_fails_the_wait(self, app: App) -> None:
        @app.server.task
        def large() -> str:
            return "x" * (SIGNALS_BYTES // 3)

        @app.server.task(retries=3)
        def flow() -> None:
            current_task().wait_for(group(large.signature() for _ in range(3)))

        with pytest.raises(TaskFailed, match="more than a checkpoint may have"):
            flow.send().get(timeout=HANG)

    def test_other_task_that_is_revoked_ends_the_wait(self, app: App, press: Press) -> None:
        @app.server.task
        def flow() -> None:
            later = press.render.options(delay=HANG).signature(1)
            current_task().wait_for(later)

        result = flow.send()
        child = self._awaited(app, result.uuid)
        app.server.revoke(child)
        with pytest.raises(TaskFailed, match=r"task render .* failed: Revoked"):
            result.get(timeout=HANG)

    def test_group_that_is_revoked_ends_the_wait(self, app: App, press: Press) -> None:
        @app.server.task
        def flow() -> None:
            later = press.render.options(delay=HANG)
            current_task().wait_for(group(later.signature(page) for page in range(2)))

        result = flow.send()
        app.server.revoke(self._awaited(app, result.uuid))
        with pytest.raises(TaskFailed, match="Revoked"):
            result.get(timeout=HANG)

    def test_values_are_of_the_types_of_their_tasks(self, app: App) -> None:
        @app.server.task
        def numbered(first: int) -> tuple[int, dt.date]:
            return first, dt.date(2026, 11, first)

        @app.server.task
        def flow() -> bool:
            task = current_task()
            return (
                task.wait_for(group(numbered.signature(n) for n in (1, 2)))
                == [(1, dt.date(2026, 11, 1)), (2, dt.date(2026, 11, 2))]
            ) and task.wait_for(app.add.signature(1, 2) | numbered.partial()) == (
                3,
                dt.date(2026, 11, 3),
            )

        assert flow.send().get(timeout=HANG)

    def test_wait_for_another_workflow_of_the_same_name_is_refused(self, app: App) -> None:
        @app.server.task(retries=1, backoff=[0.0])
        def flow() -> list[Any]:
            task = current_task()
            parts = [group(app.add.signature(n, n) for n in some) for some in ((1, 2), (3, 4))]
            if task.attempt == 2:
                parts.reverse()
            found = [task.wait_for(part) for part in parts]
            if task.attempt == 1:
                raise OSError("again")
            return found

        with pytest.raises(TaskFailed, match="other arguments than in the run before"):
            flow.send().get(timeout=HANG)

    def test_task_is_sent_although_nobody_has_time_to_wait(self, app: App, press: Press) -> None:
        @app.server.task
        def flow() -> str:
            try:
                return current_task().wait_for(press.render.signature(1), timeout=0)
            except SignalTimeout:
                return "late"

        assert flow.send().get(timeout=HANG) in ("late", "page 1")
        wait_until(lambda: app.calls, what="the other task")
        app.wait_until_idle()
        assert app.calls == [("render", 1)]

    def test_task_that_is_revoked_leaves_the_other_one_alone(self, app: App) -> None:
        @app.server.task
        def held() -> str:
            app.gate("open").wait(HANG)
            app.calls.append(("held",))
            return "done"

        @app.server.task
        def flow() -> None:
            app.calls.append(("run",))
            current_task().wait_for(held.signature())

        result = flow.send()
        child = self._awaited(app, result.uuid)
        app.server.revoke(result.uuid)
        with pytest.raises(TaskFailed, match="revoked"):
            result.get(timeout=HANG)
        app.gate("open").set()
        assert app.server.result(child).get(timeout=HANG) == "done"
        app.wait_until_idle()
        assert app.calls == [("run",), ("held",)]

    @pytest.mark.parametrize("is_result", [False, True], ids=["task", "result"])
    def test_messages_that_are_purged_end_the_wait(
        self, idle: App, press: Press, lost: LostWorker, is_result: bool
    ) -> None:
        queue = idle.server.config.default_queue
        if not idle.server.broker.features.peeking:
            pytest.skip("messages that are deleted unseen have no tasks")

        @idle.server.task
        def flow() -> None:
            current_task().wait_for(press.render.signature(1))

        result = flow.send()
        self._suspend(lost)
        if is_result:
            self._settle_next(lost)
        lost.session.close()
        name = RESULT if is_result else "render"
        wait_until(
            lambda: [one.name for one in idle.server.broker.pending(queue, 10)] == [name],
            what="the message",
        )

        idle.server.inspect.purge(queue)

        with idle.running():
            with pytest.raises(TaskFailed, match="its message was deleted"):
                result.get(timeout=HANG)
            idle.wait_until_idle()

    def test_why_names_the_other_task(self, app: App, press: Press) -> None:
        @app.server.task
        def flow() -> None:
            later = press.render.options(delay=HANG).signature(1)
            current_task().wait_for(later)

        result = flow.send()
        child = self._awaited(app, result.uuid)
        [reason] = result.why().reasons
        assert reason.cause == "task"
        assert reason.text == f"it waits for the result of render: {child}"
        assert app.server.inspect.task(result.uuid).waits_for == ""
        assert app.server.app.store.backend.get_state(child).parent == result.uuid
        app.server.revoke(child)

    def test_task_that_is_sent_anew_sends_the_other_anew(self, app: App, press: Press) -> None:
        @app.server.task
        def flow() -> Any:
            task = current_task()
            value = task.wait_for(press.render.signature(1))
            if not app.gate("open").is_set():
                raise OSError("not yet")
            return value

        result = flow.send()
        with pytest.raises(TaskFailed):
            result.get(timeout=HANG)
        app.gate("open").set()
        app.server.inspect.retry([result.uuid])
        assert result.get(timeout=HANG) == "page 1"
        assert app.calls == [("render", 1)]
        app.gate("open").clear()

        again = flow.send()
        with pytest.raises(TaskFailed):
            again.get(timeout=HANG)
        app.gate("open").set()
        app.server.inspect.retry([again.uuid], from_start=True)
        assert again.get(timeout=HANG) == "page 1"
        assert app.calls == [("render", 1)] * 3

    def test_task_without_a_checkpoint_sends_the_other_anew_from_its_start(
        self, app: App, press: Press
    ) -> None:
        @app.server.task
        def nothing() -> None:
            app.calls.append(("nothing",))

        @app.server.task
        def flow() -> Any:
            app.calls.append(("run",))
            if len(app.calls) == 3:
                raise OSError("before it reads anything")
            return current_task().wait_for(nothing.signature())

        result = flow.send()
        with pytest.raises(TaskFailed, match="before it reads"):
            result.get(timeout=HANG)
        app.server.inspect.retry([result.uuid], from_start=True)
        assert result.get(timeout=HANG) is None
        assert app.calls == [("run",), ("nothing",), ("run",)] * 2

    def test_late_result_takes_no_room(self, app: App) -> None:
        @app.server.task
        def slow() -> str:
            app.gate("open").wait(HANG)
            return "x" * (SIGNALS_BYTES * 9 // 10)

        @app.server.task
        def flow(part: int) -> Any:
            task = current_task()
            if part == 1:
                try:
                    task.wait_for(slow.signature(), timeout=0.2)
                except SignalTimeout:
                    app.gate("open").set()
                    raise Replace(flow.signature(2)) from None
            return [task.wait_for("go"), task.wait_for("go")]

        result = flow.send(1)
        wait_until(lambda: app.server.inspect.task(result.uuid).waits_for, what="the second part")
        app.wait_until_idle()
        for _ in range(2):
            app.server.signal(result.uuid, "go", "y" * (SIGNALS_BYTES // 5))
        assert len(result.get(timeout=HANG)) == 2

    def test_task_that_died_before_it_waits_has_sent_nothing(
        self, idle: App, press: Press, lost: LostWorker
    ) -> None:
        @idle.server.task
        def flow() -> Any:
            return current_task().wait_for(press.render.signature(1))

        result = flow.send()
        lost.run(lost.claim())
        lost.lose()
        with idle.running():
            assert result.get(timeout=HANG) == "page 1"
            idle.wait_until_idle()
        assert idle.calls == [("render", 1)]

    def test_zombie_sends_nothing(self, idle: App, press: Press, lost: LostWorker) -> None:
        @idle.server.task
        def flow() -> Any:
            return current_task().wait_for(press.render.signature(1))

        result = flow.send()
        zombie = lost.claim()
        session, lost.session = lost.session, lost.open()
        session.close()
        with idle.running():
            assert result.get(timeout=HANG) == "page 1"
            lost.run(zombie)
            assert zombie.settlement is not None
            assert session.settle([zombie.settlement]) == [FENCED]
            idle.wait_until_idle()
        assert idle.calls == [("render", 1)]

    def test_result_that_comes_twice_is_given_once(self, app: App, press: Press) -> None:
        @app.server.task
        def flow() -> list[Any]:
            task = current_task()
            return [
                task.wait_for(press.render.signature(1)),
                task.wait_for("go"),
                task.wait_for(press.render.signature(2)),
            ]

        result = flow.send()
        wait_until(lambda: app.server.inspect.task(result.uuid).waits_for, what="the wait")
        for name in (RESULT, FAILED):
            texts = ["oh"] if name == FAILED else []
            args = [*texts, result.uuid, "#0 result of render", "other"]
            app.server.send(
                Signature(name=name, args=[Arg(type="string", value=one) for one in args])
            )
        app.wait_until_idle()
        app.server.signal(result.uuid, "go", 7)
        assert result.get(timeout=HANG) == ["page 1", 7, "page 2"]

    def test_message_that_brings_no_result_of_ours_is_a_dead_letter(self, app: App) -> None:
        app.server.send(Signature(name=RESULT, args=[Arg(type="string", value="task_1")]))
        wait_until(app.server.inspect.dead, what="the dead letter")
        assert app.server.inspect.dead()[0].reason == "bad-name"

    def _suspend(self, lost: LostWorker) -> None:
        execution = lost.claim()
        assert lost.run(execution).state is State.RETRY
        assert execution.settlement is not None
        assert lost.session.settle([execution.settlement]) == [SETTLED]

    def _settle_next(self, lost: LostWorker) -> None:
        execution = lost.claim()
        assert lost.run(execution).state is State.SUCCESS
        assert execution.settlement is not None
        assert lost.session.settle([execution.settlement]) == [SETTLED]

    def _awaited(self, app: App, uuid: str) -> str:
        """Return the task whose result this one waits for."""
        found: list[str] = []

        def waits() -> bool:
            [body] = app.server.app.store.backend.claims([record_of(uuid)])
            if (wait := decode(body).wait) is not None:
                found.append(wait.child)
            return bool(found)

        wait_until(waits, what="the wait")
        return found[0]

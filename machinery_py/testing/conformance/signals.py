"""Promises of every pair of stores that keeps signals, about tasks that wait for them."""

from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from machinery_py import ArgumentError, Replace, State, TaskFailed, Unsupported, current_task
from machinery_py.backends.base import ALREADY, CONFLICT, FENCED, SETTLED
from machinery_py.errors import NameRefused, SignalRefused, SignalTimeout
from machinery_py.tasks.mailboxes import TIMER, Mailbox, decode, record_of
from machinery_py.tasks.signature import HEADER_EXPIRES
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.lost_worker import LostWorker, LostWorkerCase
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.signatures import decode_signature
from machinery_py.worker.running.waiting import run_again


class NoSignalConformance(LostWorkerCase):
    """Stores that keep no signals say so."""

    def test_signals_are_refused_in_words(self, app: App) -> None:
        @app.server.task
        def flow() -> None:
            current_task().wait_for("approval")

        result = flow.send()
        with pytest.raises(TaskFailed, match="Unsupported: .*flow gets no signals: the "):
            result.get(timeout=HANG)
        with pytest.raises(Unsupported, match="gets no signals"):
            app.server.signal(result.uuid, "approval")


class SignalConformance(LostWorkerCase):
    """Tasks that wait, on threaded workers and on lost ones."""

    def test_task_waits_for_a_signal(self, app: App) -> None:
        def note(value: int) -> int:
            app.calls.append(("after", value))
            return value

        @app.server.task
        def flow() -> list[Any]:
            task = current_task()
            app.calls.append(("run",))
            found = task.wait_for("approval")
            return [found, task.step("after", note, 8), task.attempt]

        result = flow.send()
        _wait_for_text(result, "waits for signal 'approval'")
        assert app.server.inspect.queues()[0].delayed == 0
        others = [app.add.send(n, 1) for n in range(8)]
        assert [one.get(timeout=HANG) for one in others] == list(range(1, 9))

        assert app.server.signal(result.uuid, "approval", {"by": "ada"})

        assert result.get(timeout=HANG) == [{"by": "ada"}, 8, 1]
        assert app.calls == [("run",), ("run",), ("after", 8)]

    def test_waiting_task_has_no_message_but_its_timer(self, app: App) -> None:
        @app.server.task
        def flow() -> Any:
            return current_task().wait_for("approval", timeout=dt.timedelta(days=7))

        result = flow.send()
        wait_until(lambda: _mailbox(app, result.uuid).wait, what="the wait")
        if app.server.broker.features.peeking:
            wait_until(lambda: app.server.broker.delayed(10), what="the timer")
            [timer] = app.server.broker.delayed(10)
            assert app.server.broker.pending(app.server.config.default_queue, 10) == []
            wait = _mailbox(app, result.uuid).wait
            assert wait is not None
            assert (timer.name, timer.uuid) == (TIMER, wait.id)
        app.server.signal(result.uuid, "approval", 7)
        assert result.get(timeout=HANG) == 7

    def test_coroutine_waits_for_a_signal(self, app: App) -> None:
        @app.server.task
        async def flow() -> Any:
            return await current_task().wait_for_async("approval", timeout=2 * HANG)

        result = flow.send()
        _wait_for_text(result, "waits for signal 'approval' until ")
        assert app.server.signal(result.uuid, "approval", [1, None])
        assert result.get(timeout=HANG) == [1, None]

    def test_signals_are_kept_until_the_task_waits_for_them(self, idle: App) -> None:
        @idle.server.task
        def flow() -> list[Any]:
            task = current_task()
            return [task.wait_for(name) for name in ("a", "b", "a", "a")]

        result = flow.send()
        for number, name in enumerate("aab"):
            assert idle.server.signal(result.uuid, name, number)
        with idle.running():
            _wait_for_text(result, "waits for signal 'a'")
            idle.server.signal(result.uuid, "a", 3)
            assert result.get(timeout=HANG) == [0, 2, 1, 3]

    def test_signal_with_the_same_key_is_dropped(self, app: App) -> None:
        @app.server.task
        def flow() -> list[Any]:
            task = current_task()
            return [task.wait_for("click"), task.wait_for("click")]

        result = flow.send()
        given = [app.server.signal(result.uuid, "click", n, key="click-81") for n in range(2)]
        assert given == [True, False]
        _wait_for_text(result, "waits for signal 'click'")
        assert not app.server.signal(result.uuid, "click", 2, key="click-81")
        assert app.server.signal(result.uuid, "click", 3)
        assert result.get(timeout=HANG) == [0, 3]

    def test_wait_ends_at_its_deadline_once_and_for_all(self, app: App) -> None:
        @app.server.task(retries=1, backoff=[0.0])
        def flow() -> str:
            task = current_task()
            try:
                task.wait_for("approval", timeout=0.3)
            except SignalTimeout as error:
                app.calls.append((str(error),))
            if task.attempt == 1:
                raise OSError("again")
            return str(task.wait_for("approval"))

        result = flow.send()
        wait_until(lambda: app.calls, what="the end of the first wait")
        _wait_for_text(result, "waits for signal 'approval'")
        app.server.signal(result.uuid, "approval", "late")
        assert result.get(timeout=HANG) == "late"
        assert app.calls == [("signal 'approval' did not come in time",)] * len(app.calls)
        assert len(app.calls) > 1

    def test_deadline_after_the_signal_changes_nothing(self, app: App) -> None:
        @app.server.task
        def flow() -> Any:
            task = current_task()
            app.calls.append(("run",))
            found = task.wait_for("approval", timeout=0.5)
            app.gate("end").wait(HANG)
            return found

        result = flow.send()
        _wait_for_text(result, "waits for signal 'approval'")
        app.server.signal(result.uuid, "approval", 7)
        wait_until(lambda: not app.server.inspect.queues()[0].delayed, what="the end of its timer")
        app.gate("end").set()
        assert result.get(timeout=HANG) == 7
        app.wait_until_idle()
        assert app.calls == [("run",), ("run",)]

    def test_next_part_of_a_replaced_task_gets_the_unread_signals(self, app: App) -> None:
        @app.server.task
        def flow(part: int) -> list[Any]:
            task = current_task()
            if part == 1:
                app.gate("sent").wait(HANG)
                app.calls.append((task.wait_for("one"),))
                raise Replace(flow.signature(2))
            return [task.wait_for("one"), task.wait_for("one")]

        result = flow.send(1)
        for number in range(2):
            app.server.signal(result.uuid, "one", number)
        app.gate("sent").set()
        _wait_for_text(result, "waits for signal 'one'")
        app.server.signal(result.uuid, "one", 2)
        assert result.get(timeout=HANG) == [1, 2]
        assert app.calls == [(0,)]

    def test_signals_of_many_senders_all_arrive(self, app: App) -> None:
        @app.server.task
        def flow(number: int) -> list[Any]:
            return [current_task().wait_for("one") for _ in range(number)]

        result = flow.send(24)
        with ThreadPoolExecutor(8) as pool:
            sent = list(pool.map(lambda n: app.server.signal(result.uuid, "one", n), range(24)))

        assert all(sent)
        assert sorted(result.get(timeout=HANG)) == list(range(24))

    def test_generation_without_a_wait_forgets_no_signal_that_was_read(self, app: App) -> None:
        @app.server.task
        def flow(part: int) -> list[Any]:
            task = current_task()
            if part == 1:
                task.wait_for("one")
            if part < 3:
                raise Replace(flow.signature(part + 1))
            return [task.wait_for("one")]

        result = flow.send(1)
        for number in range(2):
            app.server.signal(result.uuid, "one", number)
        assert result.get(timeout=HANG) == [1]

    def test_signal_while_the_task_suspends_lets_it_run_again(
        self, idle: App, lost: LostWorker
    ) -> None:
        @idle.server.task
        def flow() -> Any:
            return current_task().wait_for("approval")

        result = flow.send()
        execution = lost.claim()
        lost.run(execution)
        assert execution.settlement is not None
        assert idle.server.signal(result.uuid, "approval", 7)

        assert lost.session.settle([execution.settlement]) == [CONFLICT]
        run_again(execution)
        assert lost.session.settle([execution.settlement]) == [SETTLED]

        with idle.running():
            assert result.get(timeout=HANG) == 7
            idle.wait_until_idle()

    def test_worker_that_dies_before_its_task_waits_loses_nothing(
        self, idle: App, lost: LostWorker
    ) -> None:
        @idle.server.task
        def flow() -> Any:
            return current_task().wait_for("approval")

        result = flow.send()
        lost.run(lost.claim())
        assert idle.server.signal(result.uuid, "approval", 7)
        lost.lose()
        with idle.running():
            assert result.get(timeout=HANG) == 7
            idle.wait_until_idle()

    def test_settlement_that_is_repeated_suspends_once(self, idle: App, lost: LostWorker) -> None:
        @idle.server.task
        def flow() -> Any:
            idle.calls.append(("run",))
            return current_task().wait_for("approval")

        result = flow.send()
        execution = lost.claim()
        lost.run(execution)
        assert execution.settlement is not None
        assert lost.session.settle([execution.settlement]) == [SETTLED]
        assert lost.session.settle([execution.settlement])[0] in (ALREADY, FENCED)
        with idle.running():
            assert idle.server.signal(result.uuid, "approval", 7)
            assert result.get(timeout=HANG) == 7
            idle.wait_until_idle()
        assert idle.calls == [("run",), ("run",)]

    def test_zombie_leaves_no_wait_behind(self, idle: App, lost: LostWorker) -> None:
        @idle.server.task
        def flow() -> Any:
            value = current_task().wait_for("approval")
            idle.calls.append((value,))
            return value

        result = flow.send()
        zombie = lost.claim()
        session, lost.session = lost.session, lost.open()
        session.close()
        with idle.running():
            _wait_for_text(result, "waits for signal 'approval'")
            before = _mailbox(idle, result.uuid)
            assert lost.run(zombie).state is not State.SUCCESS
            assert zombie.settlement is not None
            assert session.settle([zombie.settlement]) == [FENCED]
            assert _mailbox(idle, result.uuid) == before
            assert idle.server.signal(result.uuid, "approval", 7)
            assert result.get(timeout=HANG) == 7
        assert idle.calls == [(7,)]

    def test_two_waits_at_a_time_are_refused(self, app: App) -> None:
        @app.server.task
        async def flow() -> list[Any]:
            task = current_task()
            first = task.wait_for_async("a")
            try:
                return [await task.wait_for_async("b")]
            finally:
                first.close()

        with pytest.raises(TaskFailed, match="one thing at a time"):
            flow.send().get(timeout=HANG)

    def test_signal_that_nobody_can_get_is_refused(self, app: App) -> None:
        done = app.add.send(1, 2)
        done.get(timeout=HANG)
        with pytest.raises(SignalRefused, match=r"has ended \(SUCCESS\)"):
            app.server.signal(done.uuid, "approval")
        with pytest.raises(SignalRefused, match="is not known"):
            app.server.signal("task_0", "approval")
        with pytest.raises(ArgumentError):
            app.server.signal(done.uuid, "approval", object())
        with pytest.raises(NameRefused, match="step 'a#1'"):
            app.server.signal(done.uuid, "a#1")
        with pytest.raises(NameRefused, match="key"):
            app.server.signal(done.uuid, "approval", key="x" * 5000)

    def test_task_that_waits_longer_than_its_expiry_goes_on(self, app: App) -> None:
        @app.server.task
        def flow() -> Any:
            return current_task().wait_for("approval")

        result = flow.options(expires=HANG).send()
        _wait_for_text(result, "waits for signal 'approval'")
        wait = _mailbox(app, result.uuid).wait
        assert wait is not None
        assert HEADER_EXPIRES not in decode_signature(wait.body).headers
        app.server.signal(result.uuid, "approval", 7)
        assert result.get(timeout=HANG) == 7

    def test_waiting_task_that_is_revoked_runs_nothing(self, app: App) -> None:
        @app.server.task
        def flow() -> None:
            app.calls.append(("run",))
            current_task().wait_for("approval")

        result = flow.send()
        _wait_for_text(result, "waits for signal 'approval'")
        app.server.revoke(result.uuid)
        with pytest.raises(TaskFailed, match="revoked"):
            result.get(timeout=HANG)
        with pytest.raises(SignalRefused):
            app.server.signal(result.uuid, "approval")
        assert _mailbox(app, result.uuid) == Mailbox()
        assert app.calls == [("run",)]

    def test_waiting_task_goes_with_the_messages_of_its_queue(self, app: App) -> None:
        if not app.server.broker.features.peeking:
            pytest.skip("messages that are deleted unseen have no tasks")

        @app.server.task
        def flow() -> None:
            app.calls.append(("run",))
            current_task().wait_for("approval", timeout=HANG)

        result = flow.send()
        _wait_for_text(result, "waits for signal 'approval'")
        wait_until(lambda: app.server.inspect.queues()[0].delayed, what="its timer")
        app.server.inspect.purge(app.server.config.default_queue)
        with pytest.raises(TaskFailed, match="its message was deleted"):
            result.get(timeout=HANG)
        with pytest.raises(SignalRefused):
            app.server.signal(result.uuid, "approval")

    def test_mailbox_goes_with_its_task(self, app: App) -> None:
        @app.server.task
        def flow() -> Any:
            return current_task().wait_for("approval")

        result = flow.send()
        app.server.signal(result.uuid, "approval", 7)
        assert result.get(timeout=HANG) == 7
        wait_until(
            lambda: app.server.app.store.backend.claims([record_of(result.uuid)]) == [None],
            what="the end of its mailbox",
        )


def _mailbox(app: App, uuid: str) -> Mailbox:
    [body] = app.server.app.store.backend.claims([record_of(uuid)])
    return decode(body)


def _wait_for_text(result: Any, *texts: str) -> None:
    """Wait until the state of the task says all of these."""

    def says() -> bool:
        state = result.get_state()
        return state is not None and all(text in state.error for text in texts)

    wait_until(says, what=" ".join(texts))

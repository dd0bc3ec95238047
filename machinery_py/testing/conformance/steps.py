"""Promises of every pair of stores that keeps checkpoints, about steps of tasks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from machinery_py import (
    BackendUnavailable,
    MachineryError,
    NoRetry,
    Replace,
    State,
    TaskFailed,
    current_task,
    group,
)
from machinery_py.backends.base import SETTLED
from machinery_py.bounds import CHECKPOINT_BYTES
from machinery_py.brokers.base import Delivery, Fate, Message
from machinery_py.errors import StepFailed, StepLost, StepRefused
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.lost_worker import LostWorker, LostWorkerCase
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.signatures import decode_signature, encode_signature
from machinery_py.worker.admission.intake import accept, peek
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.hooks import WorkerHooks

AGAIN: dict[str, Any] = {"retries": 3, "backoff": [0.0]}


@dataclasses.dataclass(frozen=True)
class Bill:
    number: int
    at: dt.date


class StepConformance(LostWorkerCase):
    """Steps of tasks on threaded workers, and on lost ones."""

    # What a step returns

    def test_kept_step_is_not_made_again_by_a_retry(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flow(number: int) -> list[Any]:
            task = current_task()
            first = task.step("first", _noted, app, "first", number)
            second = task.step("second", _noted, app, "second", by=first)
            if task.attempt < 3:
                raise OSError("again")
            return [first, second, task.attempt]

        assert flow.send(7).get(timeout=HANG) == [7, [7], 3]
        assert app.calls == [("first", 7), ("second", 7)]

    def test_value_is_the_same_in_the_first_run_and_in_later_ones(self, app: App) -> None:
        def bill() -> Bill:
            return Bill(7, dt.date(2026, 1, 2))

        def pair() -> tuple[str, int]:
            return "a", 1

        @app.server.task(retries=3, backoff=[0.0])
        def flow() -> None:
            task = current_task()
            for function in (bill, pair, _nothing, _untyped, app.add):
                args = (1, 2) if function is app.add else ()
                step: Callable[..., Any] = task.step
                app.calls.append((step(function.__name__, function, *args),))
            if task.attempt == 1:
                raise OSError("again")

        flow.send().get(timeout=HANG)

        assert app.calls[:5] == app.calls[5:]
        assert [value for (value,) in app.calls[:5]] == [
            Bill(7, dt.date(2026, 1, 2)),
            ("a", 1),
            None,
            [1, {"a": [2]}],  # a tuple in it has come back as JSON has it, at once
            3,
        ]

    def test_steps_of_one_name_are_counted(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flow() -> list[Any]:
            task = current_task()
            found = [task.step("note", _noted, app, "note", number) for number in range(3)]
            if task.attempt == 1:
                raise OSError("again")
            return found

        assert flow.send().get(timeout=HANG) == [0, 1, 2]
        assert len(app.calls) == 3

    def test_coroutine_steps_are_counted_when_they_are_called(self, app: App) -> None:
        async def note(number: int) -> int:
            await asyncio.sleep(0)
            app.calls.append((number, current_task().step_key.rpartition(":")[2]))
            return number

        @app.server.task(retries=3, backoff=[0.0])
        async def flow() -> list[int]:
            task = current_task()
            steps = [task.step_async("note", note, number) for number in range(3)]
            found = list(await asyncio.gather(*reversed(steps)))
            if task.attempt == 1:
                raise OSError("again")
            return found

        assert flow.send().get(timeout=HANG) == [2, 1, 0]
        assert sorted(app.calls) == [(0, "note"), (1, "note#2"), (2, "note#3")]

    def test_step_beside_others_of_its_name_is_refused(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flow() -> None:
            task = current_task()
            errors: list[BaseException] = []

            def beside() -> None:
                try:
                    task.step("note", _noted, app, "note", 2)
                except BaseException as error:
                    errors.append(error)

            task.step("note", _noted, app, "note", 1)
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()
            raise errors[0]

        with pytest.raises(TaskFailed, match="several threads or asyncio tasks"):
            flow.send().get(timeout=HANG)
        assert app.calls == [("note", 1)]

    # What a step raises

    def test_step_that_raises_is_made_again_by_a_retry(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0], retry_on=ValueError)
        def flow() -> str:
            return current_task().step("charge", _charge, app, fails=2)

        assert flow.send().get(timeout=HANG) == "paid"
        assert len(app.calls) == 3

    def test_step_that_sends_and_is_made_again_sends_once(
        self, idle: App, lost: LostWorker
    ) -> None:
        @idle.server.task
        def flow(how: str) -> None:
            current_task().step("notify", idle.note.send, how, "sent")
            idle.calls.append((how, "kept"))

        for how in ("queued", "run"):
            result = flow.send(how)
            execution = lost.claim()
            key = f"{result.uuid}:0:notify"
            first = idle.note.send_once(key, how, "sent")  # before the checkpoint
            if how == "run":
                lost.lose()
            else:
                lost.run(execution)
                assert execution.settlement is not None
                assert lost.session.settle([execution.settlement]) == [SETTLED]
            with idle.running():
                first.get(timeout=HANG)
                result.get(timeout=HANG)
                idle.wait_until_idle()
        assert sorted(idle.calls) == sorted(
            (how, word) for how in ("queued", "run") for word in ("kept", "sent")
        )

    def test_another_call_is_no_repeat(self, idle: App) -> None:
        sent = [
            idle.note.send_once("key", 1),
            idle.note.send_once("key", 2),
            idle.note.send_once("other", 1),
            idle.note.options(queue="other").send_once("key", 1),
            idle.note.send_once("key", 1),
        ]
        assert len({one.uuid for one in sent}) == 4
        assert sent[0].uuid == sent[-1].uuid

    def test_sending_is_a_step(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flow() -> list[Any]:
            task = current_task()
            sent = task.step("notify", app.add.send, 3, 4)
            app.calls.append((sent.uuid,))
            if task.attempt < 2:
                raise OSError("again")
            return [sent.uuid, sent.get(timeout=HANG)]

        uuid, value = flow.send().get(timeout=HANG)
        assert (value, app.calls) == (7, [(uuid,)] * 2)

    def test_sending_whose_result_cannot_be_kept_sends_nothing(self, app: App) -> None:
        @app.server.task
        def flow(how: str) -> None:
            one = app.note.signature("sent")
            sends = {"signature": one.send, "group": group([one]).send, "chain": (one | one).send}
            current_task().step("send", sends[how])

        for how in ("signature", "group", "chain"):
            with pytest.raises(
                TaskFailed, match="StepRefused: step 'send': what .* cannot be kept"
            ):
                flow.send(how).get(timeout=HANG)
        app.wait_until_idle()
        assert app.calls == []

    def test_sending_is_a_step_of_a_coroutine(self, app: App) -> None:
        @app.server.task
        async def flow() -> int:
            sent = await current_task().step_async("notify", app.add.send_async, 3, 4)
            return await sent.get_async(timeout=HANG)

        assert flow.send().get(timeout=HANG) == 7

    def test_retry_on_looks_at_what_the_step_raised(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0], dont_retry_on=ValueError)
        def flow() -> str:
            return current_task().step("charge", _charge, app, fails=1)

        with pytest.raises(TaskFailed, match="step 'charge' failed: ValueError: no money") as error:
            flow.send().get(timeout=HANG)
        assert error.value.error_type == "machinery_py.errors.StepFailed"
        assert len(app.calls) == 1

    def test_step_can_end_the_task_in_its_own_way(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flow() -> None:
            current_task().step("no", _no_retry)

        with pytest.raises(TaskFailed, match="never"):
            flow.send().get(timeout=HANG)

    @pytest.mark.parametrize("is_async", [False, True], ids=["function", "coroutine"])
    def test_caught_failure_is_kept_with_the_next_step(self, app: App, is_async: bool) -> None:
        async def charge_async() -> str:
            return _charge(app, fails=1)

        async def flow_async() -> list[str]:
            task = current_task()
            try:
                await task.step_async("charge", charge_async)
            except StepFailed as error:
                path = f"{error.step} {error.error_type} {error.error}"
            else:
                path = "paid"
            return end(path)

        def flow() -> list[str]:
            try:
                path = current_task().step("charge", _charge, app, fails=1)
            except StepFailed as error:
                path = f"{error.step} {error.error_type} {error.error}"
            return end(path)

        def end(path: str) -> list[str]:
            path = current_task().step("remind", str, path)
            if current_task().attempt == 1:
                raise OSError("again")
            return [path]

        task: Any = app.server.task("flow", **AGAIN)(flow_async if is_async else flow)
        assert task.send().get(timeout=HANG) == ["charge ValueError no money"]
        assert app.calls == [("charge",)]  # it would have succeeded

    # Redeliveries

    def test_key_of_a_step_is_the_same_in_every_try(self, idle: App, lost: LostWorker) -> None:
        @idle.server.task(retries=3, backoff=[0.0])
        def flow() -> None:
            current_task().step("charge", _keyed, idle)

        result = flow.send()
        lost.run(lost.claim())
        with pytest.raises(MachineryError, match="outside of a step"):
            _ = _context(lost).step_key
        lost.lose()
        wait_until(lambda: lost.run(lost.claim()).state is State.RETRY, what="the next run")
        keys = {key for _, key in idle.calls}

        assert keys == {f"{result.uuid}:0:charge"}

    def test_kept_step_is_read_by_the_next_worker(self, idle: App, lost: LostWorker) -> None:
        @idle.server.task
        def flow() -> int:
            value: int = current_task().step("first", _noted, idle, "first", 7)
            return value

        result = flow.send()
        assert lost.run(lost.claim()).state is State.SUCCESS  # which nobody hears of
        lost.lose()
        with idle.running():
            assert result.get(timeout=HANG) == 7
        assert idle.calls == [("first", 7)]

    def test_checkpoints_outlast_a_redelivery_that_makes_no_step(
        self, idle: App, lost: LostWorker
    ) -> None:
        runs: list[int] = []

        @idle.server.task(retries=3, backoff=[0.0])
        def flow() -> int:
            runs.append(1)
            if len(runs) == 2:
                raise OSError("before the first step")
            value: int = current_task().step("first", _noted, idle, "first", 7)
            return value

        result = flow.send()
        lost.run(lost.claim())
        lost.lose()
        with idle.running():
            assert result.get(timeout=HANG) == 7
        assert (len(runs), idle.calls) == (3, [("first", 7)])

    def test_second_message_repeats_one_step_at_most(self, idle: App, lost: LostWorker) -> None:
        @idle.server.task
        def flow() -> None:
            for name in "abc":
                current_task().step(name, _noted, idle, name)

        result = flow.send()
        first = lost.claim()
        lost.run(first)  # and it is never settled
        queue = idle.server.config.default_queue
        again = Message(uuid=result.uuid, name=flow.name, queue=queue, body=first.delivery.body)
        idle.server.broker.put([again], token="")
        with idle.running():
            result.get(timeout=HANG)
        assert idle.calls == [("a",), ("b",), ("c",), ("a",)]

    def test_next_part_of_a_replaced_task_makes_its_own_steps(self, app: App) -> None:
        @app.server.task
        def flow(part: int) -> int:
            value: int = current_task().step("count", _noted, app, part)
            if part < 3:
                raise Replace(flow.signature(part + 1))
            left.append(sorted(app.server.backend.checkpoints(current_task().uuid)))
            return value

        left: list[list[str]] = []
        assert flow.send(1).get(timeout=HANG) == 3
        assert app.calls == [(1,), (2,), (3,)]
        assert left == [["2:count"]]

    def test_run_whose_checkpoints_are_gone_fails_the_task(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flow() -> None:
            task = current_task()
            task.step("first", _noted, app, "first")
            app.server.backend.end_checkpoints(task.uuid, 0)
            raise OSError("again")

        with pytest.raises(TaskFailed, match="0 of 1 checkpoints .* are there") as error:
            flow.send().get(timeout=HANG)
        assert error.value.error_type == "machinery_py.errors.StepRefused"
        assert app.calls == [("first",)]

    def test_function_that_is_no_coroutine_is_not_called_by_step_async(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        async def flow() -> None:
            step: Any = current_task().step_async
            await step("first", _noted, app, "first")

        with pytest.raises(TaskFailed, match="is no coroutine function"):
            flow.send().get(timeout=HANG)
        assert app.calls == []

    def test_zombie_keeps_nothing_and_its_run_ends(self, idle: App, lost: LostWorker) -> None:
        @idle.server.task
        def flow() -> int:
            value: int = current_task().step("first", _held, idle, lost)
            with pytest.raises(StepLost):  # it swallows it: the run ends all the same
                current_task().step("second", _noted, idle, "second")
            return value

        def lose() -> int:
            lost.lose()
            theirs.append(lost.claim())
            return 1

        theirs: list[Execution] = []
        lost.on_step = lose  # type: ignore[attr-defined]  # of this test alone
        result = flow.send()
        mine = lost.claim()

        state = lost.run(mine)

        assert (state.state, state.error_type) == (State.FAILURE, "machinery_py.errors.StepLost")
        assert not idle.server.backend.checkpoints(result.uuid)
        assert idle.calls == []
        lost.on_step = lambda: 2  # type: ignore[attr-defined]  # of this test alone
        assert lost.run(theirs[0]).state is State.FAILURE  # of its assertion: nothing is lost now
        assert len(idle.server.backend.checkpoints(result.uuid)) == 2

    def test_tries_begin_anew_with_a_checkpoint(self, idle: App) -> None:
        @idle.server.task(retries=1, backoff=[0.0])
        def flow() -> int:
            task = current_task()
            for number in range(task.attempt):
                task.step("count", _noted, idle, number)
            if task.attempt < 5:
                raise OSError("again")
            return task.attempt

        with idle.running():
            assert flow.send().get(timeout=HANG) == 5
        assert len(idle.calls) == 5

    def test_strikes_begin_anew_with_a_checkpoint(self, idle: App, lost: LostWorker) -> None:
        @idle.server.task
        def flow() -> None:
            for number in range(len(lost.executions)):
                current_task().step("count", _noted, idle, number)

        flow.send()
        for strikes in (1, 2, 3):  # the limit is 3: each run before the last has kept a step
            execution = lost.claim()
            struck = msgspec.structs.replace(execution.delivery, strikes=strikes)
            execution.delivery = struck
            lost.run(execution)
            lost.lose()
        assert len(idle.calls) == 3
        for strikes, is_run in (5, True), (6, False):
            execution = lost.claim()
            execution.delivery = msgspec.structs.replace(execution.delivery, strikes=strikes)
            assert accept(execution, {}) is is_run
            if is_run:
                lost.lose()
        assert execution.settlement is not None
        assert execution.settlement.reason == "poison"

    def test_task_waits_while_its_checkpoints_cannot_be_read(
        self, idle: App, lost: LostWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away(uuid: str) -> dict[str, bytes]:
            raise BackendUnavailable(f"away, asked for {uuid}")

        idle.echo.send(1)
        execution = lost.claim()
        execution.delivery = msgspec.structs.replace(execution.delivery, strikes=9)
        monkeypatch.setattr(idle.server.backend, "checkpoints", away)

        assert not accept(execution, {})

        assert execution.settlement is not None
        assert execution.settlement.fate is Fate.LATER
        assert execution.settlement.states == ()

    def test_tries_without_a_checkpoint_count(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flow() -> None:
            app.calls.append((current_task().step("first", _nothing),))
            raise OSError("again")

        with pytest.raises(TaskFailed, match="again"):
            flow.send().get(timeout=HANG)
        assert len(app.calls) == 4  # the first, which has kept something, and three after it

    # What is refused

    def test_value_that_is_no_json_fails_the_task_for_good(self, app: App) -> None:
        def connect() -> Any:
            app.calls.append(())
            return threading.Lock()

        @app.server.task(retries=3, backoff=[0.0])
        def flow() -> str:
            try:
                current_task().step("connect", connect)
            except Exception:
                return "caught"
            return "kept"

        with pytest.raises(TaskFailed, match="step 'connect': what it returned cannot be kept"):
            flow.send().get(timeout=HANG)
        assert app.calls == [()]

    def test_value_that_is_too_large_fails_the_task_for_good(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flow() -> None:
            for _ in range(3):
                current_task().step("read", _large)

        with pytest.raises(TaskFailed, match="step 'read#3': it returned .*store it elsewhere"):
            flow.send().get(timeout=HANG)

    def test_other_arguments_are_an_error_where_steps_are_counted(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flow() -> Any:
            task = current_task()
            value = task.step("named", _noted, app, "named", task.attempt)
            if task.attempt == 1:
                task.step("each", _noted, app, "each", 1)
            for number in (2, 3):
                task.step("each", _noted, app, "each", number)
            raise OSError(f"again {value}")

        with pytest.raises(TaskFailed, match=r"step 'each#2' has other arguments"):
            flow.send().get(timeout=HANG)
        assert app.calls == [("named", 1), ("each", 1), ("each", 2), ("each", 3)]

    @pytest.mark.parametrize("name", ["", "a#2", "line\nbreak", "x" * 256])
    def test_name_that_cannot_be_one_fails_the_task(self, app: App, name: str) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flow(name: str) -> None:
            current_task().step(name, _nothing)

        with pytest.raises(TaskFailed, match="step ") as error:
            flow.send(name).get(timeout=HANG)
        assert error.value.error_type == "machinery_py.errors.StepRefused"

    def test_step_inside_of_a_step_fails_the_task(self, app: App) -> None:
        @app.server.task(retries=3, backoff=[0.0])
        def flow() -> None:
            current_task().step("outer", current_task().step, "inner", _nothing)

        with pytest.raises(TaskFailed, match="step 'inner' inside of another step"):
            flow.send().get(timeout=HANG)

    @pytest.mark.parametrize(
        "options", [{"ack": "early"}, {"on_worker_lost": "fail"}, {"batch": 2}], ids=str
    )
    def test_tasks_that_are_never_run_again_have_no_steps(
        self, app: App, options: dict[str, Any]
    ) -> None:
        def flow(number: Any) -> None:
            current_task().step("first", _nothing)

        task: Any = app.server.task(**AGAIN, **options)(flow)
        with pytest.raises(TaskFailed, match="cannot have steps: (ack|on_worker_lost|batch)="):
            task.send(1).get(timeout=HANG)

    # Their life

    def test_failed_task_that_is_sent_again_goes_on_behind_its_steps(self, app: App) -> None:
        broken = [True]

        @app.server.task
        def flow() -> int:
            value: int = current_task().step("first", _noted, app, "first", 7)
            if broken:
                raise OSError("broken")
            return value

        result = flow.send()
        with pytest.raises(TaskFailed):
            result.get(timeout=HANG)
        broken.clear()

        app.server.inspect.retry([result.uuid])

        wait_until(result.touch, what="the result of the retry")
        assert app.calls == [("first", 7)]

    def test_dead_letter_that_is_sent_again_goes_on_behind_its_steps(self, app: App) -> None:
        broken = [True]

        @app.server.task(on_failure="dead_letter")
        def flow() -> int:
            value: int = current_task().step("first", _noted, app, "first", 7)
            if broken:
                raise OSError("broken")
            return value

        result = flow.send()
        with pytest.raises(TaskFailed):
            result.get(timeout=HANG)
        wait_until(lambda: len(app.server.inspect.dead()) == 1, what="the dead letter")
        broken.clear()

        app.server.inspect.replay_dead([one.id for one in app.server.inspect.dead()])

        wait_until(result.touch, what="the result of the replay")
        assert app.calls == [("first", 7)]

    def test_task_without_its_checkpoints_is_sent_from_its_start(self, app: App) -> None:
        @app.server.task
        def flow() -> None:
            current_task().step("first", _keyed_once, app)
            raise OSError("broken")

        result = flow.send()
        with pytest.raises(TaskFailed):
            result.get(timeout=HANG)
        app.server.backend.end_checkpoints(result.uuid, 0)

        with pytest.raises(StepRefused, match="0 of its 1 checkpoints are there.*from_start=True"):
            app.server.inspect.retry([result.uuid])
        other = app.server.task("plain")(_broken).send()  # others are sent all the same
        with pytest.raises(TaskFailed):
            other.get(timeout=HANG)
        assert app.server.inspect.retry([result.uuid, other.uuid]) == [other.uuid]
        assert app.server.inspect.retry([result.uuid], from_start=True) == [result.uuid]

        wait_until(lambda: len(app.calls) == 2, what="the step is made again")
        app.wait_until_idle()
        assert app.calls == [(f"{result.uuid}:{number}:first",) for number in range(2)]

    # Sleep

    def test_task_that_sleeps_goes_on_behind_its_steps(self, app: App) -> None:
        @app.server.task
        def flow() -> list[Any]:
            task = current_task()
            app.calls.append(("run",))
            first = task.step("first", _noted, app, "first", 7)
            task.sleep(0.2)
            task.sleep(dt.timedelta(seconds=0.2))
            return [first, task.step("second", _noted, app, "second", 8), task.attempt]

        result = flow.send()
        assert result.get(timeout=HANG) == [7, 8, 1]
        assert app.calls == [("run",), ("first", 7), ("run",), ("run",), ("second", 8)]
        state = result.get_state()
        assert state is not None
        assert state.run == 2

    def test_coroutine_sleeps(self, app: App) -> None:
        @app.server.task
        async def flow() -> int:
            task = current_task()
            app.calls.append(("run",))
            await task.sleep_async(0.2)
            return 7

        assert flow.send().get(timeout=HANG) == 7
        assert app.calls == [("run",), ("run",)]

    def test_sleep_ends_at_the_moment_that_was_kept(self, idle: App, lost: LostWorker) -> None:
        @idle.server.task
        def flow() -> float:
            task = current_task()
            task.sleep(0.5)
            task.step("woken", _noted, idle, "woken", 1)
            return 0.0

        result = flow.send()
        asleep = lost.run(lost.claim())
        lost.lose()  # the run is made again, and its end stays
        assert lost.run(lost.claim()).eta == asleep.eta
        lost.lose()
        with idle.running():
            result.get(timeout=HANG)
        state = result.get_state()
        assert state is not None
        assert state.started_at is not None
        assert state.started_at >= asleep.eta

    def test_sleeping_task_holds_no_slot_and_says_until_when(self, app: App) -> None:
        @app.server.task
        def flow() -> None:
            current_task().sleep(dt.timedelta(days=3))

        result = flow.send()

        def is_asleep() -> bool:
            state = result.get_state()
            return state is not None and state.error_type == "Suspended"

        wait_until(is_asleep, what="a task that sleeps")
        state = result.get_state()
        assert state is not None
        assert state.state is State.RETRY
        assert state.error.startswith("sleeps until ")
        others = [app.add.send(n, 1) for n in range(8)]
        assert [one.get(timeout=HANG) for one in others] == list(range(1, 9))
        app.server.revoke(result.uuid)
        with pytest.raises(TaskFailed, match="revoked"):
            result.get(timeout=HANG)

    def test_run_that_catches_its_suspension_sleeps_all_the_same(
        self, app: App, caplog: pytest.LogCaptureFixture
    ) -> None:
        @app.server.task
        def flow() -> int:
            task = current_task()
            for _ in range(2):
                with contextlib.suppress(BaseException):
                    task.sleep(0.2)
            app.calls.append(("end",))
            return 7

        assert flow.send().get(timeout=HANG) == 7
        assert app.calls == [("end",)] * 3
        assert "caught Suspended in flow" in caplog.text

    def test_what_a_suspended_run_raises_is_logged(
        self, app: App, caplog: pytest.LogCaptureFixture
    ) -> None:
        @app.server.task
        def flow() -> int:
            try:
                current_task().sleep(0.2)
            finally:
                if not app.calls:
                    app.calls.append(("raised",))
                    raise OSError("in the finally")
            return 7

        assert flow.send().get(timeout=HANG) == 7
        assert "OSError: in the finally" in caplog.text

    def test_moment_far_away_is_in_a_hundred_years(self, app: App) -> None:
        @app.server.task
        def flow() -> None:
            current_task().sleep(
                dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-5)))
            )

        result = flow.send()
        wait_until(lambda: result.get_state().error, what="a task that sleeps")
        assert result.get_state().error.startswith("sleeps until 2")

    def test_moment_that_is_over_is_no_sleep(self, app: App) -> None:
        @app.server.task
        def flow() -> int:
            app.calls.append(("run",))
            current_task().sleep(dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=5))))
            current_task().sleep(0)
            return 7

        assert flow.send().get(timeout=HANG) == 7
        assert app.calls == [("run",)]

    @pytest.mark.parametrize("length", [dt.datetime(2026, 1, 1), -1, "1"])
    def test_length_that_is_none_fails_the_run(self, app: App, length: Any) -> None:
        @app.server.task
        def flow() -> None:
            current_task().sleep(length)

        with pytest.raises(TaskFailed, match="length: found"):
            flow.send().get(timeout=HANG)

    def test_expiry_bounds_the_first_start_only(self, idle: App, lost: LostWorker) -> None:
        @idle.server.task
        def flow() -> int:
            value: int = current_task().step("first", _noted, idle, "first", 7)
            return value

        result = flow.options(expires=HANG).send()
        lost.run(lost.claim())
        lost.lose()
        late = decode_signature(lost.claim_all()[0].body).with_headers(
            machinery_expires="1"
        )  # long ago
        [delivery] = _again(lost, late)
        execution = Execution(
            idle.server.app, WorkerHooks(), delivery, "lost", session=lost.session
        )

        assert peek(execution)
        assert accept(execution, {})
        assert lost.run(execution).state is State.SUCCESS
        assert (idle.calls, result.uuid) == ([("first", 7)], execution.signature.uuid)


def _again(lost: LostWorker, signature: Any) -> list[Delivery]:
    """Give the one message back, and return its next delivery, with another signature."""
    lost.lose()
    found = lost.claim_all()
    return [msgspec.structs.replace(one, body=encode_signature(signature)) for one in found]


def _broken() -> None:
    raise OSError("broken")


def _keyed_once(app: App) -> None:
    app.calls.append((current_task().step_key,))


def _context(lost: LostWorker) -> Any:
    context = lost.executions[-1].context
    assert context is not None
    return context


def _noted(app: App, *given: Any, by: Any = None) -> Any:
    app.calls.append((*given, by) if by is not None else given)
    return given[-1] if by is None else [by]


def _keyed(app: App) -> None:
    app.calls.append(("key", current_task().step_key))
    raise ValueError("not yet")


def _held(app: App, lost: Any) -> int:
    found: int = lost.on_step()
    return found


def _charge(app: App, *, fails: int) -> str:
    app.calls.append(("charge",))
    if len(app.calls) <= fails:
        raise ValueError("no money")
    return "paid"


def _no_retry() -> None:
    raise NoRetry("never")


def _nothing() -> None:
    return None


def _untyped():  # type: ignore[no-untyped-def]  # that is what is tried
    return [1, {"a": (2,)}]


def _large() -> str:
    return "x" * (CHECKPOINT_BYTES // 2 - 1000)

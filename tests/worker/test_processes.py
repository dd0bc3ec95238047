"""Task processes: their replies, their deaths, their limits and their end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from machinery_py import (
    AsyncResult,
    BrokerUnavailable,
    ConfigError,
    MachineryError,
    Server,
    Signature,
    State,
    TaskFailed,
)
from machinery_py.connections.proc import is_suspended, place
from machinery_py.events import TaskFailed as TaskFailedEvent
from machinery_py.events import TaskRetried, TaskSucceeded, TaskSuspended
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.processes import task_process
from machinery_py.worker.processes.frames import FrameReader
from machinery_py.worker.processes.task_process import TaskProcess
from machinery_py.worker.worker import Worker
from tests.cli.app import App, app_in_a_folder
from tests.worker import pooled
from tests.worker.pooled import server

app = app_in_a_folder

ASKED = "the retry that it asked for: "
REFUSED_LATER = {"surrogate": ASKED, "reserved": ASKED, "misfit": ASKED, "no-text": ASKED}


@pytest.fixture
def worker() -> Iterator[Worker]:
    with server.new_worker("w", 2) as worker:
        yield worker
    assert children() == set()


@pytest.fixture
def retried() -> Iterator[list[TaskRetried]]:
    seen: list[TaskRetried] = []
    unsubscribe = server.events.subscribe(TaskRetried, seen.append)
    yield seen
    unsubscribe()


def children() -> set[int]:
    """Return the task processes of this process that are not over."""
    found: set[int] = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = (Path("/proc") / name / "stat").read_text().rpartition(")")[2].split()
            command = (Path("/proc") / name / "cmdline").read_bytes()
        except OSError:
            continue
        if int(stat[1]) == os.getpid() and b"machinery_py.cli.child" in command:
            found.add(int(name))
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def runs(trace: Path) -> list[int]:
    """Return the processes of the runs, in their order."""
    return [int(name.partition("-")[2]) for name in sorted(os.listdir(trace))]


def test_process_is_another_one_and_is_kept(worker: Worker) -> None:
    pids = {pooled.where.send().get(HANG) for _ in range(3)} | {pooled.where_async.send().get(HANG)}

    assert len(pids) == 1
    assert os.getpid() not in pids


def test_tasks_say_where_they_run_or_the_worker_does() -> None:
    with server.new_worker("w", 1, pool="process"):
        assert pooled.here.send().get(HANG) == os.getpid()
        assert pooled.anywhere.send().get(HANG) != os.getpid()
    with server.new_worker("w", 1):
        assert pooled.anywhere.send().get(HANG) == os.getpid()


def test_context_progress_and_notes_are_as_in_a_thread(worker: Worker) -> None:
    result = pooled.about.send()

    assert result.get(HANG) == [result.uuid, "about", "w", "machinery_tasks", "1"]
    assert result.get_state().progress == (1, 2)
    assert result.get_state().notes == {"step": "one", "rows": 2}


def test_handlers_and_lifespans_are_in_the_process_of_the_task(worker: Worker) -> None:
    pooled.where.send().get(HANG)

    entered_in, runs_in, *marks = pooled.around.send().get(HANG)

    assert entered_in == runs_in != str(os.getpid())
    assert marks == ["after where", "around"]


def test_worker_does_not_start_if_its_processes_have_no_lifespan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POOLED_FAILS_OUTSIDE", str(os.getpid()))

    with pytest.raises(MachineryError, match="lifespan resources cannot start: OSError: no conn"):
        server.new_worker("w", 1, pool="process").start()


def test_exception_is_told_with_its_type_and_traceback(worker: Worker) -> None:
    with pytest.raises(TaskFailed) as failed:
        pooled.fail.send("no").get(HANG)

    assert (failed.value.error, failed.value.error_type) == ("no", "ValueError")
    assert "raise ValueError(text)" in failed.value.traceback


@pytest.mark.parametrize(
    "task", [pooled.ask_in_thread, pooled.ask_in_process], ids=lambda t: t.name
)
def test_retry_that_cannot_be_made_fails_its_task(worker: Worker, task: Any) -> None:
    sent = {how: task.options(retries=1).send(how) for how in pooled.ODD_RETRIES}
    for how, result in sent.items():
        with pytest.raises(TaskFailed) as failed:
            result.get(timeout=HANG)
        # What Retry itself refuses is an error of the task, and tried again.
        assert (how, result.get_state().attempt) == (how, 1 if how in REFUSED_LATER else 2)
        assert failed.value.error.startswith(REFUSED_LATER.get(how, "")), how


def test_exit_of_the_task_fails_it_and_ends_no_process(worker: Worker) -> None:
    before = pooled.where.send().get(HANG)

    with pytest.raises(TaskFailed, match="SystemExit: 3"):
        pooled.leave.send().get(HANG)

    assert pooled.where.send().get(HANG) == before


def test_postponed_task_is_run_again(worker: Worker, tmp_path: Path) -> None:
    assert pooled.later.send(str(tmp_path)).get(HANG) == "1"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("SIGKILL", "its process was killed by signal 9 (SIGKILL)"),
        ("SIGSEGV", "its process was killed by signal 11 (SIGSEGV)"),
        ("exit 0", "its process ended with exit code 0"),
        ("exit 1", "its process ended with exit code 1"),
        ("exit 2", "its process ended with exit code 2"),
        ("exit 3", "its process ended with exit code 3"),
        ("closes its descriptors", "its process ended with exit code 1"),
        ("opens files in their place", "its process ended with exit code 1"),
        ("forks", "its process ended with exit code 1"),
    ],
)
def test_lost_process_costs_its_task_a_strike(
    worker: Worker,
    retried: list[TaskRetried],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    text: str,
) -> None:
    if how == "SIGSEGV":
        monkeypatch.setattr(server.app, "config", server.config.replace(log_tasks=False))
    assert pooled.die_once.send(str(tmp_path), how).get(HANG) == 1  # the first try still

    wait_until(lambda: retried, HANG, "the event")
    assert [one.error for one in retried] == [text]
    assert [record.levelname for record in caplog.records if text in record.message] == ["WARNING"]
    assert len(runs(tmp_path)) == 2
    if how == "opens files in their place":
        assert tmp_path.with_suffix(".mine").read_bytes() == b""
    if how == "forks":
        forked = int(tmp_path.with_suffix(".forked").read_text())
        wait_until(lambda: not is_alive(forked), HANG, "the end of what it has forked")


@pytest.mark.parametrize("task", [pooled.steps, pooled.steps_async], ids=lambda t: t.name)
def test_steps_of_a_lost_process_are_kept(worker: Worker, tmp_path: Path, task: Any) -> None:
    result = task.send(str(tmp_path))

    keys = [f"{result.uuid}:0:{name}" for name in ("first", "second")]
    assert result.get(HANG) == keys
    assert sorted(one.name.partition("-")[0] for one in tmp_path.iterdir()) == ["first", "second"]


def test_task_sleeps_in_no_process(
    worker: Worker, tmp_path: Path, retried: list[TaskRetried]
) -> None:
    suspended: list[TaskSuspended] = []
    unsubscribe = server.events.subscribe(TaskSuspended, suspended.append)

    result = pooled.suspended.send(str(tmp_path))

    assert result.get(HANG) == [f"{result.uuid}:0:{name}" for name in ("first", "second")]
    unsubscribe()
    assert [one.reason.partition(" until")[0] for one in suspended] == ["sleeps"]
    assert not retried


def test_task_waits_for_a_signal_in_no_process(worker: Worker, tmp_path: Path) -> None:
    result = pooled.told.send(str(tmp_path))
    wait_until(lambda: "waits for" in result.get_state().error, HANG, "a task that waits")

    assert server.signal(result.uuid, "approval", {"by": "ada"})

    assert result.get(HANG) == {"by": "ada"}
    assert len(list(tmp_path.iterdir())) == 1


def test_task_waits_for_another_one_in_no_process(worker: Worker, tmp_path: Path) -> None:
    result = pooled.asks.send(str(tmp_path))

    keys, error_type = result.get(HANG)
    child = keys[0].partition(":")[0]
    assert keys == [f"{child}:0:{name}" for name in ("first", "second")]
    assert child != result.uuid
    assert error_type == "machinery_py.errors.Unsupported"


def test_steps_that_a_process_cannot_have_are_refused(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(TaskFailed, match="no_steps cannot have steps: on_worker_lost='fail'"):
        pooled.no_steps.send(str(tmp_path)).get(HANG)


def test_task_that_kills_each_process_is_poison(worker: Worker, tmp_path: Path) -> None:
    with pytest.raises(TaskFailed, match=r"Poison: its process .+, 3 times while it ran"):
        pooled.die.send(str(tmp_path)).get(HANG)

    assert len(runs(tmp_path)) == 3
    [letter] = server.broker.dead_letters(limit=1)
    assert letter.reason == "poison"

    server.inspect.replay_dead([letter.id])

    wait_until(lambda: len(runs(tmp_path)) == 6, HANG, "three more runs")


def test_other_tasks_notice_nothing_of_a_lost_process(worker: Worker, tmp_path: Path) -> None:
    other = pooled.until_cancelled.send(str(tmp_path))
    wait_until(lambda: runs(tmp_path), HANG, "the start")
    (tmp_path / "inner").mkdir()

    pooled.die_once.send(str(tmp_path / "inner"), "SIGKILL").get(HANG)
    server.revoke([other.uuid])

    assert other.get(HANG) == "stopped"


@pytest.mark.parametrize("task", [pooled.sleeps, pooled.sleeps_async])
def test_time_limit_is_raised_in_the_task(worker: Worker, task: Any) -> None:
    before = pooled.where.send().get(HANG)

    with pytest.raises(TaskFailed, match=r"TimeLimitExceeded: ran longer than its time limit"):
        task.send().get(HANG)

    assert pooled.where.send().get(HANG) == before


def test_task_that_catches_its_time_limit_has_succeeded(worker: Worker) -> None:
    assert pooled.sleeps_and_saves.options(time_limit=2.0).send().get(HANG) == "saved"


def test_process_that_holds_on_is_killed_and_the_task_retried(
    worker: Worker, retried: list[TaskRetried], tmp_path: Path
) -> None:
    assert pooled.stuck.send(str(tmp_path)).get(HANG) == 2

    wait_until(lambda: retried, HANG, "the event")
    assert [one.error for one in retried] == [
        "ran longer than its time limit of 2 s, and was killed 0.2 s later"
    ]
    assert not is_alive(runs(tmp_path)[0])


def test_stopped_process_is_killed_at_its_limit(worker: Worker, tmp_path: Path) -> None:
    result = pooled.stuck.send(str(tmp_path))
    wait_until(lambda: runs(tmp_path), HANG, "the start")
    os.kill(runs(tmp_path)[0], signal.SIGSTOP)

    assert result.get(HANG) == 2


def test_time_that_is_up_at_the_moment_of_success_has_one_verdict(worker: Worker) -> None:
    ends: list[TaskSucceeded | TaskFailedEvent] = []
    unsubscribe = [
        server.events.subscribe(TaskSucceeded, ends.append),
        server.events.subscribe(TaskFailedEvent, ends.append),
    ]

    results = [pooled.just_in_time.send(number) for number in range(30)]
    for number, result in enumerate(results):
        wait_until(lambda result=result: result.is_finished(), HANG, "its end")
        state = result.get_state()
        if state.state is State.SUCCESS:
            assert result.get(HANG) == number
        else:
            assert state.error.startswith("ran longer than its time limit of 0.02 s")
    wait_until(lambda: len(ends) == len(results), HANG, "the events")

    for end in unsubscribe:
        end()
    assert {one.signature.uuid for one in ends} == {result.uuid for result in results}
    pooled.where.send().get(HANG)


def test_processes_beyond_the_concurrency_end(tmp_path: Path) -> None:
    with server.new_worker("w", 2) as worker:
        both = [pooled.until_cancelled.send(str(tmp_path)) for _ in range(2)]
        wait_until(lambda: len(runs(tmp_path)) == 2, HANG, "both")
        server.revoke([one.uuid for one in both])
        for one in both:
            one.get(HANG)
        assert len(children()) == 2

        worker._live.executors.resize(1)

        wait_until(lambda: len(children()) == 1, HANG, "one process")
        assert pooled.where.send().get(HANG) in children()


def test_unfinished_task_is_handed_back_and_its_process_killed(tmp_path: Path) -> None:
    with server.new_worker("w", 1, shutdown_timeout=0.1):
        result = pooled.holds.send(str(tmp_path))
        wait_until(lambda: runs(tmp_path), HANG, "the start")
    assert not is_alive(runs(tmp_path)[0])
    assert result.get_state().state is State.STARTED

    with server.new_worker("w", 1):
        assert result.get(HANG) == "done"


def test_terminated_task_ends_as_revoked_and_its_process_is_killed(
    worker: Worker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held = pooled.holds.send(str(tmp_path))
    wait_until(lambda: bool(os.listdir(tmp_path)))
    [pid] = runs(tmp_path)
    assert server.control.workers(timeout=HANG).terminate(held.uuid) == {"w": {}}, (
        "it is not revoked"
    )

    assert server.control.revoke(held.uuid, terminate=True, timeout=HANG) == {
        "w": {held.uuid: "killed"}
    }

    with pytest.raises(TaskFailed, match="revoked"):
        held.get(timeout=HANG)
    wait_until(lambda: not is_alive(pid))
    assert pooled.where.send().get(HANG) != pid
    assert "lost its process" not in caplog.text
    assert server.control.revoke(held.uuid, terminate=True, timeout=HANG) == {"w": {}}


def test_task_that_is_handed_back_while_its_process_starts_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = server.new_worker("w", 1, shutdown_timeout=0.1)
    calls: list[Any] = []

    def wait_until_over(_: TaskProcess) -> None:
        [execution] = worker._live.executors.running()
        calls.append(execution)
        wait_until(lambda: execution.is_over, HANG, "the shutdown")

    def close_late(**how: Any) -> bool:
        wait_until(lambda: not worker._live.executors.running(), HANG, "the end of the call")
        return bool(close(**how))

    with monkeypatch.context() as patch, worker:
        close = worker._live.settler.close
        patch.setattr(worker._live.settler, "close", close_late)
        patch.setattr(TaskProcess, "wait_ready", wait_until_over)
        result = pooled.later.send(str(tmp_path))
        wait_until(lambda: calls, HANG, "the start")
        worker.stop()
    assert runs(tmp_path) == []
    assert children() == set()

    with server.new_worker("w", 1):
        assert result.get(HANG) == "1"


def test_task_that_is_cancelled_while_its_process_starts_sees_it(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancel(_: TaskProcess) -> None:
        worker._live.executors.cancel(worker._live.executors.running()[0])

    monkeypatch.setattr(TaskProcess, "wait_ready", cancel)

    assert pooled.until_cancelled.send(str(tmp_path)).get(HANG) == "stopped"


def test_time_limit_that_is_up_before_the_process_has_read_the_task_is_raised_in_it(
    worker: Worker,
) -> None:
    for _ in range(6):  # which of its threads reads first is chance
        pid = pooled.where.send().get(HANG)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda pid=pid: is_suspended(pid, place()), HANG, "the stop")  # type: ignore[misc]
        result = pooled.sleeps.send()
        wait_until(lambda one=result: one.get_state().state is State.STARTED, HANG, "the start")  # type: ignore[misc]
        time.sleep(0.4)  # beyond its limit
        os.kill(pid, signal.SIGCONT)

        with pytest.raises(TaskFailed, match=r"time limit of 0\.2 s$"):
            result.get(HANG)
    assert pooled.where.send().get(HANG) == pid


def test_signal_that_comes_behind_the_end_of_a_call_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POOLED_SIGNALS_LATE", "yes")
    with server.new_worker("w", 1):
        with pytest.raises(TaskFailed, match=r"time limit of 0\.2 s$"):
            pooled.sleeps.send().get(HANG)
        [pid] = children()
        assert pooled.where.send().get(HANG) == pid


def test_time_limit_may_be_longer_than_poll_waits(worker: Worker) -> None:
    assert pooled.within_a_month.send().get(HANG) == "done"


def test_process_ends_when_its_replies_cannot_be_taken(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        wait_until(lambda: runs(tmp_path), HANG, "the start")
        raise MemoryError

    monkeypatch.setattr(FrameReader, "read", fails)

    with pytest.raises(TaskFailed, match="MemoryError"):
        pooled.until_cancelled.send(str(tmp_path)).get(HANG)
    assert not is_alive(runs(tmp_path)[0])


def test_process_that_died_while_idle_costs_no_task_anything(
    worker: Worker, retried: list[TaskRetried]
) -> None:
    pid = pooled.where.send().get(HANG)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), HANG, "its end")

    assert pooled.where.send().get(HANG) != pid
    assert retried == []


def test_outcome_counts_though_its_process_ended_behind_it(
    worker: Worker, retried: list[TaskRetried], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, reads = TaskProcess._call, FrameReader.read
    called: list[TaskProcess] = []

    def call(self: TaskProcess, *job: Any) -> Any:
        called.append(self)
        return calls(self, *job)

    def read_behind_its_end(self: FrameReader[Any], *deadline: Any) -> Any:
        if called and called[-1]._replies is self:
            wait_until(self.has_some, HANG, what="the reply")
            process = called.pop()
            os.kill(process.pid, signal.SIGKILL)
            wait_until(lambda: not is_alive(process.pid), HANG, what="its end")
        return reads(self, *deadline)

    monkeypatch.setattr(TaskProcess, "_call", call)
    monkeypatch.setattr(FrameReader, "read", read_behind_its_end)
    first = pooled.where.send().get(HANG)

    assert not is_alive(first)
    assert pooled.where.send().get(HANG) != first
    assert retried == []


def test_outcome_that_was_written_before_the_kill_counts(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill_late(process: TaskProcess) -> None:
        wait_until(process._replies.has_some, HANG, "its reply, or its end")
        kill(process)

    kill = TaskProcess._kill
    with monkeypatch.context() as patch:
        patch.setattr(TaskProcess, "_kill", kill_late)
        saves = pooled.sleeps_and_saves.options(kill_after=0.0, time_limit=2.0)
        assert saves.send().get(HANG) == "saved"


def test_task_that_its_process_never_read_gets_no_strike(
    worker: Worker, retried: list[TaskRetried]
) -> None:
    pid = pooled.where.send().get(HANG)
    os.kill(pid, signal.SIGSTOP)
    # A read that the signal has only woken still takes what comes until the process stands.
    wait_until(lambda: is_suspended(pid, place()), HANG, "the stop")
    result = pooled.where.send()
    wait_until(lambda: result.get_state().state is State.STARTED, HANG, "the start")

    os.kill(pid, signal.SIGKILL)

    assert result.get(HANG) != pid
    assert retried == []


def test_task_that_waits_for_its_process_to_start_would_get_no_strike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start = tmp_path / "may-start"
    may_start.touch()
    monkeypatch.setenv("POOLED_STARTS_WITH", str(may_start))
    with server.new_worker("w", 1):
        may_start.unlink()
        [pid] = children()
        os.kill(pid, signal.SIGKILL)
        result = pooled.where.send()
        wait_until(lambda: children() - {pid}, HANG, "another process")
        assert begun() == 0
        may_start.touch()
        assert result.get(HANG) != pid

        running = pooled.sleeps_and_saves.options(time_limit=2.0).send()
        wait_until(lambda: begun() == 1, HANG, "the call")
        assert running.get(HANG) == "saved"


def begun() -> int:
    """Return how many messages would get a strike if the worker died now."""
    broker: Any = server.broker
    holds = list(broker.rows.all_holds.values())
    return sum(one.runs for hold in holds for one in list(hold.kept.messages.values()))


def test_process_that_dies_while_it_reads_its_task_costs_strikes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POOLED_DIES_READING", "yes")
    died = pytest.raises(TaskFailed, match="ended with exit code 9, 3 times while it ran")
    with server.new_worker("w", 1), died:
        pooled.swallow.send("x" * 500_000).get(HANG)  # more than a pipe holds


def test_process_that_a_debugger_holds_blocks_no_other(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_process, "DEATH_TIMEOUT", 0.2)
    held = pooled.dies_traced.send(str(tmp_path))
    try:
        assert held.get(HANG) == "run again"
        assert pooled.where.send().get(HANG) in children()
    finally:
        os.kill(int(tmp_path.with_suffix(".tracer").read_text()), signal.SIGKILL)


def test_end_of_a_process_is_seen_though_its_pipes_are_held(worker: Worker, tmp_path: Path) -> None:
    try:
        assert pooled.leaves_a_fork.send(str(tmp_path)).get(HANG) == "run again"
    finally:
        os.kill(int(tmp_path.with_suffix(".forked").read_text()), signal.SIGKILL)


def test_outcome_that_cannot_be_sent_is_a_failure_of_the_task(worker: Worker) -> None:
    before = pooled.where.send().get(HANG)

    with pytest.raises(TaskFailed, match="cannot be sent: "):
        pooled.ask_behind_the_back.send().get(HANG)

    assert pooled.where.send().get(HANG) == before


@pytest.mark.parametrize("name", ["here", "where"])
def test_handlers_are_not_called_for_wrong_arguments(name: str) -> None:
    calls: list[Any] = []
    worker = server.new_worker("w", 1)
    worker.set_pre_task_handler(calls.append)
    worker.set_post_task_handler(calls.append)
    worker.set_error_handler(calls.append)

    with worker:
        with pytest.raises(TaskFailed, match="where|here"):
            # As another program sends it.
            wrong = Signature.of(name, 1).replace(uuid=f"wrong-{name}")
            server.app.submit([wrong])
            server.result(wrong.uuid).get(HANG)
        assert calls == []
        getattr(pooled, name).send().get(HANG)
    assert len(calls) == 2


def test_processes_are_renewed_after_so_many_tasks() -> None:
    with server.new_worker("w", 1, max_tasks_per_child=2):
        pids = [pooled.where.send().get(HANG) for _ in range(7)]

    assert {pids.count(pid) for pid in pids[:6]} == {2}
    assert children() == set()


def test_worker_that_starts_again_is_not_worn_by_what_processes_ran_before() -> None:
    worker = server.new_worker("w", 1, max_tasks_per_child=2)
    for _ in range(2):
        with worker:
            for _ in range(4):
                pooled.where.send().get(HANG)
            assert not worker._is_worn()


def test_restarted_pool_has_new_processes_and_running_tasks_go_on(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, first = pooled.until_cancelled.send(str(tmp_path)), pooled.where.send().get(HANG)
    wait_until(lambda: bool(os.listdir(tmp_path)))
    workers = server.control.workers(timeout=HANG)
    with monkeypatch.context() as broken:
        broken.setenv("POOLED_FAILS_OUTSIDE", str(os.getpid()))
        with pytest.raises(MachineryError, match="w: a task process could not start"):
            workers.restart_pool()
    assert pooled.where.send().get(HANG) == first

    workers.restart_pool()

    second = pooled.where.send().get(HANG)
    assert second != first
    wait_until(lambda: not is_alive(first))
    assert children() == {second, *runs(tmp_path)}
    running.revoke()
    assert running.get(HANG) == "stopped"
    wait_until(lambda: children() == {second})


def test_process_that_grew_is_renewed() -> None:
    with server.new_worker("w", 1, max_memory_per_child=200 * 2**20):
        first = pooled.grow.send(250 * 2**20).get(HANG)
        wait_until(lambda: pooled.where.send().get(HANG) != first, HANG, "another process")

    assert children() == set()


def test_process_with_too_much_memory_gets_no_other_task(caplog: pytest.LogCaptureFixture) -> None:
    with server.new_worker("w", 1, max_memory_per_child=200 * 2**20):
        first = pooled.grow.send(250 * 2**20).get(HANG)
        assert pooled.where.send().get(HANG) != first

    assert "MB after its first task: it is renewed for each one" in caplog.text


def test_tasks_that_each_grow_a_little_share_the_bound() -> None:
    size = 50 * 2**20
    with server.new_worker("w", 1, max_memory_per_child=200 * 2**20):
        pids = [pooled.grow.send(size).get(HANG) for _ in range(15)]

    assert max(Counter(pids).values()) <= 4  # with the fourth, at the latest, it has too much


def test_processes_of_a_server_that_no_module_has_are_refused() -> None:
    own = Server("memory://")
    own.register_task("where", os.getpid)

    with pytest.raises(ConfigError, match="no module has it as a global"):
        own.new_worker("w", 1, pool="process").start()


def test_worker_that_could_not_start_leaves_no_process() -> None:
    away = server.config.replace(broker="redis://127.0.0.1:1", publish_timeout=0.1)
    before = server.app.swap(away, server.clock)
    try:
        with pytest.raises(BrokerUnavailable):
            server.new_worker("w", 1, pool="process").start()
    finally:
        server.app.swap(*before)

    assert children() == set()


APP = """
import ctypes, os, sys
from pathlib import Path
from machinery_py import Server

server = Server()

if os.environ.get("BROKEN") and "machinery_py.cli.child" in " ".join(sys.orig_argv):
    raise RuntimeError("not here")

@server.task
def hold() -> None:
    Path(__file__).with_name(f"runs-{os.getpid()}-{os.getppid()}").touch()
    ctypes.PyDLL(None).sleep(3600)  # holds the interpreter's lock

@server.task
def inner(text: str) -> str:
    return text[::-1]

@server.task
def outer(size: int) -> int:
    with server.lock("one"):
        return len(inner.send("x" * size).get(60))

def square(number):
    return number * number

@server.task
def spread() -> list[int]:
    import multiprocessing
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(square, [1, 2, 3])

@server.task(time_limit=0.5, kill_after=30)
def waits() -> None:
    inner.options(delay=3600).send("").get(3600)

@server.task
def eats() -> int:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return len(b"x" * 2**31)
"""


@pytest.mark.parametrize("killed", ["supervisor", "worker"])
def test_processes_end_with_what_has_started_them(app: App, killed: str) -> None:
    app.write("tasks.py", APP)
    process = app.worker("--pool", "process", "-c", "1", "--shutdown-timeout", "0")
    assert "· 1 task process\n" in process.out
    app.run("send", "tasks", "hold")
    wait_until(lambda: list(app.folder.glob("runs-*")), HANG, "the start")
    [pid, worker] = map(int, next(app.folder.glob("runs-*")).name.split("-")[1:])
    assert len({process.pid, worker, pid}) == 3

    os.kill(process.pid if killed == "supervisor" else worker, signal.SIGKILL)

    wait_until(lambda: not is_alive(pid), HANG, "the end of its process")


def test_task_in_a_process_sends_waits_locks_and_forks(app: App) -> None:
    app.write("tasks.py", APP)
    app.worker("--pool", "process", "-c", "2")

    sent = app.run("send", "tasks", "outer", "500000", "--wait", "--json")
    spread = app.run("send", "tasks", "spread", "--wait", "--json")

    assert json.loads(sent.stdout)["state"] == "SUCCESS"
    assert json.loads(spread.stdout)["result"] == [1, 4, 9]


@pytest.mark.parametrize(
    ("name", "error"), [("waits", "TimeLimitExceeded"), ("eats", "MemoryError")]
)
def test_task_in_this_library_or_without_memory_fails_alone(
    app: App, name: str, error: str
) -> None:
    app.write("tasks.py", APP)
    app.worker("--pool", "process", "-c", "1")

    done = app.run("send", "tasks", name, "--wait", "--json", code=1)

    assert error in json.loads(done.stdout)["error_type"]
    assert app.json("send", "tasks", "inner", "ab", "--wait")["state"] == "SUCCESS"


def test_first_process_that_is_killed_while_it_starts_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[int] = []

    def kill_first(process: TaskProcess) -> None:
        if not killed:
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)
        wait_ready(process)

    wait_ready = TaskProcess.wait_ready
    monkeypatch.setattr(TaskProcess, "wait_ready", kill_first)
    with server.new_worker("w", 1):
        assert pooled.where.send().get(HANG) not in killed

    assert len(killed) == 1


def test_worker_whose_app_breaks_in_a_process_does_not_start(app: App) -> None:
    app.write("tasks.py", APP)

    done = app.run("worker", "tasks", "--pool", "process", code=2, BROKEN="1")

    assert "a task process could not start: cannot import 'tasks'" in done.stderr
    assert "RuntimeError: not here" in done.stderr


# Batches


def ends_of(*results: AsyncResult[Any]) -> list[str]:
    ends = []
    for result in results:
        try:
            ends.append(str(result.get(timeout=HANG)))
        except TaskFailed as error:
            ends.append(error.error_type)
    return ends


def test_batch_runs_in_a_process_and_each_call_ends_by_itself(worker: Worker) -> None:
    results = [pooled.together.send(row) for row in ("a", "b", "c")]
    assert ends_of(*results) == ["a of 3", "b of 3", "c of 3"]
    assert results[2].get_state().progress == (1.0, 2.0)

    results = [pooled.together.send(row) for row in ("a", "raise", "c")]
    assert ends_of(*results) == ["a", "ValueError", "c"]
    assert results[1].get_state().error == results[0].uuid

    late = [pooled.together_for_long.send(row) for row in ("a", "b")]
    assert ends_of(*late) == ["machinery_py.errors.TimeLimitExceeded"] * 2


def test_call_that_kills_its_process_ends_no_other_call(worker: Worker) -> None:
    results = [pooled.together.send(row) for row in ("a", "die", "c")]
    assert ends_of(*results) == ["a of 1", "Poison", "c of 1"]


# Limits


def test_one_call_at_a_time_and_a_killed_process_keeps_no_slot(
    worker: Worker, tmp_path: Path
) -> None:
    names = ["a", "dies", "b", "c"]
    results = [pooled.alone.send(str(tmp_path), name) for name in names]

    assert [one.get(timeout=HANG) for one in results] == names
    wait_until(
        lambda: (
            not any(
                one.running or one.waiting for all in server.inspect.limits() for one in all.usage
            )
        )
    )

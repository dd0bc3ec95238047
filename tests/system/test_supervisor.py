"""`machinery worker -p N`: processes that are started again, and that end with their supervisor."""

from __future__ import annotations

import os
import signal

import pytest

from machinery_py.cli.supervisor import LONGEST_PAUSE, pause_after
from machinery_py.testing.waiting import wait_until
from tests.system.cli_app import HANG, App, Running, app_in_a_folder, children, is_alive

app = app_in_a_folder


def workers(process: Running) -> list[int]:
    return [pid for pid in children(process.pid) if is_alive(pid)]


def test_pauses_double_up_to_a_longest_one() -> None:
    assert [pause_after(deaths) for deaths in (1, 2, 3, 4, 5)] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert pause_after(100) == LONGEST_PAUSE


def test_there_is_one_banner_and_one_ready(app: App) -> None:
    process = app.worker("-p", "3", "-c", "2", "-n", "ada")

    assert "worker ada-1 · 3 processes of 2 threads\n" in process.out
    assert process.out.count("machinery ") == 1
    assert process.out.count("Ready.") == 1
    assert sorted(one["name"] for one in app.json("workers", "tasks")) == ["ada-1", "ada-2", "ada-3"]
    assert process.stop() == 0


def test_a_killed_process_is_replaced_and_its_task_runs_again(app: App) -> None:
    process = app.worker("-p", "2", "-c", "1")
    uuid = app.send("hold", "slow")
    wait_until(lambda: app.notes, HANG)
    victim = app.notes[0][1]

    os.kill(victim, signal.SIGKILL)

    wait_until(lambda: len(app.notes) == 2, HANG)
    assert app.notes[1][1] != victim
    process.wait_for(f"(pid {victim}) has ended: killed by SIGKILL; starting another one\n")
    wait_until(lambda: len(workers(process)) == 2, HANG)
    assert victim not in children(process.pid)
    app.go("slow")
    wait_until(lambda: app.state(uuid) == "SUCCESS", HANG)
    assert process.stop() == 0


def test_a_stopped_child_is_replaced_too(app: App) -> None:
    process = app.worker("-p", "2")
    first = workers(process)

    os.kill(first[0], signal.SIGTERM)

    wait_until(lambda: len(workers(process)) == 2 and first[0] not in workers(process), HANG)
    assert process.stop() == 0


def test_burst_ends_when_all_have_ended(app: App) -> None:
    uuids = [app.send("add", str(number), "1") for number in range(4)]

    app.run("worker", "tasks", "-p", "2", "--burst")

    assert [app.state(uuid) for uuid in uuids] == ["SUCCESS"] * 4


@pytest.mark.parametrize(("words", "env", "code"), [
    (["task"], {}, 2),
    (["tasks"], {"MACHINERY_URL": "sqlite:///letter.db"}, 3),
])
def test_what_cannot_start_ends_it_with_its_code(app: App, words: list[str], env: dict[str, str], code: int) -> None:
    app.write("letter.db", "Dear Sir or Madam, " * 100)

    done = app.run("worker", *words, "-p", "2", code=code, **env)

    assert "starting another one" not in done.stderr
    assert "machinery: " in done.stderr


def test_a_signal_to_the_whole_group_is_one_signal(app: App) -> None:
    process = app.start("worker", "tasks", "-p", "2", "-c", "1", own_group=True)
    process.wait_ready()
    uuid = app.send("hold", "slow")
    wait_until(lambda: app.notes, HANG)

    os.killpg(process.pid, signal.SIGINT)
    process.wait_for("SIGINT: stopping when the running tasks are done")
    app.go("slow")

    assert process.wait() == 0
    assert app.state(uuid) == "SUCCESS"
    assert len(app.notes) == 1


def test_a_second_signal_gives_unfinished_tasks_back(app: App) -> None:
    process = app.worker("-p", "2", "-c", "1")
    app.send("hold", "slow")
    wait_until(lambda: app.notes, HANG)

    process.signal(signal.SIGTERM)
    process.wait_for("stopping when")
    process.signal(signal.SIGTERM)

    assert process.wait() == 1
    assert app.json("queues", "tasks")[0]["waiting"] == 1


def test_processes_end_with_a_killed_supervisor(app: App) -> None:
    process = app.worker("-p", "2", "-c", "1")
    pids = workers(process)
    uuid = app.send("hold", "slow")
    wait_until(lambda: app.notes, HANG)

    process.signal(signal.SIGKILL)
    process.wait()
    app.go("slow")

    wait_until(lambda: not any(is_alive(pid) for pid in pids), HANG)
    assert app.state(uuid) == "SUCCESS"


def test_a_process_that_does_not_end_is_killed(app: App) -> None:
    process = app.worker("-p", "2", "-c", "1", "--shutdown-timeout", "0")
    stopped = workers(process)[0]
    os.kill(stopped, signal.SIGSTOP)

    assert process.stop() == 1

    assert f"(pid {stopped}) does not end: killing it" in process.err
    assert not is_alive(stopped)


def test_reload_and_several_processes_go_together(app: App) -> None:
    process = app.worker("-p", "2", "--reload")
    (supervisor,) = children(process.pid)
    first = children(supervisor)
    assert len(first) == 2

    app.write("more.py", "x = 1\n")

    process.wait_for("Ready.", times=2)
    wait_until(lambda: not any(is_alive(pid) for pid in (supervisor, *first)), HANG)
    assert process.stop() == 0

"""`machinery worker`: processes that are started again, and that end with their supervisor."""

from __future__ import annotations

import collections
import contextlib
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from machinery_py import Server, Signature, State
from machinery_py.cli.processes import Child
from machinery_py.cli.supervisor import LONGEST_PAUSE, MOST_FAILURES, pause_after
from machinery_py.testing.waiting import wait_until
from tests.cli.app import HANG, TASKS, App, Running, app_in_a_folder, children, is_alive
from tests.support.fixtures import url_of

app = app_in_a_folder

MAX_STRIKES = 3  # deaths after which a task is a dead letter
ENDING = (
    TASKS
    + """
@server.task
def end(code: int) -> None:
    os._exit(code)

@server.task
def noop() -> None:
    pass

@server.task
def crash() -> None:
    os.abort()
"""
)


def workers(process: Running) -> list[int]:
    return [pid for pid in children(process.pid) if is_alive(pid)]


def test_pauses_double_up_to_a_longest_one() -> None:
    assert [pause_after(failures) for failures in (0, 1, 2, 3, 4, 5)] == [
        0.0,
        0.0,
        0.5,
        1.0,
        2.0,
        4.0,
    ]
    assert pause_after(100) == LONGEST_PAUSE


def test_there_is_one_banner_and_one_ready(app: App) -> None:
    process = app.worker("-p", "3", "-c", "2", "-n", "ada")

    assert "worker ada-1 · 3 processes of 2 threads\n" in process.out
    assert process.out.count("machinery ") == 1
    assert process.out.count("Ready.") == 1
    assert sorted(one["name"] for one in app.json("workers", "tasks")) == [
        "ada-1",
        "ada-2",
        "ada-3",
    ]
    assert process.stop() == 0


def test_a_killed_process_is_replaced_and_its_task_runs_again(app: App) -> None:
    process = app.worker("-p", "2", "-c", "1")
    uuid = app.send("hold", "slow")
    wait_until(lambda: app.notes, HANG)
    victim = app.notes[0][1]

    os.kill(victim, signal.SIGKILL)

    wait_until(lambda: len(app.notes) == 2, HANG)
    assert app.notes[1][1] != victim
    process.wait_for(f"(pid {victim}) was killed by signal 9 (SIGKILL); starting another one\n")
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


@pytest.mark.parametrize(
    ("words", "env", "code"),
    [
        (["task"], {}, 2),
        (["tasks"], {"MACHINERY_URL": "sqlite:///letter.db"}, 3),
    ],
)
def test_supervisor_ends_with_the_code_of_a_failed_start(
    app: App, words: list[str], env: dict[str, str], code: int
) -> None:
    app.write("letter.db", "Dear Sir or Madam, " * 100)

    done = app.run("worker", *words, "-p", "2", code=code, **env)

    assert "starting another one" not in done.stderr
    assert "machinery: " in done.stderr


@pytest.mark.parametrize("code", [0, 2, 3])
def test_the_exit_code_of_a_task_is_not_the_workers(app: App, code: int) -> None:
    app.write("tasks.py", ENDING)
    app.send("end", str(code))

    process = app.start("worker", "tasks", "-p", "2", "-c", "1")
    process.wait_for(
        f"ended with exit code {code} (a task ended it); starting another one\n", times=MAX_STRIKES
    )
    process.wait_for(f"its worker was lost, {MAX_STRIKES} times while it ran")

    wait_until(lambda: len(workers(process)) == 2, HANG)
    assert process.stop() == 0


def test_a_burst_goes_on_when_a_task_ends_a_process_with_code_0(app: App) -> None:
    app.write("tasks.py", ENDING)
    app.send("end", "0")
    uuids = [app.send("add", str(number), "1") for number in range(2)]

    done = app.run("worker", "tasks", "-p", "2", "-c", "1", "--burst")

    assert done.stderr.count("exit code 0 (a task ended it)") == MAX_STRIKES
    assert [app.state(uuid) for uuid in uuids] == ["SUCCESS"] * 2


@pytest.mark.parametrize(
    "limit", [("--max-tasks-per-child", "2"), ("--max-memory-per-child", "1M")]
)
def test_worn_worker_process_is_renewed_without_a_pause(app: App, limit: tuple[str, str]) -> None:
    process = app.start("worker", "tasks", "-p", "2", "-c", "1", *limit)
    uuids: list[str] = []

    def has_renewed() -> bool:
        # A worn process ends what it holds, so nobody knows how many it runs.
        uuids.append(app.send("note", str(len(uuids))))
        return process.err.count("ended with exit code 0; starting another one\n") >= 3

    wait_until(has_renewed, 2 * HANG, "three renewed processes")
    wait_until(lambda: all(app.state(uuid) == "SUCCESS" for uuid in uuids), HANG)

    assert process.stop() == 0
    assert "starting another one in" not in process.err
    assert len(app.notes) == len(uuids)


def test_a_burst_goes_on_when_a_worn_process_has_ended(app: App) -> None:
    app.write("tasks.py", TASKS + "\n@server.task\ndef slow() -> None:\n    time.sleep(0.1)\n")
    uuids = [app.send("slow") for _ in range(6)]

    app.run("worker", "tasks", "-c", "1", "--burst", "--max-tasks-per-child", "2")

    assert [app.state(uuid) for uuid in uuids] == ["SUCCESS"] * 6


def test_others_go_on_while_no_process_can_be_started(app: App) -> None:
    """As under a limit of processes or memory: here the interpreter is away for a while."""
    app.write("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n').chmod(0o755)
    app.write(
        "run.py",
        "import sys\nsys.executable = './python'\n"
        "from machinery_py.cli.main import main\nsys.exit(main())\n",
    )
    process = app.program("run.py", "worker", "tasks", "-p", "2", "-c", "1")
    process.wait_ready()
    first, second = workers(process)
    descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
    (app.folder / "python").rename(app.folder / "away")

    os.kill(first, signal.SIGKILL)
    process.wait_for("cannot be started: ", times=2)

    assert workers(process) == [second]
    assert len(os.listdir(f"/proc/{process.pid}/fd")) < descriptors
    (app.folder / "away").rename(app.folder / "python")
    wait_until(lambda: len(workers(process)) == 2, HANG)
    assert process.stop() == 0


def test_full_disk_keeps_no_worker_process_from_its_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    for has_memory in (True, False):
        if not has_memory:
            monkeypatch.delattr(os, "memfd_create", raising=False)
        child = Child(["--help"], label="1", is_at_terminal=False)
        child.process.wait(HANG)
        assert child.stacks() == ""
        child.close()


def test_process_that_fails_at_start_is_restarted_with_pauses(app: App) -> None:
    app.write(
        "tasks.py", "import os, pathlib\npathlib.Path('fails').exists() and os._exit(7)\n" + TASKS
    )
    process = app.worker("-p", "2")

    app.write("fails", "")
    os.kill(workers(process)[0], signal.SIGKILL)

    process.wait_for("was killed by signal 9 (SIGKILL); starting another one\n")
    process.wait_for("ended with exit code 7; starting another one\n")
    process.wait_for("ended with exit code 7; starting another one in 0.5 s\n")
    process.wait_for("ended with exit code 7; starting another one in 1 s\n")
    assert process.stop() == 0


def test_app_that_ends_every_process_is_given_up(app: App) -> None:
    app.write("tasks.py", "import os\nos._exit(7)\n")

    done = app.run("worker", "tasks", "-p", "1", code=1)

    assert done.stderr.count("starting another one") == MOST_FAILURES - 1
    assert "cannot start: 5 in a row have ended before they were ready" in done.stderr
    assert done.stderr.endswith("(it ended with exit code 7); ending\n")


def test_process_that_cannot_start_later_ends_no_healthy_one(app: App) -> None:
    app.write(
        "tasks.py",
        "import os, pathlib\n"
        "if pathlib.Path('fails').exists(): raise RuntimeError('full')\n" + TASKS,
    )
    process = app.worker("-p", "2")
    first, second = workers(process)

    app.write("fails", "")
    os.kill(first, signal.SIGKILL)

    process.wait_for("ended with exit code 2; starting another one in 0.5 s\n")
    assert is_alive(second)
    (app.folder / "fails").unlink()
    wait_until(lambda: len(workers(process)) == 2, HANG)
    assert process.stop() == 0


def seconds_for(app: App, server: Server, names: list[str]) -> float:
    """How long two processes take, from their start, until all of these tasks are over."""
    results = [server.send(Signature(name=name)) for name in names]
    begun = time.monotonic()
    process = app.start("worker", "tasks", "-p", "2", "-c", "2")
    wait_until(lambda: all(result.get_state().is_finished for result in results), 4 * HANG)
    took = time.monotonic() - begun
    wait_until(lambda: len(workers(process)) == 2, HANG)  # the end of one that crashed was seen
    assert process.stop() == 0, process.err
    assert "starting another one in" not in process.err  # no pauses
    ended = collections.Counter(
        (name, result.get_state().state) for name, result in zip(names, results, strict=True)
    )
    assert ended == {("noop", State.SUCCESS): names.count("noop")} | (
        {("crash", State.FAILURE): names.count("crash")} if "crash" in names else {}
    )
    return took


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_poison_does_not_starve_the_others(
    app: App, store: str, request: pytest.FixtureRequest
) -> None:
    poison = 3
    names = ["noop"] * 200
    mixed = names + ["crash"] * poison
    url = url_of(store, app.folder / "poison.db", request)
    app.env["MACHINERY_URL"] = url
    app.write("tasks.py", ENDING)
    with contextlib.closing(Server(url)) as server:
        without = seconds_for(app, server, names)

        took = seconds_for(app, server, random.Random(1).sample(mixed, len(mixed)))

        letters = server.inspect.dead()
    assert [(letter.name, letter.strikes) for letter in letters] == [
        ("crash", MAX_STRIKES)
    ] * poison
    # A second for each death, or on a busy machine a worker's start and end; and as much again.
    assert took < 2 * (2 * without + poison * MAX_STRIKES * max(1.0, without))


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


@pytest.fixture
def hangup() -> Iterator[None]:
    """Let processes have SIGHUP as it is by default, also if these tests run under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.mark.usefixtures("hangup")
def test_hangup_reads_settings_again_and_tasks_run_on(app: App) -> None:
    app.write("config.toml", "concurrency = 1\n")
    process = app.start(
        "worker", "tasks", "-p", "1", own_group=True, MACHINERY_CONFIG="config.toml"
    )
    process.wait_ready()
    uuids = [app.send("hold", name) for name in ("one", "two")]
    wait_until(lambda: app.notes, HANG)

    app.write("config.toml", 'concurrency = 2\nlog_level = "debug"\n')
    for pid in (*workers(process), process.pid):
        os.kill(pid, signal.SIGHUP)
    process.wait_for("settings that have changed: concurrency = 2, log_level = 'debug' (of")
    wait_until(lambda: len(app.notes) == 2, HANG, what="the second task beside the first")
    app.write("config.toml", "concurrency = many\n")
    process.signal(signal.SIGHUP)
    process.wait_for("not all settings could be read again: ")
    app.go("one")
    app.go("two")
    process.signal(signal.SIGTERM)

    assert process.wait() == 0
    assert [app.state(uuid) for uuid in uuids] == ["SUCCESS", "SUCCESS"]
    assert len({pid for _, pid in app.notes}) == 1


@pytest.mark.usefixtures("hangup")
def test_hangup_during_the_import_of_the_app_counts(app: App) -> None:
    app.write("config.toml", "concurrency = 1\n")
    app.write(
        "tasks.py",
        TASKS + "\nwhile not (HERE / 'import.go').exists():\n"
        "    (HERE / 'imports').touch()\n    time.sleep(0.01)\n",
    )
    process = app.start(
        "worker", "tasks", "-p", "1", own_group=True, MACHINERY_CONFIG="config.toml"
    )
    wait_until((app.folder / "imports").exists, HANG)

    app.write("config.toml", "concurrency = 2\n")
    process.signal(signal.SIGHUP)
    process.wait_for("SIGHUP: ")
    app.go("import")

    process.wait_for("settings that have changed: concurrency = 2 (of")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


def test_hangup_is_ignored_where_it_was_before(app: App) -> None:
    app.write(
        "run.py",
        """\
import signal, sys
from machinery_py.cli.main import main
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
sys.exit(main(["worker", "tasks"]))
""",
    )
    process = app.program("run.py")
    process.wait_ready()

    for pid in (*workers(process), process.pid):
        os.kill(pid, signal.SIGHUP)
    app.run("send", "tasks", "note", "alive")
    wait_until(lambda: app.notes, HANG)
    process.signal(signal.SIGTERM)

    assert process.wait() == 0
    assert "SIGHUP" not in process.err


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

    assert process.err.count(f"(pid {stopped}) does not end: killing it") == 1
    assert not is_alive(stopped)


def test_reload_and_several_processes_go_together(app: App) -> None:
    process = app.worker("-p", "2", "--reload")
    first = workers(process)
    assert len(first) == 2

    app.write("more.py", "x = 1\n")

    process.wait_for("Ready.", times=2)
    assert not any(is_alive(pid) for pid in first)
    assert process.stop() == 0


# Tasks that break their process


CLOSING = (
    TASKS
    + """
@server.task
def close(low: int, high: int) -> None:
    os.closerange(low, high)

@server.task
def hang() -> None:
    import ctypes
    with open(HERE / "notes.txt", "a") as file:
        file.write(f"hang {os.getpid()}\\n")
    ctypes.PyDLL(None).pause()  # the interpreter is not let go
"""
)


GREEDY = """
import resource

@server.task
def take_all() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, hard))
    note("greedy")
    taken, is_over = [], False
    while not is_over:
        try:
            taken.append(bytearray(2**16))
        except MemoryError:
            time.sleep(0.01)
            is_over = os.access("greedy.go", os.F_OK)
    del taken
    raise MemoryError("there is no more")
"""


def test_process_whose_descriptors_a_task_closed_is_replaced(app: App) -> None:
    app.write("tasks.py", CLOSING)
    process = app.worker("-p", "2", "-c", "1")
    first = workers(process)

    app.send("close", "0", "21")

    wait_until(lambda: len(set(workers(process)) - set(first)) == 1, HANG)
    assert app.json("send", "tasks", "add", "1", "2", "--wait", "--timeout", "45")["result"] == 3
    assert process.stop() == 0


@pytest.mark.parametrize("processes", ["1", "2"])
def test_process_without_a_sign_of_life_is_replaced(app: App, processes: str) -> None:
    app.write("tasks.py", CLOSING)
    process = app.worker("-p", processes, "-c", "1", "--stall-timeout", "5s")

    app.send("hang")
    wait_until(lambda: app.notes, HANG)

    which = f"(pid {app.notes[0][1]}) has given no sign of life for 5 s"
    process.wait_for(f"{which}; its threads:\n")
    process.wait_for(f"{which}: killing it; its tasks will run again\n")
    assert re.search(r'File ".*tasks.py", line \d+ in hang\n', process.err)
    process.close()


def test_process_that_hangs_in_an_exit_handler_is_killed(app: App) -> None:
    app.write(
        "tasks.py",
        TASKS + "\n@server.task\ndef hang() -> None:\n    import atexit, threading\n"
        "    atexit.register(threading.Event().wait)\n",
    )
    uuid = app.send("hang")

    done = app.run("worker", "tasks", "--burst", "--shutdown-timeout", "0", code=1)

    assert "does not end: killing it\n" in done.stderr
    assert "starting another one" not in done.stderr
    assert app.state(uuid) == "SUCCESS"


def test_lines_of_user_code_do_not_end_the_supervisor(app: App) -> None:
    app.write(
        "tasks.py",
        TASKS
        + """
import stat
@server.task
def write_everywhere() -> None:
    for number in range(3, 64):
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                os.write(number, b"ready\\nready a b\\nsign\\nsign [7]\\nanswering\\nfile\\n")
        except OSError:
            pass
""",
    )
    process = app.worker("-c", "1")
    (child,) = workers(process)

    uuids = [app.send("write_everywhere"), app.send("add", "1", "2")]

    wait_until(lambda: all(app.state(uuid) == "SUCCESS" for uuid in uuids), HANG)
    assert workers(process) == [child]
    assert process.stop() == 0


def test_worker_without_memory_loses_nothing(app: App) -> None:
    """Other threads of the process fail while the task has all: it lives on, or is replaced."""
    app.write("tasks.py", TASKS + GREEDY)
    worker = app.worker("-c", "2")

    greedy = app.send("take_all")
    wait_until(lambda: app.notes, HANG)
    others = [app.send("add", "1", str(number)) for number in range(2)]
    app.go("greedy")

    wait_until(lambda: all(app.state(uuid) == "SUCCESS" for uuid in others), HANG)
    wait_until(lambda: app.state(greedy) == "FAILURE", HANG)
    assert worker.stop() == 0


def test_stopped_process_is_not_taken_for_a_silent_one(app: App) -> None:
    process = app.worker("--stall-timeout", "5s")
    (child,) = workers(process)
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: beats_are_old(app), HANG)

    os.kill(child, signal.SIGCONT)

    uuid = app.send("add", "1", "2")
    wait_until(lambda: app.state(uuid) == "SUCCESS", HANG)
    assert workers(process) == [child]
    assert process.stop() == 0


def beats_are_old(app: App) -> bool:
    found = app.json("health", "tasks", "--max-age", "8s", code=None)
    assert [one["stalled"] for one in found["workers"]] == [False]
    return not found["alive"]


def test_stalled_process_is_alive(app: App) -> None:
    app.write("tasks.py", CLOSING)
    process = app.worker("-c", "1")
    app.send("hang")
    wait_until(lambda: app.notes, HANG)

    def found() -> dict[str, Any]:
        beats: dict[str, Any] = app.json("health", "tasks", "--max-age", "8s", code=None)
        return beats

    wait_until(lambda: found()["workers"][0]["stalled"], HANG)

    assert (found()["alive"], found()["ready"]) == (True, False)
    assert "(stalled)" in app.run("health", "tasks").stdout
    process.signal(signal.SIGTERM)
    process.wait_for("stopping when")
    process.signal(signal.SIGTERM)
    assert process.wait() == 1


def test_single_process_is_replaced_when_a_task_ends_it(app: App) -> None:
    app.write("tasks.py", ENDING)
    process = app.worker("-c", "1", "-n", "ada")
    (first,) = workers(process)

    app.send("end", "1")
    process.wait_for(f"{MAX_STRIKES} times while it ran")

    assert workers(process) != [first]
    assert [one["name"] for one in app.json("workers", "tasks")] == ["ada"]
    assert process.stop() == 0


# Health


def beats(app: App, *words: str) -> list[int]:
    return sorted(one["pid"] for one in app.json("health", "tasks", *words, code=None)["workers"])


@pytest.mark.parametrize("words", [[], ["--heartbeat-file", "beat"]])
def test_health_knows_the_processes_that_live(app: App, words: list[str]) -> None:
    process = app.worker("-p", "2", *words)
    wait_until(lambda: beats(app, *words) == workers(process), HANG)
    victim = workers(process)[0]
    files = [*app.temporary.glob("machinery-*/*/*.json"), *app.folder.glob("beat.*")]
    [written] = [one for one in files if json.loads(one.read_text())["pid"] == victim]
    draft = written.with_name(f"{written.name}.0123456789abcdef.draft")
    draft.write_text("killed while it wrote")

    os.kill(victim, signal.SIGKILL)

    def living() -> list[int]:  # twice the same: neither while one of them begins or ends
        found = workers(process)
        return found if beats(app, *words) == found == workers(process) else []

    wait_until(lambda: len(living()) == 2 and victim not in living(), HANG)
    assert not draft.exists()
    assert process.stop() == 0


@pytest.mark.parametrize(("before", "after"), [("3", "2"), ("2", "1"), ("1", "2")])
def test_a_heartbeat_that_a_killed_worker_left_does_not_count(
    app: App, before: str, after: str
) -> None:
    left = app.worker("-p", before, "--heartbeat-file", "beat")
    pids = [left.pid, *workers(left)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    left.wait()
    app.write("beat.1.gz", "of another program")
    app.write("beat.0123456789abcdef.draft", "killed while it wrote")
    app.write("beat.2.0123456789abcdef.draft", "killed while it wrote")

    process = app.worker("-p", after, "--heartbeat-file", "beat")

    assert beats(app, "--heartbeat-file", "beat") == workers(process)
    assert process.stop() == 0
    assert sorted(path.name for path in app.folder.glob("beat*")) == ["beat.1.gz"]


def test_supervisor_is_small(app: App) -> None:
    process = app.worker("-c", "1")

    def pss(pid: int) -> int:
        """Return kB, with its share of what several processes have mapped."""
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return int(text.split("Pss:")[1].split()[0])

    assert pss(process.pid) < 15_000
    assert process.stop() == 0


# As process 1 of a container

LEAVING = (
    TASKS
    + """
import subprocess

@server.task
def leave(count: int) -> int:
    '''Leaves so many orphans behind, and returns the exit code of a program that is its own.'''
    for number in range(count):
        leave = "setsid true &" if number % 2 else "true &"
        subprocess.run(["sh", "-c", leave + " exit 0"])
    return subprocess.run(["sh", "-c", "exit 7"]).returncode
"""
)


def zombies(pid: int) -> list[int]:
    return [one for one in children(pid) if not is_alive(one)]


@pytest.mark.parametrize("words", [["-p", "1"], ["-p", "2"], ["--pool", "process"]])
def test_process_1_reaps_orphans_and_keeps_exit_codes(app: App, words: list[str]) -> None:
    app.write("tasks.py", LEAVING)
    if subprocess.run(["unshare", "--user", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("the system allows no namespaces")
    box = app.container("worker", "tasks", *words)
    box.wait_ready()
    [first] = children(box.pid)

    uuids = [app.send("leave", "20") for _ in range(3)]
    for uuid in uuids:
        assert "  SUCCESS  7  (" in app.run("result", "tasks", uuid, "--wait").stdout
    wait_until(lambda: not zombies(first), HANG, "no zombies")

    [victim, *_] = children(first)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: "was killed by signal 9 (SIGKILL)" in box.err, HANG)
    os.kill(first, signal.SIGTERM)
    assert box.wait() == 0

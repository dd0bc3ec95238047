"""`machinery worker`: its banner, its end, its logs, --burst, --reload and its health."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from machinery_py import Config, Server, Worker
from machinery_py.cli.worker import _read_again, _read_again_soon
from machinery_py.testing.waiting import wait_until
from machinery_py.worker.loops import receiver
from tests.cli.app import HANG, TASKS, App, app_in_a_folder
from tests.support.private import free_port

app = app_in_a_folder

READY = "Ready. Ctrl+C stops when the running tasks are done.\n"


def test_banner_names_worker_queues_and_tasks(app: App) -> None:
    worker = app.worker("-c", "3")

    assert re.fullmatch(
        r"machinery \d+\.\d+\.\d+ · worker "
        + re.escape(f"{socket.gethostname()}-{worker.worker}")
        + r" · 3 threads\n"
        r"  broker   sqlite:///machinery.db   "
        r"\(embedded: one machine; set MACHINERY_URL for a server\)\n"
        r"  queue    machinery_tasks\n"
        r"  tasks    add, boom, chat, greet, hold, note\n" + re.escape(READY),
        worker.out,
    )
    assert worker.stop() == 0


def test_long_lists_in_the_banner_are_wrapped(app: App) -> None:
    names = ", ".join(f'"task_number_{number}": print' for number in range(40))
    app.write(
        "tasks.py",
        f"from machinery_py import Server\nserver = Server()\nserver.register_tasks({{{names}}})\n",
    )

    worker = app.worker("-Q", "high,low", "-n", "wide")

    lines = worker.out.splitlines()
    assert "  queues   high, low" in lines
    assert all(len(line) <= 100 for line in lines)
    assert all(f"task_number_{number}" in worker.out for number in range(40))
    assert sum(line.startswith("           task_number_") for line in lines) > 3


def test_worker_warns_of_queues_that_no_worker_serves(app: App) -> None:
    app.write(
        "tasks.py",
        TASKS.replace("@server.task\ndef note", '@server.task(queue="mail")\ndef note').replace(
            "@server.task\ndef boom", '@server.task(queue="bulk")\ndef boom'
        ),
    )
    mail = app.worker("-Q", "mail,machinery_tasks")

    other = app.worker()

    mail.wait_for("no worker runs on queue 'bulk' now, and tasks are sent to it: boom")
    other.wait_for("(start one: machinery worker tasks -Q bulk)")
    assert "'mail'" not in mail.err + other.err
    assert (mail.stop(), other.stop()) == (0, 0)


def test_no_banner_is_no_output(app: App) -> None:
    worker = app.start("worker", "tasks", "--no-banner", "--burst")

    assert worker.wait() == 0
    assert worker.out == ""


def test_worker_calls_the_hooks_of_the_app(app: App) -> None:
    hooks = """
@server.lifespan
def resources():
    note.function("begins")
    yield {"name": "ends"}
    note.function("ends")

@server.on_success
def tell(ctx, result):
    note.function(f"{ctx.name} {result}, before it {ctx.state['name']}")
"""
    app.write("tasks.py", TASKS + hooks)
    app.send("add", "1", "2")

    assert app.start("worker", "tasks", "--burst").wait() == 0

    assert [text for text, _ in app.notes] == [
        "begins",
        "add 3, before it ends",
        "ends",
    ]


def test_worker_whose_lifespan_fails_does_not_start(app: App) -> None:
    app.write("tasks.py", TASKS + "\n@server.lifespan\ndef resources():\n    yield 1 / 0\n")

    worker = app.start("worker", "tasks")

    assert worker.wait() == 2
    assert worker.err.count("lifespan resources cannot start: ZeroDivisionError: division by") == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_tasks_finish(app: App, number: signal.Signals) -> None:
    uuid = app.send("hold", "slow")
    worker = app.worker()
    wait_until(lambda: app.notes, HANG)

    worker.signal(number)
    worker.wait_for(f"{number.name}: stopping when the running tasks are done")
    assert worker.process.poll() is None
    app.go("slow")

    assert worker.wait() == 0
    assert app.state(uuid) == "SUCCESS"


def test_a_second_signal_gives_unfinished_tasks_back(app: App) -> None:
    app.send("hold", "slow")
    worker = app.worker()
    wait_until(lambda: app.notes, HANG)

    worker.signal(signal.SIGTERM)
    worker.wait_for("stopping when")
    worker.signal(signal.SIGTERM)

    assert worker.wait() == 1
    assert "second SIGTERM: stopping now" in worker.err
    assert app.json("queues", "tasks")[0]["waiting"] == 1


def test_what_is_not_finished_in_time_goes_back(app: App) -> None:
    app.send("hold", "slow")
    worker = app.worker("--shutdown-timeout", "50ms")
    wait_until(lambda: app.notes, HANG)

    assert worker.stop() == 0
    assert app.json("queues", "tasks")[0]["waiting"] == 1


def test_signal_during_the_import_ends_the_worker_at_once(app: App) -> None:
    app.write("slow.py", "import time, pathlib\npathlib.Path('begun').touch()\ntime.sleep(600)\n")
    worker = app.start("worker", "slow")
    wait_until((app.folder / "begun").exists, HANG)

    assert worker.stop() == 0
    assert "Traceback" not in worker.err


def test_signal_while_exec_makes_a_class_stops_the_worker(app: App) -> None:
    # CPython remembers a KeyboardInterrupt that left exec() of text, and would end with SIGINT.
    app.write(
        "slow.py",
        "exec('import pathlib, time; pathlib.Path(\\'begun\\').touch(); time.sleep(600)')\n",
    )
    worker = app.start("worker", "slow")
    wait_until((app.folder / "begun").exists, HANG)

    assert worker.stop() == 0


def test_burst_ends_when_the_queues_are_empty(app: App) -> None:
    uuids = [app.send("add", str(number), "1") for number in range(3)]

    app.run("worker", "tasks", "--burst")

    assert [app.state(uuid) for uuid in uuids] == ["SUCCESS"] * 3


def test_queues_are_worked_off_strictly_in_their_order(app: App) -> None:
    for queue, text in [("low", "third"), ("high", "first"), ("low", "fourth"), ("high", "second")]:
        app.send("note", text, "--queue", queue)

    app.run("worker", "tasks", "--burst", "-c", "1", "-Q", "high,low")

    assert [text for text, _ in app.notes] == ["first", "second", "third", "fourth"]


def test_the_configured_concurrency_counts(app: App) -> None:
    worker = app.worker(MACHINERY_CONCURRENCY="7", MACHINERY_URL="sqlite:///other.db")

    assert "· 7 threads\n" in worker.out


def test_no_secret_is_in_the_banner(app: App) -> None:
    app.write(
        "tasks.py",
        "from machinery_py import Server\n"
        "server = Server(broker='sqlite:///a.db', lock='mongodb://ada:hunter2@localhost:27017')\n",
    )

    shown = [
        app.run(*words, code=None)
        for words in (
            ["worker", "tasks", "--burst"],
            ["config", "tasks"],
            ["config", "tasks", "--json"],
            ["doctor", "tasks"],
        )
    ]

    assert all("hunter2" not in done.stdout + done.stderr for done in shown)
    assert all(
        "mongodb://ada:***@localhost:27017" in done.stdout + done.stderr for done in shown[1:]
    )  # a worker shows no lock


def test_worker_in_a_process_with_many_open_files_can_be_stopped(app: App) -> None:
    app.write(
        "tasks.py",
        TASKS + "\nimport signal\n@server.task\ndef end() -> None:\n"
        "    os.kill(os.getppid(), signal.SIGTERM)\n",
    )
    app.write(
        "many.py",
        "import resource, sys, tasks\n"
        "from machinery_py.cli.main import main\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))\n"
        "files = [open(__file__) for _ in range(1100)]\n"
        "tasks.end.send()\n"
        "sys.exit(main(['worker', 'tasks', '-c', '1']))\n",
    )

    assert "Ready." in app.python("many.py")


@pytest.mark.parametrize("store", ["sqlite", "redis", "amqp"])
def test_a_worker_whose_descriptors_a_task_has_closed_is_replaced(
    app: App, store: str, request: pytest.FixtureRequest
) -> None:
    app.write(
        "tasks.py", TASKS + "\n@server.task\ndef close() -> None:\n    os.closerange(0, 21)\n"
    )
    if store != "sqlite":
        url = request.getfixturevalue({"redis": "empty_redis", "amqp": "amqp_url"}[store])
        app.env["MACHINERY_URL"] = str(getattr(url, "url", url))
    worker = app.worker("-c", "1")

    app.send("close")

    worker.wait_for("a task has closed descriptors of this worker: ending at once")
    worker.wait_for("ended with exit code 1 (a task ended it); starting another one\n")
    assert worker.stop() == 0


# Logs


def records(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_logs_are_a_record_a_line_and_know_the_task(app: App) -> None:
    uuid = app.send("chat", "a\nb\x1b[31m")
    app.send("boom")

    done = app.run("worker", "tasks", "--burst", "--log-format", "json")

    assert done.stdout == ""
    found = records(done.stderr)
    said, named = (one for one in found if one["logger"] == "shop")
    assert said["message"] == "said a\nb\x1b[31m"
    assert (said["task_uuid"], said["task_name"], said["attempt"]) == (uuid, "chat", 1)
    assert (named["task_uuid"], named["task_name"]) == ("mine", "chat")
    assert any(str(one["message"]).startswith("machinery 1.") for one in found)
    assert all({"time", "level", "logger", "message"} <= one.keys() for one in found)


def test_text_logs_are_a_line_a_record_and_know_the_task(app: App) -> None:
    uuid = app.send("chat", "a\nb\x1b[31m\u202e")

    done = app.run("worker", "tasks", "--burst")

    (line,) = [line for line in done.stderr.splitlines() if "said" in line]
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} WARNING shop: said a\\nb\\x1b\[31m\\u202e  \["
        + uuid
        + r" chat #1\]",
        line,
    )
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ("Server()", ["--log-level", "error"]),
        ('Server(machinery_py.Config(log_level="error"))', []),
        ('Server(); logging.getLogger().setLevel("ERROR")', []),
        ('Server(machinery_py.Config(log_level="debug"))', ["--log-level", "error"]),
    ],
)
def test_log_level_is_the_requested_one(app: App, made: str, words: list[str]) -> None:
    code = (app.folder / "tasks.py").read_text().replace("server = Server()", f"server = {made}")
    app.write("tasks.py", f"import machinery_py\n{code}")
    app.send("chat", "hello")

    done = app.run("worker", "tasks", "--burst", *words)

    assert "said hello" not in done.stderr


# Reload


def test_a_setting_that_could_not_be_changed_is_changed_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hangs, gate = tmp_path / "config.toml", threading.Event(), threading.Event()
    path.write_text("concurrency = 2\n")
    server = Server(Config.from_toml(path), broker="memory://")

    def hang(_: Worker) -> bool:
        hangs.set()
        return gate.wait(HANG)

    worker = server.new_worker()
    worker.set_pre_consume_handler(hang)
    with worker:
        assert hangs.wait(HANG)
        path.write_text("concurrency = 5\n")
        with monkeypatch.context() as patch:
            patch.setattr(receiver, "CHANGE_TIMEOUT", 0.01)
            _read_again(server, worker)
        assert worker.concurrency == 2
        gate.set()
        _read_again(server, worker)
        assert worker.concurrency == 5
    server.close()


def test_a_changed_file_starts_the_worker_again(app: App) -> None:
    worker = app.worker("--reload")

    app.write("more.py", "x = 1\n")
    worker.wait_for(READY, times=2)
    app.write(
        "tasks.py", (app.folder / "tasks.py").read_text().replace("return a + b", "return a * b")
    )
    worker.wait_for(READY, times=3)

    assert "tasks.py changed: starting again" in worker.err
    assert app.json("send", "tasks", "add", "6", "7", "--wait")["result"] == 42
    assert worker.stop() == 0


def test_a_file_that_cannot_be_imported_is_shown_and_waited_for(app: App) -> None:
    good = (app.folder / "tasks.py").read_text()
    worker = app.worker("--reload")

    app.write("tasks.py", "def broken(:\n")
    worker.wait_for("waiting until a file changes")
    assert "SyntaxError" in worker.err
    assert worker.process.poll() is None
    app.write("tasks.py", good)
    worker.wait_for(READY, times=2)

    assert worker.stop() == 0


# Health


def test_a_worker_has_a_heartbeat_until_it_ends(app: App) -> None:
    assert app.run("health", "tasks", code=1).stderr.startswith(
        "machinery: no worker of 'tasks' has a heartbeat here"
    )

    worker = app.worker()
    wait_until(lambda: app.run("health", "tasks", "--ready", code=None).returncode == 0, HANG)
    (base,) = app.temporary.glob(f"machinery-{os.getuid()}")
    (folder,) = base.iterdir()
    assert [stat.S_IMODE(one.stat().st_mode) for one in (base, folder)] == [0o700, 0o700]
    assert [one.name for one in folder.iterdir()] == [f"{worker.worker}.json"]
    assert app.json("health", "tasks")["workers"][0]["pid"] == worker.worker

    worker.stop()
    app.run("health", "tasks", code=1)
    assert not folder.exists()


def test_only_old_drafts_of_heartbeats_are_removed(app: App) -> None:
    app.worker()
    (folder,) = app.temporary.glob(f"machinery-{os.getuid()}/*")
    old, new = (folder / f"{pid}.json.0123456789abcdef.draft" for pid in (1, 2))
    for draft in (old, new):
        draft.write_text("killed while it wrote")
    os.utime(old, (0, 0))

    app.worker()

    assert (old.exists(), new.exists()) == (False, True)


def test_the_probe_imports_nothing_and_opens_nothing(app: App) -> None:
    worker = app.worker()
    os.kill(worker.worker, signal.SIGSTOP)  # a thread that opens the file now would make it anew
    app.write("tasks.py", "raise SystemExit(77)")
    (app.folder / "machinery.db").unlink()

    app.run("health", "tasks")

    assert not (app.folder / "machinery.db").exists()


def test_heartbeat_file_of_a_killed_worker_is_not_healthy(app: App) -> None:
    worker = app.worker()
    worker.close()

    app.run("health", "tasks", code=1)


def test_a_worker_that_hangs_is_not_alive(app: App) -> None:
    worker = app.worker("--heartbeat-file", "beat.json")
    app.run("health", "tasks", "--heartbeat-file", "beat.json")

    os.kill(worker.worker, signal.SIGSTOP)
    os.utime(app.folder / "beat.json", (0, 0))
    app.run("health", "tasks", "--heartbeat-file", "beat.json", code=1)
    app.run("health", "tasks", "--heartbeat-file", "beat.json", "--max-age", "36000d")
    os.kill(worker.worker, signal.SIGCONT)

    assert worker.stop() == 0
    assert not (app.folder / "beat.json").exists()


def test_a_named_heartbeat_file_follows_no_link_and_is_private(app: App) -> None:
    precious = app.write("precious.txt", "precious")
    (app.folder / "beat.json").symlink_to(precious)

    worker = app.worker("--heartbeat-file", "beat.json")

    assert precious.read_text() == "precious"
    found = (app.folder / "beat.json").lstat()
    assert stat.S_ISREG(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert worker.stop() == 0


def test_a_heartbeat_behind_a_link_or_a_pipe_is_none(app: App) -> None:
    worker = app.worker("--heartbeat-file", "beat.json")
    (app.folder / "link.json").symlink_to(app.folder / "beat.json")
    os.mkfifo(app.folder / "pipe.json")

    app.run("health", "tasks", "--heartbeat-file", "beat.json")
    app.run("health", "tasks", "--heartbeat-file", "link.json", code=1)
    app.run("health", "tasks", "--heartbeat-file", "pipe.json", code=1)

    assert worker.stop() == 0


def test_worker_is_alive_and_not_ready_when_its_broker_is_away(app: App) -> None:
    worker = app.worker(MACHINERY_LEASE="1")
    wait_until(lambda: app.run("health", "tasks", "--ready", code=None).returncode == 0, HANG)

    (app.folder / "machinery.db").rename(app.folder / "away.db")

    wait_until(lambda: app.run("health", "tasks", "--ready", code=None).returncode == 1, HANG)
    app.run("health", "tasks")
    worker.close()


def get(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=HANG) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("processes", ["1", "2"])
def test_health_can_be_asked_over_http(app: App, processes: str) -> None:
    port = free_port()
    worker = app.worker("--health-port", str(port), "-p", processes)

    wait_until(lambda: get(port, "/ready") == 200, HANG)

    assert [get(port, path) for path in ("/live", "/ready?x=1", "/", "/live/")] == [
        200,
        200,
        404,
        404,
    ]
    assert worker.stop() == 0


def test_settings_are_not_read_again_without_a_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    server = Server("memory://")
    monkeypatch.setattr(threading.Thread, "start", refuse)

    _read_again_soon(server, server.new_worker())

    assert "the settings cannot be read again: can't start new thread" in caplog.text


def test_a_port_that_is_taken_is_told(app: App) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        done = app.run("worker", "tasks", "--health-port", str(port), code=2)

    assert (
        f"machinery: --health-port 127.0.0.1:{port}: address already in use "
        f"(choose another --health-port)\n" in done.stderr
    )


def test_debugger_works_in_the_worker_of_a_terminal(app: App) -> None:
    app.write("tasks.py", TASKS + "\n@server.task\ndef stop() -> None:\n    breakpoint()\n")
    ours, theirs = pty.openpty()
    worker = subprocess.Popen(
        [sys.executable, "-m", "machinery_py", "worker", "tasks", "-c", "1"],
        cwd=app.folder,
        env=app.env,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    said = b""

    def has_said(text: bytes) -> bool:
        nonlocal said
        with contextlib.suppress(OSError):  # nothing new, or the terminal is gone
            said += os.read(ours, 65536)
        return text in said

    uuid = app.send("stop")
    wait_until(lambda: has_said(b"(Pdb)"), HANG)
    os.write(ours, b"p 40 + 2\nc\n")
    wait_until(lambda: has_said(b"42"), HANG)

    wait_until(lambda: app.state(uuid) == "SUCCESS", HANG)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(HANG) == 0
    os.close(ours)


# Output that nobody reads

PRINTING = (
    TASKS
    + """
@server.task
def shout(count: int) -> int:
    for _ in range(count):
        print("x" * 100, flush=True)
    return count
"""
)


@pytest.mark.parametrize(
    ("words", "output"),
    [
        ("", "| true"),
        ("", "| head -1"),
        ("", ">/dev/full 2>&1"),
        ("", ">&- 2>&-"),
        ("-p 2", "2>&1 | true"),
        ("--pool process", "2>&1 | head -3"),
    ],
)
def test_worker_goes_on_when_nobody_reads_its_output(app: App, words: str, output: str) -> None:
    app.write("tasks.py", PRINTING)
    line = f"{sys.executable} -m machinery_py worker tasks {words} {output}"
    with subprocess.Popen(
        ["bash", "-c", line],
        cwd=app.folder,
        env=app.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        try:
            uuid = app.send("add", "1", "2")
            app.run("result", "tasks", uuid, "--wait")
            if "full" not in output:  # a full disk is the task's own trouble
                # One that prints in the moment when the reader goes may fail.
                wait_until(lambda: prints(app), HANG)
        finally:
            os.killpg(process.pid, signal.SIGTERM)


def prints(app: App) -> bool:
    uuid = app.send("shout", "100")
    return app.run("result", "tasks", uuid, "--wait", code=None).returncode == 0

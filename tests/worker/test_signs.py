"""The keeper process of a process without a supervisor: its start, its end, and what it costs."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from machinery_py import Config, Server
from machinery_py.backends.memory import MemoryBackend
from machinery_py.clock import SYSTEM_CLOCK
from machinery_py.config.urls import SCHEMES
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.memory import MemoryFamily
from machinery_py.stores.open import FAMILIES, FamilyOptions, add_family
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.control import keeper, signs
from tests.support.servers import RedisServer

LARGEST = 15_000  # kB

#: Workers on a Redis; a line on stdin each is a Python statement, its answer a line of JSON.
PROGRAM = """
import gc, json, logging, os, sys
logging.basicConfig(level="WARNING", format="%(message)s")
from machinery_py import Config, Server
from machinery_py.worker.control import signs
signs.RESTART_PAUSE = 1.0
server = Server(config=Config(broker=sys.argv[1], lease=float(sys.argv[2])))
worker = server.new_worker("w", 1)
@server.task
def ping() -> str:
    return "pong"
answer = None
for line in sys.stdin:
    exec(line)
    print(json.dumps(answer), flush=True)
"""


def is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def keepers_of(pid: int) -> list[int]:
    """Return the keeper processes that a process has started."""
    found: list[int] = []
    for folder in pathlib.Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"machinery_py.worker.control.keeper" in words and words[-2] == b"%d" % pid:
            found.append(int(folder.name))
    return [one for one in found if is_alive(one)]


class Program:
    """A user's process."""

    def __init__(self, url: str, folder: pathlib.Path, *, lease: float = 3.0, **env: str) -> None:
        self.errors = folder / "errors"
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, url, str(lease)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | env,
            )

    def do(self, statement: str) -> Any:
        self.begin(statement)
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def begin(self, statement: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(statement + "\n")
        self.process.stdin.flush()

    def keeper(self) -> int:
        """Return its keeper, when it has one."""
        wait_until(lambda: len(keepers_of(self.process.pid)) == 1, HANG, "a keeper process")
        return keepers_of(self.process.pid)[0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(HANG)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def program(empty_redis: RedisServer, tmp_path: pathlib.Path) -> Iterator[Program]:
    program = Program(empty_redis.url, tmp_path)
    yield program
    program.close()


def test_all_workers_of_a_process_have_one_keeper(program: Program) -> None:
    program.do("worker.start(); others = [server.new_worker(f'w{n}', 1) for n in range(3)]")
    keeper = program.keeper()

    program.do("[other.start() for other in others]")
    program.do("[other.stop() for other in [worker, *others]]")
    program.do("worker.start()")

    assert program.keeper() == keeper


def test_process_without_a_worker_has_no_keeper(program: Program) -> None:
    program.do("answer = server.broker.workers()")

    assert keepers_of(program.process.pid) == []


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_keeper_ends_with_its_process(program: Program, how: signal.Signals) -> None:
    program.do("worker.start()")
    keeper = program.keeper()

    program.process.send_signal(how)

    wait_until(lambda: not is_alive(keeper), HANG)


def test_keeper_ends_at_the_end_of_the_program_without_a_word(
    empty_redis: RedisServer, tmp_path: pathlib.Path
) -> None:
    program = Program(empty_redis.url, tmp_path, PYTHONWARNINGS="always::ResourceWarning")
    program.do("worker.start()")
    keeper = program.keeper()
    program.do("worker.stop(); server.close(); os.fork() or sys.exit()")
    assert program.process.stdin is not None
    program.process.stdin.close()

    assert program.process.wait(HANG) == 0
    wait_until(lambda: not is_alive(keeper), HANG)
    assert "still running" not in program.errors.read_text()


def test_killed_keeper_is_replaced_and_knows_the_sessions(
    empty_redis: RedisServer, tmp_path: pathlib.Path
) -> None:
    # The keeper has a third of the lease to open the broker.
    lease = 8.0
    with (
        contextlib.closing(Program(empty_redis.url, tmp_path, lease=lease)) as program,
        contextlib.closing(Server(config=Config(broker=empty_redis.url, lease=lease))) as server,
    ):
        program.do("worker.start()")
        first = program.keeper()

        os.kill(first, signal.SIGKILL)
        wait_until(lambda: keepers_of(program.process.pid) not in ([], [first]), HANG)
        second = program.keeper()
        wait_until(lambda: len(os.listdir(f"/proc/{second}/task")) == 2, HANG, "its thread")
        assert program.do("answer = signs._Own.signs.give()")  # which it has, whatever comes

        killed = "the keeper of this process was killed by signal 9 (SIGKILL)"
        wait_until(lambda: killed in program.errors.read_text(), HANG)
        (before,) = server.broker.workers()
        begun = time.monotonic()
        # Nothing else runs meanwhile.
        program.begin(f"import ctypes; ctypes.PyDLL(None).sleep({2.5 * lease:g})")

        def is_over() -> bool:
            server.broker.tend()
            return time.monotonic() - begun > 2.4 * lease

        wait_until(is_over, HANG)
        assert [one.session for one in server.broker.workers()] == [before.session]


def test_forked_child_has_a_keeper_of_its_own(program: Program) -> None:
    program.do("worker.start()")
    parents = program.keeper()

    child = program.do(
        "answer = os.fork() or (server.new_worker('c', 1).start(), __import__('time').sleep(600))"
    )
    wait_until(lambda: len(keepers_of(child)) == 1, HANG)
    (childs,) = keepers_of(child)
    os.kill(child, signal.SIGKILL)

    wait_until(lambda: not is_alive(childs), HANG)
    assert program.keeper() == parents


@pytest.mark.parametrize(
    "where",
    [
        "sys.executable = ''",
        "sys.frozen = True",  # PyInstaller and others: the executable is the app
        "sys.executable = '/usr/bin/uwsgi'",
    ],
)
def test_worker_goes_on_where_no_keeper_can_be_started(program: Program, where: str) -> None:
    program.do(f"{where}; worker.start()")

    assert program.do("answer = ping.send().get(timeout=60)") == "pong"
    wait_until(lambda: "this process has no keeper" in program.errors.read_text(), HANG)
    assert program.errors.read_text().count("no keeper") == 1
    assert keepers_of(program.process.pid) == []


class OwnFamily(MemoryFamily):
    """A store of the user's whose consumers live by beats."""

    def __init__(self, url: str, options: FamilyOptions) -> None:
        super().__init__("memory://", options)
        broker = self.broker()
        broker.features = msgspec.structs.replace(broker.features, beats=True)


def test_worker_on_a_store_of_ones_own_is_told_that_it_has_no_keeper(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = keepers_of(os.getpid())  # of tests before this one
    add_family("own", f"{__name__}:OwnFamily")
    try:
        server = Server(config=Config(broker="own://:secret@host"))
        with contextlib.closing(server), server.new_worker("w", 1) as worker:
            wait_until(lambda: worker.ready, HANG)
    finally:
        del FAMILIES["own"], SCHEMES["own"]

    (line,) = [one.getMessage() for one in caplog.records if "keeper" in one.getMessage()]
    assert "is opened by code of your own (add_family)" in line
    assert "secret" not in line
    assert 'pool="process"' in line
    assert keepers_of(os.getpid()) == before


def test_keeper_opens_the_broker_beside_a_ready_made_result_backend(
    empty_redis: RedisServer,
) -> None:
    backend = MemoryBackend(MemoryRows(SYSTEM_CLOCK))
    server = Server(broker=empty_redis.url, result_backend=backend)

    told = json.loads(json.dumps(signs.nested(server.config)))  # as the keeper reads it

    with contextlib.closing(server), contextlib.closing(keeper._open_family(told)) as family:
        assert family.broker().workers() == []


def test_path_that_is_no_text_does_no_harm(program: Program) -> None:
    program.do("import pathlib; sys.path.insert(0, pathlib.Path('/tmp')); worker.start()")

    assert is_alive(program.keeper())


def test_keeper_is_small(program: Program) -> None:
    program.do("worker.start()")
    keeper = program.keeper()

    usage = pathlib.Path(f"/proc/{keeper}/smaps_rollup").read_text()

    assert int(usage.split("Pss:")[1].split()[0]) < LARGEST

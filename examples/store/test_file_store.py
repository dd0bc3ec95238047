"""The file store, installed as a package, passes the suites that every store must pass."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_store import FileBackend, FileBroker, FileRows

from machinery_py import Config, Server
from machinery_py.errors import StoreUnusable
from machinery_py.limits.rows import RowsLimits
from machinery_py.locks.rows import RowsLock
from machinery_py.rows.contract import Key, RowStep, Write
from machinery_py.stores.rows import RowsStore
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.limits import LimitsConformance, OpenLimits
from machinery_py.testing.conformance.locks import LockConformance, OpenLock
from machinery_py.testing.conformance.messages_rows import MessageRowsConformance, OpenMessageRows
from machinery_py.testing.conformance.rows import OpenRows, RowsConformance
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from machinery_py.testing.conformance.workflows import WorkflowConformance

OpenFile = Callable[[], FileRows]


@pytest.fixture
def open_file(tmp_path: Path, clock: ManualClock) -> OpenFile:
    return lambda: FileRows(tmp_path / "queue.mp", clock)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the package. Needs no network."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "file_store.py"):
        shutil.copy(Path(__file__).with_name(name), source)
    options = ["--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(target), str(source)],
        check=True,
        timeout=240,
    )
    return target


class TestFileRows(RowsConformance):
    @pytest.fixture
    def open_rows(self, open_file: OpenFile) -> OpenRows:
        return open_file


class TestFileMessageRows(MessageRowsConformance):
    @pytest.fixture
    def open_rows(self, open_file: OpenFile) -> OpenMessageRows:
        return open_file


class TestFileLock(LockConformance):
    @pytest.fixture
    def open_lock(self, open_file: OpenFile) -> OpenLock:
        return lambda: RowsLock(open_file())


class TestFileLimits(LimitsConformance):
    @pytest.fixture
    def open_limits(self, open_file: OpenFile) -> OpenLimits:
        return lambda: RowsLimits(open_file())


class TestFileBroker(BrokerConformance):
    @pytest.fixture
    def open_broker(self, open_file: OpenFile) -> OpenBroker:
        return lambda: FileBroker(open_file(), lease=self.lease)


class TestFileBackend(BackendConformance):
    MANY = 300  # each of them rewrites the file

    @pytest.fixture
    def open_backend(self, open_file: OpenFile) -> OpenBackend:
        return lambda: FileBackend(open_file(), expire_in=self.expire_in)


class TestFileStore(SettlementConformance, ScheduleConformance, ClaimConformance):
    @pytest.fixture
    def open_store(self, open_file: OpenFile) -> OpenStore:
        def open_store() -> RowsStore:
            rows = open_file()
            return RowsStore(FileBroker(rows), FileBackend(rows))

        return open_store


class TestFileServer(WorkflowConformance):
    LONG = 50

    @pytest.fixture
    def server(
        self, tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[Server]:
        monkeypatch.syspath_prepend(installed)  # so that its entry point is found
        yield Server(Config(broker=f"file://{tmp_path}/queue.mp"))


PROGRAM = """
import sys
from machinery_py import Server

server = Server(sys.argv[1])
add = server.task("add")(lambda a, b: a + b)
result = add.send(20, 22)
server.new_worker("one", burst=True).launch(signals=False)
print(result.get(timeout=60.0), sys.modules["file_store"].__file__)
print(server.config.redacted()["stores"])
"""


def test_installed_package_brings_its_scheme_and_options(installed: Path, tmp_path: Path) -> None:
    done = run_installed(installed, tmp_path, MACHINERY_STORES="file.fsync:false")

    assert done.stdout.splitlines() == [
        f"42 {installed / 'file_store.py'}",
        "{'file': {'fsync': False}}",
    ], done.stderr


@pytest.mark.parametrize(
    ("stores", "words"),
    [
        ("file.fsink:false", "stores.file.fsink: unknown key; did you mean 'fsync'?"),
        ("file.fsync:7", "stores.file.fsync: found 7 (expected true or false)"),
        ("fiel.fsync:true", "no store plug-in 'fiel' (installed: file; did you mean 'file'?)"),
    ],
)
def test_wrong_own_option_is_told(installed: Path, tmp_path: Path, stores: str, words: str) -> None:
    done = run_installed(installed, tmp_path, MACHINERY_STORES=stores)

    assert done.stderr.splitlines()[-1].endswith(f"MACHINERY_STORES: stores: {words}")


def run_installed(
    installed: Path, tmp_path: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, f"file://{tmp_path}/queue.mp"],
        check=False,
        env={**os.environ, "PYTHONPATH": str(installed), **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ready_made_objects_are_used_as_they_are(tmp_path: Path) -> None:
    rows = FileRows(tmp_path / "queue.mp")
    broker, backend = FileBroker(rows), FileBackend(rows)
    server = Server(broker=broker, result_backend=backend)
    add = server.task("add")(_add)

    result = add.send(20, 22)
    waiting = broker.waiting("machinery_tasks")
    server.new_worker("one", burst=True).launch(signals=False)

    assert server.broker is broker
    assert server.backend is backend
    assert waiting == 1
    assert result.get(timeout=60.0) == 42


def _add(a: int, b: int) -> int:
    return a + b


@pytest.mark.parametrize("content", [b"{", b"#" * 100])
def test_file_that_is_no_record_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "queue.mp"
    path.write_bytes(b"0123456789abcdef" + content)
    with pytest.raises(StoreUnusable, match=re.escape(f"file store {str(path)!r}: ")):
        FileBroker(FileRows(path)).stats()
    with pytest.raises(StoreUnusable, match="Not a directory"):
        FileBroker(FileRows(path / "none")).stats()


def test_step_that_cannot_be_written_is_not_true(tmp_path: Path) -> None:
    rows, key = FileRows(tmp_path / "queue.mp"), Key("kind", "a")
    rows.commit([RowStep(write={key: Write(body=b"1")})])
    (tmp_path / "queue.mp.new").mkdir()
    with pytest.raises(StoreUnusable, match="Is a directory"):
        rows.commit([RowStep(write={key: Write(body=b"2")})])
    (tmp_path / "queue.mp.new").rmdir()

    [found] = rows.read([key])
    assert found is not None and found.body == b"1"


COUNTER = """
import sys
from pathlib import Path
from file_store import FileRows
from machinery_py.rows.contract import Key, Write

rows = FileRows(Path(sys.argv[1]), fsync=False)
A, B = Key("count", "a"), Key("count", "b")

def one_more(found, now):
    more = Write(body=b"%d" % (int(found[0].body if found[0] else b"0") + 1))
    return {A: more, B: more}, int(more.body)

while True:
    print(rows.change([A], one_more), flush=True)
"""


def test_processes_that_are_killed_leave_whole_steps(tmp_path: Path) -> None:
    path, told = tmp_path / "queue.mp", list[int]()
    counters = [started(COUNTER, path) for _ in range(3)]
    for process in counters * 2:  # each is killed somewhere in a step, while others go on
        assert process.stdout is not None
        told += [int(process.stdout.readline()) for _ in range(20)]
    for process in counters:
        process.kill()
        told += [int(line) for line in process.communicate()[0].splitlines() if line]

    one, two = FileRows(path).read([Key("count", "a"), Key("count", "b")])
    assert one is not None and two is not None and one.body == two.body
    assert len(told) == len(set(told)) <= int(one.body) <= len(told) + len(counters)


CUT = """
import resource, signal, sys
from pathlib import Path
from file_store import FileRows
from machinery_py.rows.contract import Key, RowStep, Write

rows, key = FileRows(Path(sys.argv[1])), Key("kind", "a")
rows.commit([RowStep(write={key: Write(body=b"whole")})])
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # ends the process in the middle of a write
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
rows.commit([RowStep(write={key: Write(body=bytes(200_000))})])
"""


def test_process_that_ends_inside_a_write_leaves_the_last_step(tmp_path: Path) -> None:
    path = tmp_path / "queue.mp"
    assert started(CUT, path).wait(timeout=60.0) == -signal.SIGXFSZ

    [found] = FileRows(path).read([Key("kind", "a")])
    assert found is not None and found.body == b"whole"


KILLED = """
import os, signal, sys
from machinery_py import Server

server = Server(sys.argv[1])
server.task("add")(lambda a, b: os.kill(os.getpid(), signal.SIGKILL))
server.new_worker("one", 1).launch()
"""


def test_tasks_of_a_killed_worker_run_in_another(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PYTHONPATH", str(installed))
    monkeypatch.setenv("MACHINERY_LEASE", "2")
    server = Server(Config(broker=f"file://{tmp_path}/queue.mp", lease=2.0))
    add = server.task("add")(_add)
    results = [add.send(number, 1) for number in range(5)]

    assert started(KILLED, f"file://{tmp_path}/queue.mp").wait(timeout=60.0) == -signal.SIGKILL
    with server.new_worker("two", 1):
        assert [result.get(timeout=60.0) for result in results] == [1, 2, 3, 4, 5]


def started(program: str, argument: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(argument)],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )

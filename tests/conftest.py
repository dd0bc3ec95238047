"""What every test may rely on."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from machinery_py import Server
from machinery_py.connections import session_files
from machinery_py.connections.redis import errors as redis_errors
from tests.support import private_mongo

# A machine that is busy is no failure: nothing here is a measurement.
settings.register_profile("machinery", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("machinery")

#: Slow or heavy tests (three RabbitMQ nodes take half a minute to start): `make chaos` runs them.
LONG = [
    "chaos/test_chaos_amqp.py",
    "brokers/rabbitmq/test_cluster.py",
    "backends/rabbitmq/test_restart.py",
]
collect_ignore = [] if os.environ.get("MACHINERY_TEST_FULL") else LONG

#: Tests and their servers keep their files in memory where it has room: stores flush them to the
#: disk many thousand times. It is no less than a disk to a process that is killed.
MEMORY, ROOM = "/dev/shm", 4_000_000_000  # bytes; a run needs a quarter of it
if "TMPDIR" not in os.environ and os.access(MEMORY, os.W_OK):
    _found = os.statvfs(MEMORY)
    if _found.f_bavail * _found.f_frsize > ROOM and not _found.f_flag & os.ST_NOEXEC:
        tempfile.tempdir = MEMORY

pytest_plugins = ["pytester", "tests.support.fixtures", "tests.by_store"]

# What the machine happens to have set must not reach the tests.
for name in [
    name
    for name in os.environ
    if name.startswith("MACHINERY_") and not name.startswith("MACHINERY_TEST_")
]:
    del os.environ[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-matrix",
        action="store_true",
        help="write docs/reference/matrix.md from the tests of this run",
    )


def pytest_report_header() -> str:
    return f"MongoDB: {os.environ.get('MACHINERY_TEST_MONGODB_URL') or private_mongo.best_kind()}"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-matrix"):
        from tests.matrix import Matrix

        config.pluginmanager.register(Matrix())


@pytest.fixture(autouse=True, scope="session")
def _what_consumers_ran_is_known_to_this_run_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Keep the consumers' files in a fresh temporary folder, its path short enough for sockets."""
    tmp_path_factory.getbasetemp()  # before the patch: below the new folder, paths are too long
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="mpy") as folder:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True)
def _no_files_in_the_repository(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    """`Server()` makes its file where the test runs: not here."""
    monkeypatch.chdir(str(tmp_path))


@pytest.fixture(autouse=True)
def _spoilt_keys_are_named_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that an earlier test has spoilt is logged once a minute."""
    monkeypatch.setattr(redis_errors, "_logged", {})


@pytest.fixture(autouse=True)
def _files_of_consumers_are_closed() -> Iterator[None]:
    """Tests leave consumers that are lost, and each has two descriptors."""
    before = set(session_files._own)
    yield
    for key in session_files._own.keys() - before:
        if file := session_files._own.get(key):
            file.abandon()


@pytest.fixture(autouse=True)
def _servers_are_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close a Server that a test left open: other tests count the servers' connections."""
    made: list[weakref.ref[Server]] = []
    begin = Server.__init__

    def noted(server: Server, *args: Any, **kwargs: Any) -> None:
        made.append(weakref.ref(server))
        begin(server, *args, **kwargs)

    monkeypatch.setattr(Server, "__init__", noted)
    yield
    for one in made:
        server = one()
        if server is not None and hasattr(server, "_waiters"):  # else it was refused
            with contextlib.suppress(Exception):  # its store may be gone
                server.close()

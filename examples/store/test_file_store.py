"""The file store passes the suites that every store must pass. Run by `pytest examples/store`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from file_store import File, FileBackend, FileBroker

from machinery_py import Config, Server
from machinery_py.stores.open import add_family
from machinery_py.stores.transactional import OneStore
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from machinery_py.testing.conformance.brokers import BrokerConformance, OpenBroker
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from machinery_py.testing.conformance.workflows import WorkflowConformance

OpenFile = Callable[[], File]


@pytest.fixture
def open_file(tmp_path: Path, clock: ManualClock) -> OpenFile:
    return lambda: File(tmp_path / "queue.mp", clock)


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
        def open_store() -> OneStore:
            file = open_file()
            return OneStore(FileBroker(file), FileBackend(file), file.transaction)

        return open_store


class TestFileServer(WorkflowConformance):
    LONG = 50

    @pytest.fixture
    def server(self, tmp_path: Path) -> Iterator[Server]:
        add_family("file", "file_store:FileFamily")
        yield Server(Config(broker=f"file://{tmp_path}/queue.mp"))

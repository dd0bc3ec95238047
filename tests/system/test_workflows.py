"""Whole applications over pairs of stores, with real workers in threads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from machinery_py import Config, Server
from machinery_py.testing.conformance.application import App
from machinery_py.testing.conformance.workflows import LinkedConformance, WorkflowConformance

_numbers = itertools.count(1)


def memory() -> str:
    # A name, so that a second Server finds the same store.
    return f"memory://workflows-{next(_numbers)}"


class TestMemory(WorkflowConformance):
    @pytest.fixture
    def server(self) -> Server:
        return Server(Config(broker=memory()))


class TestSQLite(WorkflowConformance):
    @pytest.fixture
    def server(self, tmp_path: Path) -> Server:
        return Server(Config(broker=f"sqlite:///{tmp_path}/store.db?synchronous=normal"))


class TestMemoryBrokerAndSQLiteBackend(WorkflowConformance):
    LONG = 300

    @pytest.fixture
    def server(self, tmp_path: Path) -> Server:
        return Server(
            Config(
                broker=memory(), result_backend=f"sqlite:///{tmp_path}/store.db?synchronous=normal"
            )
        )


class TestSQLiteBrokerAndMemoryBackend(WorkflowConformance):
    LONG = 300

    @pytest.fixture
    def server(self, tmp_path: Path) -> Server:
        return Server(
            Config(
                broker=f"sqlite:///{tmp_path}/store.db?synchronous=normal", result_backend=memory()
            )
        )


class TestEager(LinkedConformance):
    """Tasks run inside `send`: there is no worker, and nothing is waited for."""

    LONG = 300

    @pytest.fixture
    def server(self) -> Server:
        return Server(Config(broker="eager"))

    @pytest.fixture
    def app(self, idle: App) -> Iterator[App]:
        yield idle

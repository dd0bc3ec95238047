"""A Server on memory stores with a manual clock, for tests of packages above the stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from machinery_py import Config, Server
from machinery_py.testing import Harness


class Bench:
    """A Server with some tasks, and `drain` to run them in the test's thread."""

    def __init__(self) -> None:
        self.server = Server(Config(broker="memory://"))
        self.calls: list[tuple[object, ...]] = []
        self.add = self.server.register_task("add", _add)
        self.note = self.server.register_task("note", self._note)
        self.fail = self.server.register_task("fail", _fail)
        self.pair = self.server.register_task("pair", _pair)
        self.harness = Harness(self.server)

    def _note(self, *args: object) -> None:
        self.calls.append(args)

    def drain(self) -> int:
        return self.harness.drain(raise_failures=False)


def _add(a: int, b: int) -> int:
    return a + b


def _fail(text: str) -> int:
    raise ValueError(text)


def _pair(a: str, b: int) -> tuple[str, int]:
    return a, b


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    with bench.harness:
        yield bench

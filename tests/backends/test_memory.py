"""The backend contract over MemoryBackend."""

from __future__ import annotations

import pytest

from machinery_py import Config, Server
from machinery_py.backends.memory import MemoryBackend
from machinery_py.errors import ConfigError
from machinery_py.rows.contract import Facts, Key, Write
from machinery_py.rows.memory import MemoryRows
from machinery_py.rows.messages import MessageStep
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend


class TestMemoryBackend(BackendConformance):
    @pytest.fixture
    def open_backend(self, clock: ManualClock) -> OpenBackend:
        backend = MemoryBackend(MemoryRows(clock), expire_in=self.expire_in)
        return lambda: backend


def test_ended_tasks_are_counted_without_their_bodies() -> None:
    clock = ManualClock()
    rows = MemoryRows(clock)
    facts = Facts(at=rows.now(), name="Fmail")
    rows.commit([MessageStep(write={Key("task", "t"): Write(body=b"not read", facts=facts)})])

    [count] = MemoryBackend(rows).finished_since(clock.now())
    assert (count.queue, count.succeeded, count.failed) == ("mail", 0, 1)


def test_servers_of_one_name_agree_on_how_their_store_works() -> None:
    first = Server(Config(broker="memory://agreed", lease=5.0))
    assert first.backend is Server(first.config).backend
    for other, word in (
        (
            Server(Config(broker="memory://agreed")),
            "lease is 5.0 in the Server that opened this store first, and 10.0 here",
        ),
        (
            Server(Config(broker="memory://agreed", lease=5.0, results_expire_in=60)),
            "results_expire_in is 3600.0 .* 60.0 here",
        ),
        (Server(first.config, clock=ManualClock()), "clock is .*SystemClock"),
    ):
        with pytest.raises(ConfigError, match=f"memory://agreed: {word}"):
            _ = other.backend
    first.close()

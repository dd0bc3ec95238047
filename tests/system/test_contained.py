"""Task processes that are harmed, over each kind of store: nobody else's task notices."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from collections.abc import Iterator, Sequence

import pytest

from machinery_py import AsyncResult, State
from machinery_py.connections.proc import is_suspended, place
from machinery_py.testing.waiting import wait_until
from machinery_py.worker.processes.frames import CHECK
from tests.support.fixtures import url_of
from tests.system.contained import HANG, IN_TIME, Contained


@pytest.fixture(params=["sqlite", "redis", "amqp+redis", "mongodb"])
def contained(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[Contained]:
    broker, _, backend = str(request.param).partition("+")
    url = url_of(broker, tmp_path / "db", request)
    results = url_of(backend, tmp_path / "db", request) if backend else url
    one = Contained(tmp_path, url, results, "-c", "4", "--shutdown-timeout", "0")
    yield one
    one.close()


def test_harm_to_processes_reaches_no_other_task(contained: Contained) -> None:
    harmed = contained.send("SIGKILL", "SIGSEGV", "exit", "exit", "fork", "SIGABRT")
    others = contained.send("stop", *["return"] * 20)
    timed = contained.send(*[IN_TIME] * 8)
    stopped, _ = contained.held(others[0])
    wait_until(lambda: is_suspended(stopped, place()), HANG)
    since = time.monotonic()
    _expect_results(harmed)
    wait_until(lambda: time.monotonic() > since + 2 * CHECK, HANG)  # it is looked at meanwhile
    os.kill(stopped, signal.SIGCONT)
    _expect_results(others)
    assert [contained.strikes(one) for one in harmed] == [[0, 1]] * len(harmed)
    assert [contained.strikes(one) for one in others] == [[0]] * len(others)
    wait_until(lambda: all(one.is_finished() for one in timed), HANG, "the end of the timed ones")

    for killed in ("worker", "supervisor"):
        hit = contained.send("hold", "hold")
        found = [contained.held(one) for one in hit]
        worker = found[0][1]
        os.kill(worker if killed == "worker" else contained.supervisor.pid, signal.SIGKILL)
        wait_until(lambda pids=found: not any(map(_is_alive, sum(pids, ()))), HANG)  # type: ignore[misc]
        if killed == "supervisor":
            contained.supervisor.wait()
            contained.start()
        others += contained.send("return")
        harmed += hit
        _expect_results(hit, others[-1:])

    assert {len(contained.runs(one)) for one in harmed} == {2}
    assert {len(contained.runs(one)) for one in others} == {1}
    for number, one in enumerate(timed):
        state = one.get_state()
        assert state.is_finished
        assert len(contained.runs(one)) <= 1  # 0: it was late before it had noted that
        is_late = state.state is State.FAILURE
        assert "TimeLimitExceeded" in state.error_type if is_late else one.get(HANG) == number


def _expect_results(*parts: Sequence[AsyncResult[int]]) -> None:
    for results in parts:
        for number, one in enumerate(results):
            assert one.get(HANG) == number


def _is_alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

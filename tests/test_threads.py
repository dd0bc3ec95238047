"""LoopThread: start, stop, failure and join of a thread that loops."""

from __future__ import annotations

import threading

import pytest

from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.threads import LoopThread


def test_stop_ends_a_pause_and_calls_wake() -> None:
    woken, paused = threading.Event(), threading.Event()

    def body() -> None:
        paused.set()
        assert loop.pause(HANG)

    loop = LoopThread("loop", body, wake=woken.set)
    loop.start()
    assert paused.wait(HANG)

    loop.stop()

    assert loop.join(HANG)
    assert woken.is_set()
    assert loop.failure is None


def test_a_failure_is_kept_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    def body() -> None:
        raise SystemExit("over")

    loop = LoopThread("loop", body)
    loop.start()

    assert loop.join(HANG)
    assert repr(loop.failure) == "SystemExit('over')"
    assert "thread loop has died" in caplog.text


def test_join_returns_false_while_the_body_goes_on() -> None:
    end = threading.Event()
    loop = LoopThread("loop", lambda: end.wait(HANG))
    loop.start()

    assert not loop.join(0.0)
    end.set()
    assert loop.join(HANG)


def test_join_before_the_start_and_from_inside_returns_at_once() -> None:
    joined: list[bool] = []
    loop = LoopThread("loop", lambda: joined.append(loop.join(HANG)))

    assert loop.join(HANG)
    loop.start()

    wait_until(lambda: joined == [True], HANG, "the join from inside")

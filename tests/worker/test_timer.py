"""Timer: order, beat, cancelling, failures, its thread."""

import functools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.loops import timer as module
from machinery_py.worker.loops.timer import Timer


class Seconds:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Seconds:
    return Seconds()


@pytest.fixture
def errors() -> list[BaseException]:
    return []


@pytest.fixture
def timer(clock: Seconds, errors: list[BaseException]) -> Timer:
    """Without a thread: the test calls `fire`."""
    return Timer("test", clock=clock, on_error=errors.append)


@pytest.fixture
def running() -> Iterator[Timer]:
    timer = Timer("test-timer")
    timer.start()
    yield timer
    timer.close(HANG)


def test_earlier_ones_come_first_then_those_made_first(timer: Timer, clock: Seconds) -> None:
    called: list[str] = []
    timer.after(2.0, lambda: called.append("late"))
    timer.after(1.0, lambda: called.append("first"))
    timer.after(1.0, lambda: called.append("second"))

    assert (timer.fire(), called) == (1.0, [])
    clock.now += 1.0
    assert (timer.fire(), called) == (1.0, ["first", "second"])
    clock.now += 5.0
    assert timer.fire() == float("inf")
    assert called == ["first", "second", "late"]


def test_beat_does_not_drift_and_is_never_faster(timer: Timer, clock: Seconds) -> None:
    called: list[float] = []
    timer.every(3.0, lambda: called.append(clock.now))
    for _ in range(1_000):  # looked at late, by another time each time
        clock.now += 0.7
        timer.fire()

    assert len(called) == 1_000 * 0.7 // 3
    assert all(0 <= (at - 100.0) % 3.0 < 0.7 for at in called)


def test_missed_beats_are_left_out(timer: Timer, clock: Seconds) -> None:
    called: list[float] = []
    timer.every(1.0, lambda: called.append(clock.now), first=0.0)

    timer.fire()
    clock.now += 3_600.5
    assert timer.fire() == pytest.approx(0.5)

    assert called == [100.0, 3_700.5]


def test_cancelled_entry_is_not_called(timer: Timer, clock: Seconds) -> None:
    called: list[str] = []
    entry = timer.every(1.0, lambda: called.append("x"))
    clock.now += 1.0
    timer.fire()

    entry.cancel()
    entry.cancel()
    clock.now += 9.0

    assert (timer.fire(), called, entry.is_cancelled) == (float("inf"), ["x"], True)


def test_function_may_cancel_its_own_entry_and_enter_others(timer: Timer, clock: Seconds) -> None:
    called: list[str] = []

    def once() -> None:
        called.append("once")
        entry.cancel()
        timer.after(0.0, lambda: called.append("other"))

    entry = timer.every(1.0, once)
    clock.now += 5.0

    assert (timer.fire(), called) == (float("inf"), ["once", "other"])


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_timer_goes_on_after_an_exception(
    timer: Timer, clock: Seconds, errors: list[BaseException], error: BaseException
) -> None:
    def fails() -> None:
        raise error

    timer.every(1.0, fails)
    for _ in range(3):
        clock.now += 1.0
        timer.fire()

    assert errors == [error] * 3


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_impossible_times_are_refused(timer: Timer, seconds: float) -> None:
    with pytest.raises(ValueError, match="a number above 0"):
        timer.every(seconds, lambda: None)
    with pytest.raises(ValueError, match="give 0, or more"):
        timer.every(1.0, lambda: None, first=seconds)
    with pytest.raises(ValueError, match="give 0, or more"):
        timer.after(seconds, lambda: None)
    with pytest.raises(ValueError, match="a number above 0"):
        timer.every(0.0, lambda: None)


def test_cancelled_entries_are_removed(timer: Timer) -> None:
    timer.after(3_600.0, lambda: None)
    for _ in range(5 * module.SWEEP):
        timer.after(3_600.0, lambda: None).cancel()

    assert len(timer._entries) <= module.SWEEP


def test_cancelled_entry_keeps_nothing_of_its_function(timer: Timer) -> None:
    class Large: ...

    large = Large()
    kept = weakref.ref(large)
    entry = timer.after(3_600.0, functools.partial(id, large))
    del large
    assert kept() is not None

    entry.cancel()

    assert kept() is None


# Its thread


def test_entry_that_comes_later_wakes_the_thread(running: Timer) -> None:
    called = threading.Event()
    running.after(3_600.0, lambda: None)
    sleeping = running._changed._waiters  # type: ignore[attr-defined]  # of the Condition
    wait_until(lambda: bool(sleeping), HANG, "the thread sleeps")
    running.after(0.0, called.set)

    assert called.wait(HANG)


def test_thread_that_did_not_start_is_started_for_the_next_entry(
    running: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    called: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            running.after(0.0, lambda: called.append("refused"))

    running.after(0.0, lambda: called.append("taken"))

    wait_until(lambda: called, HANG, "the call")
    assert called == ["taken"]


def test_timer_with_an_entry_in_an_hour_ends_at_once() -> None:
    timer = Timer("test-hour")
    timer.start()
    timer.after(3_600.0, lambda: None)
    timer.close(HANG)

    assert all(one.name != "test-hour" for one in threading.enumerate())


def test_timer_has_a_thread_only_from_its_first_entry_on(running: Timer) -> None:
    def is_there() -> bool:
        return any(one.name == "test-timer" for one in threading.enumerate())

    assert not is_there()
    running.after(3_600.0, lambda: None)
    assert is_there()


def test_entries_count_from_the_start_and_stay_for_the_next(clock: Seconds) -> None:
    timer = Timer("test-again", clock=clock)
    called = threading.Semaphore(0)
    entry = timer.every(5.0, called.release, first=0.0)
    clock.now += 60.0

    for _ in range(2):
        timer.start()
        assert called.acquire(timeout=HANG)
        timer.close(HANG)
        timer.close(HANG)

    assert entry.called_at == 160.0


def test_wall_clock_that_jumps_does_no_harm(
    running: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = threading.Semaphore(0)
    running.every(0.001, called.release)
    for jump in (86_400.0, -86_400.0):
        monkeypatch.setattr(time, "time", lambda jump=jump: jump)
        for _ in range(3):
            assert called.acquire(timeout=HANG)


def test_failure_of_the_timer_itself_is_known() -> None:
    def fail(error: BaseException) -> None:
        raise error

    timer = Timer("test-broken", on_error=fail)
    error = ValueError("no")
    timer.after(0.0, lambda: fail(error))
    timer.start()

    wait_until(lambda: timer.failure is error, HANG, "the failure")
    timer.close(HANG)


def test_function_that_was_left_behind_starts_no_second_thread() -> None:
    timer, gate, begun, ticks = (
        Timer("test-left"),
        threading.Event(),
        threading.Event(),
        threading.Semaphore(0),
    )
    threads: set[str] = set()

    def hang() -> None:
        begun.set()
        gate.wait(HANG)

    def tick() -> None:
        threads.add(str(threading.get_ident()))
        ticks.release()

    timer.start()
    timer.after(0.0, hang)
    assert begun.wait(HANG)
    left = next(one for one in threading.enumerate() if one.name == "test-left")
    timer.close(0.0)
    timer.every(0.001, tick)
    timer.start()
    assert ticks.acquire(timeout=HANG)
    gate.set()
    left.join(HANG)

    assert not left.is_alive()
    for _ in range(3):
        assert ticks.acquire(timeout=HANG)
    assert len(threads) == 1
    timer.close(HANG)


def test_process_ends_quietly_with_a_timer_that_runs() -> None:
    code = (
        "from machinery_py.worker.loops.timer import Timer\n"
        "timer = Timer('left'); timer.start(); timer.every(0.001, lambda: None)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG, check=True
    )
    assert ended.stderr == ""

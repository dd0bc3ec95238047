"""How many tasks run at a time: the rule, and a worker that follows it."""

from __future__ import annotations

import threading
import time

import pytest

from machinery_py import ConfigError, Server
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.autoscale import GROW_AFTER, SHRINK_AFTER, Autoscaler
from tests.worker.test_executors import Pool


@pytest.mark.parametrize(
    ("held", "oldest", "is_full", "wanted"),
    [
        (3, 0.0, False, 4),  # one waits here
        (3, 0.1, False, 2),  # not for long
        (2, None, True, 4),  # the queue has more, as far as is known
        (2, None, False, 2),
        (1, None, True, 2),  # a slot is free
    ],
)
def test_it_grows_when_all_slots_are_busy_and_a_task_has_waited(
    held: int, oldest: float | None, is_full: bool, wanted: int
) -> None:
    rule = Autoscaler(2, 5)
    rule.claimed(0.0, is_full=is_full)
    rule.claimed(GROW_AFTER, is_full=is_full)

    for now in (0.0, GROW_AFTER / 2):
        assert rule.wanted(now, current=2, held=held, oldest=oldest) == 2
    assert rule.wanted(GROW_AFTER, current=2, held=held, oldest=oldest) == wanted


def test_a_claim_that_got_less_than_it_asked_for_begins_the_wait_anew() -> None:
    rule = Autoscaler(2, 5)
    for now, is_full in ((0.0, True), (0.4, False), (0.45, True)):
        rule.claimed(now, is_full=is_full)

    assert rule.wanted(0.6, current=2, held=2, oldest=None) == 2
    assert rule.wanted(1.0, current=2, held=2, oldest=None) == 4


def test_it_grows_to_the_need_in_one_go() -> None:
    rule, current = Autoscaler(2, 50), 2
    rule.claimed(0.0, is_full=True)

    for need in (4, 8, 16, 32):  # each claim gets what it asks for
        current = rule.wanted(GROW_AFTER, current=current, held=current, oldest=None)
        assert current == need
    rule.claimed(GROW_AFTER, is_full=False)  # the last gets less

    assert rule.wanted(GROW_AFTER, current=32, held=20, oldest=None) == 32


def test_it_shrinks_to_the_most_that_was_held_within_thirty_seconds() -> None:
    rule = Autoscaler(2, 10)
    held_at = {0.0: 8, 10.0: 3, 10.5: 5, 11.0: 0, 40.0: 4}
    for now, held in held_at.items():
        assert rule.wanted(now, current=8, held=held, oldest=None) == (8 if now < 40 else 5)

    assert rule.wanted(40.5, current=5, held=0, oldest=None) == 4
    assert rule.wanted(40.0 + SHRINK_AFTER, current=4, held=0, oldest=None) == 2


@pytest.mark.parametrize("span", [(0, 3), (3, 2)])
def test_a_span_that_makes_no_sense_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="autoscale: found"):
        Server("memory://").new_worker(autoscale=span)


def test_worker_grows_to_the_need_at_once_when_tasks_wait() -> None:
    server = Server("memory://")
    together, may_end = threading.Barrier(9), threading.Event()
    begun: list[float] = []

    def meet() -> None:
        begun.append(time.monotonic())
        together.wait(HANG)  # only with nine at a time
        may_end.wait(HANG)

    task = server.register_task("meet", meet)
    results = [task.send() for _ in range(9)]
    with server.new_worker("w", autoscale=(2, 10)) as worker:
        wait_until(lambda: worker.active == 9, HANG, "nine at a time")
        assert worker.concurrency == 10
        may_end.set()
        for result in results:
            result.get(HANG)

    assert begun[8] - begun[2] < GROW_AFTER  # the steps after the first come without a pause


def test_slots_that_are_too_many_vanish_when_their_tasks_end() -> None:
    pool = Pool(concurrency=3)
    first = [pool.submit("long") for _ in range(3)]
    wait_until(lambda: len(pool.runs) == 3, HANG, "the start")

    pool.executors.resize(1)
    pool.may_end.set()
    for one in first:
        pool.wait_for(one)
    pool.may_end.clear()
    [pool.submit("long") for _ in range(2)]

    wait_until(lambda: len(pool.runs) == 4, HANG, "the next")
    assert len(pool.executors.running()) == 1
    pool.executors.resize(2)
    wait_until(lambda: len(pool.runs) == 5, HANG, "the slot that came back")
    pool.close()

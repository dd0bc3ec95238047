"""How many tasks run at a time: the rule, and a worker that follows it."""

from __future__ import annotations

import threading

import pytest

from machinery_py import ConfigError, Server
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.autoscale import GROW_AFTER, SHRINK_AFTER, Autoscaler
from tests.worker.test_executors import Pool


@pytest.mark.parametrize(
    ("running", "waiting", "was_full", "wanted"),
    [
        (2, 1, False, 4),  # more are held than run
        (2, 0, True, 4),  # the queue has more, as far as is known
        (2, 0, False, 2),
        (1, 1, True, 2),  # a slot is free
    ],
)
def test_it_grows_when_all_slots_are_busy_and_tasks_wait(
    running: int, waiting: int, was_full: bool, wanted: int
) -> None:
    rule = Autoscaler(2, 5)
    rule.last_claim_was_full = was_full

    for now in (0.0, GROW_AFTER / 2):
        assert rule.wanted(now, current=2, running=running, waiting=waiting) == 2
    assert rule.wanted(GROW_AFTER, current=2, running=running, waiting=waiting) == wanted


def test_it_grows_to_the_most_within_a_second_or_two() -> None:
    rule, current, now = Autoscaler(2, 5), 2, 0.0

    while current < 5:
        current = rule.wanted(now, current=current, running=current, waiting=1)
        now += 0.25

    assert now <= 2.0
    assert rule.wanted(now + 1.0, current=5, running=5, waiting=1) == 5


def test_it_shrinks_to_what_ran_when_it_was_idle_for_long() -> None:
    rule = Autoscaler(2, 10)
    rule.wanted(0.0, current=8, running=1, waiting=0)
    rule.wanted(1.0, current=8, running=3, waiting=0)

    assert rule.wanted(SHRINK_AFTER - 0.1, current=8, running=0, waiting=0) == 8
    assert rule.wanted(SHRINK_AFTER, current=8, running=0, waiting=0) == 3
    rule.wanted(SHRINK_AFTER + 1.0, current=3, running=0, waiting=0)
    assert rule.wanted(2 * SHRINK_AFTER + 1.0, current=3, running=0, waiting=0) == 2


@pytest.mark.parametrize("span", [(0, 3), (3, 2)])
def test_a_span_that_makes_no_sense_is_refused(span: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="autoscale: found"):
        Server("memory://").new_worker(autoscale=span)


def test_worker_grows_while_tasks_wait() -> None:
    server = Server("memory://")
    together, may_end = threading.Barrier(4), threading.Event()

    def meet() -> None:
        together.wait(HANG)  # only with four at a time
        may_end.wait(HANG)

    task = server.register_task("meet", meet)
    results = [task.send() for _ in range(4)]
    with server.new_worker("w", autoscale=(1, 4)) as worker:
        wait_until(lambda: worker.active == 4, HANG, "four at a time")
        may_end.set()
        for result in results:
            result.get(HANG)


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

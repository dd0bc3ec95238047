"""Calls that threads share, with stores that are away, refuse, or are interrupted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence

import pytest

from machinery_py.connections.shared_calls import MOST, SharedCalls
from machinery_py.errors import BackendUnavailable, NameRefused
from machinery_py.testing.waiting import HANG, together, wait_until

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


class Store:
    """A store of squares, whose first call lasts until `go` is set."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.go = threading.Event()
        self.first: BaseException | None = None  # raised by the first call
        self.is_away = False
        self.shared = SharedCalls(self.squares)

    def squares(self, numbers: Sequence[int]) -> list[int]:
        self.calls.append(list(numbers))
        if len(self.calls) == 1:
            assert self.go.wait(HANG)
            if self.first is not None:
                raise self.first
        elif self.is_away:
            raise BackendUnavailable("no answer")
        if bad := [number for number in numbers if number < 0]:
            raise NameRefused(f"number {bad[0]}")
        return [number * number for number in numbers]

    def ask(self, number: int) -> object:
        try:
            return self.shared.ask(number)
        except BaseException as error:
            return error

    def go_when_waiting(self, count: int) -> None:
        """Let the first call go on as soon as so many wait behind it."""

        def wait() -> None:
            wait_until(lambda: len(self.shared._waiting) == count, HANG)
            self.go.set()

        threading.Thread(target=wait).start()


@pytest.fixture
def store() -> Store:
    return Store()


def asked_in_order(store: Store, numbers: Sequence[int]) -> list[object]:
    """Ask from a thread each, the first alone, the others in this order behind it."""
    answers: dict[int, object] = {}

    def ask(number: int) -> None:
        answers[number] = store.ask(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in numbers]
    threads[0].start()
    wait_until(lambda: store.calls, HANG)
    for behind, thread in enumerate(threads[1:], 1):
        thread.start()
        wait_until(lambda behind=behind: len(store.shared._waiting) == behind, HANG)
    store.go.set()
    for thread in threads:
        thread.join(HANG)
    return [answers[number] for number in numbers]


def test_those_that_ask_meanwhile_are_carried_by_one_call(store: Store) -> None:
    assert asked_in_order(store, [1, 4, 2, 3]) == [1, 16, 4, 9]
    assert store.calls == [[1], [4, 2, 3]]

    assert store.ask(5) == 25
    assert store.calls[2:] == [[5]]


def test_one_call_carries_so_many_and_the_next_one_the_rest(store: Store) -> None:
    store.go_when_waiting(MOST + 10)

    answers = together(MOST + 11, store.ask)

    assert answers == [number * number for number in range(MOST + 11)]
    assert [len(call) for call in store.calls] == [1, MOST, 10]


def test_refused_question_fails_alone(store: Store) -> None:
    first, good, bad, better, worse = asked_in_order(store, [1, 2, -3, 4, -5])

    assert (first, good, better) == (1, 4, 16)
    assert [str(bad), str(worse)] == ["number -3", "number -5"]
    assert store.calls == [[1], [2, -3, 4, -5], [2], [-3], [4], [-5]]


def test_store_that_is_away_is_asked_once_for_all(store: Store) -> None:
    store.is_away = True

    first, *others = asked_in_order(store, [1, 2, 3, 4])

    assert first == 1
    assert [str(error) for error in others] == ["no answer"] * 3
    assert len(set(map(id, others))) == 3  # an error of its own for each thread
    assert store.calls == [[1], [2, 3, 4]]
    store.is_away = False
    assert store.ask(5) == 25


def test_interrupted_leader_leaves_its_call_to_another(store: Store) -> None:
    store.first = KeyboardInterrupt()

    first, *others = asked_in_order(store, [1, 2, 3])

    assert isinstance(first, KeyboardInterrupt)
    assert others == [4, 9]
    assert store.ask(5) == 25


def test_call_that_was_carried_along_is_repeated_after_an_interruption(store: Store) -> None:
    carried: list[list[int]] = []

    def call(numbers: Sequence[int]) -> list[int]:
        answers = store.squares(numbers)
        carried.append(list(numbers))
        if len(carried) == 2:
            raise KeyboardInterrupt
        return answers

    store.shared = SharedCalls(call)

    first, interrupted, third, fourth = asked_in_order(store, [1, 2, 3, 4])

    assert isinstance(interrupted, KeyboardInterrupt)
    assert (first, third, fourth) == (1, 9, 16)
    assert carried == [[1], [2, 3, 4], [3, 4]]


def test_interrupted_thread_leaves_the_line(store: Store) -> None:
    thread = threading.Thread(target=store.ask, args=(1,))
    thread.start()
    wait_until(lambda: store.calls, HANG)
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)

    def interrupt() -> None:
        wait_until(lambda: store.shared._waiting, HANG)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            store.shared.ask(2)
    finally:
        signal.signal(signal.SIGUSR1, before)

    store.go.set()
    thread.join(HANG)
    assert store.ask(3) == 9
    assert store.calls == [[1], [3]]


@needs_fork
def test_forked_child_waits_for_no_leader_of_its_parent(store: Store) -> None:
    thread = threading.Thread(target=store.ask, args=(1,))
    thread.start()
    wait_until(lambda: store.calls, HANG)

    assert in_child(lambda: store.ask(5) == 25) == 0

    store.go.set()
    thread.join(HANG)
    assert store.ask(6) == 36


def in_child(check: Callable[[], bool]) -> int:
    """Return the exit code of a forked child: 0 if the check holds; a signal if it hangs."""
    if pid := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(HANG))
    os._exit(0 if check() else 1)

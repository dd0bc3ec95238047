"""Waiting by polling: how much of the watched tasks one look reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from machinery_py.backends.polling import PollingListener
from machinery_py.testing.waiting import HANG


class Looks:
    """A store of unfinished tasks; each third read of it wakes the waiter."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.listener = PollingListener(self._finished, at_once=10)
        self.listener.watch(f"task_{number}" for number in range(60))

    def _finished(self, uuids: Sequence[str]) -> Iterable[str]:
        self.read += uuids
        if len(self.read) % 30 == 0:
            self.listener.wake()
        return ()


def test_look_ends_when_woken_and_the_next_one_goes_on() -> None:
    looks = Looks()

    looks.listener.wait(HANG)
    assert len(looks.read) == 30
    looks.listener.wait(HANG)

    assert len(set(looks.read)) == len(looks.read) == 60


def test_look_ends_with_the_time_of_its_waiter() -> None:
    looks = Looks()

    looks.listener.wait(0.0)

    assert len(looks.read) == 10

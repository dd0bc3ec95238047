"""Promises of every lock store: one holder at a time, until its ttl.

class TestMyLock(LockConformance):
    @pytest.fixture
    def open_lock(self, clock: ManualClock) -> OpenLock:
        return lambda: MyLock("my://localhost", clock=clock)
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

import pytest

from machinery_py.locks.base import Lock, LockHolding
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import together

#: Each call returns a new handle on the same store.
OpenLock = Callable[[], Lock]


def taken(lock: Lock, name: str = "n", ttl: float = 10.0) -> LockHolding:
    held = lock.acquire(name, ttl=ttl)
    assert held is not None
    return held


class LockConformance:
    """Tests of every promise of Lock."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Return the clock of the store."""
        return ManualClock()

    @pytest.fixture
    def open_lock(self, clock: ManualClock) -> OpenLock:
        raise NotImplementedError(f"{type(self).__name__}: override the fixture open_lock")

    @pytest.fixture
    def lock(self, open_lock: OpenLock) -> Lock:
        return open_lock()

    def test_lock_is_held_by_one(self, open_lock: OpenLock, clock: ManualClock) -> None:
        one, two = open_lock(), open_lock()
        held = taken(one)

        assert (held.name, held.expires_at) == ("n", clock.now() + dt.timedelta(seconds=10))
        assert two.acquire("n", ttl=10.0) is None
        assert one.acquire("n", ttl=10.0) is None
        assert two.acquire("other", ttl=10.0) is not None

    def test_one_of_200_threads_gets_the_lock(self, lock: Lock) -> None:
        def winners(name: str) -> int:
            held = together(200, lambda _: lock.acquire(name, ttl=10.0))
            return sum(one is not None for one in held)

        assert [winners(name) for name in ("a", "b")] == [1, 1]

    def test_released_lock_is_free(self, lock: Lock) -> None:
        held = taken(lock)

        assert lock.release(held) is True
        assert lock.release(held) is False
        assert lock.renew(held, ttl=10.0) is False
        assert taken(lock).token != held.token

    def test_lock_is_free_after_its_ttl(self, lock: Lock, clock: ManualClock) -> None:
        held = taken(lock)
        clock.advance(5.0)  # a store whose own clock goes on meanwhile is not too early
        assert lock.acquire("n", ttl=10.0) is None
        clock.advance(5.0)

        assert lock.renew(held, ttl=10.0) is False
        assert lock.release(held) is False
        taken(lock)

    def test_renewed_lock_is_held_for_a_ttl_from_now(self, lock: Lock, clock: ManualClock) -> None:
        held = taken(lock)
        for _ in range(5):
            clock.advance(6.0)
            assert lock.renew(held, ttl=10.0) is True
        assert lock.acquire("n", ttl=10.0) is None
        assert lock.renew(held, ttl=1.0) is True
        clock.advance(1.0)
        taken(lock)

    def test_late_holder_neither_renews_nor_releases_the_next(
        self, lock: Lock, clock: ManualClock
    ) -> None:
        slow = taken(lock)
        clock.advance(10.0)
        held = taken(lock)

        assert lock.release(slow) is False
        assert lock.renew(slow, ttl=99.0) is False

        assert lock.acquire("n", ttl=10.0) is None
        assert lock.release(held) is True

    def test_fence_grows_with_each_holder(self, lock: Lock, clock: ManualClock) -> None:
        fences: list[int] = []
        for number in range(6):
            held = taken(lock)
            fences.append(held.fence)
            taken(lock, f"other {number}", ttl=1.0)
            if number % 2:
                lock.release(held)
            else:
                clock.advance(10.0)

        assert fences == sorted(set(fences))

    def test_any_name_is_a_lock_name(self, lock: Lock) -> None:
        names = ["", "a b", "日本", "'; DROP TABLE locks", "x" * 5000, "%"]
        assert [taken(lock, name).name for name in names] == names

    def test_closing_the_store_keeps_held_locks(self, open_lock: OpenLock) -> None:
        lock = open_lock()
        taken(lock)
        lock.close()
        lock.close()
        assert open_lock().acquire("n", ttl=10.0) is None

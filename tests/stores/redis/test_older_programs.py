"""Programs of older versions on the same Redis: what both change has the keys and bytes of before.

Workers are replaced one by one. If one version kept its schedules elsewhere, both would send each
tick; if it kept its claims or locks elsewhere, one of each version would hold the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from machinery_py.backends.base import Rider
from machinery_py.backends.redis.backend import RedisBackend
from machinery_py.locks.base import LockHolding
from machinery_py.locks.redis import RedisLock
from tests.stores.redis.case import Drivers, ServerClock, clock, open_driver

__all__ = ["clock", "open_driver"]


@pytest.fixture
def ask(open_driver: Drivers) -> Callable[..., Any]:
    """Send a command, as the script of an older program does."""
    driver = open_driver()
    return lambda *words: driver.ask(*words, doing="testing")


def test_claim_is_shared(open_driver: Drivers, ask: Callable[..., Any]) -> None:
    backend = RedisBackend(open_driver())
    ask(b"SET", b"mpy:u:key", b"old", b"EX", b"100")

    assert backend.claims(["key"]) == [b"old"]
    assert not backend.amend(Rider(name="key", expected=None, body=b"new", life=50.0))
    assert backend.amend(Rider(name="key", expected=b"old", body=b"new", life=50.0))
    assert ask(b"GET", b"mpy:u:key") == b"new"
    assert 0 < ask(b"TTL", b"mpy:u:key") <= 50
    backend.release([("key", b"new")])
    assert ask(b"EXISTS", b"mpy:u:key") == 0


def test_schedule_is_shared(open_driver: Drivers, ask: Callable[..., Any]) -> None:
    backend = RedisBackend(open_driver())
    ask(b"HSET", b"mpy:records", b"nightly", b"old")
    ask(b"SET", b"mpy:records:n", b"7")

    records = backend.records()
    assert (records.version, records.bodies) == ("7", {"nightly": b"old"})
    assert not backend.amend(Rider(name="nightly", expected=None, body=b"new"))
    assert backend.amend(Rider(name="nightly", expected=b"old", body=b"new"))
    assert ask(b"HGETALL", b"mpy:records") == [b"nightly", b"new"]
    assert ask(b"GET", b"mpy:records:n") == b"8"
    assert backend.amend(Rider(name="nightly", expected=b"new", body=None))
    assert ask(b"HGETALL", b"mpy:records") == []
    assert ask(b"GET", b"mpy:records:n") == b"9"


def test_lock_is_shared(open_driver: Drivers, ask: Callable[..., Any], clock: ServerClock) -> None:
    lock = RedisLock(open_driver())
    ask(b"SET", b"mpy:fence", b"9000000000000017")
    ask(b"SET", b"mpy:lock:{n}", b"token 9000000000000017", b"PX", b"100000")

    assert lock.acquire("n", ttl=10.0) is None
    held = LockHolding(name="n", token="token", fence=17, expires_at=clock.now())
    assert lock.renew(held, ttl=50.0)
    assert 0 < ask(b"PTTL", b"mpy:lock:{n}") <= 50_000
    assert lock.release(held)

    ours = lock.acquire("n", ttl=10.0)
    assert ours is not None and ours.fence == 9_000_000_000_000_018
    assert ask(b"GET", b"mpy:lock:{n}") == f"{ours.token} {ours.fence}".encode()

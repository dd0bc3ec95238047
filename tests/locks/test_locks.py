"""Locks whose reply is lost, of several processes, and Go's own."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from machinery_py.connections.redis.client import RedisDriver
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.errors import Unsupported
from machinery_py.locks.base import go_lock_key
from machinery_py.locks.memory import MemoryLock
from machinery_py.locks.redis import RedisLock
from machinery_py.locks.rows import RowsLock
from machinery_py.rows.contract import RowStep, StepResult
from machinery_py.rows.memory import MemoryRows
from machinery_py.rows.messages import MessageStep
from machinery_py.rows.sqlite import SQLiteRows
from machinery_py.schedules.timetable import Schedule
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.locks import taken
from tests.stores.redis.case import clock, open_driver
from tests.stores.sqlite.processes import Other
from tests.support.proxy import Proxy
from tests.support.servers import RedisServer

__all__ = ["clock", "open_driver"]


class RepeatingRows(MemoryRows):
    """Rows of a store that repeats each step, as after a lost reply."""

    def commit(self, steps: Sequence[RowStep | MessageStep]) -> list[StepResult]:
        super().commit(steps)
        return super().commit(steps)


def test_lock_whose_step_was_repeated_is_held(clock: ManualClock) -> None:
    lock = RowsLock(RepeatingRows(clock))

    held = lock.acquire("n", ttl=10.0)

    assert held is not None
    assert held.expires_at <= clock.now() + dt.timedelta(seconds=10)
    assert lock.acquire("n", ttl=10.0) is None
    lock.release(held)
    assert lock.acquire("n", ttl=10.0) is not None


def test_lock_whose_reply_was_lost_is_held(redis_server: RedisServer, redis_url: str) -> None:
    with (
        Proxy(redis_server.port) as proxy,
        closing(RedisDriver(proxy.through(redis_url))) as driver,
    ):
        lock = RedisLock(driver)
        first = taken(lock)
        assert lock.release(first)
        proxy.drop_next_reply(matching=b"EVALSHA")

        held = taken(lock)

        assert held.fence > first.fence
        assert lock.acquire("n", ttl=10.0) is None
        assert lock.release(held)


def test_of_several_processes_one_wins(tmp_path: Path) -> None:
    script = """
from machinery_py.locks.rows import RowsLock
from machinery_py.rows.sqlite import SQLiteRows
lock = RowsLock(SQLiteRows(driver))
heard()
say(*[name for name in map(str, range(50)) if lock.acquire(name, ttl=60.0)])
"""
    others = [Other(tmp_path / "machinery.db", script) for _ in range(4)]
    for other in others:
        other.tell()
    won = [name for other in others for name in other.line().split()]
    assert [other.end() for other in others] == [0] * 4
    assert sorted(won, key=int) == [str(number) for number in range(50)]


# Go's locks, as recorded from Go

GOLDEN = Path(__file__).parents[1] / "wire" / "golden" / "lock_keys.jsonl"
LINES: list[dict[str, Any]] = [
    json.loads(line) for line in GOLDEN.read_text(encoding="utf-8").splitlines()
]
OURS = {  # Go's way leaves a key for ever, or is an error
    "free; until is now: no expiry is sent, the key stays for ever": (
        True,
        ["SET", "PX", "1", "NX"],
    ),
    "free; until has passed": (False, []),
}


def of(category: str) -> list[dict[str, Any]]:
    return [line for line in LINES if line["category"] == category]


def moment(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text.replace("Z", "+00:00"))


def nanoseconds(moment: dt.datetime) -> int:
    return (
        (moment - dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc))
        // dt.timedelta(microseconds=1)
        * 1000
    )


class Listening(RedisDriver):
    """Notes what is sent to the server."""

    def __init__(self, url: str, clock: ManualClock) -> None:
        super().__init__(url, clock=clock)
        self.commands: list[list[str]] = []

    def ask(self, *parts: bytes, **more: Any) -> Any:
        self.commands.append([part.decode() for part in parts])
        return super().ask(*parts, **more)


@pytest.mark.parametrize("line", of("key"), ids=lambda line: line["key"])
def test_keys_are_gos(line: dict[str, Any]) -> None:
    assert go_lock_key(line["program"], line["name"], line["spec"]) == line["key"]


@pytest.mark.parametrize("line", of("lock"), ids=lambda line: line["note"])
def test_locks_are_gos(line: dict[str, Any], redis_url: str) -> None:
    driver = Listening(redis_url, ManualClock(moment(line["now"])))
    if "held" in line:
        RedisDriver(redis_url).ask(
            b"SET", line["key"].encode(), line["held"].encode(), doing="preparing"
        )
    lock = RedisLock(driver).go()
    until = int(line["value"]) + 1
    try:
        ok = (
            lock.lock_with_retries(line["key"], until)
            if "four attempts" in line["note"]
            else lock.lock(line["key"], until)
        )
    except ValueError as error:
        assert "no number" in line["note"]
        assert "found b'abc' (expected a moment in nanoseconds)" in str(error)
        ok = False

    commands = [
        [word.upper() if len(word) == 2 else word for word in command] for command in line["redis"]
    ]
    if line["note"] in OURS:
        ok_of_ours, words = OURS[line["note"]]
        commands = [[words[0], line["key"], line["value"], *words[1:]]] if words else []
        assert ok is ok_of_ours
    else:
        assert ok is line["ok"]
    assert driver.commands == [
        [word.upper() if word == "nx" else word for word in command] for command in commands
    ]
    driver.close()


@pytest.mark.parametrize("line", of("periodic"), ids=lambda line: line["name"])
def test_a_tick_is_locked_as_by_go(line: dict[str, Any], redis_url: str) -> None:
    spec = line["key"].removeprefix(f"machinery_lock_worker{line['name']}")
    following = Schedule(spec).next(moment(line["now"]))
    assert following is not None
    driver = Listening(redis_url, ManualClock(moment(line["now"])))
    assert (
        RedisLock(driver)
        .go()
        .lock(go_lock_key(line["program"], line["name"], spec), nanoseconds(following))
    )
    assert [word.lower() for word in driver.commands[0]] == [
        word.lower() for word in line["redis"][0]
    ]
    driver.close()


def test_gos_lock_in_memory_is_held_until_its_moment() -> None:
    clock = ManualClock()
    lock = MemoryLock(MemoryRows(clock)).go()
    until = nanoseconds(clock.now() + dt.timedelta(seconds=10))
    assert lock.lock("k", until)
    assert not lock.lock_with_retries("k", until + 10**10)
    assert lock.lock("other", until)
    clock.advance(10)
    assert lock.lock("k", until + 10**10)


def test_go_knows_no_locks_in_sqlite(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="Go Machinery knows no locks there"):
        RowsLock(SQLiteRows(SQLiteDriver(tmp_path / "machinery.db"))).go()

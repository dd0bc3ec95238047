"""SQLite's own behaviour as a backend: many rows in few steps, batched expiry, other processes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from machinery_py.backends.base import SETTLED, Change
from machinery_py.backends.rows import SWEPT
from machinery_py.backends.sqlite.backend import SQLiteBackend
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import Arrival, State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.groups import listed
from machinery_py.testing.waiting import HANG, together
from tests.stores.sqlite.processes import Other

EXPIRE_IN = 3600.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "machinery.db"


@pytest.fixture
def backend(path: Path, clock: ManualClock) -> Iterator[SQLiteBackend]:
    driver = SQLiteDriver(path, clock=clock, synchronous="NORMAL")
    yield SQLiteBackend(driver, expire_in=EXPIRE_IN)
    driver.close()


def ended(uuid: str, *, group: str = "", total: int = 0, ok: bool = True) -> Change:
    state = TaskState(task_uuid=uuid, state=State.SUCCESS if ok else State.FAILURE)
    arrival = Arrival(group_uuid=group, task_uuid=uuid, total=total, ok=ok, callback=b"{}")
    return Change(key=uuid, mark=uuid, states=(state,), arrivals=(arrival,) if group else ())


def count(backend: SQLiteBackend, kind: str) -> int:
    with backend.driver.reading() as connection:
        found = connection.execute("SELECT count(*) FROM rows WHERE kind = ?", (kind,))
        return int(found.fetchone()[0])


def test_members_of_several_groups_in_a_batch_are_counted_once(
    backend: SQLiteBackend,
) -> None:
    members = [f"t{number}" for number in range(1000)]
    for group in ("even", "odd"):
        backend.init_group(
            group, [one for one in members if (int(one[1:]) % 2 == 1) is (group == "odd")]
        )
    changes = [
        ended(one, group="odd" if int(one[1:]) % 2 else "even", total=500) for one in members
    ]

    assert backend.apply(changes[:999]) == [SETTLED] * 999
    assert [ready.group_uuid for ready in backend.ready_groups(5)] == ["even"]
    assert backend.apply(changes[990:])[-1] == SETTLED

    assert {ready.group_uuid for ready in backend.ready_groups(5)} == {"even", "odd"}


def test_a_chord_that_can_never_complete_is_forgotten_in_the_end(
    backend: SQLiteBackend, clock: ManualClock
) -> None:
    backend.apply([ended("early", group="g", total=2)])
    clock.advance(days=8)
    for _ in range(3):
        backend.tend()
    assert (count(backend, "task"), count(backend, "group")) == (0, 0)
    with backend.driver.reading() as connection:
        assert connection.execute("SELECT * FROM members").fetchall() == []


def test_expiry_is_done_in_steps(backend: SQLiteBackend, clock: ManualClock) -> None:
    backend.apply([ended(f"t{number}") for number in range(SWEPT + 10)])
    clock.advance(EXPIRE_IN + 1)

    assert backend.tend() < 1.0
    assert count(backend, "task") == 10
    assert backend.tend() > 10.0
    assert count(backend, "task") == 0


def test_a_revocation_is_forgotten_after_three_days(
    backend: SQLiteBackend, clock: ManualClock
) -> None:
    backend.revoke(["a"])
    clock.advance(days=2.9)
    backend.tend()
    assert backend.revoked(["a"]) == {"a"}
    clock.advance(days=0.2)
    backend.tend()
    assert backend.revoked(["a"]) == set()


def test_states_of_one_moment_are_listed_in_the_order_they_came(backend: SQLiteBackend) -> None:
    backend.apply(
        [Change(key="batch", states=tuple(TaskState(task_uuid=uuid) for uuid in ("c", "a", "b")))]
    )
    backend.apply([Change(key="a", states=(TaskState(task_uuid="a", state=State.STARTED),))])
    assert [state.task_uuid for state in listed(backend)] == ["a", "b", "c"]


def test_a_text_without_utf_8_is_kept_readable(backend: SQLiteBackend) -> None:
    state = TaskState(
        task_uuid="t", state=State.FAILURE, error="no file 'caf\udce9'", traceback="\ud800"
    )
    backend.apply([Change(key="t", states=(state,)), ended("u")])
    assert backend.get_state("t").error == "no file 'caf\\udce9'"
    assert set(backend.get_states(["t", "u", "\udce9"])) == {"t", "u"}
    assert backend.find("\udce9") == []


def test_progress_comes_back_to_the_last_bit(backend: SQLiteBackend) -> None:
    for progress in ((0.1, 3e300), (1.0, float("inf")), (2, 7)):
        backend.apply(
            [
                Change(
                    key="t",
                    states=(TaskState(task_uuid="t", state=State.STARTED, progress=progress),),
                )
            ]
        )
        assert backend.get_state("t").progress == progress


def test_a_failed_batch_leaves_nothing_behind(backend: SQLiteBackend) -> None:
    class Unsound(TaskState, frozen=True, kw_only=True):
        """Its results cannot be written."""

    bad = Unsound(task_uuid="b", state=State.SUCCESS, results=(Arg(type="json", value=object()),))
    with pytest.raises(Exception):  # noqa: B017 - whatever the encoder says
        backend.apply([ended("a", group="g", total=1), Change(key="b", states=(bad,))])

    assert backend.get_states(["a", "b"]) == {}
    assert backend.ready_groups(5) == []
    assert backend.apply([ended("c")]) == [SETTLED]
    assert backend.ready_groups(5) == []


def test_another_process_wakes_a_listener(path: Path) -> None:
    backend = SQLiteBackend(SQLiteDriver(path))
    script = """
backend = SQLiteBackend(driver)
while uuid := heard():
    backend.apply([Change(key=uuid, states=(TaskState(task_uuid=uuid, state=State.SUCCESS),))])
"""
    listener = backend.listener()
    with Other(path, script) as other:
        for number in range(10):
            listener.watch([f"t{number}"])
            started = time.monotonic()
            other.tell(f"t{number}")
            listener.wait(HANG)
            assert time.monotonic() - started < HANG / 2
            assert backend.get_state(f"t{number}").is_finished
    listener.close()


def test_watcher_of_thousands_is_told_of_each(backend: SQLiteBackend) -> None:
    uuids = [f"t{number}" for number in range(1500)]
    listener = backend.listener()
    listener.watch(uuids)

    def work(index: int) -> None:
        if index:
            for start in range(0, len(uuids), 100):
                backend.apply([ended(uuid) for uuid in uuids[start : start + 100]])
            return
        left = set(uuids)
        while left:
            listener.wait(HANG)
            left -= set(backend.get_states(list(left)))

    started = time.monotonic()
    together(2, work)
    assert time.monotonic() - started < HANG
    listener.close()

"""House-keeping of a backend over rows: in steps, as the worker's thread has more to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from machinery_py.backends.base import Change
from machinery_py.backends.rows import GROUP, LOOKED, TASK, RowsBackend
from machinery_py.rows.contract import PAGE, Facts, Key, StoredRow, Write
from machinery_py.rows.memory import MemoryRows
from machinery_py.rows.messages import MessageStep
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.testing.clocks import ManualClock

GROUPS = 2 * LOOKED + 1


class CountedRows(MemoryRows):
    """Counts the keys that are read, and the rows that are listed."""

    asked = listed = 0

    def read(self, keys: Sequence[Key]) -> list[StoredRow | None]:
        self.asked += len(keys)
        return super().read(keys)

    def list(self, kind: str, **more: Any) -> list[StoredRow]:
        found = super().list(kind, **more)
        self.listed += len(found)
        return found


@pytest.fixture
def backend() -> RowsBackend:
    """A backend with many old groups, of whose members the last one has no result yet."""
    clock = ManualClock()
    backend = RowsBackend(CountedRows(clock), expire_in=60.0)
    for number in range(GROUPS):
        uuids = tuple(f"{number}.{member}" for member in range(3))
        states = tuple(TaskState(task_uuid=uuid, state=State.PENDING) for uuid in uuids)
        meta = GroupMeta(group_uuid=f"{number}", task_uuids=uuids)
        backend.apply([Change(key=uuids[0], states=states, groups=(meta,))])
    clock.advance(3600.0)
    return backend


def test_old_groups_are_looked_at_in_steps(backend: RowsBackend) -> None:
    assert isinstance(backend.rows, CountedRows)
    for _ in range(5):
        backend.rows.asked = 0
        backend.tend()
        assert backend.rows.asked <= 3 * LOOKED

    assert backend.get_group("0") is not None


def test_old_groups_without_members_are_forgotten_in_steps(backend: RowsBackend) -> None:
    waiting = ("0.2", f"{GROUPS - 1}.0")
    for number in range(GROUPS):
        for member in range(3):
            if (uuid := f"{number}.{member}") not in waiting:
                backend.purge_state(uuid)
    while backend.tend() < 1.0:
        pass

    there = [number for number in range(GROUPS) if backend.get_group(f"{number}") is not None]
    assert there == [0, GROUPS - 1]


def test_result_is_kept_for_a_chord_whose_arrival_is_a_change_of_its_own() -> None:
    clock = ManualClock()
    backend = RowsBackend(MemoryRows(clock), expire_in=60.0)
    done = TaskState(task_uuid="a", state=State.SUCCESS)
    arrival = Arrival(group_uuid="g", task_uuid="a", total=2, ok=True, callback=b"c")
    backend.apply([Change(key="a", states=(done,)), Change(key="g", arrivals=(arrival,))])
    clock.advance(3600.0)

    assert list(backend.get_states(["a"])) == ["a"]


def test_outboxes_are_listed_from_the_oldest_page_by_page() -> None:
    clock = ManualClock()
    rows = CountedRows(clock)
    backend = RowsBackend(rows)
    for number in range(2 * PAGE):
        backend.apply([Change(key=f"{number}", outbox=(b"1",))])
        clock.advance(0.001)

    found = backend.unsent(10, older_than=1.0, skip=5)
    assert [key for key, _ in found] == [f"{number}" for number in range(5, 15)]
    assert rows.listed <= PAGE
    assert backend.unsent(10, older_than=1.0, skip=PAGE + 1) == []


def test_chords_that_are_ready_are_listed_from_the_oldest_page_by_page() -> None:
    clock = ManualClock()
    rows = CountedRows(clock)
    backend = RowsBackend(rows)
    for number in range(2 * PAGE):
        arrival = Arrival(group_uuid=f"{number}", task_uuid="t", total=1, ok=True, callback=b"{}")
        backend.apply([Change(key="t", arrivals=(arrival,))])
        clock.advance(0.001)

    assert [one.group_uuid for one in backend.ready_groups(3)] == ["0", "1", "2"]
    assert rows.listed <= PAGE


def test_ended_tasks_are_counted_without_their_bodies() -> None:
    clock = ManualClock()
    rows = MemoryRows(clock)
    facts = Facts(at=rows.now(), name="Fmail")
    rows.commit([MessageStep(write={Key("task", "t"): Write(body=b"not read", facts=facts)})])

    [count] = RowsBackend(rows).finished_since(clock.now())
    assert (count.queue, count.succeeded, count.failed) == ("mail", 0, 1)


def test_rows_of_strangers_end_neither_house_keeping_nor_listings() -> None:
    """As a role of PostgreSQL may write them that sends, and no more."""
    clock = ManualClock()
    backend = RowsBackend(MemoryRows(clock), expire_in=60.0)
    state = TaskState(task_uuid="ours", state=State.PENDING)
    backend.apply([Change(key="ours", states=(state,))])
    odd = Write(body=b"\xc1", facts=Facts(at=1))
    backend.rows.commit([MessageStep(write={Key(TASK, "odd"): odd, Key(GROUP, "odd"): odd})])
    clock.advance(3600.0)

    backend.tend()

    assert backend.rows.read([Key(GROUP, "odd")]) == [None]
    assert [one.task_uuid for _, one in backend.list_states().found] == ["ours"]

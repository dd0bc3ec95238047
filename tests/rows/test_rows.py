"""The conformance suite of rows over each store of rows, and what is theirs alone."""

from __future__ import annotations

import pytest

from machinery_py.connections.memory import MemoryHub
from machinery_py.rows.contract import Key, RowStep, Write
from machinery_py.rows.memory import MemoryRows
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.rows import SECOND, OpenRows, RowsConformance


class TestMemoryRows(RowsConformance):
    @pytest.fixture
    def open_rows(self, clock: ManualClock) -> OpenRows:
        rows = MemoryRows(MemoryHub(clock))
        return lambda: rows

    def test_end_of_a_row_does_not_follow_the_clock_on_the_wall(self, clock: ManualClock) -> None:
        rows = MemoryRows(MemoryHub(clock))
        key = Key("kind", "a")
        rows.commit([RowStep(write={key: Write(body=b"1", expires_at=rows.now() + SECOND)})])
        clock.set_back(-3600.0)

        assert rows.read([key]) != [None]

    def test_rows_that_are_over_go_while_others_come(self, clock: ManualClock) -> None:
        rows = MemoryRows(MemoryHub(clock))
        for number in range(1000):
            write = Write(body=b"1", expires_at=rows.now() + SECOND)
            rows.commit([RowStep(write={Key("kind", str(number)): write})])
            clock.advance(0.1)

        assert len(rows._kinds["kind"]) < 20

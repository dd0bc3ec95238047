"""Each store of rows against rows in memory: the same steps at the same times, the same answers."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machinery_py.connections.postgresql.client import PostgreSQLDriver
from machinery_py.connections.sqlite.database import SQLiteDriver
from machinery_py.fences import Fence
from machinery_py.rows.contract import NO_ROW, Facts, Key, Rows, RowStep, StoredRow, Version, Write
from machinery_py.rows.memory import MemoryRows
from machinery_py.rows.postgresql import PostgreSQLRows
from machinery_py.rows.sqlite import SQLiteRows
from machinery_py.testing.clocks import ManualClock
from tests.models.machine import EXAMPLES

KEYS = tuple(Key(kind, id) for kind in ("one", "two") for id in "abc")
SEEN, ABSENT, OLD = range(3)  # a version that was read just now; none; one that is gone

New = tuple[bytes, float, int, str]  # body, seconds until it is over, place in the listings, name


@dataclasses.dataclass(frozen=True)
class Move:
    """After a pause: steps that expect some rows and write some, a listing, or a look for the old.

    Attributes:
        steps: of each, the row by which a repeat is known; key → what is expected; rows to be there
            afterwards; rows to be written, None: it goes.
    """

    pause: float
    jump: float
    steps: list[tuple[Key | None, dict[Key, int], dict[Key, New], dict[Key, New | None]]]
    repeated: bool
    after: int
    items: int
    name: str | None


NEW = st.tuples(
    st.binary(max_size=3),
    st.sampled_from((0.0, 1.0, 5.0)),
    st.integers(-1, 2),
    st.sampled_from(("", "x")),
)
MOVES = st.builds(
    Move,
    pause=st.sampled_from((0.0, 0.5, 1.0, 7.0)),
    jump=st.just(0.0) | st.sampled_from((-100.0, 100.0)),
    steps=st.lists(
        st.tuples(
            st.none() | st.sampled_from(KEYS),
            st.dictionaries(st.sampled_from(KEYS), st.sampled_from((SEEN, SEEN, ABSENT, OLD))),
            st.dictionaries(st.sampled_from(KEYS), NEW, max_size=2),
            st.dictionaries(st.sampled_from(KEYS), st.none() | NEW, max_size=4),
        ),
        max_size=3,
    ),
    repeated=st.booleans(),
    after=st.integers(0, 3),
    items=st.integers(1, 4),
    name=st.sampled_from((None, "", "x")),
)


class Both:
    """Rows of a store beside rows in memory. Versions differ; in both those of a row grow."""

    def __init__(self, store: Rows, clock: ManualClock) -> None:
        self.clock, self.store = clock, store
        self.model = MemoryRows(clock)
        self.versions: tuple[dict[Key, Version], ...] = ({}, {})  # the last seen of each row

    def do(self, move: Move) -> None:
        self.clock.advance(move.pause)
        if move.jump and isinstance(self.store, MemoryRows):
            self.clock.set_back(-move.jump)
        steps = [
            [self._step(rows, *one) for one in move.steps] for rows in (self.model, self.store)
        ]
        for _ in range(1 + move.repeated):  # as after a lost reply
            model, store = self.model.commit(steps[0]), self.store.commit(steps[1])
            assert list(map(type, model)) == list(map(type, store))
        for kind in ("one", "two"):
            model_rows = self._listed(self.model, kind, move)
            assert model_rows == self._listed(self.store, kind, move)
        assert self.model.expire(100) is self.store.expire(100) is False
        self.compare()

    def _step(
        self,
        rows: Rows,
        once: Key | None,
        wanted: dict[Key, int],
        created: dict[Key, New],
        written: dict[Key, New | None],
    ) -> RowStep:
        read = dict(zip(wanted, rows.read(list(wanted)), strict=True))
        expect: dict[Key, Version] = {}
        for key, how in wanted.items():
            row = read[key]
            seen = NO_ROW if row is None else row.version
            expect[key] = {SEEN: seen, ABSENT: NO_ROW, OLD: Version(Fence(1))}[how]
        return RowStep(
            once=once,
            expect=expect,
            create={key: _write(one) for key, one in created.items()},
            write={key: one and _write(one) for key, one in written.items()},
        )

    def _listed(self, rows: Rows, kind: str, move: Move) -> list[tuple[object, ...]]:
        found = rows.list(kind, items=move.after) if move.after else []
        behind = found[-1] if found else None
        return [
            _plain(row) for row in rows.list(kind, name=move.name, after=behind, items=move.items)
        ]

    def compare(self) -> None:
        model, store = self.model.read(KEYS), self.store.read(KEYS)
        assert [row and _plain(row) for row in model] == [row and _plain(row) for row in store]
        changed = [self._changed(*one) for one in zip((model, store), self.versions, strict=True)]
        assert changed[0] == changed[1]

    def _changed(self, rows: list[StoredRow | None], last: dict[Key, Version]) -> set[Key]:
        """Return the rows whose versions are new; these must be greater than before."""
        new = {row.key: row.version for row in rows if row and last.get(row.key) != row.version}
        assert all(version > last.get(key, NO_ROW) for key, version in new.items())
        last.update(new)
        return set(new)


def _write(new: New) -> Write:
    body, seconds, at, name = new
    return Write(
        body=body,
        expires_in=round(seconds * 1e6) if seconds else None,
        facts=Facts(at=at, name=name) if at >= 0 else None,
    )


def _plain(row: StoredRow) -> tuple[object, ...]:
    return row.key, row.body, row.facts


@pytest.mark.slow
def test_sqlite_answers_as_memory(tmp_path: Path) -> None:
    clock = ManualClock()
    path = tmp_path / "machinery.db"

    @settings(max_examples=EXAMPLES or 60, deadline=None, derandomize=not EXAMPLES, database=None)
    @given(st.lists(MOVES, min_size=1, max_size=30))
    def check(moves: list[Move]) -> None:
        with closing(SQLiteDriver(path, clock=clock, synchronous="NORMAL")) as driver:
            rows = SQLiteRows(driver)
            rows.commit([RowStep(write=dict.fromkeys(KEYS))])
            both = Both(rows, clock)
            for move in moves:
                both.do(move)

    check()


@pytest.mark.slow
def test_postgresql_answers_as_memory(postgres_url: str) -> None:
    clock = ManualClock()

    with closing(PostgreSQLDriver(postgres_url, clock=clock)) as driver:
        rows = PostgreSQLRows(driver)

        @settings(
            max_examples=EXAMPLES or 15, deadline=None, derandomize=not EXAMPLES, database=None
        )
        @given(st.lists(MOVES, min_size=1, max_size=30))
        def check(moves: list[Move]) -> None:
            rows.commit([RowStep(write=dict.fromkeys(KEYS))])
            both = Both(rows, clock)
            for move in moves:
                both.do(move)

        check()

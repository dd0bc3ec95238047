"""Promises of every store of rows.

class TestMyRows(RowsConformance):
    @pytest.fixture
    def open_rows(self, clock: ManualClock) -> OpenRows:
        return lambda: MyRows("my://localhost", clock=clock)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from machinery_py.clock import micros
from machinery_py.errors import NameRefused, Unsupported
from machinery_py.fences import Fence
from machinery_py.rows.contract import (
    ID_BYTES,
    NO_ROW,
    Committed,
    Conflict,
    Facts,
    Key,
    Repeated,
    Rows,
    RowStep,
    StepResult,
    StoredRow,
    Version,
    Write,
)
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import together

#: Each call returns a new handle on the same store.
OpenRows = Callable[[], Rows]

A, B = Key("kind", "a"), Key("kind", "b")
SECOND = 1_000_000  # µs
OLD = Version(Fence(1))


def body_of(rows: Rows, key: Key) -> bytes | None:
    row = rows.read([key])[0]
    return None if row is None else row.body


def written(rows: Rows, key: Key, write: Write | bytes | None) -> Version:
    """Write a row whatever is there, and return its version."""
    content = Write(body=write) if isinstance(write, bytes) else write
    [done] = rows.commit([RowStep(write={key: content})])
    assert isinstance(done, Committed)
    return done.version


def count_up(rows: Sequence[StoredRow | None], now: int) -> tuple[Mapping[Key, Write | None], int]:
    """Add 1 to the first row."""
    del now
    number = 1 + (0 if rows[0] is None else int(rows[0].body))
    return {A: Write(body=b"%d" % number)}, number


class RowsConformance:
    """Tests of every promise of Rows."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Return the clock of the store."""
        return ManualClock()

    @pytest.fixture
    def open_rows(self, clock: ManualClock) -> OpenRows:
        raise NotImplementedError(f"{type(self).__name__}: override the fixture open_rows")

    @pytest.fixture
    def rows(self, open_rows: OpenRows) -> Rows:
        return open_rows()

    def test_time_is_the_stores(self, rows: Rows, clock: ManualClock) -> None:
        assert rows.now() == micros(clock.now())
        clock.advance(1.5)
        assert rows.now() == micros(clock.now())

    def test_rows_are_read_in_the_order_of_their_keys(self, open_rows: OpenRows) -> None:
        rows = open_rows()
        version = written(rows, A, b"1")

        assert open_rows().read([B, A, A]) == [
            None,
            StoredRow(key=A, body=b"1", version=version),
            StoredRow(key=A, body=b"1", version=version),
        ]
        assert rows.read([]) == []

    def test_rows_of_two_kinds_are_two(self, rows: Rows) -> None:
        other = Key("other", A.id)
        written(rows, A, b"1")
        written(rows, other, b"2")

        assert [body_of(rows, key) for key in (A, other)] == [b"1", b"2"]

    @pytest.mark.parametrize(
        "id", ["", "a b", "a\nb", "ä\U0001f600", "a\0b", "\ud800", "x" * ID_BYTES]
    )
    def test_any_text_is_an_id(self, rows: Rows, id: str) -> None:
        key = Key("kind", id)
        written(rows, key, Write(body=b"1", facts=Facts(at=1, name=id)))

        assert body_of(rows, key) == b"1"
        assert rows.commit([RowStep(expect={key: NO_ROW})]) == [Conflict()]
        written(rows, key, None)
        assert body_of(rows, key) is None

    @pytest.mark.parametrize("id", ["x" * (ID_BYTES + 1), "ä" * ID_BYTES])
    def test_id_that_is_too_long_is_refused(self, rows: Rows, id: str) -> None:
        key, new = Key("kind", id), Write(body=b"1")
        for step in (
            RowStep(expect={key: NO_ROW}, write={A: new}),
            RowStep(write={A: new, key: new}),
            RowStep(write={A: new}, create={key: new}),
            RowStep(write={A: Write(body=b"1", facts=Facts(at=1, name=id))}),
        ):
            with pytest.raises(NameRefused, match="at most 1,000"):
                rows.commit([RowStep(write={B: new}), step])
        with pytest.raises(NameRefused):
            rows.change([A], lambda found, now: ({key: new}, None))

        assert rows.read([A, key, B]) == [None, None, None]

    @pytest.mark.parametrize("body", [b"", b"\0", bytes(range(256)), b"x" * 1_000_000])
    def test_any_bytes_are_a_body(self, rows: Rows, body: bytes) -> None:
        written(rows, A, body)

        assert body_of(rows, A) == body

    def test_step_holds_if_its_rows_are_as_expected(self, rows: Rows) -> None:
        first = written(rows, A, b"1")
        step = RowStep(
            expect={A: first, B: NO_ROW}, write={A: Write(body=b"2"), B: Write(body=b"3")}
        )

        [done] = rows.commit([step])
        first_now, second = rows.read([A, B])
        assert isinstance(done, Committed)
        assert first_now is not None and first_now.version > first
        assert second is not None and second.version == done.version
        assert [body_of(rows, key) for key in (A, B)] == [b"2", b"3"]

    @pytest.mark.parametrize("expected", [NO_ROW, OLD])
    def test_step_that_conflicts_writes_nothing(self, rows: Rows, expected: Version) -> None:
        written(rows, A, b"1")
        step = RowStep(expect={A: expected, B: NO_ROW}, write={B: Write(body=b"2"), A: None})

        assert rows.commit([step]) == [Conflict()]
        assert [body_of(rows, key) for key in (A, B)] == [b"1", None]

    def test_row_that_is_missing_is_not_the_one_expected(self, rows: Rows) -> None:
        assert rows.commit([RowStep(expect={A: OLD}, write={B: Write(body=b"")})]) == [Conflict()]
        assert body_of(rows, B) is None

    def test_repeated_step_conflicts_with_itself(self, rows: Rows) -> None:
        step = RowStep(expect={A: NO_ROW}, write={A: Write(body=b"1")})

        assert isinstance(rows.commit([step])[0], Committed)
        assert rows.commit([step]) == [Conflict()]

    def test_steps_of_a_batch_stand_by_themselves(self, rows: Rows) -> None:
        step = RowStep(expect={A: NO_ROW}, write={A: Write(body=b"1")})
        done, conflict, last = rows.commit([step, step, RowStep(write={B: Write(body=b"2")})])

        assert (
            isinstance(done, Committed) and conflict == Conflict() and isinstance(last, Committed)
        )
        assert [body_of(rows, key) for key in (A, B)] == [b"1", b"2"]

    def test_step_is_carried_out_once_while_its_row_is_there(
        self, rows: Rows, clock: ManualClock
    ) -> None:
        token = Key("token", "t")
        step = RowStep(
            once=token,
            expect={B: NO_ROW},
            write={token: Write(body=b"", expires_in=SECOND), A: Write(body=b"1")},
        )
        assert isinstance(rows.commit([step])[0], Committed)
        written(rows, A, b"2")
        written(rows, B, b"3")  # not as expected, which the first one did not meet

        assert rows.commit([step]) == [Repeated()]
        assert body_of(rows, A) == b"2"
        clock.advance(1.0)
        assert rows.commit([step]) == [Conflict()]

    @pytest.mark.parametrize("how", ["create", "write"])
    def test_row_of_an_earlier_step_of_the_call_tells_that_a_step_is_repeated(
        self, rows: Rows, how: str
    ) -> None:
        """Also if the step that is not carried out would only look for it."""
        made = {A: Write(body=b"1")}
        first = RowStep(create=made) if how == "create" else RowStep(write=made)
        looks, creates = RowStep(once=A, write={B: Write(body=b"2")}), RowStep(once=A, create=made)
        done, *repeated = rows.commit([first, looks, creates])

        assert isinstance(done, Committed) and repeated == [Repeated(), Repeated()]
        assert body_of(rows, B) is None

    def test_step_that_creates_its_row_is_carried_out_once(self, rows: Rows) -> None:
        step = RowStep(once=A, create={A: Write(body=b"1"), B: Write(body=b"2")})
        done, repeated = rows.commit([step, step])

        assert isinstance(done, Committed) and repeated == Repeated()

    def test_row_that_was_made_and_deleted_is_none_again(self, rows: Rows) -> None:
        step = RowStep(expect={B: NO_ROW}, write={A: Write(body=b"1")})
        written(rows, B, b"1")
        written(rows, B, None)

        assert isinstance(rows.commit([step])[0], Committed)

    def test_row_is_created_if_it_is_missing(self, rows: Rows, clock: ManualClock) -> None:
        first = Write(body=b"1", expires_in=SECOND)
        step = RowStep(create={A: Write(body=b"2"), B: Write(body=b"3")})
        written(rows, A, first)

        assert isinstance(rows.commit([step])[0], Committed)
        assert [body_of(rows, key) for key in (A, B)] == [b"1", b"3"]
        clock.advance(1.0)
        rows.commit([step])
        assert [body_of(rows, key) for key in (A, B)] == [b"2", b"3"]

    def test_step_in_conflict_creates_nothing(self, rows: Rows) -> None:
        step = RowStep(expect={A: OLD}, create={B: Write(body=b"1")})

        assert rows.commit([step]) == [Conflict()]
        assert body_of(rows, B) is None

    def test_life_counts_from_the_step(self, rows: Rows, clock: ManualClock) -> None:
        step = RowStep(write={A: Write(body=b"1", expires_in=SECOND)})
        clock.advance(5.0)
        [done] = rows.commit([step])
        assert isinstance(done, Committed) and done.at == rows.now()
        clock.advance(0.999)
        assert body_of(rows, A) == b"1"
        clock.advance(0.001)

        assert body_of(rows, A) is None

    def test_of_many_who_make_a_row_one_does(self, open_rows: OpenRows) -> None:
        handles = [open_rows() for _ in range(4)]
        for number in range(10):
            made, other = Key("kind", f"{number}"), Key("kind", f"{number} not written")

            def make(index: int, made: Key = made, other: Key = other) -> StepResult:
                mine = Key("mine", f"{made.id} {index}")
                step = RowStep(
                    expect={made: NO_ROW, other: NO_ROW},
                    write={made: Write(body=b"%d" % index), mine: Write(body=b"")},
                )
                return handles[index].commit([step])[0]

            done = together(4, make)
            assert sum(isinstance(one, Committed) for one in done) == 1

    def test_of_two_who_expect_what_the_other_makes_one_holds(self, open_rows: OpenRows) -> None:
        """Neither row is there, and neither is written by the one that expects it absent."""
        handles = [open_rows() for _ in range(2)]
        for number in range(20):
            both = Key("kind", f"{number} a"), Key("kind", f"{number} b")

            def make(index: int, both: tuple[Key, Key] = both) -> StepResult:
                step = RowStep(
                    expect={both[index]: NO_ROW}, write={both[1 - index]: Write(body=b"")}
                )
                return handles[index].commit([step])[0]

            done = together(2, make)
            assert sum(isinstance(one, Committed) for one in done) == 1

    def test_step_in_a_callers_transaction_is_refused_in_words(self, rows: Rows) -> None:
        """A store that can do it replaces this test by its own."""
        with pytest.raises(Unsupported, match="cannot be part of your transaction"):
            rows.on(object())

    def test_deleted_row_is_not_there_and_may_be_deleted_again(self, rows: Rows) -> None:
        written(rows, A, b"1")
        written(rows, A, None)
        written(rows, A, None)

        assert body_of(rows, A) is None

    def test_rows_are_forgotten_unless_they_have_changed(self, rows: Rows) -> None:
        keys = [A, B, Key("other", "a")]
        for key in keys:
            written(rows, key, b"1")
        found = [row for row in rows.read(keys) if row is not None]
        written(rows, B, b"2")

        rows.forget(found)
        rows.forget(found)
        rows.forget([])
        assert [body_of(rows, key) for key in keys] == [None, b"2", None]

    def test_version_of_a_row_never_goes_back(self, rows: Rows, clock: ManualClock) -> None:
        versions = [written(rows, A, b"1")]
        written(rows, A, None)
        versions.append(written(rows, A, Write(body=b"2", expires_in=SECOND)))
        clock.advance(2.0)
        rows.expire(100)
        versions.append(written(rows, A, b"3"))
        clock.set_back(86_400.0)
        versions.append(written(rows, A, b"4"))
        written(rows, A, None)
        rows.commit([RowStep(create={A: Write(body=b"5")})])
        versions += [row.version for row in rows.read([A]) if row is not None]

        assert versions == sorted(set(versions)) and len(versions) == 5

    def test_row_that_is_over_is_not_there(self, rows: Rows, clock: ManualClock) -> None:
        write = Write(body=b"1", expires_in=SECOND, facts=Facts(at=1))
        version = written(rows, A, write)
        clock.advance(0.999)
        assert body_of(rows, A) == b"1"
        clock.advance(0.001)

        assert body_of(rows, A) is None
        assert rows.list("kind") == []
        assert rows.commit([RowStep(expect={A: version}, write={B: Write(body=b"")})]) == [
            Conflict()
        ]
        assert isinstance(
            rows.commit([RowStep(expect={A: NO_ROW}, write={A: write})])[0], Committed
        )

    def test_row_that_is_written_again_has_a_new_end(self, rows: Rows, clock: ManualClock) -> None:
        written(rows, A, Write(body=b"1", expires_in=SECOND))
        written(rows, B, Write(body=b"1", expires_in=SECOND))
        written(rows, A, Write(body=b"2", expires_in=3 * SECOND))
        written(rows, B, Write(body=b"2"))
        clock.advance(2.0)
        while rows.expire(10):
            pass

        assert [body_of(rows, key) for key in (A, B)] == [b"2", b"2"]

    def test_what_is_over_is_deleted_in_steps(self, rows: Rows, clock: ManualClock) -> None:
        keys = [Key("kind", str(number)) for number in range(5)]
        rows.commit([RowStep(write={key: Write(body=b"1", expires_in=SECOND) for key in keys})])
        written(rows, A, b"stays")
        assert rows.expire(2) is False  # nothing is over yet
        clock.advance(1.0)

        assert [rows.expire(2), rows.expire(2)] == [True, True]
        assert rows.expire(2) is False
        assert body_of(rows, A) == b"stays"

    def test_listing_has_the_latest_first(self, rows: Rows) -> None:
        for id, at in (("a", 2), ("b", 3), ("c", 2), ("d", 1)):
            written(rows, Key("kind", id), Write(body=b"1", facts=Facts(at=at)))
        written(rows, Key("other", "e"), Write(body=b"1", facts=Facts(at=9)))
        written(rows, Key("kind", "f"), b"in no listing")

        assert [row.key.id for row in rows.list("kind")] == ["b", "c", "a", "d"]
        assert rows.list("kind", items=1)[0].facts == Facts(at=3)

    def test_listing_goes_on_behind_a_row_that_is_gone(self, rows: Rows) -> None:
        for number in range(6):
            key = Key("kind", str(number))
            written(rows, key, Write(body=b"1", facts=Facts(at=number // 2)))
        first = rows.list("kind", items=2)
        written(rows, first[-1].key, None)
        second = rows.list("kind", items=3, after=first[-1])

        assert [row.key.id for row in (*first, *second)] == ["5", "4", "3", "2", "1"]
        assert [row.key.id for row in rows.list("kind", after=second[-1])] == ["0"]

    def test_listing_by_name(self, rows: Rows) -> None:
        for id, name in (("a", "x"), ("b", "y"), ("c", "x"), ("d", "")):
            written(rows, Key("kind", id), Write(body=b"1", facts=Facts(at=1, name=name)))

        assert [row.key.id for row in rows.list("kind", name="x")] == ["c", "a"]
        assert [row.key.id for row in rows.list("kind", name="")] == ["d"]
        assert rows.list("kind", name="z") == []

    def test_change_is_decided_anew_until_it_holds(self, rows: Rows) -> None:
        calls: list[int] = []

        def decide(
            found: Sequence[StoredRow | None], now: int
        ) -> tuple[Mapping[Key, Write | None], int]:
            calls.append(now)
            return count_up(found, now)

        assert [rows.change([A], decide) for _ in range(3)] == [1, 2, 3]
        assert len(calls) == 3 and body_of(rows, A) == b"3"

    def test_change_that_writes_nothing_returns_its_result(self, rows: Rows) -> None:
        assert rows.change([A], lambda found, now: ({}, found)) == [None]

    def test_no_change_of_many_threads_is_lost(self, open_rows: OpenRows) -> None:
        handles = [open_rows() for _ in range(4)]
        found = together(40, lambda index: handles[index % 4].change([A], count_up))

        assert sorted(found) == list(range(1, 41))

"""Each row of the checklist of what other task queues do has a test, or a reason."""

from __future__ import annotations

from tests.docs import celery_rows
from tests.docs.pages import ROOT
from tests.system import endings


def test_every_row_of_the_checklist_has_a_test_or_an_answer() -> None:
    rows = [(row, set(row.numbers.split())) for row in celery_rows.ROWS]
    held = [number for _, numbers in rows for number in numbers]

    assert endings.answered() == endings.CHECKLIST
    assert len(held) == len(set(held))
    assert set(held) == celery_rows.CHECKLIST
    assert [row.numbers for row, _ in rows if not (row.tests or row.is_otherwise)] == []


def test_tests_that_hold_a_row_are_there() -> None:
    code = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("tests", "machinery_py/testing")
        for path in (ROOT / folder).rglob("*.py")
    )
    named = {*endings.TESTS.values(), *(n for row in celery_rows.ROWS for n in row.tests.split())}

    assert [name for name in sorted(named) if f"def {name}(" not in code] == []

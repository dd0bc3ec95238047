"""Notes of a running task: what may be noted, and what is refused."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from machinery_py.errors import ArgumentError
from machinery_py.tasks.context import MAX_NOTES, Context, notes_json
from machinery_py.tasks.signature import Signature
from machinery_py.tasks.states import TaskState


def context_of(reports: list[object] | None = None) -> Context:
    report = None if reports is None else reports.append
    signature: Signature[Any] = Signature(name="load", uuid="task_1")
    return Context(signature, queue="", delivery=1, worker="", report=report)


def read(context: Context) -> dict[str, Any]:
    return TaskState(task_uuid="task_1", notes_json=notes_json(context.noted)).notes


DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("fact", "told"),
    [
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        ("\ud800", "half a surrogate pair"),
        (10**30, "more than 64 bits"),
        (dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc), "is not JSON"),
        (b"bytes", "is not JSON"),
        ({1: 2}, "is not JSON"),
        (object(), "<object>"),
        (DEEP, "200 levels"),
        (LOOP, "200 levels"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() else "",
)
def test_note_that_is_not_json_is_refused_and_changes_nothing(fact: object, told: str) -> None:
    reports: list[object] = []
    context = context_of(reports)
    context.note(step="one")

    with pytest.raises(ArgumentError, match=f"cannot note 'bad': .*{told}"):
        context.note(step="two", bad=fact)

    assert (read(context), reports) == ({"step": "one"}, [None])


def test_notes_have_4_kb_in_all() -> None:
    context = context_of()
    context.note(step="x" * 2_000, other="ü" * 500)

    with pytest.raises(ValueError, match="5,0.. bytes of JSON, more than 4,096"):
        context.note(third="ü" * 1_000)
    context.note(step="")  # it is replaced, so there is room again
    context.note(third="ü" * 1_000)

    assert read(context) == {"step": "", "other": "ü" * 500, "third": "ü" * 1_000}
    assert len(notes_json(context.noted).encode()) <= MAX_NOTES


def test_noted_value_that_changes_later_stays_as_it_was() -> None:
    context, rows = context_of(), [1]

    context.note(rows=rows)
    rows.append(2)

    assert read(context) == {"rows": [1]}


def test_noting_nothing_reports_nothing() -> None:
    reports: list[object] = []

    context_of(reports).note()

    assert reports == []

"""Each row of the checklist of what other task queues do has a test, or a reason."""

from __future__ import annotations

import json
import re

from machinery_py import Signature
from machinery_py.tasks import signature
from machinery_py.wire.signatures import encode_signature
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


def test_fields_of_celerys_envelope_are_answered_by_ours() -> None:
    page = (ROOT / "docs" / "explanation" / "celery.md").read_text(encoding="utf-8")
    rows = page.partition("### The envelope of a message")[2].splitlines()
    answers = [row.split("|")[2] for row in rows if row.startswith("|")][2:]
    ours = set(json.loads(encode_signature(Signature(name="task"))))
    headers = {value for name, value in vars(signature).items() if name.startswith("HEADER_")}

    named = {name for answer in answers for name in re.findall("`([A-Za-z_]+)`", answer)}
    assert named - ours - headers == set()
    assert [answer for answer in answers if not answer.strip()] == []
    assert len(answers) > 20


def test_tests_that_hold_a_row_are_there() -> None:
    code = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("tests", "machinery_py/testing")
        for path in (ROOT / folder).rglob("*.py")
    )
    named = {*endings.TESTS.values(), *(n for row in celery_rows.ROWS for n in row.tests.split())}

    assert [name for name in sorted(named) if f"def {name}(" not in code] == []

"""Texts of ours have a longest length: errors, tracebacks, lines of the log."""

from __future__ import annotations

import logging
import pathlib
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py import MachineryError, RetryTaskLater, TaskFailed
from machinery_py.registry.outcomes import Failed
from machinery_py.texts import MAX_ERROR, MAX_LINE, MAX_TRACEBACK, cut, get_logger, traceback_text

PACKAGE = pathlib.Path(__file__).parents[1] / "machinery_py"


@given(
    st.text(max_size=300) | st.text(max_size=40).map(lambda text: text * 100), st.integers(60, 400)
)
def test_a_text_is_cut_to_its_bytes_and_says_so(text: str, limit: int) -> None:
    short = cut(text, limit)

    assert len(short.encode("utf-8", "backslashreplace")) <= limit
    if short != text:
        assert short.endswith(f"… ({len(text):,} characters)")
        assert len(text.encode("utf-8", "backslashreplace")) > limit


@pytest.mark.parametrize(
    "kind",
    [MachineryError, lambda text: TaskFailed("u", "f", text), lambda text: RetryTaskLater(text, 1)],
)
def test_an_error_of_ours_is_no_longer_than_max_error(kind: type[MachineryError]) -> None:
    error = kind("x" * 9_000_000)

    assert len(str(error)) <= MAX_ERROR
    assert str(pickle.loads(pickle.dumps(MachineryError("x" * 9_000_000)))) == str(
        MachineryError("x" * 9_000_000)
    )
    assert str(kind("short")).count("short") == 1


def test_a_failure_of_any_origin_has_a_cut_text() -> None:
    assert len(Failed(error="é" * 9_000_000).error.encode()) <= MAX_ERROR
    assert Failed(error="short").error == "short"


def recurse(depth: int) -> None:
    exec(
        "raise ValueError('y' * 1_000_000)"
        if depth == 0
        else f"recurse({depth - 1})  #" + "z" * 5_000
    )  # no two lines alike


def test_a_traceback_keeps_its_ends_and_short_lines() -> None:
    with pytest.raises(ValueError) as caught:
        recurse(200)

    text = traceback_text(caught.value)

    assert text.startswith("Traceback")
    assert "ValueError: yyyy" in text
    assert len(text.encode()) <= MAX_TRACEBACK + MAX_LINE
    assert max(map(len, text.split("\n"))) <= MAX_LINE

    lines = traceback_text(ValueError("\n".join(map(str, range(100_000)))))
    assert len(lines) <= MAX_TRACEBACK
    assert lines.rstrip().endswith("99999")
    assert re.search(r"\n  … \(of [\d,]+ bytes\)\n", lines)


def test_a_line_of_the_log_is_cut_and_a_short_one_is_left(caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("machinery_py.for_test")

    logger.error("task %s", "u" * 2_000_000)
    logger.error("task %s", "short")
    try:
        raise ValueError("v" * 9_000_000)
    except ValueError:
        logger.exception("failed")

    assert all(len(line) < 2000 for line in caplog.text.split("\n"))
    assert caplog.records[0].getMessage().endswith("… (2,000,005 characters)")
    assert caplog.records[1].args == ("short",)  # as it was given: programs group by it
    assert "ValueError: vvv" in caplog.text


def test_a_wrong_call_of_the_log_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", False)

    get_logger("machinery_py.for_test").error("%d", "no number")


def test_every_logger_of_ours_cuts_its_lines() -> None:
    wrong = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^logger = (?!get_logger\()", path.read_text(), re.MULTILINE)
    ]

    assert wrong == []

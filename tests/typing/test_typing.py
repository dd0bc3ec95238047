"""Type checkers accept accepted.py, and find errors on the marked lines of refused.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
ACCEPTED, REFUSED = FOLDER / "accepted.py", FOLDER / "refused.py"
FILES = (ACCEPTED, REFUSED)

Errors = dict[Path, dict[int, str]]  # file → line → text


def mypy() -> Errors:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--no-error-summary",
            "--show-absolute-path",
            *map(str, FILES),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    found = re.findall(r"^(.+?):(\d+): error: (.*)$", run.stdout, re.MULTILINE)
    return collected((Path(file), int(line), text) for file, line, text in found)


def pyright() -> Errors:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pyright",
            "--outputjson",
            "--pythonpath",
            sys.executable,
            *map(str, FILES),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=170,
    )
    assert run.returncode in (0, 1), run.stdout + run.stderr
    found = json.loads(run.stdout)["generalDiagnostics"]
    return collected(
        (Path(one["file"]), one["range"]["start"]["line"] + 1, one["message"])
        for one in found
        if one["severity"] == "error"
    )


def collected(found: Iterable[tuple[Path, int, str]]) -> Errors:
    errors: Errors = {file: {} for file in FILES}
    for file, line, text in found:
        errors.setdefault(file, {}).setdefault(line, text)
    return errors


@pytest.mark.parametrize("check", [mypy, pyright], ids=["mypy", "pyright"])
def test_public_calls_are_accepted_and_marked_lines_refused(check: Callable[[], Errors]) -> None:
    errors = check()

    assert errors[ACCEPTED] == {}
    lines = REFUSED.read_text(encoding="utf-8").splitlines()
    marked = {number: line for number, line in enumerate(lines, 1) if line.endswith("# refused")}
    found = errors[REFUSED]

    assert {number: line for number, line in marked.items() if number not in found} == {}, (
        "accepted, but must not be"
    )
    assert {number: text for number, text in found.items() if number not in marked} == {}, (
        "refused, but must not be"
    )

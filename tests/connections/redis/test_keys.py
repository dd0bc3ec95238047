"""The tables of keys name every key that a script spells, and no key is in two rows."""

from __future__ import annotations

import pathlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import machinery_py
from machinery_py.connections.redis.keys import ITEMS, quoted

SCRIPTS = sorted(pathlib.Path(machinery_py.__file__).parent.rglob("*.lua"))
#: 'mpy:…', which may go on with a value and another text.
_SPELLED = re.compile(r"'(mpy:[^']*)'(?:\s*\.\.\s*([\w.\[\]]+))?(?:\s*\.\.\s*'([^']*)')?")
#: Beginnings of keys, which scripts compare with or put before a name of the table.
BEGINNINGS = {"mpy:", "mpy:1", "mpy:p:", "mpy:{1}:", "mpy:limit:{1}:", "mpy:limits:{1}:"}


def spelled(text: str) -> set[str]:
    """Return the keys that a script spells, with 1 in place of each value."""
    code = re.sub(r"^\s*--.*$", "", text, flags=re.MULTILINE)
    return {
        head + ("1" if value else "") + (tail or "") for head, value, tail in _SPELLED.findall(code)
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_key_that_a_script_spells_is_in_the_table(script: pathlib.Path) -> None:
    unknown = {
        key
        for key in spelled(script.read_text()) - BEGINNINGS
        if not any(row.matches(key, row.kind) for row in ITEMS)
    }

    assert unknown == set()


def test_keys_with_a_value_in_them_are_read_from_a_script() -> None:
    text = (
        "call('SET', 'mpy:o:{' .. key .. '}', x) "
        "call('GET', 'mpy:u:' .. name) call('GET', 'mpy:ready')"
    )

    assert spelled(text) == {"mpy:o:{1}", "mpy:u:1", "mpy:ready"}


def test_no_key_has_two_rows() -> None:
    names = [row.name for row in ITEMS]
    assert len(names) == len(set(names))


@given(st.text(), st.text())
def test_names_are_quoted_so_that_no_two_become_one(one: str, other: str) -> None:
    assert (quoted(one) == quoted(other)) == (one == other)
    assert not {"{", "}"} & set(quoted(one))

"""Slots of a Redis Cluster, as a Redis computes them for these keys, and names in our keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from machinery_py.connections.redis.requests import described
from machinery_py.connections.redis.slots import guard, quoted, slot_of, unquoted


@pytest.mark.parametrize(
    ("key", "slot"),
    [
        ("123456789", 12739),
        ("foo", 12182),
        ("", 0),
        ("{}foo", slot_of(b"{}foo")),
        ("a{foo}b", 12182),
        ("{foo}{bar}", 12182),
    ],
)
def test_a_key_is_in_the_slot_of_its_tag(key: str, slot: int) -> None:
    assert slot_of(key.encode()) == slot


@given(st.text(), st.text())
def test_names_are_quoted_so_that_no_two_become_one(one: str, other: str) -> None:
    assert unquoted(quoted(one)) == one
    assert (quoted(one) == quoted(other)) == (one == other)


@given(st.text(alphabet="a{}%"))
def test_all_keys_of_a_name_are_in_one_slot(name: str) -> None:
    tag = quoted(name)
    keys = [tag, f"mpy:m:{{{tag}}}", f"mpy:o:{{{tag}}}", guard(f"mpy:{{{tag}}}:".encode()).decode()]
    assert len({slot_of(key.encode()) for key in keys}) == 1


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("ASK 11958 127.0.0.1:7000", "slot 11958 is on its way to 127.0.0.1:7000"),
        ("MOVED 5 [::1]:7001", "slot 5 has moved to [::1]:7001"),
        ("BUSY a script runs", "BUSY a script runs"),
    ],
)
def test_redirection_without_a_class_is_described(said: str, text: str) -> None:
    assert described(ResponseError(said)) == text

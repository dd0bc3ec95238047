"""Each conversion of an argument that Go does or refuses."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from machinery_py.errors import ArgumentError
from machinery_py.tasks.signature import Signature
from machinery_py.values.values import to_python
from machinery_py.wire.signatures import decode_exact, decode_signature
from tests.wire.golden_files import line_id, lines

LINES = lines("arguments.jsonl")

#: A Python worker takes this type of ours; Go does not.
OURS = {"json"}


def message(line: dict[str, Any]) -> bytes:
    return b'{"Name":"f","Args":[{"Name":"","Type":%s,"Value":%s}]}' % (
        json.dumps(line["type"]).encode(),
        line["value"].encode(),
    )


def converted(signature: Signature[Any]) -> Any:
    (arg,) = signature.args
    return to_python(arg.type, arg.value)


def from_go(value: Any) -> Any:
    if isinstance(value, list):
        return [from_go(item) for item in value]
    return (
        {"+Inf": math.inf, "-Inf": -math.inf}.get(value, value) if isinstance(value, str) else value
    )


@pytest.mark.parametrize("line", [line for line in LINES if line["ok"]], ids=line_id)
@pytest.mark.parametrize("decode", [decode_signature, decode_exact])
def test_a_value_is_converted_as_go_converts_it(line: dict[str, Any], decode: Any) -> None:
    value = converted(decode(message(line)))

    expected = from_go(line["converted"])
    if line["go_type"] == "[]uint8":
        assert type(value) is bytes
        value = list(value)
    assert repr(value) == repr(expected)  # tells 1 from 1.0 and 0.0 from -0.0


@pytest.mark.parametrize("line", [line for line in LINES if not line["ok"]], ids=line_id)
def test_a_value_is_refused_with_the_text_of_go(line: dict[str, Any]) -> None:
    if line["type"] in OURS:
        assert converted(decode_signature(message(line))) == json.loads(line["value"])
        return
    with pytest.raises(ArgumentError):
        converted(decode_signature(message(line)))

    with pytest.raises(ArgumentError) as caught:
        converted(decode_exact(message(line)))
    assert str(caught.value) == line["error"]


@pytest.mark.parametrize(
    "line", [line for line in lines("poison.jsonl") if line["kind"] == "argument"], ids=line_id
)
def test_message_that_kills_a_go_worker_only_fails_here(line: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"is not \[\]"):
        converted(decode_signature(message(line)))

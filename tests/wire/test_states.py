"""Task states and groups that the real Go program wrote or was given."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from machinery_py.errors import DecodeError
from machinery_py.tasks.states import State
from machinery_py.values.values import from_result
from machinery_py.wire.states import (
    decode_group,
    decode_results,
    decode_state,
    encode_group,
    encode_results,
    encode_state,
)
from machinery_py.wire.times import parse_time
from tests.wire.golden_files import line_id, lines, payload

STATES = lines("task_states.jsonl")
_SPELLED_OTHERWISE = re.compile(r"\\u|float|[eE.]\d{1,300}[,}\]]|\d{7,9}Z|[+]\d\d:")


def comparable(record: dict[str, Any]) -> dict[str, Any]:
    result = {**record, "CreatedAt": parse_time(record["CreatedAt"])}
    if "TaskUUIDs" in result:
        result["TaskUUIDs"] = result["TaskUUIDs"] or []
    return result


def written_again(kind: str, body: bytes) -> bytes:
    return (
        encode_state(decode_state(body))
        if kind == "task_state"
        else encode_group(decode_group(body))
    )


@pytest.mark.parametrize("line", STATES, ids=line_id)
def test_message_from_go_is_encoded_to_the_same_bytes(line: dict[str, Any]) -> None:
    wire = line["wire"].encode()

    written = written_again(line["kind"], wire)

    assert list(json.loads(written)) == list(json.loads(wire))
    assert comparable(json.loads(written)) == comparable(json.loads(wire))
    if not _SPELLED_OTHERWISE.search(line["wire"]):
        assert written == wire


def test_most_states_are_compared_to_the_byte() -> None:
    assert sum(1 for line in STATES if not _SPELLED_OTHERWISE.search(line["wire"])) > 50


@pytest.mark.parametrize(
    "line", [line for line in STATES if '"Results":[{' in line["wire"]], ids=line_id
)
def test_every_result_of_go_can_be_read(line: dict[str, Any]) -> None:
    results = decode_state(line["wire"].encode()).results

    for result, golden in zip(results, json.loads(line["wire"])["Results"], strict=True):
        value = from_result(result.type, result.value)
        if result.type == "[]uint8":
            assert type(value) is bytes
        elif result.type.startswith("[]") and golden["Value"] is None:
            assert value == []
        elif result.type == "float32":
            assert value == pytest.approx(golden["Value"])
        elif result.type == "[]float32":
            assert value == [pytest.approx(item) for item in golden["Value"]]
        elif golden["Type"] == "float64" and '"Value":-0' in line["wire"]:
            assert repr(value) == "-0.0"
        else:
            assert value == golden["Value"]
    assert [(result.type, result.value) for result in decode_results(encode_results(results))] == [
        (result.type, result.value) for result in results
    ]


#: Where we differ: name → why.
OTHERWISE = {
    "state_unknown_state": "Go keeps any word; "
    "there is nothing that a waiting caller could do with it",
    "state_null_result": "a null result is one without type and value",
}


@pytest.mark.parametrize("line", lines("state_decode.jsonl"), ids=line_id)
def test_states_and_groups_are_accepted_and_refused_as_by_go(line: dict[str, Any]) -> None:
    body = payload(line)
    if line["name"] == "state_unknown_state":
        with pytest.raises(DecodeError, match="REVOKED"):
            decode_state(body)
        return
    if not line["ok"]:
        with pytest.raises(DecodeError):
            written_again(line["kind"], body)
        return

    written = json.loads(written_again(line["kind"], body))

    expected = comparable(line["value"])
    if line["name"] == "state_null_result":
        expected["Results"] = [{"Type": "", "Value": None}]
    assert comparable(written) == expected


def test_results_are_null_unless_success() -> None:
    for state in State:
        body = b'{"TaskUUID":"u","State":"%s","Results":[]}' % state.encode()
        results = json.loads(encode_state(decode_state(body)))["Results"]
        assert results == ([] if state is State.SUCCESS else None)


BROKEN = [b"", b"{}", b"null", b"[]", b'{"State":1}', b"\xff", b'{"State":"SUCCESS","Results":[1]}']


@pytest.mark.parametrize("body", BROKEN)
def test_bytes_that_are_no_state_are_refused(body: bytes) -> None:
    with pytest.raises(DecodeError, match="no task state"):
        decode_state(body)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{}", b'"x"', b"[", b'[{"Type":1}]'])
def test_bytes_that_are_no_results_are_refused(body: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_results(body)

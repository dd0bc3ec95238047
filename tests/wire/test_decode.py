"""Payloads given to Go's decoder: ours accepts the same ones, with the same values."""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from machinery_py.errors import ArgumentError, DecodeError
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.values.values import to_python
from machinery_py.wire.signatures import decode_exact, decode_signature, encode_signature
from machinery_py.wire.times import parse_time
from tests.wire.golden_files import FOLDER, line_id, lines, payload

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
NAMES = {
    "uuid": "UUID",
    "name": "Name",
    "routing_key": "RoutingKey",
    "group_uuid": "GroupUUID",
    "group_task_count": "GroupTaskCount",
    "priority": "Priority",
    "immutable": "Immutable",
    "retry_count": "RetryCount",
    "retry_timeout": "RetryTimeout",
    "broker_message_group_id": "BrokerMessageGroupId",
    "sqs_receipt_handle": "SQSReceiptHandle",
    "stop_task_deletion_on_error": "StopTaskDeletionOnError",
    "ignore_when_task_not_registered": "IgnoreWhenTaskNotRegistered",
}


def as_json(value: Any) -> Any:
    """A value with its numbers as text, as the golden lines are loaded."""
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return getattr(value, "token", value)


def as_golden(signature: Signature[Any]) -> dict[str, Any]:
    """The signature as the golden lines show it: without what is empty."""
    message = {go: getattr(signature, ours) for ours, go in NAMES.items()}
    message["ETA"] = signature.eta
    message["Args"] = [
        {"Name": arg.name, "Type": arg.type, "Value": as_json(arg.value)} for arg in signature.args
    ]
    message["Headers"] = {
        key: as_json(msgspec.json.decode(value)) if isinstance(value, msgspec.Raw) else value
        for key, value in signature.headers.items()
    }
    message["OnSuccess"] = [as_golden(callback) for callback in signature.on_success]
    message["OnError"] = [as_golden(callback) for callback in signature.on_error]
    callback = signature.chord_callback
    message["ChordCallback"] = None if callback is None else as_golden(callback)
    return {
        key: str(item) if type(item) is int else item
        for key, item in message.items()
        if item or (key == "ChordCallback" and item is not None)
    }


def expected(value: dict[str, Any]) -> dict[str, Any]:
    """A golden value in the same form: null and empty are the same."""
    result = {
        key: item for key, item in value.items() if item not in ([], {}) or key == "ChordCallback"
    }
    if "ETA" in result:
        result["ETA"] = parse_time(result["ETA"])
    for key in ("OnSuccess", "OnError"):
        if key in result:
            result[key] = [expected(item) for item in result[key]]
    if "ChordCallback" in result:
        result["ChordCallback"] = expected(result["ChordCallback"])
    return result


def load_all(signature: Signature[Any]) -> None:
    for callback in (*signature.on_success, *signature.on_error):
        load_all(callback)
    if signature.chord_callback is not None:
        load_all(signature.chord_callback)


#: Go refuses these where it decodes the message; we do when the nested signature is looked at.
FOUND_LATER = {"nested_error"}

LINES = lines("decode.jsonl")


@pytest.mark.parametrize("line", [line for line in LINES if not line["ok"]], ids=line_id)
def test_payload_that_go_refuses_is_refused(line: dict[str, Any]) -> None:
    if line["name"] in FOUND_LATER:
        signature = decode_signature(payload(line))
        with pytest.raises(DecodeError):
            load_all(signature)
        return
    with pytest.raises(DecodeError):
        decode_signature(payload(line))
    with pytest.raises(DecodeError):
        decode_exact(payload(line))


def values_with_tokens() -> dict[str, Any]:
    """The values with numbers as text: those of Args and Headers stand exactly as in Go."""
    with (FOLDER / "decode.jsonl").open(encoding="utf-8") as file:
        found = [json.loads(text, parse_float=str, parse_int=str) for text in file]
    return {line["name"]: line.get("value") for line in found}


WITH_TOKENS = values_with_tokens()


@pytest.mark.parametrize("line", [line for line in LINES if line["ok"]], ids=line_id)
def test_payload_that_go_accepts_is_read_alike(line: dict[str, Any]) -> None:
    signature = decode_exact(payload(line))

    assert as_golden(signature) == expected(WITH_TOKENS[line["name"]])


@pytest.mark.parametrize("line", [line for line in LINES if line["ok"]], ids=line_id)
def test_both_decoders_agree_and_the_message_can_be_sent_again(line: dict[str, Any]) -> None:
    signature = decode_signature(payload(line))

    assert as_golden(signature).keys() == as_golden(decode_exact(payload(line))).keys()
    again = decode_signature(encode_signature(signature))
    # Raw values, of odd headers and unknown keys, cannot be compared.
    assert again.replace(extra={}, headers={}) == signature.replace(extra={}, headers={})
    assert list(again.headers) == sorted(signature.headers)


@pytest.mark.parametrize("line", [line for line in LINES if "eta_unix_ns" in line], ids=line_id)
def test_an_eta_is_the_same_moment_to_the_microsecond(line: dict[str, Any]) -> None:
    eta = decode_signature(payload(line)).eta

    assert eta is not None
    assert (eta - EPOCH) // dt.timedelta(microseconds=1) == line["eta_unix_ns"] // 1000


def test_moment_outside_pythons_range_becomes_the_nearest() -> None:
    first, last = (moment.replace(tzinfo=dt.UTC) for moment in (dt.datetime.min, dt.datetime.max))

    assert parse_time("0000-02-29T00:00:00Z") == first
    assert parse_time("0001-01-01T00:00:00+01:00") == first
    assert parse_time("9999-12-31T23:59:59.999999999-24:00") == last
    with pytest.raises(DecodeError):
        parse_time("0000-02-30T00:00:00Z")


def test_unknown_keys_are_kept_and_written_again() -> None:
    body = b'{"Name":"f","Trace":{"id": 1.50},"deadline":[1e400]}'

    written = encode_signature(decode_signature(body))

    assert written.endswith(b',"Trace":{"id": 1.50},"deadline":[1e400]}')
    assert encode_signature(decode_signature(written)) == written


def test_repeated_key_is_decoded_as_recorded_from_go() -> None:
    assert decode_signature(b'{"Headers":{"a":"1"},"Headers":{"b":"2"}}').headers == {
        "a": "1",
        "b": "2",
    }
    args = decode_signature(b'{"Args":[{"Type":"int64","Value":1}],"args":[{"Name":"x"}]}').args
    assert [(arg.name, arg.type, arg.value) for arg in args] == [("x", "int64", 1)]


def test_non_string_header_is_passed_on_but_refused_from_users() -> None:
    signature = decode_signature(b'{"Name":"f","Headers":{"n":1.50,"b":true,"s":"x"}}')

    assert signature.headers["s"] == "x"
    written = encode_signature(signature.with_headers(mine="1"))
    assert b'"Headers":{"b":true,"mine":"1","n":1.50,"s":"x"}' in written


NUMBERS = (
    "0", "-0", "1", "1.0", "1e2", "1E2", "1.5", "-1", "255", "256", "1e0", "0e0", "-0.0", "3.0",
    "2e-1", "12", "1.50", "[-0]", "18446744073709551615", "18446744073709551616",
    "-9223372036854775809",
    "[1,-0 ,2]", "[1e3]", "[1.0]", "[0]", "true",
    '"MQ=="', "null",
)  # fmt: skip
TYPES = (
    "int64", "int8", "uint8", "uint64", "uint", "float64", "float32", "string",
    "[]int64", "[]uint8", "[]byte", "[]uint64",
    "[]float64",
)  # fmt: skip
SEVEN = (Arg(type="int64", value=7),)
MESSAGES = {
    "plain": Signature[Any](name="f", uuid="u-00", args=SEVEN),
    "with options": Signature[Any](name="f", args=SEVEN, retry_count=3),
    "with a callback": Signature[Any](name="f", args=SEVEN, on_success=(Signature(name="g"),)),
    "long chain": Signature[Any](
        name="f", args=SEVEN, on_success=(Signature(name="g", uuid="x" * 20_000),)
    ),
}


def meaning(decode: Callable[[bytes], Signature[Any]], body: bytes) -> list[str]:
    try:
        signature = decode(body)
        values = [repr(to_python(arg.type, arg.value)) for arg in signature.args]
    except (ArgumentError, DecodeError) as error:
        return [type(error).__name__]
    return [*values, str(signature.priority), str(signature.retry_count)]


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("space", [b"", b" "])
def test_fast_and_exact_decoder_read_a_number_alike(kind: str, space: bytes) -> None:
    body = encode_signature(MESSAGES[kind])
    for token in NUMBERS:
        for key in (b'"Priority":', b'"RetryCount":', b'"GroupTaskCount":'):
            changed = re.sub(key + rb"\d", key + space + token.encode(), body, count=1)
            assert meaning(decode_signature, changed) == meaning(decode_exact, changed), (
                key,
                token,
            )
        for type_name in TYPES:
            changed = body.replace(
                b'"int64","Value":7',
                f'"{type_name}","Value":'.encode() + space + token.encode() + space,
                1,
            )
            assert meaning(decode_signature, changed) == meaning(decode_exact, changed), (
                type_name,
                token,
            )

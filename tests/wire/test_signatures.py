"""Messages that the real Go program wrote: read, written again, compared."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from typing import Any

import pytest

from machinery_py.errors import ArgumentError
from machinery_py.tasks.backoff import next_fibonacci
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.values.values import describe, describe_as
from machinery_py.wire import decode as wire_decode
from machinery_py.wire.signatures import LastEncoded, decode_signature, encode_signature
from machinery_py.wire.times import parse_time
from tests.wire.golden_files import FOLDER, line_id, lines

SIGNATURES = lines("signatures.jsonl")
KEYS = list(json.loads(SIGNATURES[0]["wire"]))

# Strings with <, > or & and floats differ in spelling (golden/README); our ETA: UTC, microseconds.
_SPELLED_OTHERWISE = re.compile(r'\\u|float|"json.Number|"ETA":"[^"]*(\.\d{7,9}Z|\d\d:\d\d)"|1\.5')


def comparable(message: Any) -> Any:
    """The message's meaning: null equals empty; moments and numbers compare by value."""
    if isinstance(message, list):
        return [comparable(item) for item in message]
    if not isinstance(message, dict) or "RoutingKey" not in message:
        return message
    result = dict(message)
    for golden in message["Args"] or ():
        if golden["Type"] == "float64":
            golden["Value"] = float(golden["Value"])  # Go writes 2.0 as 2
    for key in ("Args", "Headers", "OnSuccess", "OnError"):
        result[key] = comparable(message[key]) or None
    result["ChordCallback"] = comparable(message["ChordCallback"])
    result["ETA"] = message["ETA"] and parse_time(message["ETA"])
    return result


@pytest.mark.parametrize("line", SIGNATURES, ids=line_id)
def test_message_from_go_is_encoded_to_the_same_bytes(line: dict[str, Any]) -> None:
    written = encode_signature(decode_signature(line["wire"].encode()))

    assert list(json.loads(written)) == KEYS
    assert comparable(json.loads(written)) == comparable(json.loads(line["wire"]))


PLAIN = [line for line in SIGNATURES if not _SPELLED_OTHERWISE.search(line["wire"])]


@pytest.mark.parametrize("line", PLAIN, ids=line_id)
def test_plain_messages_are_the_same_to_the_byte(line: dict[str, Any]) -> None:
    wire = line["wire"].encode()

    assert with_our_empties(encode_signature(decode_signature(wire))) == with_our_empties(wire)


#: Messages that need the slow decoder.
SLOW = {
    "headers_values": "values that are no strings",
    "float64_extremes": "-0",
}


@pytest.mark.parametrize(
    "line", [line for line in SIGNATURES if line["name"] not in SLOW], ids=line_id
)
def test_fast_decoder_reads_gos_messages(
    line: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Both decoders read the same; only this shows it when messages take the slow one by accident.
    def refuse(body: bytes, **options: Any) -> Any:
        raise AssertionError(body)

    monkeypatch.setattr(wire_decode, "_decode_leniently", refuse)
    signature = decode_signature(line["wire"].encode())
    again = decode_signature(encode_signature(signature))

    assert again == signature
    assert list(again.on_success) == list(signature.on_success)


def with_our_empties(wire: bytes) -> bytes:
    wire = wire.replace(b'"Headers":null', b'"Headers":{}')
    return re.sub(rb'"(Args|OnSuccess|OnError)":\[\]', rb'"\1":null', wire)


def test_most_lines_are_compared_to_the_byte() -> None:
    assert len(PLAIN) > len(SIGNATURES) / 2


def arg(golden: dict[str, Any]) -> Arg:
    value = golden["Value"]
    if golden["Type"].startswith("float"):
        value = float(value)
    return Arg(name=golden["Name"], type=golden["Type"], value=value)


def rebuilt(message: dict[str, Any]) -> Signature[Any]:
    """The same signature made by hand, from plain Args."""
    return Signature(
        name=message["Name"],
        uuid=message["UUID"],
        routing_key=message["RoutingKey"],
        eta=parse_time(message["ETA"]) if message["ETA"] else None,
        group_uuid=message["GroupUUID"],
        group_task_count=message["GroupTaskCount"],
        args=tuple(map(arg, message["Args"] or ())),
        headers=message["Headers"] or {},
        priority=message["Priority"],
        immutable=message["Immutable"],
        retry_count=message["RetryCount"],
        retry_timeout=message["RetryTimeout"],
        on_success=tuple(map(rebuilt, message["OnSuccess"] or ())),
        on_error=tuple(map(rebuilt, message["OnError"] or ())),
        chord_callback=rebuilt(message["ChordCallback"]) if message["ChordCallback"] else None,
        broker_message_group_id=message["BrokerMessageGroupId"],
        sqs_receipt_handle=message["SQSReceiptHandle"],
        stop_task_deletion_on_error=message["StopTaskDeletionOnError"],
        ignore_when_task_not_registered=message["IgnoreWhenTaskNotRegistered"],
    )


#: What Go sends and we refuse to send, unless it came off the wire.
REFUSED = {
    "type_and_value_differ": "Go does not look; its workers fail the task, or wrap 300 to 44",
    "null_values": "no Go worker takes null for a string",
    "headers_values": "Go workers lose the task when they publish such headers on AMQP",
    "callback_result_types": "types that no worker takes as an argument",
    "periodic_task_full": "its OnError hands on a null as string",
}


@pytest.mark.parametrize("line", SIGNATURES, ids=line_id)
def test_the_same_signature_made_by_hand_is_written_the_same(line: dict[str, Any]) -> None:
    signature = rebuilt(json.loads(line["wire"]))

    if line["name"] in REFUSED:
        with pytest.raises(ArgumentError):
            encode_signature(signature)
        return
    assert comparable(json.loads(encode_signature(signature))) == comparable(
        json.loads(line["wire"])
    )


UNSENDABLE: dict[str, Any] = {
    "float64_nan": lambda: Signature.of("f", math.nan),
    "float64_inf": lambda: Signature.of("f", math.inf),
    "float64_minus_inf": lambda: Signature.of("f", -math.inf),
    "float_slice_nan": lambda: Signature.of("f", [1.0, math.nan]),
    "header_nan": lambda: Signature(name="f", headers={"h": math.nan}),
    # Python refuses these where the moment is made.
    "eta_year_10000": lambda: Signature(
        name="f", eta=dt.datetime(10000, 1, 1, tzinfo=dt.timezone.utc)
    ),
    "eta_year_minus_1": lambda: Signature(
        name="f", eta=dt.datetime(-1, 1, 1, tzinfo=dt.timezone.utc)
    ),
    "eta_offset_24h": lambda: Signature(
        name="f", eta=dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=24)))
    ),
    "complex": lambda: Signature.of("f", 1j),
    "func": lambda: Signature.of("f", len),
}


@pytest.mark.parametrize("line", lines("encode_errors.jsonl"), ids=line_id)
def test_value_that_go_cannot_send_is_refused(line: dict[str, Any]) -> None:
    refusal = ValueError if line["name"].startswith("eta_") else ArgumentError

    with pytest.raises(refusal):
        encode_signature(UNSENDABLE[line["name"]]())


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        [math.nan],
        2**64,
        -(2**63) - 1,
        "\ud800",
        ["\udfff"],
        {"a": math.nan},
        object(),
    ],
)
def test_hand_made_args_are_checked_before_encoding(value: Any) -> None:
    for type_name in ("float64", "int64", "string", "[]float64", "[]string", "json"):
        signature: Signature[Any] = Signature(
            name="add",
            args=(Arg(type="int64", value=1), Arg(type=type_name, value=value, name="b")),
        )

        with pytest.raises(ArgumentError, match=r"^add argument 'b': cannot send"):
            encode_signature(signature)


@pytest.mark.parametrize(
    "line", [line for line in lines("poison.jsonl") if line["kind"] == "argument"], ids=line_id
)
def test_value_that_kills_a_go_worker_is_not_sent(line: dict[str, Any]) -> None:
    value = json.loads(line["value"])

    with pytest.raises(ArgumentError):
        describe_as(line["type"], value)
    with pytest.raises(ArgumentError):
        encode_signature(Signature(name="f", args=(Arg(type=line["type"], value=value),)))
    assert describe(value)[0] in ("bool", "json")


@pytest.mark.parametrize(
    "line", [line for line in lines("poison.jsonl") if line["kind"] == "message"], ids=line_id
)
def test_a_null_among_the_callbacks_is_dropped_and_not_handed_on(line: dict[str, Any]) -> None:
    signature = decode_signature(line["payload"].encode())

    assert all(callback.name == "none" for callback in (*signature.on_success, *signature.on_error))
    written = json.loads(encode_signature(signature))
    assert None not in (written["OnSuccess"] or []) + (written["OnError"] or [])


def test_cron_specs_in_poison_are_none_of_ours() -> None:
    assert {line["kind"] for line in lines("poison.jsonl")} == {"argument", "message", "cron_spec"}


def test_the_fibonacci_delays_are_those_of_go() -> None:
    golden = json.loads((FOLDER / "fibonacci.json").read_text())

    assert [next_fibonacci(before) for before, _ in golden["next"]] == [
        after for _, after in golden["next"]
    ]
    for start, delays in golden["delays"].items():
        timeout = int(start)
        for delay in delays:
            timeout = next_fibonacci(timeout)
            assert timeout == delay
    for before, after in zip(golden["sequence"][1:], golden["sequence"][2:], strict=False):
        assert next_fibonacci(before) == after or after > 2**62


def test_last_encoded_notices_other_headers_and_signatures() -> None:
    one, other = Signature(name="one", headers={"a": "1"}), Signature(name="other")
    encoded = LastEncoded()

    asked = [(one, {"b": "2"}), (one, {"b": "2"}), (one, {"b": "3"}), (other, {"b": "3"})]

    for signature, headers in asked:
        body = encode_signature(signature.replace(headers=headers))
        assert encoded(signature, headers) == body
    assert encoded(other, {"b": "3"}) is encoded(other, {"b": "3"})

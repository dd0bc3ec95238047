"""Deep, large or hostile messages: decoding soon ends in a signature or DecodeError."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py.errors import ArgumentError, DecodeError
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.wire.depth import is_deep, levels
from machinery_py.wire.signatures import decode_exact, decode_signature, encode_signature
from machinery_py.wire.states import decode_group, decode_results, decode_state

R = TypeVar("R")


def chain(length: int) -> Signature[Any]:
    step = Signature[Any](name=f"step{length}", uuid=f"task_{length}")
    for number in range(length - 1, 0, -1):
        args = (Arg(type="int64", value=number), Arg(type="string", value='}]"{'))
        step = Signature(name=f"step{number}", uuid=f"task_{number}", args=args, on_success=(step,))
    return step


@pytest.mark.parametrize("length", [1, 2, 400, 460, 1000])
def test_a_chain_is_read_step_by_step_to_its_end(length: int) -> None:
    signature = decode_signature(encode_signature(chain(length)))

    for number in range(1, length + 1):
        assert signature.name == f"step{number}"
        if number % 100 == 1:
            signature = decode_signature(encode_signature(signature))  # as the next worker gets it
        if number < length:
            (signature,) = signature.on_success
    assert not signature.on_success


def test_a_chain_as_long_as_go_reads_is_read_and_sent_on() -> None:
    signature = decode_signature(encode_signature(chain(5000)))

    for number in (1, 2, 3):
        assert signature.name == f"step{number}"
        (following,) = signature.on_success
        signature = decode_signature(encode_signature(following))


def test_a_chain_of_a_thousand_is_decoded_in_milliseconds() -> None:
    body = encode_signature(chain(1000))

    started = time.thread_time()
    decode_signature(body)
    assert time.thread_time() - started < 0.5


def test_chain_is_decoded_in_a_thread_with_a_small_stack() -> None:
    body = encode_signature(chain(4900))
    found: list[str] = []
    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(
            target=lambda: found.append(decode_signature(body).on_success[0].name)
        )
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)

    assert found == ["step2"]


def test_encoder_refuses_more_signatures_than_go_reads() -> None:
    with pytest.raises(ArgumentError, match="holds 5001 signatures inside of each other"):
        encode_signature(chain(5001))


@pytest.mark.parametrize("bracket", ["[", "{", '{"a":', '[{"b":'])
@pytest.mark.parametrize(
    "key",
    [
        "Args",
        "OnSuccess",
        "OnError",
        "ChordCallback",
        "Headers",
        "Other",
        "Name",
        "ETA",
        "GroupTaskCount",
    ],
)
@pytest.mark.parametrize("closed", [True, False])
def test_a_hundred_thousand_levels_are_refused(key: str, bracket: str, closed: bool) -> None:
    end = {"[": "]", "{": "}", '{"a":': "}", '[{"b":': "}]"}[bracket] * 100_000 if closed else ""
    body = f'{{"{key}":{bracket * 100_000}{end}}}'.encode()

    with pytest.raises(DecodeError):
        decode_signature(body)


@pytest.fixture
def without_a_limit_of_python() -> Iterator[None]:
    """As on a Python whose own limit is nowhere near; run what is tested in `with_much_stack`."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(10**6)
    yield
    sys.setrecursionlimit(before)


def with_much_stack(call: Callable[[], R]) -> R:
    before = threading.stack_size(400 * 1024 * 1024)
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(call).result()
    finally:
        threading.stack_size(before)


@pytest.mark.usefixtures("without_a_limit_of_python")
@pytest.mark.parametrize(
    "decode", [decode_signature, decode_exact, decode_state, decode_group, decode_results]
)
@pytest.mark.parametrize(
    "key", ["OnSuccess", "OnError", "ChordCallback", "Args", "Headers", "Results", "Other"]
)
@pytest.mark.parametrize(("start", "end"), ["[]", ('{"a":', "}")])
def test_100000_levels_are_refused_at_any_recursion_limit(
    decode: Callable[[bytes], object], key: str, start: str, end: str
) -> None:
    body = f'{{"{key}":{start * 100_000}1{end * 100_000}}}'.encode()

    with pytest.raises(DecodeError):
        with_much_stack(lambda: decode(body))
    with pytest.raises(DecodeError):
        with_much_stack(lambda: decode(b"[" + body + b"]"))


def message_with(value: str, **changes: str) -> bytes:
    body = encode_signature(Signature.of("f", 1)).replace(
        b'"Type":"int64","Value":1', f'"Type":"json","Value":{value}'.encode()
    )
    for key, text in changes.items():
        body = body.replace(f'"{key}":null'.encode(), f'"{key}":{text}'.encode())
    return body


@pytest.mark.usefixtures("without_a_limit_of_python")
@pytest.mark.parametrize(("start", "end"), ["[]", ('{"a":', "}"), ('["]",{"\\\\\\"{":', "}]")])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"OnError": '[{"Name":"e"}]'},
        {"OnSuccess": '[{"OnSuccess":' * 120 + "null" + "}]" * 120},
    ],
)
def test_a_value_of_200_levels_is_read_and_one_of_201_is_not(
    start: str, end: str, changes: dict[str, str]
) -> None:
    each = 2 if "," in start else 1
    fits = message_with(start * (200 // each) + "1" + end * (200 // each), **changes)
    deeper = message_with("[" + start * (200 // each) + "1" + end * (200 // each) + "]", **changes)

    for decode in (decode_signature, decode_exact):
        assert encode_signature(decode(fits))  # and it can be sent on
        with pytest.raises(DecodeError):
            decode(deeper)
        with pytest.raises(DecodeError):
            decode(deeper.replace(b'"Name"', b'"name"', 1))


@pytest.mark.usefixtures("without_a_limit_of_python")
def test_a_result_of_200_levels_is_read_and_one_of_201_is_not() -> None:
    for count in (200, 201):
        value = "[" * count + "1" + "]" * count
        results = f'[{{"Type":"json","Value":{value}}}]'
        state = (
            f'{{"TaskUUID":"u","TaskName":"f","State":"SUCCESS","Results":{results},"Error":"",'
            '"CreatedAt":"2026-01-02T03:04:05Z","TTL":0}'
        )
        lenient = state.replace("TaskName", "taskname")
        for decode, body in (
            (decode_results, results),
            (decode_state, state),
            (decode_state, lenient),
        ):
            with contextlib.nullcontext() if count == 200 else pytest.raises(DecodeError):
                assert decode(body.encode())


def slow_levels(text: str) -> int:
    """The same, a character at a time."""
    deepest = now = 0
    inside = escaped = False
    for char in text:
        if inside:
            inside = escaped or char != '"'
            escaped = not escaped and char == "\\"
        elif char == '"':
            inside = True
        else:
            now += (char in "[{") - (char in "]}")
            deepest = max(deepest, now)
    return deepest


JSON = st.recursive(
    st.none() | st.integers() | st.text('[]{}"\\,: é', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text('[]{}"\\', max_size=4), inner, max_size=4)
    ),
    max_leaves=40,
)


@given(JSON, st.integers(0, 400), st.booleans())
def test_levels_are_counted_as_they_stand_outside_of_strings(
    value: Any, cut: int, spaced: bool
) -> None:
    text = json.dumps(value, indent=1 if spaced else None, ensure_ascii=False)

    assert levels(text.encode()) == slow_levels(text)
    assert levels(text[:cut].rstrip("\\").encode()) == slow_levels(text[:cut])


@given(st.integers(150, 260), st.integers(1, 3), st.sampled_from([0, 2, 3]), st.booleans())
def test_depth_of_a_message_is_that_of_its_deepest_value(
    count: int, repeats: int, around: int, wide: bool
) -> None:
    one = "[" * count + "]" * count
    text = f"[{','.join([one] * repeats + ['[{},[]]'] * 500 * wide)}]" + " " * 600

    assert is_deep(text.encode(), around) == (count + 1 > 200 + around)


@pytest.mark.slow
def test_levels_without_an_object_around_them_are_refused() -> None:
    for body in (b"[" * 100_000, b"{" * 100_000, b'{"a":' * 100_000, b"[" * 10_000_000):
        for decode in (decode_signature, decode_exact, decode_state, decode_group, decode_results):
            with pytest.raises(DecodeError):
                decode(body)


def test_unknown_keys_may_be_as_deep_as_go_allows() -> None:
    body = b'{"Name":"f","Other":' + b"[" * 9000 + b"]" * 9000 + b"}"

    assert encode_signature(decode_signature(body)).endswith(b"]" * 9000 + b"}")


def test_chord_callbacks_inside_of_each_other_have_an_end() -> None:
    body = b"{}"
    for _ in range(64):
        body = b'{"Name":"f","ChordCallback":' + body + b"}"

    signature = decode_signature(body)
    assert signature.chord_callback is not None
    with pytest.raises(DecodeError, match="64 chord callbacks"):
        decode_signature(b'{"ChordCallback":' + body + b"}")
    with pytest.raises(DecodeError):
        decode_signature(b'{"ChordCallback":' * 9_000 + b"{}" + b"}" * 9_000)


def test_ten_megabytes_are_read_and_written() -> None:
    text = "é" * 5_000_000
    signature = Signature.of("f", text, list(range(1000)))

    again = decode_signature(encode_signature(signature))

    assert again == signature
    lenient = decode_signature(encode_signature(signature).replace(b'"Name":"f"', b'"name":"f"', 1))
    assert lenient == signature


@pytest.mark.slow
def test_ten_megabytes_of_quotes_and_backslashes_end_soon() -> None:
    started = time.perf_counter()
    for junk in (
        b'"',
        b"\\",
        b'\\"',
        b'"\\',
        b'["',
        b"\\ud800",
        b"1",
        b"-",
        b" ",
        b"{}",
        b"\xff",
        b'"",',
    ):
        for around in (
            b'{"OnSuccess":[%s',
            b'{"OnSuccess":["%s"]}',
            b'{"Args":[%s]}',
            b'{"X":%s}',
            b"%s",
        ):
            with contextlib.suppress(DecodeError):
                decode_signature(around % (junk * (2_000_000 // len(junk))))
    assert time.perf_counter() - started < 60


WHOLE = encode_signature(
    Signature(
        name="f",
        uuid="u",
        args=(
            Arg(type="int64", value=1),
            Arg(type="json", value={"a": [None, 1.5, "é"]}, name="x"),
        ),
        headers={"a": "b"},
        on_success=(Signature(name="s"),),
        chord_callback=Signature(name="c"),
    )
)
FRAGMENTS = st.sampled_from(
    [
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b":",
        b'"',
        b"\\",
        b"null",
        b"true",
        b"-0",
        b"1e400",
        b"NaN",
        b"\xff",
        b"\\ud800",
        b" ",
    ]
    + [b'"%s":' % key.encode() for key in json.loads(WHOLE)]
    + [
        b'"Type"',
        b'"Value"',
        b'"int64"',
        b"9" * 5000,
        b"[null]",
        b'"2026-01-02T03:04:05Z"',
        b'"args"',
        b"\x00",
    ]
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good message with pieces cut out, put in, or doubled."""
    body = WHOLE
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(body)))
        end = draw(st.integers(start, min(len(body), start + 30)))
        middle = draw(st.one_of(FRAGMENTS, st.binary(max_size=4), st.just(body[start:end] * 2)))
        body = body[:start] + middle + body[end:]
    return body


def look_at_all(signature: Signature[Any], depth: int = 0) -> None:
    with contextlib.suppress(DecodeError):
        for callback in (*signature.on_success, *signature.on_error):
            if depth < 5:
                look_at_all(callback, depth + 1)


@given(st.one_of(damaged(), st.binary(max_size=60), st.lists(FRAGMENTS, max_size=25).map(b"".join)))
def test_any_bytes_give_a_signature_or_decode_error(body: bytes) -> None:
    for decode in (decode_signature, decode_exact):
        try:
            signature = decode(body)
        except DecodeError as error:
            assert str(error).startswith("no ")
            continue
        look_at_all(signature)
        assert decode_signature(encode_signature(signature)).name == signature.name


@given(st.one_of(damaged(), st.binary(max_size=60), st.lists(FRAGMENTS, max_size=25).map(b"".join)))
def test_any_bytes_give_a_record_or_decode_error(body: bytes) -> None:
    for decode in (decode_state, decode_group, decode_results):
        with contextlib.suppress(DecodeError):
            decode(body)


@pytest.mark.parametrize(
    "end", ["", ',"Priority":1,"Immutable":false,"RetryCount":0,"RetryTimeout":0']
)
def test_the_shortest_message_with_a_deep_value_is_refused(end: str) -> None:
    options = end or ',"Priority":0,"Immutable":false,"RetryCount":0,"RetryTimeout":0'
    whole = (
        '{"UUID":"","Name":"f","RoutingKey":"","ETA":null,"GroupUUID":"","GroupTaskCount":0,"Args":[{"Value":%s}],"Headers":null'
        f'{options},"OnSuccess":null,"OnError":null,"ChordCallback":null,"BrokerMessageGroupId":"","SQSReceiptHandle":"",'
        '"StopTaskDeletionOnError":false,"IgnoreWhenTaskNotRegistered":false}'
    )

    assert decode_signature((whole % ("[" * 200 + "]" * 200)).encode()).args
    with pytest.raises(DecodeError):
        decode_signature((whole % ("[" * 201 + "]" * 201)).encode())
    with pytest.raises(DecodeError):
        decode_signature(b'{"Args":[{"Value":%s}]}' % (b"[" * 201 + b"]" * 201))

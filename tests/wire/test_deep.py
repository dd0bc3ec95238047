"""Messages that are deep, large or hostile: decoding ends in a signature or in DecodeError, soon."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py.errors import ArgumentError, DecodeError
from machinery_py.signature import Arg, Signature
from machinery_py.wire import (
    decode_exact,
    decode_group,
    decode_results,
    decode_signature,
    decode_state,
    encode_signature,
)


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


def test_a_chain_is_decoded_in_a_thread_with_a_small_stack_as_well() -> None:
    body = encode_signature(chain(4900))
    found: list[str] = []
    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=lambda: found.append(decode_signature(body).on_success[0].name))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)

    assert found == ["step2"]


def test_more_signatures_than_go_reads_are_refused_by_the_encoder() -> None:
    with pytest.raises(ArgumentError, match="holds 5001 signatures inside of each other"):
        encode_signature(chain(5001))


@pytest.mark.parametrize("bracket", ["[", "{", '{"a":', '[{"b":'])
@pytest.mark.parametrize(
    "key", ["Args", "OnSuccess", "OnError", "ChordCallback", "Headers", "Other", "Name", "ETA", "GroupTaskCount"]
)
@pytest.mark.parametrize("closed", [True, False])
def test_a_hundred_thousand_levels_are_refused(key: str, bracket: str, closed: bool) -> None:
    end = {"[": "]", "{": "}", '{"a":': "}", '[{"b":': "}]"}[bracket] * 100_000 if closed else ""
    body = f'{{"{key}":{bracket * 100_000}{end}}}'.encode()

    with pytest.raises(DecodeError):
        decode_signature(body)


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


def test_ten_megabytes_of_quotes_and_backslashes_end_soon() -> None:
    started = time.perf_counter()
    for junk in (b'"', b"\\", b'\\"', b'"\\', b'["', b"\\ud800", b"1", b"-", b" ", b"{}", b"\xff", b'"",'):
        for around in (b'{"OnSuccess":[%s', b'{"OnSuccess":["%s"]}', b'{"Args":[%s]}', b'{"X":%s}', b"%s"):
            with contextlib.suppress(DecodeError):
                decode_signature(around % (junk * (2_000_000 // len(junk))))
    assert time.perf_counter() - started < 60


WHOLE = encode_signature(
    Signature(
        name="f",
        uuid="u",
        args=(Arg(type="int64", value=1), Arg(type="json", value={"a": [None, 1.5, "é"]}, name="x")),
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
    + [b'"Type"', b'"Value"', b'"int64"', b"9" * 5000, b"[null]", b'"2026-01-02T03:04:05Z"', b'"args"', b"\x00"]
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

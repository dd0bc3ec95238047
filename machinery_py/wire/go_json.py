"""Reading JSON as Go reads it, for what the fast decoder of wire/signatures.py does not take.

Keys in any case, repeated keys, unknown keys, bytes after the first value, broken UTF-8, half
surrogate pairs, numbers whose text matters, and messages nested so deep (Go reads 10,000 levels)
that a decoder which descends would fail. A message costs some 80 µs here. Nothing that Go or this
library writes needs it, except very long chains.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any

import msgspec

from machinery_py.errors import DecodeError
from machinery_py.values.json_values import MAX_DEPTH
from machinery_py.values.malformed import MALFORMED
from machinery_py.values.values import Number
from machinery_py.wire.depth import MAX_LEVELS, is_deep
from machinery_py.wire.times import parse_time

_INT64 = range(-(2**63), 2**63)
_UINT8 = range(256)

#: Is given a key and where its value begins; says where the value ends.
Member = Callable[[str, int], int]


def fold(key: str) -> str:
    """Return the key as Go compares it: in any case, and with the long s as an s."""
    return key.lower().replace("\u017f", "s")


def _replace_bytes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    # Go replaces each byte, Python each sequence.
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("machinery_go", _replace_bytes)

_HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
_HEX = "[0-9a-fA-F]{2}"
_ESCAPE = re.compile(
    rf"\\(?:(u[dD][89abAB]{_HEX}\\u[dD][c-fC-F]{_HEX})|(u[dD][89a-fA-F]{_HEX})|.)", re.DOTALL
)


def _text(body: bytes) -> str:
    text = body.decode("utf-8", "machinery_go")
    if _HALF_PAIR.search(text):
        text = _ESCAPE.sub(lambda match: "\\ufffd" if match.group(2) else match.group(), text)
    return text


_SPACE = re.compile(r"[ \t\n\r]*")
# Up to the next bracket outside a string; possessive, so that hostile text causes no backtracking.
_BRACKET = re.compile(
    r'[^"\[\]{}]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[\]{}]*+)*+([\[\]{}])', re.DOTALL
)


def _refuse_constant(token: str) -> Any:
    raise DecodeError(f"{token} is no JSON")


def _int(token: str) -> int | float:
    return Number(token) if token == "-0" or len(token) > 4000 else int(token)


def _float(token: str) -> float:
    number = float(token)
    return Number(token) if number in (float("inf"), float("-inf")) else number


_SHORT = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_int, parse_float=_float)
_EXACT = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=Number, parse_float=Number)
_checked = msgspec.json.Decoder(msgspec.Raw).decode


class GoJsonReader:
    """One message's text. Its methods take where something begins and return where it ends."""

    def __init__(self, body: bytes, *, exact: bool = False) -> None:
        self.text: str = _text(body)
        self._is_deep = is_deep(body, 0)
        self._decode = (_EXACT if exact else _SHORT).raw_decode

    def skip_space(self, at: int) -> int:
        match = _SPACE.match(self.text, at)
        return match.end() if match else at

    def value(self, at: int) -> tuple[Any, int]:
        """Return the JSON value that begins there, and where it ends."""
        if self._is_deep and self.text.startswith(("{", "["), at):
            self._end_of_brackets(at, MAX_DEPTH)
        try:
            return self._decode(self.text, at)
        except RecursionError:  # called with hardly any stack left
            raise DecodeError("exceeded max depth") from None
        except ValueError as error:
            raise self.wrong(at, getattr(error, "msg", str(error))) from None

    def wrong(self, at: int, why: str) -> DecodeError:
        return DecodeError(f"character {at}, {self.text[at : at + 20]!r}: {why}")

    def object(self, at: int, member: Member) -> int:
        """Give each member of the object that begins there to the function."""
        text, skip = self.text, self.skip_space
        at = skip(at + 1)
        if text.startswith("}", at):
            return at + 1
        while True:
            if not text.startswith('"', at):
                raise self.wrong(at, "expected a key")
            key, at = self.value(at)
            at = skip(at)
            if not text.startswith(":", at):
                raise self.wrong(at, "expected a colon")
            at = skip(member(key, skip(at + 1)))
            if text.startswith("}", at):
                return at + 1
            if not text.startswith(",", at):
                raise self.wrong(at, "expected a comma or the end of the object")
            at = skip(at + 1)

    def array(self, at: int, item: Callable[[int], int]) -> int:
        """Call the function with the beginning of each item; it returns where the item ends."""
        text, skip = self.text, self.skip_space
        at = skip(at + 1)
        if text.startswith("]", at):
            return at + 1
        while True:
            at = skip(item(at))
            if text.startswith("]", at):
                return at + 1
            if not text.startswith(",", at):
                raise self.wrong(at, "expected a comma or the end of the array")
            at = skip(at + 1)

    def raw(self, at: int) -> tuple[bytes, int]:
        """Return the bytes of the value that begins there, however deep, and where it ends.

        A value too deep for a decoder that descends has its grammar checked later, level by level.
        """
        if not self.text.startswith(("{", "["), at):
            end = self.value(at)[1]
            return self.text[at:end].encode(), end
        end = self._end_of_brackets(at, MAX_LEVELS - 1)
        raw = self.text[at:end].encode()
        if not is_deep(raw):
            try:
                _checked(raw)
            except MALFORMED:
                self.value(at)  # the stricter of the two may be wrong
        return raw, end

    def _end_of_brackets(self, at: int, limit: int) -> int:
        find, text = _BRACKET.match, self.text
        closing: list[str] = []
        while True:
            match = find(text, at)
            if match is None:
                raise DecodeError("unexpected end")
            at = match.end()
            bracket = match[1]
            if bracket == "{":
                closing.append("}")
            elif bracket == "[":
                closing.append("]")
            elif closing.pop() != bracket:
                raise self.wrong(at - 1, "the brackets do not match")
            elif not closing:
                return at
            if len(closing) > limit:
                raise DecodeError(f"nested deeper than {limit} levels")


#: Is given the text, where it begins, and what the same key gave before.
Field = Callable[[GoJsonReader, int, Any], tuple[Any, int]]


def _scalar(kind: type, what: str) -> Field:
    def read(reader: GoJsonReader, at: int, before: Any) -> tuple[Any, int]:
        value, end = reader.value(at)
        if value is None:
            return before, end  # Go: null changes nothing
        if type(value) is not kind:
            raise reader.wrong(at, f"expected {what}")
        return value, end

    return read


def _integer(allowed: range) -> Field:
    def read(reader: GoJsonReader, at: int, before: Any) -> tuple[Any, int]:
        value, end = reader.value(at)
        if value is None:
            return before, end
        token = reader.text[at:end]
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not token.lstrip("-").isdecimal()
        ):
            raise reader.wrong(at, "expected an integer")
        number = int(token) if len(token) < 30 else allowed.stop
        if number not in allowed or (token == "-0" and allowed is _UINT8):
            raise reader.wrong(
                at, f"expected an integer from {allowed.start} to {allowed.stop - 1}"
            )
        return number, end

    return read


def read_moment(reader: GoJsonReader, at: int, before: Any) -> tuple[Any, int]:
    value, end = reader.value(at)
    if value is None:
        return None, end
    if type(value) is not str:
        raise reader.wrong(at, "expected a time")
    # As it stands there: Go resolves no escapes in it.
    return parse_time(reader.text[at + 1 : end - 1]), end


def read_strings(reader: GoJsonReader, at: int, before: Any) -> tuple[Any, int]:
    value, end = reader.value(at)
    if value is None:
        return (), end
    if type(value) is not list or not all(item is None or type(item) is str for item in value):
        raise reader.wrong(at, "expected a list of strings")
    return tuple([item or "" for item in value]), end


def read_args(reader: GoJsonReader, at: int, before: Any) -> tuple[Any, int]:
    """Read args or results as (name, type, value).

    Go merges a repeated list into the earlier one.
    """
    if reader.text.startswith("null", at):
        return (), at + 4
    if not reader.text.startswith("[", at):
        raise reader.wrong(at, "expected a list of arguments")
    earlier = list(before or ())
    args: list[tuple[str, str, Any]] = []

    def item(at: int) -> int:
        fields: dict[str, Any] = (
            dict(zip(("name", "type", "value"), earlier[len(args)], strict=True))
            if len(args) < len(earlier)
            else {}
        )
        end = read_members(reader, at, ARG, fields, None)
        args.append((fields.get("name", ""), fields.get("type", ""), fields.get("value")))
        return end

    end = reader.array(at, item)
    return tuple(args), end


def _any(reader: GoJsonReader, at: int, before: Any) -> tuple[Any, int]:
    value, end = reader.value(at)
    if type(value) is float and repr(value) != (token := reader.text[at:end]):
        value = Number(token)  # for a list of unsigned numbers, of which Go takes the characters
    return value, end


def read_headers(reader: GoJsonReader, at: int, before: Any) -> tuple[Any, int]:
    """Read headers: strings, and other values as raw JSON, which is passed on unchanged."""
    if reader.text.startswith("null", at):
        return {}, at + 4
    if not reader.text.startswith("{", at):
        raise reader.wrong(at, "expected an object of headers")
    headers: dict[str, Any] = dict(before or {})  # Go merges a repeated key

    def member(key: str, at: int) -> int:
        value, end = reader.value(at)
        headers[key] = value if type(value) is str else msgspec.Raw(reader.text[at:end].encode())
        return end

    return headers, reader.object(at, member)


def _nested(bracket: str, what: str) -> Field:
    def read(reader: GoJsonReader, at: int, before: Any) -> tuple[Any, int]:
        raw, end = reader.raw(at)
        if raw == b"null":
            return b"", end
        if not reader.text.startswith(bracket, at):
            raise reader.wrong(at, f"expected {what}")
        return raw, end

    return read


TEXT = _scalar(str, "a string")
BOOL = _scalar(bool, "true or false")
INT = _integer(_INT64)
ARG: dict[str, tuple[str, Field]] = {
    "name": ("name", TEXT),
    "type": ("type", TEXT),
    "value": ("value", _any),
}
SIGNATURE: dict[str, tuple[str, Field]] = {
    "uuid": ("uuid", TEXT),
    "name": ("name", TEXT),
    "routingkey": ("routing_key", TEXT),
    "eta": ("eta", read_moment),
    "groupuuid": ("group_uuid", TEXT),
    "grouptaskcount": ("group_task_count", INT),
    "args": ("args", read_args),
    "headers": ("headers", read_headers),
    "priority": ("priority", _integer(_UINT8)),
    "immutable": ("immutable", BOOL),
    "retrycount": ("retry_count", INT),
    "retrytimeout": ("retry_timeout", INT),
    "onsuccess": ("on_success", _nested("[", "a list of signatures")),
    "onerror": ("on_error", _nested("[", "a list of signatures")),
    "chordcallback": ("chord_callback", _nested("{", "a signature")),
    "brokermessagegroupid": ("broker_message_group_id", TEXT),
    "sqsreceipthandle": ("sqs_receipt_handle", TEXT),
    "stoptaskdeletiononerror": ("stop_task_deletion_on_error", BOOL),
    "ignorewhentasknotregistered": ("ignore_when_task_not_registered", BOOL),
}
STATE: dict[str, tuple[str, Field]] = {
    "taskuuid": ("task_uuid", TEXT),
    "taskname": ("task_name", TEXT),
    "state": ("state", TEXT),
    "results": ("results", read_args),
    "error": ("error", TEXT),
    "createdat": ("created_at", read_moment),
    "ttl": ("ttl", INT),
}
GROUP: dict[str, tuple[str, Field]] = {
    "groupuuid": ("group_uuid", TEXT),
    "taskuuids": ("task_uuids", read_strings),
    "chordtriggered": ("chord_triggered", BOOL),
    "lock": ("lock", BOOL),
    "createdat": ("created_at", read_moment),
    "ttl": ("ttl", INT),
    "plan": ("plan", TEXT),
}


def read_members(
    reader: GoJsonReader,
    at: int,
    table: dict[str, tuple[str, Field]],
    fields: dict[str, Any],
    extra: dict[str, Any] | None,
) -> int:
    """Read the object (or null) that begins there into `fields`.

    Unknown keys go into `extra` as raw JSON.
    """
    if reader.text.startswith("null", at):
        return at + 4
    if not reader.text.startswith("{", at):
        raise reader.wrong(at, "expected an object")

    def member(key: str, at: int) -> int:
        known = table.get(fold(key))
        if known is None:
            raw, end = reader.raw(at)
            if extra is not None:
                extra[key] = msgspec.Raw(raw)
            return end
        name, read = known
        value, end = read(reader, at, fields.get(name))
        if value is not None:
            fields[name] = value
        else:
            fields.pop(name, None)
        return end

    return reader.object(at, member)


def read_record(
    body: bytes, table: dict[str, tuple[str, Field]], what: str, *, exact: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields that the first JSON value of the bytes sets, and its unknown keys.

    Raises:
        DecodeError: Go would not read it.
    """
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    try:
        reader = GoJsonReader(body, exact=exact)
        read_members(reader, reader.skip_space(0), table, fields, extra)
    except RecursionError:
        raise DecodeError(f"no {what}: exceeded max depth") from None
    except MALFORMED as error:
        raise DecodeError(f"no {what}: {error}") from None
    return fields, extra

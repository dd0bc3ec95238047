"""What can be sent, under which type, and that it comes back the same."""

from __future__ import annotations

import dataclasses
import datetime as dt
import decimal
import enum
import math
import socket
import typing
import uuid
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypedDict

import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py.errors import ArgumentError
from machinery_py.values.reading import converter
from machinery_py.values.values import (
    Number,
    describe,
    describe_as,
    from_result,
    result_of,
    to_python,
)


def over_the_wire(value: Any, hint: Any = None) -> Any:
    type_name, wire_value = describe(value, hint)
    return to_python(type_name, msgspec.json.decode(msgspec.json.encode(wire_value)))


INTS = st.integers(-(2**63), 2**64 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text()
PLAIN = st.one_of(st.none(), st.booleans(), INTS, FLOATS, TEXT)
# Python calls an ambiguous moment of a named zone unequal to the same moment in any other zone; it
# has a test of its own.
ZONES = st.integers(-1439, 1439).map(lambda minutes: dt.timezone(dt.timedelta(minutes=minutes)))
SPECIAL = st.one_of(
    st.binary(),
    st.datetimes(timezones=ZONES),
    st.dates(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.sets(INTS | TEXT),
    st.frozensets(st.dates()),
)
KEYS = st.one_of(TEXT, st.just("$"), st.just("v"))
JSON = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=15,
)
ANY = st.recursive(
    PLAIN | SPECIAL,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(INTS | st.dates() | st.uuids(), inner, max_size=3)
    ),
    max_leaves=15,
)


@given(JSON)
def test_every_json_value_comes_back_the_same(value: Any) -> None:
    assert over_the_wire(value) == value


@given(ANY)
def test_every_python_value_that_can_be_sent_comes_back_the_same(value: Any) -> None:
    back = over_the_wire(value)

    assert back == value
    assert type(back) is type(value)


@given(st.datetimes(timezones=st.timezones()))
def test_a_moment_of_a_named_zone_keeps_instant_and_offset(value: dt.datetime) -> None:
    assert over_the_wire(value).isoformat() == value.isoformat()


@given(st.one_of(*(st.lists(kind) for kind in (st.booleans(), INTS, FLOATS, TEXT))))
def test_lists_of_one_kind_keep_kind_and_order(value: list[Any]) -> None:
    back = over_the_wire(value)

    assert back == value
    assert list(map(type, back)) == list(map(type, value))


@given(ANY)
def test_value_sent_under_its_own_type_is_accepted(value: Any) -> None:
    type_name, wire_value = describe(value)

    assert describe_as(type_name, wire_value) == wire_value


class Color(enum.Enum):
    RED = "red"


class Word(enum.StrEnum):
    GO = "go"


class Level(enum.IntEnum):
    HIGH = 3


class Text(str):
    def __str__(self) -> str:
        return "something else"


@pytest.mark.parametrize(
    ("value", "type_name", "wire"),
    [
        (True, "bool", True),
        (1, "int64", 1),
        (2**63 - 1, "int64", 2**63 - 1),
        (2**63, "uint64", 2**63),
        (-(2**63), "int64", -(2**63)),
        (1.0, "float64", 1.0),
        ("é", "string", "é"),
        (b"\x01", "[]byte", b"\x01"),
        (bytearray(b"a"), "[]byte", b"a"),
        (memoryview(b"a"), "[]byte", b"a"),
        ([1, 2], "[]int64", [1, 2]),
        ((1, 2), "[]int64", [1, 2]),
        ([2**63, 1], "[]uint64", [2**63, 1]),
        ([2**63, -1], "json", [2**63, -1]),
        ([True, False], "[]bool", [True, False]),
        ([1.5], "[]float64", [1.5]),
        ([1, 2.5], "[]float64", [1.0, 2.5]),
        ([2**53 + 1, 2.5], "json", [2**53 + 1, 2.5]),
        (["a"], "[]string", ["a"]),
        ([True, 1], "json", [True, 1]),
        ([], "json", []),
        ([None], "json", [None]),
        ([[1]], "json", [[1]]),
        ({"a": 1}, "json", {"a": 1}),
        (None, "json", None),
        (Color.RED, "string", "red"),
        (Word.GO, "string", "go"),
        (Level.HIGH, "int64", 3),
        (Text("a"), "string", "a"),
        ([Level.HIGH, 1], "json", [3, 1]),
    ],
)
def test_value_is_sent_under_its_natural_type(value: Any, type_name: str, wire: Any) -> None:
    found = describe(value)

    assert found == (type_name, wire)
    assert type(found[1]) is type(wire)


@pytest.mark.parametrize(
    ("value", "hint", "type_name", "wire"),
    [
        ([], list[int], "[]int64", []),
        ([], list[float], "[]float64", []),
        ([], list[str] | None, "[]string", []),
        ((), tuple[bool, ...], "[]bool", []),
        ([1], list[float], "[]float64", [1.0]),
        ([2**63], list[int], "[]uint64", [2**63]),
        (["a"], list[int], "[]string", ["a"]),
        (None, list[int] | None, "json", None),
        (1, float, "float64", 1.0),
        (2**53 + 1, float, "int64", 2**53 + 1),
        (True, float, "bool", True),
        (5, Annotated[int, "int32"], "int32", 5),
        (5, Annotated[int, "how many"], "int64", 5),
        (5, Annotated[float, "float32"], "float32", 5.0),
        (None, Annotated[list[int], "[]int"], "[]int", None),
        (5, Annotated[int, []], "int64", 5),
        ({}, dict[str, int], "json", {}),
    ],
)
def test_an_annotation_decides_where_the_value_alone_does_not(
    value: Any, hint: Any, type_name: str, wire: Any
) -> None:
    found = describe(value, hint)

    assert found == (type_name, wire)
    assert type(found[1]) is type(wire)


def cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = {"a": value}
    return value


class Pair(enum.Enum):
    ONE = (1, 2)


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int


def nested_keys(count: int) -> Any:
    """Each level of it is three of JSON."""
    value: Any = 1
    for _ in range(count):
        value = {1: value}
    return value


@dataclasses.dataclass
class Ring:
    other: Any = None


def ring() -> Ring:
    first = Ring()
    first.other = first
    return first


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        2**64,
        -(2**63) - 1,
        10**5000,
        "\ud800",
        {"\udfff": 1},
        {"a": math.nan},
        [1, {"b": 2**64}],
        {2**64: 1},
        [1.0, -math.inf],
        dt.datetime(2026, 1, 1),
        object(),
        len,
        int,
        Color,
        Ring,
        1j,
        (number for number in [1]),
        cyclic(),
        ring(),
        deep(300),
        deep(100_000),
        {"a": {1, object()}},
        {(1, 2): "a"},
        {"a": [{("x",): 1}]},
        {(1, 2), (3, 4)},
        frozenset({(1,)}),
        {Pair.ONE: 1},
        {Frozen(1): 1},
        {frozenset({(1,)}): 1},
        nested_keys(67),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unsendable_value_is_refused_without_its_address(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^cannot send ") as caught:
        describe(value)

    assert " at 0x" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_refusal_names_the_key_that_would_return_as_a_list() -> None:
    with pytest.raises(ArgumentError) as caught:
        describe({(1, 2): "a"})

    text = (
        "cannot send (1, 2) as a key of a dict or an item of a set: "
        "it would come back as a list (send a list of pairs)"
    )
    assert str(caught.value) == text


@pytest.mark.parametrize(
    "value",
    [deep(199), nested_keys(66), {frozenset({1}): {b"x", None}}],
    ids=["deep", "keys", "frozen"],
)
def test_value_just_inside_the_limits_comes_back_the_same(value: Any) -> None:
    assert over_the_wire(value) == value


def test_refusal_names_the_alternative() -> None:
    with socket.socket() as thing, pytest.raises(ArgumentError) as caught:
        describe(thing)

    assert str(caught.value) == "cannot send <socket> (send an id and load it in the task)"


@pytest.mark.parametrize(
    ("type_name", "value"),
    [
        ("int8", 128),
        ("uint8", -1),
        ("int64", 2**63),
        ("int64", 1.0),
        ("int64", True),
        ("bool", 1),
        ("string", 1),
        ("float32", 1e39),
        ("float64", math.nan),
        ("float64", 2**60),
        ("[]int64", "ab"),
        ("[]int64", {}),
        ("[]int8", [1, 300]),
        ("[]string", [None]),
        ("[]float64", [math.inf]),
        ("[]byte", 5),
        ("[]byte", "no base64"),
        ("[]byte", [256]),
        ("json", {1}),
        ("nonsense", 1),
        ("INT64", 1),
        ("", None),
    ],
)
def test_an_explicit_type_is_held_to(type_name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^(cannot send|illegal base64)"):
        describe_as(type_name, value)


def test_an_unknown_type_names_the_known_ones() -> None:
    with pytest.raises(
        ArgumentError, match=r"unknown type \(known: bool, string, .*int64.*\[\]byte"
    ):
        describe_as("integer", 1)


@pytest.mark.parametrize(
    ("type_name", "value", "wire"),
    [
        ("[]byte", "AQI=", b"\x01\x02"),
        ("[]uint8", [1, 2], b"\x01\x02"),
        ("[]int", (1,), [1]),
        ("float64", 1, 1.0),
    ],
)
def test_explicit_type_accepts_values_that_fit(type_name: str, value: Any, wire: Any) -> None:
    assert describe_as(type_name, value) == wire


def test_a_number_keeps_its_text() -> None:
    with pytest.raises(ArgumentError, match=r"^1\.50 is not string$"):
        to_python("string", Number("1.50"))
    assert math.copysign(1, to_python("float64", Number("-0"))) == -1
    assert to_python("int64", Number("12")) == 12


@pytest.mark.parametrize("digits", [30, 5000])
def test_an_integer_of_many_digits_is_out_of_range(digits: int) -> None:
    with pytest.raises(ArgumentError, match="value out of range"):
        to_python("int64", Number("9" * digits))


def test_an_error_text_does_not_repeat_megabytes() -> None:
    with pytest.raises(ArgumentError) as caught:
        to_python("int64", "x" * 1_000_000)

    assert len(str(caught.value)) < 2000


@pytest.mark.slow
@given(
    st.recursive(
        PLAIN,
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["$", "v", "a"]), inner),
    )
)
def test_any_json_under_any_type_is_converted_or_refused(value: Any) -> None:
    for type_name in (
        "py",
        "int8",
        "[]byte",
        "[]uint64",
        "[]string",
        "float32",
        "bool",
        "string",
        "nonsense",
    ):
        try:
            to_python(type_name, value)
        except ArgumentError:
            from_result(type_name, value)


TAGS: list[Any] = [
    "datetime",
    "date",
    "timedelta",
    "decimal",
    "uuid",
    "bytes",
    "set",
    "dict",
    "new",
    None,
    [],
]


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("value", [None, 1, "x", [], [[1]], {"a": 1}, [[[1], 2]], ["x", "y"]])
def test_a_tag_that_cannot_be_resolved_is_an_argument_error(tag: Any, value: Any) -> None:
    try:
        to_python("py", {"$": tag, "v": value})
    except ArgumentError as error:
        assert "py value" in str(error) or "base64" in str(error)


class Point(NamedTuple):
    x: int
    y: int


@pytest.mark.parametrize(
    ("returned", "results"),
    [
        (None, ()),
        ((), ()),
        (1, (("int64", 1),)),
        ((1, "a"), (("int64", 1), ("string", "a"))),
        ((1, None), (("int64", 1), ("json", None))),
        ([1, 2], (("[]int64", [1, 2]),)),
        (b"a", (("[]uint8", b"a"),)),
        ((b"a", b""), (("[]uint8", b"a"), ("[]uint8", b""))),
        (Point(1, 2), (("[]int64", [1, 2]),)),
    ],
)
def test_a_tuple_is_several_results_and_none_is_none(returned: Any, results: Any) -> None:
    assert result_of(returned) == results


def test_result_of_another_type_than_declared_is_read_as_stored() -> None:
    assert from_result("main.S", {"A": 1}) == {"A": 1}
    assert from_result("int64", "x") == "x"
    assert from_result("[]string", None) == []
    assert from_result("[]uint8", "aGk=") == b"hi"


@dataclasses.dataclass
class Address:
    street: str
    since: dt.date | None = None
    tags: set[str] = dataclasses.field(default_factory=set)


class Order(msgspec.Struct):
    id: uuid.UUID
    total: decimal.Decimal
    raw: bytes = b""
    address: Address | None = None


class Options(TypedDict):
    depth: int


class Model(pydantic.BaseModel):
    a: int


class Proto(typing.Protocol):
    def run(self) -> None: ...


ADDRESS = Address("Main", since=dt.date(2026, 1, 2), tags={"a"})


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (ADDRESS, Address),
        (Address("x"), Address),
        ([ADDRESS], list[Address]),
        ({"home": ADDRESS}, dict[str, Address]),
        (Order(uuid.UUID(int=1), decimal.Decimal("1.50"), b"\xff", ADDRESS), Order),
        (Order(uuid.UUID(int=1), decimal.Decimal("1.50")), Order | None),
        (Point(1, 2), Point),
        (Color.RED, Color),
        (Level.HIGH, Level),
        ({"depth": 1}, Options),
        ((1, "a"), tuple[int, str]),
        ({1, 2}, set[int]),
        (frozenset("a"), frozenset[str] | None),
        (None, Order | None),
        (dt.datetime(2026, 1, 1, tzinfo=dt.UTC), dt.datetime),
        (dt.timedelta(days=1, microseconds=1), dt.timedelta),
        ({1: "a"}, dict[int, str]),
        (Model(a=1), Model),
        ([Model(a=1), Model(a=2)], list[Model]),
        ([1, 2], list[float]),
        ("a", typing.Literal["a", "b"]),
    ],
)
def test_annotated_parameter_gets_the_sent_value(value: Any, annotation: Any) -> None:
    convert = converter(annotation)

    assert convert is not None
    back = convert(over_the_wire(value, annotation))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "annotation",
    [int, str, bool, bytes, Any, None, object, list, dict, list[int], list[str] | None,
     int | None, dict[str, Any],
     "Later", Annotated[int, "int32"], typing.TypeVar("T"), int | str | None],
)  # fmt: skip
def test_argument_of_its_own_type_is_not_converted(annotation: Any) -> None:
    assert converter(annotation) is None


@pytest.mark.parametrize("annotation", [Callable[[], None], Proto, int | Proto | Model])
def test_an_annotation_that_json_does_not_know_changes_nothing(annotation: Any) -> None:
    convert = converter(annotation)

    assert convert is None or convert(len) is len


def test_an_int_for_a_float_becomes_one() -> None:
    convert = converter(float)

    assert convert is not None
    assert repr(convert(2)) == "2.0"
    for wrong in ("x", None, [1.5]):
        with pytest.raises(ArgumentError, match="is no float"):
            convert(wrong)


@pytest.mark.parametrize(
    ("annotation", "value", "text"),
    [
        (Address, {"street": 5}, r"is no Address: expected `str`, got `int` - at `\$.street`"),
        (list[Address], [{}], r"missing required field `street` - at `\$\[0\]`"),
        (Color, "blue", "invalid enum value 'blue'"),
        (dt.datetime, "tomorrow", "is no datetime: invalid"),
        (Model, {}, r"(?s)is no Model: ValidationError: .*a\n +Field required"),
        (socket.socket, 5, "is no socket: expected socket, got int"),
    ],
)
def test_value_that_does_not_fit_is_an_argument_error_with_path(
    annotation: Any, value: Any, text: str
) -> None:
    convert = converter(annotation)

    assert convert is not None
    with pytest.raises(ArgumentError, match=text):
        convert(value)

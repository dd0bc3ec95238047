"""Values of annotated parameters: each comes to its task as it was sent, or `send` refuses it."""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import ipaddress
import pathlib
import re
import typing
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar

import attrs
import msgspec
import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, SecretBytes, SecretStr
from pydantic.alias_generators import to_camel

from machinery_py import ArgumentError, Config, Server, Signature, chain, chord, group
from machinery_py.errors import TaskFailed
from machinery_py.registry.calls import Call
from machinery_py.registry.unique_keys import unique_key
from machinery_py.values.unchanged import unchanged
from machinery_py.wire.signatures import decode_signature, encode_signature

HANG = 30.0

# Enums


class Color(enum.Enum):
    RED = "red"


class Pair(enum.Enum):
    ONE = (1, 2)
    TWO = (2, 3)


class Price(enum.Enum):
    LOW = decimal.Decimal("1.5")
    DAY = dt.date(2026, 1, 1)


class Mode(enum.IntFlag):
    READ = 1
    WRITE = 2


class Word(enum.StrEnum):
    GO = "go"


# Dataclasses, Structs, attrs

T = TypeVar("T")


@dataclasses.dataclass
class Cat:
    name: str
    lives: int = 9


@dataclasses.dataclass
class Dog:
    name: str
    owner: str = "x"


@dataclasses.dataclass
class Cow:
    """Like a Cat, field by field."""

    name: str
    lives: int = 9


@dataclasses.dataclass
class Kitten(Cat):
    age: int = 0


@dataclasses.dataclass
class Home:
    pet: Cat | Dog
    at: dt.time
    path: pathlib.Path
    address: ipaddress.IPv4Address
    raw: bytes
    prices: dict[decimal.Decimal, int]
    pair: Pair
    tags: set[str]
    pets: list[Cat | Dog] = dataclasses.field(default_factory=list)
    password: SecretStr | None = None


@dataclasses.dataclass
class Late:
    x: int
    y: int = dataclasses.field(init=False, default=3)


@dataclasses.dataclass
class Box(Generic[T]):
    item: T


@dataclasses.dataclass
class Node:
    value: int
    next: Node | None = None
    path: pathlib.Path | None = None


@dataclasses.dataclass(eq=False)
class Unequal:
    path: pathlib.Path


@attrs.define
class Attrs:
    x: int
    _hidden: int = 2
    path: pathlib.Path | None = None


class First(msgspec.Struct):
    x: int


class Second(msgspec.Struct):
    y: int
    x: int = 0


class Tagged(msgspec.Struct, tag=True):
    x: int
    path: pathlib.Path = pathlib.Path("a")


class Row(msgspec.Struct, array_like=True, tag="row"):
    x: int
    path: pathlib.Path


class Renamed(msgspec.Struct, rename="camel"):
    user_id: int
    some_path: pathlib.Path = pathlib.Path("a")


class Point(NamedTuple):
    x: int
    path: pathlib.Path


class Options(TypedDict, total=False):
    depth: typing.Required[int]
    path: pathlib.Path


UserId = NewType("UserId", int)
Folder = NewType("Folder", pathlib.Path)


# Pydantic


class Base(BaseModel):
    a: int


class Sub(Base):
    b: int = 3


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)
    user_id: int


class Paths(BaseModel):
    a: int = Field(validation_alias="aa")
    b: int = Field(serialization_alias="bb", validation_alias=pydantic.AliasPath("x", 0))


class Swapped(BaseModel):
    a: int = Field(alias="b")
    b: int = Field(alias="a")


class Login(BaseModel):
    password: SecretStr
    key: SecretBytes = SecretBytes(b"\xff")


class Meow(BaseModel):
    kind: Literal["cat"] = "cat"


class Woof(BaseModel):
    kind: Literal["dog"] = "dog"


class One(BaseModel):
    n: int = 1


class Other(BaseModel):
    n: int = 1


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    id: uuid.UUID
    color: Color
    pair: tuple[int, int]
    day: dt.date
    numbers: set[int]


class StrictBytes(BaseModel):
    model_config = ConfigDict(strict=True)
    id: uuid.UUID
    raw: bytes


class Square(BaseModel):
    model_config = ConfigDict(extra="forbid")
    side: int

    @pydantic.computed_field  # type: ignore[prop-decorator]  # pydantic's way
    @property
    def area(self) -> int:
        return self.side**2


class Hidden(BaseModel):
    a: int
    b: int = Field(5, exclude=True)


class Private(BaseModel):
    a: int
    _b: int = pydantic.PrivateAttr(3)


class Extra(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class Naive(BaseModel):
    at: dt.datetime
    tags: set[str]


class Blob(BaseModel):
    raw: bytes


class Rooted(pydantic.RootModel[list[Base]]): ...


class Generic1(BaseModel, Generic[T]):
    item: T


class Web(BaseModel):
    url: pydantic.HttpUrl
    pattern: re.Pattern[str]


class Shout(BaseModel):
    """Whoever makes one of its own JSON gets another."""

    text: str

    @pydantic.field_validator("text")
    @classmethod
    def louder(cls, text: str) -> str:
        return text + "!"


@pydantic.dataclasses.dataclass
class Made:
    x: int
    path: pathlib.Path


PETS = Annotated[Meow | Woof, Field(discriminator="kind")]
ONE = uuid.UUID(int=1)
DAY = dt.date(2026, 1, 2)
MOMENT = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
D = decimal.Decimal
A = pathlib.Path("a")
HOME = Home(
    Dog("d"),
    dt.time(10, 30, tzinfo=dt.UTC),
    pathlib.Path("/x"),
    ipaddress.IPv4Address("10.0.0.1"),
    b"\xff",
    {D("1.5"): 1},
    Pair.ONE,
    {"a", "b"},
    [Cat("c"), Dog("d")],
    SecretStr("hunter2"),
)


def call_of(hint: Any, **settings: Any) -> Call:
    def function(x: Any) -> Any: ...

    function.__annotations__ = {"x": hint, "return": hint}
    return Call("task", function, **settings)


def arrived(call: Call, value: Any) -> Any:
    """Return what the task gets, after a journey over the wire."""
    sent = Signature[Any](name="task", args=call.arguments((value,), {}))
    return call.values(decode_signature(encode_signature(sent)).args)[0][0]


def returned(call: Call, value: Any) -> Any:
    """Return what `get` gives of a result."""
    stored = Signature[Any](name="task", args=call.results(value))
    values = Call("read", lambda *args: None).values(
        decode_signature(encode_signature(stored)).args
    )[0]
    return call.result(tuple(values) if type(value) is tuple else values[0])


TRAVELS: list[tuple[Any, Any]] = [
    (Color, Color.RED),
    (Color | None, Color.RED),
    (Pair, Pair.TWO),
    (list[Pair], [Pair.ONE]),
    (Price, Price.LOW),
    (Price, Price.DAY),
    (Mode, Mode.READ | Mode.WRITE),
    (Word, Word.GO),
    (Color | str, "red"),
    (Literal[Color.RED], Color.RED),
    (Cat | Dog, Cat("a")),
    (Cat | Dog | None, Dog("a")),
    (list[Cat | Dog], [Cat("a"), Dog("b")]),
    (dict[str, Cat | Dog], {"a": Dog("x")}),
    (Home, HOME),
    (Late, Late(1)),
    (Box[int], Box(1)),
    (Box[Cat | Dog], Box(Dog("a"))),
    (Box[pathlib.Path], Box(A)),
    (Node, Node(1, Node(2, None, A))),
    (Attrs, Attrs(1, 3, A)),
    (First | Second, First(1)),
    (First | Second, Second(1, 2)),
    (Tagged, Tagged(1)),
    (Row, Row(1, A)),
    (Renamed, Renamed(1)),
    (Point, Point(1, A)),
    (list[Point], [Point(1, A)]),
    (Options, {"depth": 1, "path": A}),
    (Options, {"depth": 1}),
    (UserId, 5),
    (Folder, A),
    (dt.time, dt.time(1, 2, 3, 4)),
    (pathlib.Path, A),
    (pathlib.PurePosixPath, pathlib.PurePosixPath("a")),
    (pathlib.PureWindowsPath, pathlib.PureWindowsPath("a\\b")),
    (pathlib.Path | str, "a"),
    (pathlib.Path | str, A),
    (ipaddress.IPv6Network, ipaddress.ip_network("::/8")),
    (ipaddress.IPv4Interface, ipaddress.ip_interface("1.2.3.4/8")),
    (ipaddress.IPv4Address | ipaddress.IPv6Address, ipaddress.ip_address("::1")),
    (dict[D, int], {D("1.50"): 2}),
    (dict[uuid.UUID, int], {ONE: 1}),
    (dict[dt.date, Cat], {DAY: Cat("a")}),
    (dict[pathlib.Path, int], {A: 1}),
    (dict[int, str], {1: "a"}),
    (dict[Color, int], {Color.RED: 1}),
    (collections.deque[int], collections.deque([1, 2], 5)),
    (collections.OrderedDict[str, int], collections.OrderedDict(a=1)),
    (collections.Counter[str], collections.Counter("aab")),
    (collections.Counter, collections.Counter("aab")),
    (dict[str], {"a": 1}),  # type: ignore[type-arg]
    (frozenset[int], frozenset({1})),
    (set[pathlib.Path], {A}),
    (tuple[int, pathlib.Path], (1, A)),
    (tuple[pathlib.Path, ...], (A, A)),
    (D | str, "1.5"),
    (D | str, D("1.5")),
    (dt.date | dt.datetime, DAY),
    (dt.date | dt.datetime, MOMENT),
    (dt.date | str, "2026-01-02"),
    (list[int] | set[int], {1}),
    (list[int] | set[int], [1]),
    (tuple[int, int] | list[str], (1, 2)),
    (bytes | str, b"a"),
    (bytes | str, "YQ=="),
    (int | Cat, 5),
    (Literal["a", 1] | Cat, "a"),
    (Iterable[Cat], [Cat("a")]),
    (Mapping[str, Cat], {"a": Cat("b")}),
    (Sequence[Cat | Dog], [Cat("a")]),
    (bytearray, bytearray(b"a")),
    (Any, A),
    (Any, collections.deque([1])),
    (Any, dt.time(1)),
    (np.float32, np.float32(1.5)),
    (np.int64, np.int64(5)),
    (Base, Base(a=1)),
    (list[Base], [Base(a=1)]),
    (dict[str, Base], {"a": Base(a=1)}),
    (tuple[Base, ...], (Base(a=1),)),
    (tuple[Base, Meow], (Base(a=1), Meow())),
    (Camel, Camel(userId=1)),
    (list[Camel], [Camel(userId=1)]),
    (Paths, Paths(aa=1, x=[2])),  # type: ignore[call-arg]  # the aliases
    (Swapped, Swapped(b=1, a=2)),
    (Login, Login(password=SecretStr("hunter2"))),
    (Login | int, Login(password=SecretStr("hunter2"))),
    (list[Login], [Login(password=SecretStr("hunter2"))]),
    (SecretStr, SecretStr("hunter2")),
    (Meow | Woof, Woof()),
    (PETS, Woof()),
    (list[PETS], [Woof(), Meow()]),
    (Meow | Cat, Cat("a")),
    (Meow | First, First(1)),
    (Strict, Strict(id=ONE, color=Color.RED, pair=(1, 2), day=DAY, numbers={1})),
    (StrictBytes, StrictBytes(id=ONE, raw=b"\xff")),
    (Square, Square(side=2)),
    (Hidden, Hidden(a=1)),
    (Private, Private(a=1)),
    (Extra, Extra(a=1, z=[1])),  # type: ignore[call-arg]  # extra="allow"
    (Naive, Naive(at=dt.datetime(2026, 1, 2), tags={"a"})),
    (Blob, Blob(raw=b"\xff")),
    (Blob | None, Blob(raw=b"a")),
    (Rooted, Rooted([Base(a=1)])),
    (Generic1[int], Generic1[int](item=1)),
    (Generic1[Base], Generic1[Base](item=Base(a=1))),
    (Web, Web(url=pydantic.HttpUrl("http://a.b/c"), pattern=re.compile("a"))),
    (pydantic.HttpUrl, pydantic.HttpUrl("http://a.b/c")),
    (Made, Made(1, A)),
]


def named(value: object) -> str:
    """Return an id that is the same in each process: no order of a set, no place in memory."""
    if isinstance(value, str):
        return value
    return value.__name__ if isinstance(value, type) else type(value).__name__


@pytest.mark.parametrize(("hint", "value"), TRAVELS, ids=named)
def test_argument_and_result_come_as_they_were_sent(hint: Any, value: Any) -> None:
    call = call_of(hint)

    for got in (arrived(call, value), returned(call, value)):
        assert type(got) is type(value)
        assert got == value


def test_object_without_equality_comes_with_its_fields() -> None:
    got = arrived(call_of(Unequal), Unequal(A))

    assert type(got) is Unequal
    assert got.path == A


private = Private(a=1)
private._b = 4
REFUSED: list[tuple[Any, Any, str]] = [
    (Cat | Cow, Cow("a"), "it could be Cat and Cow"),
    (One | Other, Other(), "it could be One and Other"),
    (Cat, Kitten("a"), "cannot send <Kitten> as Cat: it would arrive as <Cat>"),
    (Cat, Cow("a"), "cannot send <Cow> as Cat"),
    (Base, Sub(a=1), "cannot send <Sub> as Base"),
    (list[Base], [Sub(a=1)], "it would arrive as"),
    (str, Color.RED, "cannot send <Color> as str: it would arrive as 'red'"),
    (Color | str, Color.RED, "it would arrive as 'red'"),
    (dict[str, Any] | Cat, Cat("a"), "it would arrive as"),
    (Box[Any], Box(Cat("a")), "it would arrive as <Box>"),
    (Options, {"path": A}, "missing required field `depth`"),
    (Options, {"depth": 1, "more": 2}, "it would arrive as"),
    (dict[tuple[int, int], int], {(1, 2): 3}, "send a list of pairs"),
    (dict[Pair, int], {Pair.ONE: 1}, "send a list of pairs"),
    (collections.defaultdict[str, int], collections.defaultdict(int), "expected defaultdict"),
    (Any, 1j, "cannot send <complex>"),
    (Any, range(3), "cannot send <range>"),
    (Any, re.compile("a"), "cannot send <Pattern>"),
    (type[int], int, "cannot send <type>"),
    (dt.datetime, dt.datetime(2026, 1, 2), "it has no time zone"),
    (Any, np.zeros(2), "use its tolist"),
    (list[float], np.zeros(2), "use its tolist"),
    (Any, np.array(5), "cannot send <ndarray>"),
    (Any, np.datetime64("2026-01-02"), "cannot send <datetime64>"),
    (Any, np.longdouble(1), "cannot send <longdouble>"),
    (Any, np.float64("nan"), "no nan"),
    (Hidden, Hidden(a=1, b=6), "does not make an equal one of its own JSON"),
    (Private, private, "does not make an equal one of its own JSON"),
    (Shout, Shout(text="a"), "does not make an equal one of its own JSON"),
    (Any, Login(password=SecretStr("hunter2")), "it is a secret"),
    (Any, [{"a": SecretStr("hunter2")}], "it is a secret"),
    (dict, {"a": Login(password=SecretStr("hunter2"))}, "it is a secret"),
    (Base, Login(password=SecretStr("hunter2")), "is no Base"),
]


@pytest.mark.parametrize(("hint", "value", "text"), REFUSED, ids=named)
def test_what_would_not_come_as_it_is_is_refused(hint: Any, value: Any, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        arrived(call_of(hint), value)

    assert text in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("hint", "value", "got"),
    [
        (Any, Cat("a"), {"name": "a", "lives": 9}),
        (Any, Base(a=1), {"a": 1}),
        (Any, Camel(userId=1), {"user_id": 1}),
        (Any, (1, 2), [1, 2]),
        (Any, Color.RED, "red"),
        (str, Word.GO, "go"),
        (int, np.int64(3), 3),
        (float, np.float32(1.5), 1.5),
        (bool, np.bool_(True), True),
        (Any, {"mean": np.float64(1.5), "n": [np.uint8(2)]}, {"mean": 1.5, "n": [2]}),
        (list[float], [np.float32(1)], [1.0]),
        (bytes, bytearray(b"a"), b"a"),
        (pathlib.Path, "a", A),
        (Cat, {"name": "a"}, Cat("a")),
        (Base, {"a": 1}, Base(a=1)),
        (Camel, {"userId": 1}, Camel(userId=1)),
        (Meow | Woof, {"kind": "dog"}, Woof()),
    ],
    ids=named,
)
def test_documented_conversions(hint: Any, value: Any, got: Any) -> None:
    found = arrived(call_of(hint), value)

    assert found == got
    assert type(found) is type(got)


# Any type with any value of it


SCALARS: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (int, st.integers(-(2**63), 2**64 - 1)),
    (bool, st.booleans()),
    (str, st.text(max_size=3)),
    (bytes, st.binary(max_size=3)),
    (float, st.floats(allow_nan=False, allow_infinity=False)),
    (D, st.decimals(allow_nan=False)),
    (dt.date, st.dates()),
    (dt.time, st.times()),
    (dt.timedelta, st.timedeltas()),
    (dt.datetime, st.datetimes(timezones=st.just(dt.UTC))),
    (uuid.UUID, st.uuids()),
    (pathlib.PurePosixPath, st.sampled_from("abc").map(pathlib.PurePosixPath)),
    (ipaddress.IPv4Address, st.ip_addresses(v=4)),
    (Color, st.sampled_from(Color)),
    (Pair, st.sampled_from(Pair)),
    (Word, st.sampled_from(Word)),
    (Cat, st.builds(Cat, st.text(max_size=2), st.integers(0, 9))),
    (Dog, st.builds(Dog, st.text(max_size=2), st.text(max_size=2))),
    (Cow, st.builds(Cow, st.text(max_size=2), st.integers(0, 9))),
    (First, st.builds(First, st.integers(0, 9))),
    (Base, st.builds(Base, a=st.integers(0, 9))),
    (Sub, st.builds(Sub, a=st.integers(0, 9))),
    (Woof, st.just(Woof())),
    (Blob, st.builds(Blob, raw=st.binary(max_size=3))),
    (Login, st.builds(Login, password=st.text(max_size=2).map(SecretStr))),
    (Any, st.none() | st.integers(0, 9) | st.dates()),
]


def _made(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def wrapped(typed: tuple[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
        hint, values = typed
        return st.sampled_from(
            [
                (list[hint], st.lists(values, max_size=2)),
                (tuple[hint, ...], st.lists(values, max_size=2).map(tuple)),
                (dict[str, hint], st.dictionaries(st.text(max_size=1), values, max_size=2)),
                (hint | None, st.none() | values),
                (Box[hint], values.map(Box)),
            ]
        )

    def both(pair: Any) -> tuple[Any, st.SearchStrategy[Any]]:
        (one, values), (other, more) = pair
        return typing.Union[one, other], values | more  # noqa: UP007 - of Any, too

    return inner.flatmap(wrapped) | st.tuples(inner, inner).map(both)


TYPED = st.recursive(st.sampled_from(SCALARS), _made, max_leaves=4)


@pytest.mark.slow
@given(st.data())
def test_any_value_comes_to_its_annotation_as_it_was_or_is_refused(data: st.DataObject) -> None:
    hint, values = data.draw(TYPED)
    value = data.draw(values)
    call = call_of(hint)

    try:
        got = arrived(call, value)
    except ArgumentError:
        return
    # An annotation with Any in it takes models as dicts; of those above Any has none.
    assert got == value, (hint, value)
    assert type(got) is type(value) or isinstance(value, (int, Word)), (hint, value)


# Everything that is not a plain call


def test_keywords_and_more_arguments_are_rebuilt_too() -> None:
    def function(*pets: Cat | Dog, path: pathlib.Path = A, **more: Base) -> None: ...

    call = Call("task", function)
    sent = Signature[Any](
        name="task", args=call.arguments((Cat("a"), Dog("b")), {"path": A, "z": Base(a=1)})
    )
    values, named = call.values(decode_signature(encode_signature(sent)).args)

    assert values == [Cat("a"), Dog("b")]
    assert named == {"path": A, "z": Base(a=1)}


def test_partial_of_a_value_that_would_change_is_refused() -> None:
    def function(pet: Cat, more: int) -> None: ...

    with pytest.raises(ArgumentError, match="cannot send <Kitten> as Cat"):
        Call("task", function).arguments((Kitten("a"),), {}, partial=True)


def test_secrets_are_sent_as_the_task_says() -> None:
    login = Login(password=SecretStr("hunter2"))
    free, shut = call_of(Any, secrets=True), call_of(Login, secrets=False)

    got = arrived(free, login)
    assert got == {"password": "hunter2", "key": b"\xff"}
    assert "hunter2" not in repr(got)
    with pytest.raises(ArgumentError, match="it is a secret"):
        arrived(shut, login)
    with pytest.raises(ArgumentError, match="it is a secret"):
        shut.results(login)


def test_equal_arguments_have_one_unique_key() -> None:
    call = call_of(Any)
    first = {1: {0, 8}, 2: frozenset({"a"})}, {1: 1, 2: 2}
    second = {2: frozenset({"a"}), 1: {8, 0}}, {2: 2, 1: 1}

    for one, other in zip(first, second, strict=True):
        keys = {unique_key("task", call, call.arguments((v,), {}), True) for v in (one, other)}
        assert len(keys) == 1
    models = [Naive(at=dt.datetime(2026, 1, 2), tags=tags) for tags in ({"a", "b"}, {"b", "a"})]
    typed = call_of(Base | Login)
    login = [Login(password=SecretStr("x")) for _ in range(2)]
    assert len({unique_key("t", typed, typed.arguments((v,), {}), True) for v in login}) == 1
    assert models[0] == models[1]


def test_the_check_sees_what_equality_hides() -> None:
    @dataclasses.dataclass
    class Same:
        x: Any

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    assert unchanged(Same(1), Same(1))
    assert not unchanged(Same(1), Same(2))
    assert not unchanged(Same(Cat("a")), Same({"name": "a", "lives": 9}))


def test_values_travel_through_workers_and_workflows() -> None:
    server = Server(Config(broker="memory://"))
    got: list[Any] = []

    @server.task
    def pet(x: Cat | Dog) -> Cat | Dog:
        got.append(x)
        return x

    @server.task
    def pets(*xs: Cat | Dog) -> list[Cat | Dog]:
        return list(xs)

    @server.task
    def gathered(xs: list[Woof | Meow]) -> int:
        got.append(xs)
        return len(xs)

    @server.task
    def model(x: PETS) -> Meow | Woof:
        return x

    @server.task(batch=10, batch_within=0.01)
    def batch(rows: list[Base]) -> list[Base]:
        got.extend(rows)
        return rows

    @server.task
    def numbers() -> object:
        return {"mean": np.float32(1.5), "n": np.int64(2)}

    @server.task
    def changed() -> Cat:
        return Kitten("a")

    @server.task
    def array() -> object:
        return np.zeros(2)

    with server.new_worker(concurrency=2):
        assert pet.send(Dog("a")).get(timeout=HANG) == Dog("a")
        assert got == [Dog("a")]
        flow = chain(pet.signature(Dog("a")), pet.partial())
        assert server.send(flow).get(timeout=HANG) == Dog("a")
        both = group(pet.signature(Dog("a")), pet.signature(Cat("b")))
        assert server.send(both).get(timeout=HANG) == [Dog("a"), Cat("b")]
        collected = chord([pet.signature(Dog("a")), pet.signature(Cat("b"))], pets.partial())
        assert server.send(collected).get(timeout=HANG) == [Dog("a"), Cat("b")]
        listed = chord(
            [model.signature(Woof()), model.signature(Meow())], gathered.partial(), collect=True
        )
        assert server.send(listed).get(timeout=HANG) == 2
        assert got[-1] == [Woof(), Meow()]
        assert batch.send(Base(a=1)).get(timeout=HANG) == Base(a=1)
        assert got[-1] == Base(a=1)
        chunks = pet.chunks([(Dog("a"),), (Cat("b"),)], 2)
        assert server.send(chunks).get(timeout=HANG) == [[Dog("a"), Cat("b")]]
        assert numbers.send().get(timeout=HANG) == {"mean": 1.5, "n": 2}
        with pytest.raises(TaskFailed, match="changed result: cannot send <Kitten> as Cat"):
            changed.send().get(timeout=HANG)
        with pytest.raises(TaskFailed, match="array result: cannot send <ndarray>"):
            array.send().get(timeout=HANG)
    server.close()


def test_function_is_refused_though_annotated() -> None:
    with pytest.raises(ArgumentError, match="builtin_function"):
        arrived(call_of(Callable[[], None]), print)


def test_annotation_that_is_not_there_at_run_time_hides_no_change() -> None:
    def function(pet: NotThere, other: Cat | Dog, count: int = 0) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    call = Call("task", function)
    sent = Signature[Any](name="task", args=call.arguments(({"a": [1]}, Dog("a")), {}))

    values, _ = call.values(decode_signature(encode_signature(sent)).args)
    assert values == [{"a": [1]}, Dog("a")]
    with pytest.raises(ArgumentError, match="its annotation 'NotThere' names what is not there"):
        call.arguments((Cat("a"), Dog("a")), {})
    with pytest.raises(ArgumentError, match="is no int"):
        call.arguments((1, Dog("a"), "x"), {})

"""Values of a call as its annotations say: what a received value is made into.

msgspec reads, in C, what it knows: numbers, texts, moments, lists, dataclasses, Structs, enums of
texts. The rest is read here, part by part: unions whose members msgspec cannot tell apart, paths,
addresses, pydantic's classes, attrs, enums of other values. An annotation is looked at once.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import functools
import inspect
import ipaddress
import pathlib
import types
import typing
import uuid
from collections import abc
from collections.abc import Callable
from typing import Any

import msgspec

from machinery_py.errors import ArgumentError
from machinery_py.values import pydantic_types, records
from machinery_py.values.json_values import pack, shown
from machinery_py.values.unchanged import unchanged
from machinery_py.values.values import LISTS, wanted, without_none

Read = Callable[[Any], Any]

_AS_IT_IS = frozenset(
    {Any, None, inspect.Parameter.empty, object, int, str, bool, bytes, type(None), list, dict}
)


def converter(annotation: Any) -> Read | None:
    """Return a function that makes a received value one of the annotated type.

    None when there is nothing to do.

    The function raises ArgumentError with the path to what does not fit.
    """
    if typing.get_origin(annotation) is typing.Annotated:
        return converter(annotation.__origin__)
    if _is_plain(annotation):
        return None
    if annotation is float:
        return _convert_float
    try:
        read = _Reader().of(annotation)
    except (TypeError, NameError, AttributeError):
        return None  # an annotation that says nothing: it names what only type checkers know
    if read is None:
        return None
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)

    def convert(value: Any) -> Any:
        try:
            return read(value)
        except (msgspec.ValidationError, _Misfit, RecursionError) as error:
            text = str(error)
            raise ArgumentError(
                f"{shown(value)} is no {name}: {text[:1].lower()}{text[1:]}"
            ) from None
        except Exception as error:  # user code: what a dataclass or a model does when it is made
            raise ArgumentError(
                f"{shown(value)} is no {name}: {type(error).__name__}: {error}"
            ) from error

    return convert


class _Misfit(ValueError):
    """Raised when a value is not what its annotation says."""


#: What msgspec reads as it comes, with no look at its parts.
_NATIVE = frozenset(
    {
        int, str, float, bool, bytes, bytearray, memoryview, type(None), list, dict, tuple, set,
        frozenset, dt.datetime, dt.date, dt.time, dt.timedelta, decimal.Decimal, uuid.UUID,
    }
)  # fmt: skip
_SETS = (set, frozenset, abc.Set, abc.MutableSet)
_MAPPINGS = (dict, abc.Mapping, abc.MutableMapping)
_FROM_TEXT = (
    pathlib.PurePath,
    ipaddress.IPv4Address,
    ipaddress.IPv6Address,
    ipaddress.IPv4Network,
    ipaddress.IPv6Network,
)


class _Reader:
    """Builder of the function that reads the values of one annotation.

    A class may contain itself: so it keeps what it has begun.
    """

    def __init__(self) -> None:
        self._begun: dict[Any, dict[str, Read]] = {}

    def of(self, hint: Any) -> Read | None:
        """Return what reads a value; None: any value is as the annotation says.

        Raises:
            TypeError, NameError, AttributeError: nothing is known of the annotation.
        """
        hint = _bare(hint)
        if hint in (Any, object, inspect.Parameter.empty) or _says_nothing(hint):
            return None
        if self._is_native(hint):
            return functools.partial(msgspec.convert, type=hint)
        origin: Any = typing.get_origin(hint) or hint
        items = typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            return self._union(hint, items)
        if origin is typing.Literal:
            return functools.partial(_literal, items)
        if _is_class(origin) and not issubclass(origin, enum.Enum):
            if (read := self._container(origin, items)) is not None:
                return read
            has_fields = records.is_record(origin) or typing.is_typeddict(origin)
            if (has_fields or _is_row(origin)) and not pydantic_types.is_pydantic(origin):
                return self._record(hint, origin, items)
        return functools.partial(_one, origin) if _is_class(origin) else None

    def _is_native(self, hint: Any) -> bool:
        if not _knows(hint, set()):
            return False
        try:
            msgspec.json.Decoder(hint)
        except (TypeError, NameError):
            return False
        return True

    def _or_any(self, hint: Any) -> Read:
        return self.of(hint) or _as_it_is

    def _union(self, hint: Any, items: tuple[Any, ...]) -> Read:
        members = [(item, self.of(item)) for item in items if item is not type(None)]
        takes_none = type(None) in items

        def read(value: Any) -> Any:
            if value is None and takes_none:
                return None
            if len(members) == 1:
                return (members[0][1] or _as_it_is)(value)
            return _one_of(hint, members, value)

        return read

    def _container(self, origin: type, items: tuple[Any, ...]) -> Read | None:
        if origin is tuple:
            if len(items) == 2 and items[1] is ...:
                inner = self._or_any(items[0])
                return lambda value: tuple(map(inner, _listed(value)))
            parts = [self._or_any(item) for item in items]
            return functools.partial(_tuple, parts) if items else None
        if origin in (*LISTS, *_SETS, collections.deque):
            item = self._or_any(items[0]) if items else _as_it_is
            made: Any = list if origin in LISTS else set if origin in _SETS else origin
            made = frozenset if origin is frozenset else made

            def read(value: Any) -> Any:
                found = map(item, _listed(value))
                if made is collections.deque:
                    return collections.deque(found, getattr(value, "maxlen", None))
                return made(found)

            return read
        if origin is collections.Counter:
            items = (*(items or (Any,)), int)
        if origin in (*_MAPPINGS, collections.OrderedDict, collections.Counter):
            pair = items if len(items) == 2 else (Any, Any)
            key, item = map(self._or_any, pair)
            kind: Any = dict if origin in _MAPPINGS else origin

            def read_pairs(value: Any) -> Any:
                if not isinstance(value, dict):
                    raise _Misfit(f"expected a dict, got {type(value).__name__}")
                return kind({key(name): item(one) for name, one in value.items()})

            return read_pairs
        return None

    def _record(self, hint: Any, origin: Any, items: tuple[Any, ...]) -> Read:
        readers = self._begun.get(hint)
        if readers is None:  # else whoever has begun it fills it
            readers = self._begun[hint] = {}
            hints = records.hints_of(origin, items)
            readers |= {name: self._or_any(one) for name, one in hints.items()}
        if typing.is_typeddict(origin):
            return functools.partial(_typed_dict, _required(origin), readers)
        if _is_row(origin):
            return lambda value: origin(
                *_tuple([readers.get(name, _as_it_is) for name in origin._fields], value)
            )
        return lambda value: records.made(origin, readers, value)


def _bare(hint: Any) -> Any:
    """Return an annotation without what is only said about it."""
    while True:
        origin = typing.get_origin(hint)
        if origin in (typing.Annotated, typing.Final, typing.Required, typing.NotRequired):
            hint = hint.__origin__ if origin is typing.Annotated else typing.get_args(hint)[0]
        elif isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif hasattr(hint, "__value__") and type(hint).__name__ == "TypeAliasType":
            hint = hint.__value__
        elif hint is None:
            return type(None)
        else:
            return hint


def _says_nothing(hint: Any) -> bool:
    return (
        isinstance(hint, (str, typing.TypeVar, typing.ForwardRef))
        or bool(getattr(hint, "_is_protocol", False))
        or typing.get_origin(hint) in (abc.Callable, type)
        or hint in (Callable, typing.Callable)
    )


def _knows(hint: Any, seen: set[Any]) -> bool:
    """Return whether msgspec reads all parts of an annotation as they were sent."""
    hint = _bare(hint)
    if hint in (Any, object) or hint in _NATIVE or hint in seen:
        return True
    origin, items = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is typing.Literal:
        return all(type(item) in (str, int, bool, type(None)) for item in items)
    if not all(item is ... or _knows(item, seen) for item in items):
        return False
    if origin in (typing.Union, types.UnionType, tuple, *LISTS, *_SETS, *_MAPPINGS):
        return origin is not abc.Iterable
    if not isinstance(origin, type) or pydantic_types.is_pydantic(origin):
        return False
    if issubclass(origin, enum.Enum):
        return True  # of others than texts and integers msgspec says itself that it cannot
    is_known = (
        issubclass(origin, msgspec.Struct)
        or (dataclasses.is_dataclass(origin) and not records.has_init_only(origin))
        or typing.is_typeddict(origin)
        or _is_row(origin)
    )
    seen.add(hint)
    return is_known and all(_knows(one, seen) for one in records.hints_of(origin, items).values())


def _is_class(kind: Any) -> bool:
    return isinstance(kind, type)


def _is_row(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _as_it_is(value: Any) -> Any:
    return value


def _listed(value: Any) -> Any:
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return value
    raise _Misfit(f"expected a list, got {type(value).__name__}")


def _tuple(parts: list[Read], value: Any) -> tuple[Any, ...]:
    items = _listed(value)
    if len(items) != len(parts):
        raise _Misfit(f"expected {len(parts)} items, got {len(items)}")
    return tuple([read(item) for read, item in zip(parts, items, strict=True)])


def _required(kind: Any) -> frozenset[str]:
    """Return the keys that a TypedDict must have; it does not know if its annotations are texts."""
    hints = {name: typing.get_origin(one) for name, one in records.hints_of(kind).items()}
    asked = {name for name, origin in hints.items() if origin is typing.Required}
    spared = {name for name, origin in hints.items() if origin is typing.NotRequired}
    return frozenset(kind.__required_keys__ - spared | asked)


def _typed_dict(required: frozenset[str], readers: dict[str, Read], value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Misfit(f"expected a dict, got {type(value).__name__}")
    missing = required - value.keys()
    if missing:
        raise _Misfit(f"missing required field `{min(missing)}`")
    return {name: readers[name](value[name]) for name in readers if name in value}


def _literal(allowed: tuple[Any, ...], value: Any) -> Any:
    for one in allowed:
        plain = one.value if isinstance(one, enum.Enum) else one
        if type(plain) is type(value) and plain == value:
            return one
    raise _Misfit(f"expected one of {allowed!r}")


def _one_of(hint: Any, members: list[tuple[Any, Read | None]], value: Any) -> Any:
    """Return the value as the one member of a union makes it that could have been sent like this.

    That is a member that takes the value as it is; else that of whose value the same would be sent;
    else the only one that it fits.
    """
    found: list[tuple[Any, Any]] = []
    errors: list[str] = []
    for member, read in members:
        if read is None:
            continue
        try:
            found.append((member, read(value)))
        except Exception as error:  # of any kind: what user code says of what is not its own
            errors.append(str(error))
    for _, one in found:
        if type(one) is type(value) and unchanged(value, one, within=True):
            return one
    best = [(member, one) for member, one in found if _sent_alike(one, value)] or found
    if not best and any(read is None for _, read in members):
        return value  # such as a Protocol, which says nothing of values
    if not best:
        raise _Misfit(f"it fits no member ({'; '.join(errors)})")
    if len(best) > 1:
        names = " and ".join(getattr(member, "__name__", str(member)) for member, _ in best)
        raise _Misfit(f"it could be {names} (let them differ in a field, such as a Literal)")
    return best[0][1]


def _sent_alike(one: Any, other: Any) -> bool:
    try:
        return bool(pack(one, 0, True, True) == pack(other, 0, True, True))
    except ArgumentError:
        return False


def _one(kind: Any, value: Any) -> Any:
    """Return the value as one of a class with no parts that anything is known of."""
    if issubclass(kind, enum.Enum):
        return _member(kind, value)
    if pydantic_types.is_pydantic(kind):
        return pydantic_types.read(kind, value)
    if isinstance(value, kind):
        return value
    build: Any = kind
    if issubclass(kind, _FROM_TEXT) and isinstance(value, str):
        return build(value)
    is_number = kind.__module__ == "numpy" and isinstance(value, (bool, int, float))
    base = next((one for one in (str, int, float, bytes) if issubclass(kind, one)), None)
    if is_number or (base is not None and type(value) is base):
        made = build(value)
        if made == value:
            return made
    raise _Misfit(f"expected {kind.__name__}, got {type(value).__name__}")


def _member(kind: Any, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    try:
        return kind(value)
    except (ValueError, TypeError):
        packed = pack(value, 0, True)
    for member in kind:
        if pack(member.value, 0, True) == packed:
            return member
    raise _Misfit(f"invalid enum value {value!r}")


def checker(annotation: Any) -> Callable[[Any], Any] | None:
    """Return a function that refuses a value that the annotation rules out, without converting.

    None when it rules out no value.

    As type checkers have it: a bool is an int.
    """
    if typing.get_origin(annotation) is typing.Annotated:
        inner = annotation.__origin__
        # Go's []uint8 comes as bytes, also for who calls it a list of integers.
        is_bytes = wanted(annotation)[0] in ("[]byte", "[]uint8")
        return checker(typing.Union[inner, bytes] if is_bytes else inner)  # noqa: UP007
    fits = _fits(annotation) if _is_plain(annotation) else None
    if fits is None:
        return None

    def check(value: Any) -> Any:
        if fits(value):
            return value
        raise ArgumentError(
            f"{shown(value)} is no "
            f"{annotation.__name__ if isinstance(annotation, type) else annotation}"
        )

    return check


def wire_type(annotation: Any) -> str:
    """Return the type name whose values fit the annotation without a check; "" if there is none."""
    if typing.get_origin(annotation) is typing.Annotated:
        return wire_type(annotation.__origin__)
    hint = without_none(annotation)
    if hint is float:
        return "float64"
    if not _is_plain(hint):
        return ""
    return _WIRE_TYPES.get(hint, "") if isinstance(hint, type) else wanted(hint)[0]


_WIRE_TYPES: dict[type, str] = {int: "int64", str: "string", bool: "bool"}


def _fits(annotation: Any) -> Callable[[Any], bool] | None:
    """Return a function that tests a value against a plain annotation; None: any value fits."""
    origin, items = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        parts = [_fits(item) for item in items]
        some = [part for part in parts if part is not None]
        return (
            (lambda value: any(part(value) for part in some)) if len(some) == len(parts) else None
        )
    if origin is not None:
        inner = _fits(items[0]) if origin in LISTS and items else None
        return lambda value: (
            isinstance(value, origin)
            and (inner is None or type(value) is not list or all(map(inner, value)))
        )
    if annotation in (None, type(None)):
        return lambda value: value is None
    if annotation in (Any, object, inspect.Parameter.empty):
        return None
    return lambda value: isinstance(value, annotation)


def _convert_float(value: Any) -> float:
    if not isinstance(value, (int, float)):
        raise ArgumentError(f"{shown(value)} is no float")
    return float(value) if type(value) is int else value


def _is_plain(annotation: Any) -> bool:
    try:
        if annotation in _AS_IT_IS:
            return True
    except TypeError:
        return False
    origin, items = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType) or origin in (list, abc.Sequence, abc.Iterable):
        return all(_is_plain(item) for item in items)
    if origin in (dict, abc.Mapping):
        return items == (str, Any)
    return False

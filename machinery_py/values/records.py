"""Dataclasses, msgspec's Structs and attrs' classes: their fields, as they travel and as they are.

A field travels under its name; of a Struct under its encoded name, with its tag, as msgspec has it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import typing
from collections.abc import Callable
from typing import Any

import msgspec

Read = Callable[[Any], Any]


class RecordField(typing.NamedTuple):
    """A field. `wire`: the name under which it travels; `given`: what __init__ calls it, or ""."""

    name: str
    wire: str
    given: str
    has_default: bool
    compared: bool


@functools.lru_cache(maxsize=1024)
def is_record(kind: Any) -> bool:
    """Return whether a class is one of those whose instances travel field by field."""
    return isinstance(kind, type) and (
        dataclasses.is_dataclass(kind)
        or issubclass(kind, msgspec.Struct)
        or hasattr(kind, "__attrs_attrs__")
    )


@functools.lru_cache(maxsize=1024)
def fields_of(kind: Any) -> list[RecordField]:
    if issubclass(kind, msgspec.Struct):
        return [
            RecordField(one.name, one.encode_name, one.name, not one.required, True)
            for one in msgspec.structs.fields(kind)
        ]
    if dataclasses.is_dataclass(kind):
        return [
            RecordField(
                one.name,
                one.name,
                one.name if one.init else "",
                one.default is not dataclasses.MISSING
                or one.default_factory is not dataclasses.MISSING,
                one.compare,
            )
            for one in dataclasses.fields(kind)
        ]
    return [
        RecordField(one.name, one.name, one.alias if one.init else "", True, bool(one.eq))
        for one in kind.__attrs_attrs__
    ]


@functools.lru_cache(maxsize=1024)
def _values_of(kind: Any, compared: bool) -> tuple[tuple[str, ...], Callable[[Any], Any]]:
    """Return the names under which fields travel, and what takes their values, all at once."""
    fields = [one for one in fields_of(kind) if one.compared or not compared]
    names = [one.name for one in fields]
    take = operator.attrgetter(*names) if len(names) > 1 else None
    return tuple(one.wire for one in fields), take or (
        lambda value: tuple(getattr(value, name) for name in names)
    )


def written(value: Any) -> dict[str, Any] | list[Any]:
    """Return the fields of a record, as they are.

    Raises:
        AttributeError: one of them was never set.
    """
    kind: Any = type(value)
    names, take = _values_of(kind, False)
    found = dict(zip(names, take(value), strict=True))
    if not issubclass(kind, msgspec.Struct):
        return found
    if msgspec.UNSET in found.values():
        found = {name: item for name, item in found.items() if item is not msgspec.UNSET}
    config = kind.__struct_config__
    if config.array_like:
        return [*([config.tag] if config.tag is not None else ()), *found.values()]
    return {config.tag_field: config.tag, **found} if config.tag_field else found


def compared(value: Any) -> tuple[Any, ...]:
    """Return the values of the fields that make two records equal."""
    kind: Any = type(value)
    _, take = _values_of(kind, True)
    found: tuple[Any, ...] = take(value)
    return found


def hints_of(kind: Any, arguments: tuple[Any, ...] = ()) -> dict[str, Any]:
    """Return the annotations of the fields, with these arguments for the class's type variables.

    Raises:
        Exception: as typing.get_type_hints.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    if not arguments:
        return hints
    given = dict(zip(getattr(kind, "__parameters__", ()), arguments, strict=False))
    return {name: _bound(hint, given) for name, hint in hints.items()}


def _bound(hint: Any, given: dict[Any, Any]) -> Any:
    if isinstance(hint, typing.TypeVar):
        return given.get(hint, hint)
    free = getattr(hint, "__parameters__", ())
    if free and not isinstance(hint, type):
        return hint[tuple(given.get(one, one) for one in free)]
    return hint


def made(kind: Any, readers: dict[str, Read], value: Any) -> Any:
    """Make a record of what was received of it; unknown keys are left out, as msgspec does.

    Raises:
        Exception: it does not fit, or user code has failed.
    """
    if isinstance(value, kind):
        return value
    items = _items(kind, value)
    given, later = {}, {}
    for one in fields_of(kind):
        if one.wire not in items:
            if not one.has_default:
                raise ValueError(f"missing required field `{one.wire}`")
            continue
        try:
            item = readers[one.name](items[one.wire]) if one.name in readers else items[one.wire]
        except Exception as error:
            raise ValueError(f"{one.wire}: {error}") from error
        if one.given:
            given[one.given] = item
        else:
            later[one.name] = item
    made = kind(**given)
    for name, item in later.items():
        object.__setattr__(made, name, item)
    return made


def _items(kind: Any, value: Any) -> dict[str, Any]:
    config = kind.__struct_config__ if issubclass(kind, msgspec.Struct) else None
    if config is not None and config.array_like:
        if not isinstance(value, list):
            raise ValueError(f"expected a list, got {type(value).__name__}")
        tag, rest = (value[:1], value[1:]) if config.tag is not None else ([], value)
        if tag and tag[0] != config.tag:
            raise ValueError(f"expected the tag {config.tag!r}")
        return dict(zip([one.wire for one in fields_of(kind)], rest, strict=False))
    if not isinstance(value, dict):
        raise ValueError(f"expected a dict of fields, got {type(value).__name__}")
    if config is not None and config.tag_field and value.get(config.tag_field) != config.tag:
        raise ValueError(f"expected the tag {config.tag!r}")
    return value


def has_init_only(kind: Any) -> bool:
    """Return whether __init__ takes what no field keeps."""
    return any(
        isinstance(hint, dataclasses.InitVar) or "InitVar" in str(hint)
        for hint in inspect.get_annotations(kind).values()
    )

"""Tables of the dashboard's JSON API, from its routes and records."""

from __future__ import annotations

import datetime as dt
import inspect
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from machinery_py.dashboard import api
from machinery_py.dashboard.records import Problem
from machinery_py.dashboard.routes import ROUTES, Route
from machinery_py.operations import BY_ROUTE, OPERATIONS

_WORDS = {dt.datetime: "time", types.NoneType: "null", Any: "any", str: "text", int: "integer"}
_WORDS |= {float: "number", bool: "true or false"}


def routes() -> str:
    """Return all routes with what they take and give."""
    assert api.Api  # its methods are the routes
    lines = ["| route | takes | gives | does | command |", "|---|---|---|---|---|"]
    for one in (route for methods in ROUTES.values() for route in methods.values()):
        takes = ", ".join(_field(name, hint, default) for name, hint, default in _fields(one.takes))
        gives = f"`{one.key}`: {_type(one.gives)}" if one.key else _type(one.gives)
        command = BY_ROUTE[f"{one.method} {one.path}"].command
        same = f"`{command}`" if command else ""
        lines.append(f"| `{one.method} api/{one.path}` | {takes} | {gives} | {one.help} | {same} |")
    return "\n".join(lines)


def operations() -> str:
    """Return the commands, with their routes in the JSON API."""
    lines = ["| command | kind | does | route |", "|---|---|---|---|"]
    for one in OPERATIONS:
        if one.command:
            method, _, path = one.route.partition(" ")
            same = f"`{method} api/{path}`" if path else ""
            lines.append(f"| `{one.command}` | {one.kind} | {one.help} | {same} |")
    return "\n".join(lines)


def records() -> str:
    """Return all records that routes take and give."""
    lines = ["| record | fields | |", "|---|---|---|"]
    for one in sorted(_reached(), key=lambda one: one.__name__):
        fields = ", ".join(f"`{name}` {_type(hint)}" for name, hint, _ in _fields(one))
        help = " ".join((inspect.getdoc(one) or "").partition("\n\nAttributes:")[0].split())
        lines.append(f"| `{one.__name__}` | {fields} | {help} |")
    return "\n".join(lines)


def _fields(record: type[msgspec.Struct]) -> Iterator[tuple[str, Any, object]]:
    hints = typing.get_type_hints(record, include_extras=False)
    for field in msgspec.structs.fields(record):
        yield field.encode_name, hints[field.name], field.default


def _field(name: str, hint: Any, default: object) -> str:
    text = f"`{name}` {_type(hint)}"
    return text if default is msgspec.NODEFAULT else f"[{text}]"


def _type(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_type, inner))
    if origin is tuple:
        return f"[{', '.join(map(_type, inner))}]"
    if origin in (Mapping, dict):
        return "object"
    if origin is Sequence:
        return f"list of {_type(inner[0])}"
    return _WORDS.get(hint) or f"`{hint.__name__}`"


def _reached() -> set[type[msgspec.Struct]]:
    found: set[type[msgspec.Struct]] = set()
    every: list[Route] = [route for methods in ROUTES.values() for route in methods.values()]
    waiting: list[Any] = [Problem, *(one.gives for one in every)]
    waiting += [hint for one in every for _, hint, _ in _fields(one.takes)]
    while waiting:
        one = waiting.pop()
        waiting += typing.get_args(one)
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and one not in found:
            found.add(one)
            waiting += [hint for _, hint, _ in _fields(one)]
    return found

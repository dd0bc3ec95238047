"""Values of pydantic's models and types: what is sent of them, and how they are made again.

Pydantic is never imported here: whoever has such a value or annotation has imported it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import msgspec


class NotJson(Exception):
    """Raised when a value is more than JSON has."""


def is_pydantic(kind: Any) -> bool:
    """Return whether pydantic knows how to make a value of this class."""
    return "pydantic" in sys.modules and _is_known(kind)


@functools.lru_cache(maxsize=1024)
def _is_known(kind: Any) -> bool:
    known = hasattr(kind, "__pydantic_validator__") or hasattr(kind, "__get_pydantic_core_schema__")
    return known and isinstance(kind, type) and _adapter(kind) is not None


@functools.lru_cache(maxsize=1024)
def _adapter(kind: type) -> Any:
    try:
        return sys.modules["pydantic"].TypeAdapter(kind)
    except Exception:  # user code: a schema that cannot be made
        return None


@functools.cache
def _by_any_name() -> dict[str, bool]:
    """Let a field be given by its name as well as by its alias, from pydantic 2.11 on."""
    validate = sys.modules["pydantic"].TypeAdapter.validate_python
    knows = "by_name" in inspect.signature(validate).parameters
    return {"by_alias": True, "by_name": True} if knows else {}


def forms(value: Any) -> Iterator[Any]:
    """Yield what may be sent of a value, the best first; not each can be read again.

    JSON comes before Python's values, which need tags and which strict models refuse in part; names
    of fields come before aliases. Sets have no order that all processes share, and keys of unique
    tasks are made of the arguments: so they are better sent as sets.
    """
    in_json, in_python = _dumped(value, "json"), _dumped(value, "python")
    ways = (in_python, in_json) if any(map(_holds_set, in_python)) else (in_json, in_python)
    for whole in itertools.chain(*ways):
        if type(whole) is not type(value):
            yield whole


def _dumped(value: Any, mode: str) -> list[Any]:
    kind: Any = type(value)
    found: list[Any] = []
    for by_alias in (False, True):
        try:
            whole = _adapter(kind).dump_python(
                value, mode=mode, by_alias=by_alias, round_trip=True, warnings=False
            )
        except Exception:  # pydantic's errors, and user code
            continue
        if whole not in found:
            found.append(whole)
    return found


def _holds_set(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_set, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_set, value))
    return isinstance(value, (set, frozenset))


def read(kind: type, value: Any) -> Any:
    """Make a value of the class from what was received.

    Raises:
        Exception: pydantic's, and of user code.
    """
    if isinstance(value, kind):
        return value
    adapter, names = _adapter(kind), _by_any_name()
    try:
        text = msgspec.json.encode(_json(value))
    except NotJson:
        return adapter.validate_python(value, **names)
    return adapter.validate_json(text, **names)  # strict models take more from JSON


def _json(value: Any) -> Any:
    """Return a copy of plain JSON values."""
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if kind is dict:
        if not all(isinstance(key, str) for key in value):
            raise NotJson
        return {key: _json(item) for key, item in value.items()}
    if kind is list:
        return [_json(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise NotJson

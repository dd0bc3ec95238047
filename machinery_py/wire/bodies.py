"""Bodies of rows: msgpack, also of texts that are not UTF-8, and of results that it cannot hold."""

from __future__ import annotations

import datetime as dt
import json

import msgspec
from msgspec.structs import force_setattr

from machinery_py.fences import NO_FENCE, Fence
from machinery_py.tasks.states import TaskState
from machinery_py.texts import printable

_encode = msgspec.msgpack.Encoder().encode


def encode(value: object) -> bytes:
    """Return the value as msgpack; half a surrogate pair in a text is written out."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, builtin_types=(bytes, dt.datetime))
        return _encode(_readable(plain))


def _readable(value: object) -> object:
    match value:
        case str():
            return printable(value)
        case dict():
            return {_readable(key): _readable(one) for key, one in value.items()}
        case list() | tuple():
            return [_readable(one) for one in value]
        case _:
            return value


class TaskBody(msgspec.Struct, array_like=True, gc=False):
    """A task as its row has it: its state, the mark that wrote it, the epoch of its last delivery.

    `odd`: by their place, results as JSON that msgpack cannot hold.
    """

    state: TaskState | None = None
    mark: str = ""
    epoch: Fence = NO_FENCE
    odd: dict[int, str] = {}


_decode_task = msgspec.msgpack.Decoder(TaskBody).decode


def encode_task(state: TaskState | None, mark: str, epoch: Fence) -> bytes:
    """Return the body of a task's row.

    Results with integers of more than 64 bits, or half a surrogate pair, are kept as they are.
    """
    try:
        return _encode((state, mark, epoch))
    except (OverflowError, UnicodeEncodeError):
        if state is None or not state.results:
            return encode((state, mark, epoch))
        results, odd = list(state.results), dict[int, str]()
        for number, arg in enumerate(results):
            try:
                _encode(arg.value)
            except (OverflowError, UnicodeEncodeError):
                odd[number] = json.dumps(arg.value)
                results[number] = msgspec.structs.replace(arg, value=None)
        return encode((msgspec.structs.replace(state, results=results), mark, epoch, odd))


def decode_task(body: bytes) -> TaskBody:
    """Return what `encode_task` was given."""
    one = _decode_task(body)
    if one.state is not None and one.state.results:
        results = list(one.state.results)
        for number, text in one.odd.items():
            results[number] = msgspec.structs.replace(results[number], value=json.loads(text))
        force_setattr(one.state, "results", tuple(results))  # it is ours alone yet
    return one

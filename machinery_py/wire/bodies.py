"""Bodies of rows: msgpack, or JSON where people read them; also of texts that are not UTF-8, and of
results that msgpack cannot hold.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from typing import Any, Final

import msgspec
from msgspec.structs import force_setattr

from machinery_py.fences import NO_FENCE, Fence
from machinery_py.tasks.states import GroupMeta, TaskState
from machinery_py.texts import printable


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


class Bodies:
    """Bodies in one format."""

    def __init__(
        self,
        encode: Callable[[Any], bytes],
        decoder: Callable[[type[Any]], Callable[[bytes], Any]],
    ) -> None:
        self._encode = encode
        self.decoder = decoder
        self._decode_task: Callable[[bytes], TaskBody] = decoder(TaskBody)
        self._decode_group: Callable[[bytes], GroupMeta] = decoder(GroupMeta)

    def encode(self, value: object) -> bytes:
        """Return the value in this format; half a surrogate pair in a text is written out."""
        try:
            return self._encode(value)
        except UnicodeEncodeError:
            plain = msgspec.to_builtins(value, builtin_types=(bytes, dt.datetime))
            return self._encode(_readable(plain))

    def encode_task(self, state: TaskState | None, mark: str, epoch: Fence) -> bytes:
        """Return the body of a task's row.

        Results with integers of more than 64 bits, or half a surrogate pair, are kept as they are.
        """
        try:
            return self._encode((state, mark, epoch))
        except (OverflowError, UnicodeEncodeError):
            if state is None or not state.results:
                return self.encode((state, mark, epoch))
            results, odd = list(state.results), dict[int, str]()
            for number, arg in enumerate(results):
                try:
                    self._encode(arg.value)
                except (OverflowError, UnicodeEncodeError):
                    odd[number] = json.dumps(arg.value)
                    results[number] = msgspec.structs.replace(arg, value=None)
            state = msgspec.structs.replace(state, results=results)
            return self.encode((state, mark, epoch, odd))

    def decode_task(self, body: bytes) -> TaskBody:
        """Return what `encode_task` was given."""
        one = self._decode_task(body)
        if one.state is not None and one.state.results:
            results = list(one.state.results)
            for number, text in one.odd.items():
                results[number] = msgspec.structs.replace(results[number], value=json.loads(text))
            force_setattr(one.state, "results", tuple(results))  # it is ours alone yet
        return one

    def decode_group(self, body: bytes) -> GroupMeta:
        """Return the record of a group."""
        meta = self._decode_group(body)
        force_setattr(meta, "task_uuids", tuple(meta.task_uuids))
        return meta


MSGPACK = Bodies(
    msgspec.msgpack.Encoder().encode, lambda kind: msgspec.msgpack.Decoder(kind).decode
)
JSON = Bodies(msgspec.json.Encoder().encode, lambda kind: msgspec.json.Decoder(kind).decode)
encode: Final = MSGPACK.encode

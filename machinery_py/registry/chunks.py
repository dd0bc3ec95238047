"""Chunks: many calls of a task in one message, which one run makes one after the other.

A chunk is one task: it has one state, its tries and its time limit are those of all its calls. Its
arguments are theirs in a row, and HEADER_CHUNK says how many each call has. Ours alone.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from machinery_py.errors import ArgumentError
from machinery_py.registry.calls import Call
from machinery_py.tasks.signature import HEADER_CHUNK, Arg, Checked, Signature
from machinery_py.values.json_values import Chunk, pack
from machinery_py.values.values import to_python


def chunk_of(calls: Sequence[Signature[Any]]) -> Signature[Any]:
    """Return one signature for these calls of a task. It takes no results of a step before it.

    Raises:
        ArgumentError: they have different numbers of arguments, or some by name.
    """
    first, width = calls[0], len(calls[0].args)
    if (
        any(len(one.args) != width or any(arg.name for arg in one.args) for one in calls)
        or not width
    ):
        raise ArgumentError(
            f"{first.name}: the calls of a chunk have different arguments, or some by name "
            "(give each the same number, by position)"
        )
    args = Checked(arg for one in calls for arg in one.args)
    return first.replace(args=args).fixed().with_headers(**{HEADER_CHUNK: str(width)})


def is_chunk(signature: Signature[Any]) -> bool:
    return HEADER_CHUNK in signature.headers


def rows_of(call: Call, signature: Signature[Any]) -> list[list[Any]]:
    """Return the arguments of each call.

    Raises:
        ArgumentError: they do not fit, or the header says nothing that fits them.
    """
    text, args = str(signature.headers[HEADER_CHUNK]), signature.args
    width = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not width or len(args) % width:
        raise ArgumentError(f"{call.name}: {len(args)} arguments are no chunk of {text!r} each")
    return [call.values(args[at : at + width])[0] for at in range(0, len(args), width)]


def each(function: Callable[..., Any], *given: Any) -> list[Any]:
    """Call the function for each row, the last of the given; a Context may be in front."""
    *context, rows = given
    return [function(*context, *row) for row in rows]


async def each_async(function: Callable[..., Coroutine[Any, Any, Any]], *given: Any) -> list[Any]:
    """`each` for a coroutine function: one call after the other."""
    *context, rows = given
    return [await function(*context, *row) for row in rows]


def result_of_chunk(call: Call, values: list[Any]) -> tuple[Arg, ...]:
    """Return what is stored: one list, which its reader converts by the task's annotation.

    Raises:
        ArgumentError: a value cannot be stored.
    """
    found = Arg(type="py", value=pack(Chunk(values), 0, True, call.secrets_in_results))
    for value, one in zip(values, to_python("py", found.value), strict=True):
        call.check_result(value, one)
    return (found,)

"""Calls of the user's hooks, and texts of what user code raises, which may be anything."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from machinery_py.tasks.signature import Signature
from machinery_py.texts import MAX_ERROR, cut, traceback_text

INTERRUPTIBLE = True  # calls user code and takes no lock, see worker/executors.py

Around = Callable[[Signature[Any]], Iterator[None]]


class WorkerHooks:
    """Handlers called around each task. See Worker for the setters."""

    def __init__(self) -> None:
        self.pre_consume: Callable[[], bool] | None = None
        self.pre_task: Callable[[Signature[Any]], object] | None = None
        self.post_task: Callable[[Signature[Any]], object] | None = None
        self.error: Callable[[Exception], object] | None = None


def call_around(
    arounds: Sequence[Around], signature: Signature[Any], call: Callable[[], Any]
) -> Any:
    """Call between the halves of the generators, the first registered outermost."""
    with contextlib.ExitStack() as stack:
        for around in arounds:
            stack.enter_context(_halves(around, signature))
        return call()


async def await_around(
    arounds: Sequence[Around], signature: Signature[Any], call: Callable[[], Awaitable[Any]]
) -> Any:
    """Await between the halves of the generators, as `call_around` calls."""
    with contextlib.ExitStack() as stack:
        for around in arounds:
            stack.enter_context(_halves(around, signature))
        return await call()


def _halves(around: Around, signature: Signature[Any]) -> contextlib.AbstractContextManager[None]:
    return contextlib.contextmanager(around)(signature)


def text_of(error: BaseException) -> str:
    """Return the error as text, cut to MAX_ERROR (Go's `Error`); its class's name if empty."""
    try:
        text = str(error)
    except BaseException as broken:  # user code in __str__
        text = f"(its text cannot be had: {type(broken).__name__})"
    return cut(text or type(error).__name__, MAX_ERROR).encode("utf-8", "replace").decode()


def type_name_of(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__
    return name if kind.__module__ == "builtins" else f"{kind.__module__}.{name}"


def traceback_of(error: BaseException) -> str:
    return traceback_text(error).encode("utf-8", "replace").decode()

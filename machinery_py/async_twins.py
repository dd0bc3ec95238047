"""Async twins: the same call in a thread, so that the event loop goes on meanwhile.

    get_state_async = twin(get_state)

has the parameters, the result and the errors of `get_state`. A thread cannot be stopped: after a
cancellation or a timeout (`asyncio.timeout`) nobody waits for the call, but it goes on and may
still change what it was to change.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def twin(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Return the method for coroutines; its attribute has the method's name and `_async`."""
    name = method.__name__

    @functools.wraps(method)
    async def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        import asyncio  # loaded by now: we are in a coroutine

        # By its name: a subclass may have overridden the method.
        return await asyncio.to_thread(getattr(self, name), *args, **kwargs)

    called.__name__ = f"{name}_async"
    called.__qualname__ = f"{method.__qualname__}_async"
    called.__doc__ = f"`{name}` for coroutines."
    return called

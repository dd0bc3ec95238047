"""Async twins: the same call in a thread, so that the event loop goes on meanwhile.

    get_state_async = twin(get_state)

has the parameters, the result and the errors of `get_state`. A thread cannot be stopped: after a
cancellation or a timeout (`asyncio.timeout`) nobody waits for the call, but it goes on and may
still change what it was to change. What no thread has begun with is not made, unless it `goes_on`:
so for calls that give something back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from machinery_py.call_threads import in_thread

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")


def twin(
    method: Callable[Concatenate[S, P], R], *, goes_on: bool = False
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
    """Return the method for coroutines; its attribute has the method's name and `_async`."""
    name = method.__name__

    @functools.wraps(method)
    async def called(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        # By its name: a subclass may have overridden the method.
        call = functools.partial(getattr(self, name), *args, **kwargs)
        return await in_thread(call, goes_on=goes_on)

    called.__name__ = f"{name}_async"
    called.__qualname__ = f"{method.__qualname__}_async"
    called.__doc__ = f"`{name}` for coroutines."
    return called

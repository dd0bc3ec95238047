"""Interruption of a task from outside: TimeLimitExceeded, raised in its thread.

The exception comes between any two steps, also where a lock has just been taken: it would never be
released, and block all that wait for it. So a thread is left alone while it is in `logging`, or in
this library, called by its task.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from machinery_py.errors import TimeLimitExceeded

F = TypeVar("F", bound=Callable[..., Any])

TASKS = "machinery_py.testing."  # modules whose functions are tasks, as the user's are

_boundaries: set[CodeType] = set()


def is_boundary(function: F) -> F:
    """Mark the function that calls user code; it deals with an exception from any step above it."""
    _boundaries.add(function.__code__)
    return function


def interrupt(thread_id: int) -> bool:
    """Raise TimeLimitExceeded in a thread, as soon as it runs Python code again. False: not now."""
    import ctypes  # 10 ms that only workers with time limits pay

    if not may_interrupt(sys._current_frames().get(thread_id)):
        return False
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    set_exception(ctypes.c_ulong(thread_id), ctypes.py_object(TimeLimitExceeded))
    if may_interrupt(sys._current_frames().get(thread_id)):
        return True
    set_exception(ctypes.c_ulong(thread_id), None)  # the thread went on meanwhile
    return False


def may_interrupt(frame: FrameType | None) -> bool:
    """Return whether a thread in this frame holds no lock that others wait for.

    Any module of this library may hold one, and `logging`, except those with a global
    INTERRUPTIBLE: they call user code and take no lock.
    """
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if (
            module.partition(".")[0] in ("machinery_py", "logging")
            and "INTERRUPTIBLE" not in frame.f_globals
            and not module.startswith(TASKS)
        ):
            # The frames above were all of user code.
            return frame.f_code in _boundaries
        frame = frame.f_back
    return True

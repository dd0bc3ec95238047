"""Calls of the user's hooks, and texts of what user code raises, which may be anything."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, Self

from machinery_py.errors import TimeLimitExceeded
from machinery_py.registry.hooks import Surrounding
from machinery_py.registry.outcomes import Failed
from machinery_py.tasks.context import Context
from machinery_py.tasks.signature import Signature
from machinery_py.texts import MAX_ERROR, cut, get_logger, traceback_text
from machinery_py.worker.reconnect import Handler, Reconnect
from machinery_py.worker.running.event_loop import EventLoopThread

logger = get_logger(__name__)

INTERRUPTIBLE = True  # calls user code and takes no lock, see worker/running/executors.py


class WorkerHooks:
    """Handlers of one worker (set by HandlerSetters), and what those of the app need there.

    Attributes:
        state: what the lifespans have yielded.
        run_coroutine: runs a coroutine handler, and returns what it returns.
        ended: called with each execution whose end was committed, in the thread that did it.
        is_behind: returns whether no new tasks are to be taken, because handlers of ended ones
            are late; None: none is.
        settling: held for a moment while an execution begins or ends: one lock for all of them.
    """

    def __init__(self) -> None:
        self.pre_consume: Callable[[], bool] | None = None
        self.pre_task: Callable[[Signature[Any]], object] | None = None
        self.post_task: Callable[[Signature[Any]], object] | None = None
        self.error: Callable[[Exception], object] | None = None
        self.state: Mapping[str, Any] = {}
        self.run_coroutine: Callable[[Coroutine[Any, Any, Any]], Any] = EventLoopThread(
            "machinery"
        ).run
        self.ended: Callable[[Any], object] = lambda _: None
        self.is_behind: Callable[[], bool] | None = None
        self.settling: Final = threading.Lock()


class HandlerSetters:
    """The setters of a worker's handlers, usable as decorators; Go's names."""

    def __init__(self, reconnect: Reconnect) -> None:
        self._hooks = WorkerHooks()
        self._reconnect = reconnect

    def set_error_handler(
        self, handler: Callable[[Exception], object]
    ) -> Callable[[Exception], object]:
        """Set what is called with the exception of each task that fails for good.

        It replaces the log line, and runs in the task's thread.
        """
        self._hooks.error = handler
        return handler

    def set_pre_task_handler(
        self, handler: Callable[[Signature[Any]], object]
    ) -> Callable[[Signature[Any]], object]:
        """Set what is called before each run; what it raises fails the run."""
        self._hooks.pre_task = handler
        return handler

    def set_post_task_handler(
        self, handler: Callable[[Signature[Any]], object]
    ) -> Callable[[Signature[Any]], object]:
        """Set what is called after each run, however it ended."""
        self._hooks.post_task = handler
        return handler

    def set_pre_consume_handler(self, handler: Callable[[Self], bool]) -> Callable[[Self], bool]:
        """Set what is called before each claim: while it returns False, nothing is claimed."""
        self._hooks.pre_consume = lambda: handler(self)
        return handler

    def set_connection_error_handler(self, handler: Handler) -> Handler:
        """Set what is called when the broker is lost, and after each attempt that failed.

        It may return the seconds to the next attempt.
        """
        self._reconnect.handler = handler
        return handler


# Handlers of the app: what they raise is logged, and nothing else


def call_handlers(
    kind: str,
    handlers: Sequence[Callable[..., object]],
    hooks: WorkerHooks,
    context: Context,
    *given: object,
) -> None:
    """Call handlers in this thread, coroutines on the loop.

    Raises:
        TimeLimitExceeded: the time of the task was up meanwhile.
    """
    for handler in handlers:
        try:
            found = handler(context, *given)
            if inspect.iscoroutine(found):
                hooks.run_coroutine(found)
        except BaseException as error:  # user code; sys.exit() must not end the worker either
            if isinstance(error, TimeLimitExceeded) and context.cancelled:
                raise
            _log_failure(kind, handler, context)


async def await_handlers(
    kind: str, handlers: Sequence[Callable[..., object]], context: Context
) -> None:
    """Call handlers on the running loop; else as `call_handlers`."""
    import asyncio  # loaded for coroutines only

    for handler in handlers:
        try:
            found = handler(context)
            if inspect.isawaitable(found):
                await found
        except BaseException as error:  # user code
            is_cancelled = isinstance(error, asyncio.CancelledError)
            if is_cancelled and (task := asyncio.current_task()) and task.cancelling():
                raise  # the time of the task is up
            _log_failure(kind, handler, context)


def _log_failure(kind: str, handler: Callable[..., object], context: Context) -> None:
    logger.exception(
        "%s handler %s failed: task %s %s",
        kind,
        name_of(handler),
        context.name,
        context.uuid,
        extra={"task_uuid": context.uuid},
    )


def name_of(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def call_between(
    before: Sequence[Callable[[Context], object]],
    after: Sequence[Callable[[Context], object]],
    hooks: WorkerHooks,
    context: Context,
    call: Callable[[], Any],
) -> Any:
    """Call between the handlers of before_task and after_task."""
    call_handlers("before_task", before, hooks, context)
    try:
        return call()
    finally:
        call_handlers("after_task", after, hooks, context)


async def await_between(
    before: Sequence[Callable[[Context], object]],
    after: Sequence[Callable[[Context], object]],
    _: WorkerHooks,
    context: Context,
    call: Callable[[], Awaitable[Any]],
) -> Any:
    """Await between the handlers of before_task and after_task."""
    await await_handlers("before_task", before, context)
    try:
        return await call()
    finally:
        await await_handlers("after_task", after, context)


def call_around(
    arounds: Sequence[Surrounding], signature: Signature[Any], call: Callable[[], Any]
) -> Any:
    """Call between the halves of the generators, the first registered outermost."""
    with contextlib.ExitStack() as stack:
        for around in arounds:
            stack.enter_context(around(signature))
        return call()


async def await_around(
    arounds: Sequence[Surrounding], signature: Signature[Any], call: Callable[[], Awaitable[Any]]
) -> Any:
    """Await between the halves of the generators, as `call_around` calls."""
    with contextlib.ExitStack() as stack:
        for around in arounds:
            stack.enter_context(around(signature))
        return await call()


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


def failure_by(error: BaseException, before: str = "", *, retryable: bool = True) -> Failed:
    """Return the failure of a task by what was raised, with a text before its own."""
    return Failed(
        error=before + text_of(error),
        error_type=type_name_of(error),
        traceback=traceback_of(error),
        retryable=retryable,
    )

"""Lifespans of a process that runs tasks, with its event loop and the handlers of ended tasks.

Lifespans are entered in the order of registration, before the first task, and left in reverse after
the last, in the same thread; an async one is entered and left in one task of the event loop.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Final, cast

from machinery_py.app import Application
from machinery_py.errors import MachineryError
from machinery_py.registry.hooks import Lifespan, RunCoroutine
from machinery_py.texts import get_logger
from machinery_py.worker.running.end_hooks import EndHooks
from machinery_py.worker.running.event_loop import EventLoopThread
from machinery_py.worker.running.hooks import WorkerHooks, name_of, text_of, type_name_of
from machinery_py.worker.stopping import StopRequest

logger = get_logger(__name__)


@contextlib.contextmanager
def lifespans(functions: Sequence[Lifespan], run: RunCoroutine) -> Iterator[dict[str, Any]]:
    """Enter all, and give what they have yielded, in one dict; leave them again.

    Args:
        run: runs a coroutine on the loop of async ones, and returns what it returns.

    Raises:
        MachineryError: one could not start; those before it have been left.
    """
    state: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for function in functions:
            held: Any = (
                _async_held(function, run)
                if inspect.isasyncgenfunction(function)
                else contextlib.contextmanager(cast("Callable[[], Iterator[Any]]", function))()
            )
            try:
                given = stack.enter_context(_told_at_its_end(held, name_of(function)))
                if not isinstance(given, Mapping | None):
                    raise TypeError(f"it yielded {given!r} (expected a dict, or nothing)")
            except BaseException as error:  # user code; SystemExit is no reason to look started
                what = f"{type_name_of(error)}: {text_of(error)}"
                raise MachineryError(
                    f"lifespan {name_of(function)} cannot start: {what}"
                ) from error
            state.update(given or {})
        yield state


@contextlib.contextmanager
def _told_at_its_end(held: Any, name: str) -> Iterator[Any]:
    """Enter it, and leave it; an exception then is logged, and the others are left, too."""
    given = held.__enter__()
    try:
        yield given
    finally:
        try:
            held.__exit__(None, None, None)
        except BaseException:  # user code
            logger.exception("lifespan %s failed at its end", name)


@contextlib.contextmanager
def _async_held(function: Lifespan, run: RunCoroutine) -> Iterator[Any]:
    import asyncio  # loaded for coroutines only

    async def hold(entered: asyncio.Future[Any], leave: asyncio.Event) -> None:
        held = cast("Callable[[], AsyncIterator[Any]]", function)
        async with contextlib.asynccontextmanager(held)() as given:
            entered.set_result(given)
            await leave.wait()

    async def enter() -> tuple[Any, asyncio.Event, asyncio.Task[None]]:
        entered, leave = asyncio.get_running_loop().create_future(), asyncio.Event()
        task = asyncio.create_task(hold(entered, leave))
        await asyncio.wait((task, entered), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return await entered, leave, task

    async def end(leave: asyncio.Event, task: asyncio.Task[None]) -> None:
        leave.set()
        await task

    given, leave, task = run(enter())
    try:
        yield given
    finally:
        run(end(leave, task))


class Lifespans:
    """The event loop of a worker, the app's lifespans, and its handlers of ended tasks.

    Lifespans are entered and left in one thread, which lives as long as they do.

    Attributes:
        loop: the event loop.
    """

    def __init__(self, app: Application, hooks: WorkerHooks, *, name: str) -> None:
        self._functions = tuple(app.hooks.lifespans)
        self._hooks = hooks
        self._name = name
        self.loop: Final = EventLoopThread(name)
        self._ends = EndHooks(hooks, name=name)
        hooks.run_coroutine, hooks.ended, hooks.is_behind = self.loop.run, self._ends.put, None
        self._left = threading.Event()
        self._has_entered = False
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def enter(self, request: StopRequest) -> None:
        """Enter the lifespans. Returns early if the worker is asked to stop meanwhile.

        Raises:
            MachineryError: one cannot start.
        """
        if not self._functions:
            return
        self._thread = threading.Thread(
            target=self._live, args=(request,), name=f"{self._name}-lifespan", daemon=True
        )
        self._thread.start()
        while not self._has_entered and self._failure is None and not request.is_made:
            request.wait(0.5)
        if self._failure is not None:
            raise self._failure

    def call_ends(self, timeout: float) -> None:
        """Call the handlers of ended tasks that wait, for so long at most. No more will come."""
        self._ends.close(timeout)

    def leave(self, timeout: float) -> None:
        """Call the handlers that wait, leave the lifespans, end the loop: each for so long at most.

        May be called twice.
        """
        self._ends.close(timeout)
        self._left.set()
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive() and self._failure is None:
                logger.error("a lifespan did not end within %g s; it is left behind", timeout)
        self.loop.close()

    def _live(self, request: StopRequest) -> None:
        try:
            with lifespans(self._functions, self.loop.run) as state:
                self._hooks.state, self._has_entered = state, True
                request.wake()
                self._left.wait()
        except BaseException as error:  # `enter` raises it
            self._failure = error
            request.wake()

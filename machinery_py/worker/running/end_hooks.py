"""Handlers of ended tasks: on_success, on_retry and on_failure, called after the commit."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

from machinery_py.errors import TaskFailed
from machinery_py.tasks.context import enter, leave
from machinery_py.tasks.states import SUSPENDED, State, TaskState
from machinery_py.tasks.workflow import result_value
from machinery_py.texts import get_logger
from machinery_py.threads import LoopThread
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.hooks import WorkerHooks, call_handlers
from machinery_py.worker.running.runner import Run

logger = get_logger(__name__)

MOST_WAITING = 1_000  # ended tasks whose handlers are not called yet, until no new tasks are taken


def handlers_of(execution: Execution) -> Sequence[Callable[..., object]]:
    """Return the handlers that want to know of this end."""
    settlement = execution.settlement
    states = settlement.states if settlement is not None else ()
    if states and states[0].error_type == SUSPENDED:
        return ()  # it goes on, and was not retried
    return execution.app.hooks.on_end.get(states[0].state, ()) if states else ()


def call_end_handlers(execution: Execution) -> None:
    """Call the handlers of an end that was committed, in this thread, as if in the task."""
    handlers, settlement = handlers_of(execution), execution.settlement
    if not handlers or settlement is None:
        return
    state = settlement.states[0]
    kind = f"on_{state.state.lower()}"
    context = Run(execution).new_context()  # the time of the run's own may be up, or there is none
    context.end()  # the connection of its transaction is the next task's
    token = enter(context)
    try:
        is_good = state.state is State.SUCCESS
        given = _result_of(execution, state) if is_good else error_of(execution, state)
        call_handlers(kind, handlers, execution.hooks, context, given)
    except Exception:  # of the type of a result; the next ends have handlers, too
        logger.exception(
            "%s handlers are not called: task %s %s",
            kind,
            context.name,
            context.uuid,
            extra={"task_uuid": context.uuid},
        )
    finally:
        leave(token)


def _result_of(execution: Execution, state: TaskState) -> Any:
    """Return the result as `AsyncResult.get` would; None if it is ignored."""
    value, task = result_value(state.results), execution.task
    return value if task is None else task.call.result(value)


def error_of(execution: Execution, state: TaskState) -> BaseException:
    """Return the error of an end: as it was raised, if that was in this process."""
    return execution.error or TaskFailed(
        state.task_uuid, state.task_name, state.error, error_type=state.error_type
    )


class EndHooks:
    """Calls the handlers of ended tasks, one after the other, in a thread of its own.

    The thread starts with the first of them: a handler that blocks keeps no task from its end.
    """

    def __init__(self, hooks: WorkerHooks, *, name: str) -> None:
        self._hooks = hooks
        self._queue: queue.SimpleQueue[Execution | None] = queue.SimpleQueue()
        self._loop = LoopThread(f"{name}-hooks", self._work)
        self._has_started = self._was_behind = self._is_closed = False

    def put(self, execution: Execution) -> None:
        """Call its handlers, if there are any. For the thread that commits."""
        if handlers_of(execution):
            self._queue.put(execution)
            if not self._has_started:
                self._start()

    def _start(self) -> None:
        try:
            self._loop.start()
        except RuntimeError as error:
            logger.error("no thread for on_… handlers: %s; the next end tries again", error)
            return
        self._has_started, self._hooks.is_behind = True, self.is_behind

    def is_behind(self) -> bool:
        """Return whether so many wait for their handlers that no new tasks are to be taken."""
        is_behind = self._queue.qsize() >= MOST_WAITING
        if is_behind and not self._was_behind:
            logger.warning(
                "%d ended tasks wait for their on_… handlers; no new tasks are taken until these "
                "have caught up",
                self._queue.qsize(),
            )
        self._was_behind = is_behind
        return is_behind

    def close(self, timeout: float) -> None:
        """Call what waits, for so long at most; once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._queue.put(None)
        if not self._loop.join(timeout) or self._queue.qsize() > 1:
            logger.error(
                "the handlers of %d ended tasks are not called: one did not return within %g s",
                max(0, self._queue.qsize() - 1),
                timeout,
            )

    def _work(self) -> None:
        while (execution := self._queue.get()) is not None:
            call_end_handlers(execution)

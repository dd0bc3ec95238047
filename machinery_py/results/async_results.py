"""Results of tasks, for threads and coroutines.

Nothing here polls while the backend can notify: a waiter reads, listens, reads again, and sleeps
until it is woken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Final, Generic, Protocol, Self, TypeVar, cast

import msgspec

from machinery_py.async_twins import twin
from machinery_py.backends.base import Backend
from machinery_py.call_threads import in_thread
from machinery_py.clock import Clock, Seconds, timeout_of
from machinery_py.errors import (
    BackendUnavailable,
    MachineryError,
    ResultExpired,
    ResultTimeout,
    TaskFailed,
)
from machinery_py.results.waiter import LOOK_AGAIN, AsyncWaiter, AsyncWaiters
from machinery_py.tasks.context import (
    check_time,
    waiting_for_tasks,
    waiting_for_tasks_async,
)
from machinery_py.tasks.reasons import Why
from machinery_py.tasks.states import State, TaskState
from machinery_py.tasks.workflow import result_value
from machinery_py.texts import get_logger

logger = get_logger(__name__)

R = TypeVar("R", covariant=True)

JUST = 0.02  # seconds after its sending in which few tasks have ended
FIRST_PAUSE = 0.025  # seconds, doubled with each look at a store that is away
WARN_AFTER = 2.0  # seconds without a worker on the task's queue until the waiter says so


class ResultSource(Protocol):
    """Part of a Server that results need."""

    @property
    def backend(self) -> Backend: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def kept_for(self) -> float: ...
    @property
    def waiters(self) -> AsyncWaiters: ...
    def convert(self, name: str, value: Any) -> Any: ...
    def worker_hint(self, queue: str) -> tuple[str, str]: ...
    def why(self, uuid: str, *, ask: bool) -> Why: ...
    def check_wait(self, result: Waitable[Any]) -> None: ...
    def revoke(self, uuids: Sequence[str]) -> None: ...


class Waitable(Generic[R]):
    """Shared part of all results: waiting. A subclass defines what to wait for, and the value."""

    def __init__(self, source: ResultSource) -> None:
        self._source = source
        self._states: dict[str, TaskState] = {}  # finished ones
        self._failed: set[str] = set()  # of them; another look asks again, as a retry may follow
        self._sent_at = -math.inf  # by `time.monotonic`, if it was sent here

    def just_sent(self) -> Self:
        """Return it, noting the time of its sending."""
        self._sent_at = time.monotonic()
        return self

    def get(self, timeout: Seconds | None = None, *, propagate: bool = True) -> R:
        """Wait for the result, and return it.

        Inside a task the slot of this task is lent to another one meanwhile, with a warning.

        Args:
            timeout: seconds, or a timedelta; None waits as long as it takes, 0 and less look once.
            propagate: False: of what has failed, return the TaskFailed in place of its value.

        Raises:
            TaskFailed: the task failed, or one that the result needs.
            ResultTimeout: the result was not there in time; the task goes on.
            ResultExpired: there is no state (any more).
            BackendUnavailable: the result backend was away when the time was up.
            Unsupported: in the `server.transaction` that sends the task.
            TypeError, ValueError: the timeout is no length, or NaN.
        """
        if not propagate:
            return cast(R, self._get_all(timeout))
        self._source.check_wait(self)
        self._forget_failures()
        wait = Wait(self, timeout)
        # What was sent just now has not ended: its first look is the one after `watch`.
        is_new = time.monotonic() - self._sent_at <= JUST
        self._sent_at = -math.inf
        while True:
            try:
                if is_new or not self._look():
                    with waiting_for_tasks():
                        self._listen(wait)
                return self._value()
            except BackendUnavailable as error:
                is_new = False
                time.sleep(wait.pause_of_outage(error))

    def _listen(self, wait: Wait) -> None:
        """Return when the value is there."""
        listener = self._source.backend.listener()
        watched: set[str] = set()
        try:
            while True:
                # Read again after each new name is watched: a task may have ended in between.
                new = set(self._awaited()) - watched
                if new:
                    listener.watch(new)
                    watched |= new
                else:
                    listener.wait(wait.next_pause())
                    self._know(listener.told())
                if self._look():
                    return
        finally:
            listener.close()

    def _get_all(self, timeout: Seconds | None) -> Any:
        """Return the value, with each TaskFailed in place of what has failed."""
        try:
            return self.get(timeout)
        except TaskFailed as error:
            return error

    async def get_async(self, timeout: Seconds | None = None, *, propagate: bool = True) -> R:
        """Wait in a coroutine: `get` for coroutines."""
        if not propagate:
            return cast(R, await self._get_all_async(timeout))
        self._source.check_wait(self)
        self._forget_failures()
        wait = Wait(self, timeout)
        with self._source.waiters.waiter() as waiter:
            pause = await in_thread(lambda: self._step(wait, waiter))
            if pause is not None:
                async with waiting_for_tasks_async():
                    while pause is not None:
                        if pause:
                            await waiter.wait(pause)
                        pause = await in_thread(lambda: self._step(wait, waiter))
        return self._value()

    async def _get_all_async(self, timeout: Seconds | None) -> Any:
        try:
            return await self.get_async(timeout)
        except TaskFailed as error:
            return error

    def _step(self, wait: Wait, waiter: AsyncWaiter) -> float | None:
        """Do one step of `get_async`, in a thread, since it asks the store.

        Returns the seconds to wait before the next step; None when the result is there.
        """
        try:
            if self._look():
                return None
            return 0.0 if waiter.watch(self._awaited()) else wait.next_pause()
        except BackendUnavailable as error:
            return wait.pause_of_outage(error)

    def __await__(self) -> Generator[Any, None, R]:
        return self.get_async().__await__()

    def touch(self) -> R | None:
        """Return the result, or None while there is none. Does not wait.

        Raises:
            TaskFailed: as `get`.
        """
        self._forget_failures()
        return self._value() if self._look() else None

    touch_async: Final = twin(touch)

    def is_finished(self) -> bool:
        """Return whether `get` would return or raise at once. Does not wait."""
        self._forget_failures()
        try:
            return self._look()
        except (TaskFailed, ResultExpired):
            return True

    is_finished_async: Final = twin(is_finished)

    def why(self, *, ask: bool = True) -> Why:
        """Return what holds it now: of several tasks the first, and how many others there are.

        Args:
            ask: False: no worker is asked, which can take some seconds, and less is found.

        Raises:
            StateNotFound: nothing is known of it (any more).
        """
        try:
            self._look()
        except (TaskFailed, ResultExpired):
            pass  # the state says it
        held = self._holding()
        return msgspec.structs.replace(self._source.why(held[0], ask=ask), others=len(held) - 1)

    why_async: Final = twin(why)

    def _read(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        """Return the states; finished ones are asked for once."""
        missing = [uuid for uuid in uuids if uuid not in self._states]
        found = self._source.backend.get_states(missing) if missing else {}
        self._know(state for state in found.values() if state.is_finished)
        return {**found, **{uuid: self._states[uuid] for uuid in uuids if uuid in self._states}}

    def _know(self, finished: Iterable[TaskState]) -> None:
        for state in finished:
            self._states[state.task_uuid] = state
            if state.state is State.FAILURE:
                self._failed.add(state.task_uuid)

    def _forget_failures(self) -> None:
        """Ask for the states of failed tasks again, since each may have been retried."""
        failed, self._failed = self._failed, set()
        if failed:
            kept = {uuid: one for uuid, one in self._states.items() if uuid not in failed}
            self._states = kept

    def _result_of(self, state: TaskState) -> Any:
        return self._source.convert(state.task_name, result_value(state.results))

    def _expired(self, uuid: str) -> ResultExpired:
        return ResultExpired(uuid, kept_for=self._source.kept_for)

    def forget(self) -> None:
        """Forget the states of those of its tasks that have ended.

        Results that a chord waits for stay.

        Raises:
            Unsupported: the backend cannot list its states.
        """
        self._source.backend.delete_finished(self._tasks())
        self._states, self._failed = {}, set()

    forget_async: Final = twin(forget)

    # For the subclass

    def _tasks(self) -> Sequence[str]:
        """Return the UUIDs of all its tasks."""
        raise AssertionError

    def _look(self) -> bool:
        """Return whether the value is there. Raises what `get` raises."""
        raise AssertionError

    def _value(self) -> R:
        raise AssertionError

    def _awaited(self) -> Sequence[str]:
        """Return the UUIDs whose end would change something."""
        raise AssertionError

    def _holding(self) -> Sequence[str]:
        """Return the UUIDs of the tasks that hold it after the last look, one at least."""
        raise AssertionError

    def _describe(self) -> tuple[str, str, str]:
        """Return (what is waited for, its last known state, its queue), for texts."""
        raise AssertionError


class Wait:
    """Time of one `get`: pauses between reads, an outage of the store, the warning, the timeout."""

    def __init__(self, waitable: Waitable[Any], timeout: Seconds | None) -> None:
        self._waitable = waitable
        self._clock = waitable._source.clock
        self._timeout = timeout_of(timeout)
        self._start = self._clock.monotonic()
        self._warned = False
        self._pause = FIRST_PAUSE

    def pause_of_outage(self, error: BackendUnavailable) -> float:
        """Return the seconds to wait for a store that is away; raises the error when time is up."""
        check_time()
        left = math.inf
        if self._timeout is not None:
            left = self._timeout - (self._clock.monotonic() - self._start)
            if left <= 0:
                raise error
        if self._pause == FIRST_PAUSE:
            logger.warning("waiting for a result, and for its store: %s", error)
        self._pause = min(LOOK_AGAIN, self._pause * 2)
        return min(self._pause, left)

    def next_pause(self) -> float:
        """Return the seconds to sleep at most.

        Raises:
            ResultTimeout: the timeout is over.
        """
        check_time()
        waited = self._clock.monotonic() - self._start
        if self._timeout is not None and waited >= self._timeout:
            what, state, _ = self._waitable._describe()
            raise ResultTimeout(
                f"no result of {what} after {self._timeout:.1f} s; last state {state}"
                f"{self._reasons()}"
            )
        if not self._warned and waited >= WARN_AFTER:
            self._warned = True
            _, _, queue = self._waitable._describe()
            hint, command = self._waitable._source.worker_hint(queue)
            if hint:
                logger.warning("%s (%s)", hint.replace(" on ", " on queue "), command)
        remaining = LOOK_AGAIN if self._timeout is None else min(LOOK_AGAIN, self._timeout - waited)
        return remaining if self._warned else min(remaining, WARN_AFTER - waited)

    def _reasons(self) -> str:
        """Say what holds it, without asking workers: the time is up."""
        try:
            reasons = self._waitable.why(ask=False).reasons
        except MachineryError:  # its store is away, or forgot it: the timeout is what is raised
            return ""
        return f", {reasons[0].text}" if reasons else ""


class PartialChain(Protocol):
    """Part of a ChainResult that its steps need."""

    def _is_past(self, step: AsyncResult[Any]) -> bool: ...
    def _holding(self) -> Sequence[str]: ...


class AsyncResult(Waitable[R]):
    """Result of one task.

    Attributes:
        uuid: of the task; `server.result(uuid)` finds the result again in another process.
        name, queue: of the task, as far as they are known here.
        duplicate: the call was not sent, because the same call, sent before, is not over; this is
            the result of that one.
    """

    def __init__(
        self,
        source: ResultSource,
        uuid: str,
        *,
        name: str = "",
        queue: str = "",
        duplicate: bool = False,
    ) -> None:
        super().__init__(source)
        self.uuid = uuid
        self.name = name
        self.queue = queue
        self.duplicate = duplicate
        # The chain in which it is a step, and has no state before its turn.
        self._chain: PartialChain | None = None

    def get_state(self) -> TaskState:
        """Read the state of the task.

        Raises:
            StateNotFound: the state expired, or the task was never sent.
        """
        self._forget_failures()
        return self._states.get(self.uuid) or self._source.backend.get_state(self.uuid)

    get_state_async: Final = twin(get_state)

    def revoke(self) -> None:
        """Fail the task as "revoked" if it has not started; ask it to stop if it runs."""
        self._source.revoke([self.uuid])

    revoke_async: Final = twin(revoke)

    def _look(self) -> bool:
        try:
            return self._look_alone()
        except ResultExpired:
            if self._chain is None or self._chain._is_past(self):
                raise
            return False

    def _look_alone(self) -> bool:
        """Look as if it were no step of a chain."""
        state = self._states.get(self.uuid) or self._read([self.uuid]).get(self.uuid)
        if state is None:
            raise self._expired(self.uuid)
        raise_if_failed(state)
        return state.is_finished

    def _value(self) -> R:
        return cast(R, self._result_of(self._states[self.uuid]))

    def _awaited(self) -> Sequence[str]:
        return (self.uuid,)

    _tasks = _awaited

    def _holding(self) -> Sequence[str]:
        if self._chain is None:
            return (self.uuid,)
        try:
            is_past = self._chain._is_past(self)
        except TaskFailed:  # of a step before it
            is_past = False
        return (self.uuid,) if is_past else self._chain._holding()

    def _describe(self) -> tuple[str, str, str]:
        state = self._read([self.uuid]).get(self.uuid)
        return (
            self.uuid,
            state.state if state else "unknown",
            (state.queue if state else "") or self.queue,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.uuid}>"


def raise_if_failed(state: TaskState) -> None:
    """Raise TaskFailed when the state is FAILURE."""
    if state.state is State.FAILURE:
        raise TaskFailed(
            state.task_uuid,
            state.task_name,
            state.error,
            error_type=state.error_type,
            traceback=state.traceback,
        )

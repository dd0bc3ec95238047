"""What a sender gets back: the result of a task, a group, a chain or a chord, now or later, here or in a coroutine.

Nothing here polls while the backend can notify: a waiter looks, listens, looks again, and sleeps until it is woken.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

from machinery_py.async_twins import twin
from machinery_py.backends.base import Backend
from machinery_py.clock import Clock
from machinery_py.errors import ResultExpired, ResultTimeout, TaskFailed
from machinery_py.results.waiter import LOOK_AGAIN, AsyncWaiter, AsyncWaiters
from machinery_py.tasks.context import check_time
from machinery_py.tasks.states import State, TaskState
from machinery_py.tasks.workflow import result_value
from machinery_py.texts import get_logger

logger = get_logger(__name__)

R = TypeVar("R", covariant=True)

WARN_AFTER = 2.0  # seconds without a worker on the task's queue until the waiter says so


class ResultSource(Protocol):
    """What results need of a Server."""

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
    def revoke(self, uuids: Sequence[str]) -> None: ...


class Waitable(Generic[R]):
    """The shared part: waiting. A subclass says what it waits for and what it makes of it."""

    def __init__(self, source: ResultSource) -> None:
        self._source = source
        self._states: dict[str, TaskState] = {}  # finished ones; they never change again

    def get(self, timeout: float | None = None) -> R:
        """The result, when it is there.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            TaskFailed: a task that it takes has failed.
            ResultTimeout: it was not there in time; the task goes on.
            ResultExpired: there is no state (any more).
        """
        wait = _Wait(self, timeout)
        if self._look():
            return self._value()
        listener = self._source.backend.listener()
        watched: set[str] = set()
        try:
            while True:
                # Looked at again after each new name is listened for, so that nothing that ends in between is missed.
                new = set(self._awaited()) - watched
                if new:
                    listener.watch(new)
                    watched |= new
                else:
                    listener.wait(wait.next_pause())
                if self._look():
                    break
        finally:
            listener.close()
        return self._value()

    async def get_async(self, timeout: float | None = None) -> R:
        """`get` for coroutines."""
        import asyncio  # loaded by now: we are in a coroutine

        wait = _Wait(self, timeout)
        with self._source.waiters.waiter() as waiter:
            while (pause := await asyncio.to_thread(self._step, wait, waiter)) is not None:
                if pause:
                    await waiter.wait(pause)
        return self._value()

    def _step(self, wait: _Wait, waiter: AsyncWaiter) -> float | None:
        """One step of `get_async`, in a thread, since each asks the store: the seconds until the next; None: it is there."""
        if self._look():
            return None
        return 0.0 if waiter.watch(self._awaited()) else wait.next_pause()

    def __await__(self) -> Generator[Any, None, R]:
        return self.get_async().__await__()

    def touch(self) -> R | None:
        """The result, or None while there is none. Does not wait.

        Raises:
            TaskFailed: as `get`.
        """
        return self._value() if self._look() else None

    touch_async = twin(touch)

    def is_finished(self) -> bool:
        """Whether `get` would return or raise at once. Does not wait."""
        try:
            return self._look()
        except (TaskFailed, ResultExpired):
            return True

    is_finished_async = twin(is_finished)

    def _read(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        """The states; finished ones are asked for once."""
        missing = [uuid for uuid in uuids if uuid not in self._states]
        found = self._source.backend.get_states(missing) if missing else {}
        self._states.update({uuid: state for uuid, state in found.items() if state.is_finished})
        return {**found, **{uuid: self._states[uuid] for uuid in uuids if uuid in self._states}}

    def _result_of(self, state: TaskState) -> Any:
        return self._source.convert(state.task_name, result_value(state.results))

    def _expired(self, uuid: str) -> ResultExpired:
        return ResultExpired(uuid, kept_for=self._source.kept_for)

    # For the subclass

    def _look(self) -> bool:
        """Whether the value is there. Raises what `get` raises."""
        raise AssertionError

    def _value(self) -> R:
        raise AssertionError

    def _awaited(self) -> Sequence[str]:
        """The UUIDs whose end would change something."""
        raise AssertionError

    def _describe(self) -> tuple[str, str, str]:
        """(what is waited for, its last known state, its queue), for texts."""
        raise AssertionError


class _Wait:
    """The time of one `get`: how long to the next look, when to warn, when to give up."""

    def __init__(self, waitable: Waitable[Any], timeout: float | None) -> None:
        self._waitable = waitable
        self._clock = waitable._source.clock
        self._timeout = timeout
        self._start = self._clock.monotonic()
        self._warned = False

    def next_pause(self) -> float:
        """Seconds to sleep at most.

        Raises:
            ResultTimeout: the time is up.
        """
        check_time()
        waited = self._clock.monotonic() - self._start
        if self._timeout is not None and waited >= self._timeout:
            what, state, queue = self._waitable._describe()
            hint, _ = self._waitable._source.worker_hint(queue)
            raise ResultTimeout(
                f"no result of {what} after {self._timeout:.1f} s; last state {state}"
                f"{', ' + hint if hint else ''}"
            )
        if not self._warned and waited >= WARN_AFTER:
            self._warned = True
            _, _, queue = self._waitable._describe()
            hint, command = self._waitable._source.worker_hint(queue)
            if hint:
                logger.warning("%s (%s)", hint.replace(" on ", " on queue "), command)
        remaining = LOOK_AGAIN if self._timeout is None else min(LOOK_AGAIN, self._timeout - waited)
        return (
            remaining
            if self._warned or waited >= WARN_AFTER
            else min(remaining, WARN_AFTER - waited)
        )


class AsyncResult(Waitable[R]):
    """The result of one task.

    Attributes:
        uuid: of the task; `server.result(uuid)` finds it again in another process.
        name, queue: of the task, as far as they are known here.
        duplicate: the call was not sent: this is the result of the same call, sent before, which is not over.
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
        self._chain: ChainResult[Any] | None = (
            None  # in which it is a step, and has no state before its turn
        )

    def get_state(self) -> TaskState:
        """How far the task is.

        Raises:
            StateNotFound: it expired, or was never sent.
        """
        return self._states.get(self.uuid) or self._source.backend.get_state(self.uuid)

    get_state_async = twin(get_state)

    def revoke(self) -> None:
        """If it has not started, it never will, and is FAILURE, "revoked", from now on; if it runs, it is asked to stop."""
        self._source.revoke([self.uuid])

    revoke_async = twin(revoke)

    def _look(self) -> bool:
        try:
            return self._look_alone()
        except ResultExpired:
            if self._chain is None or self._chain._is_past(self):
                raise
            return False

    def _look_alone(self) -> bool:
        """As if it were no step of anything."""
        state = self._states.get(self.uuid) or self._read([self.uuid]).get(self.uuid)
        if state is None:
            raise self._expired(self.uuid)
        raise_if_failed(state)
        return state.is_finished

    def _value(self) -> R:
        return cast(R, self._result_of(self._states[self.uuid]))

    def _awaited(self) -> Sequence[str]:
        return (self.uuid,)

    def _describe(self) -> tuple[str, str, str]:
        state = self._read([self.uuid]).get(self.uuid)
        return (
            self.uuid,
            state.state if state else "unknown",
            (state.queue if state else "") or self.queue,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.uuid}>"


class GroupResult(Waitable[R]):
    """The results of a group, in its order: a list. Iterating gives the single AsyncResults."""

    def __init__(
        self,
        source: ResultSource,
        uuid: str,
        uuids: Sequence[str],
        names: Sequence[str],
        *,
        queue: str = "",
        leading: Sequence[str] = (),
    ) -> None:
        super().__init__(source)
        self.uuid = uuid
        self.results = [
            AsyncResult[Any](source, one, name=name, queue=queue)
            for one, name in zip(uuids, names, strict=True)
        ]
        self._uuids = tuple(uuids)
        self._leading = tuple(leading)
        self._open = [*leading, *uuids]
        self._sent = True  # False while a chain has not got here: then a missing state is no news

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: int) -> AsyncResult[Any]:
        return self.results[index]

    def __iter__(self) -> Iterator[AsyncResult[Any]]:
        return iter(self.results)

    def progress(self) -> tuple[int, int]:
        """How many members have ended, and how many there are. Does not wait."""
        self._read(self._uuids)
        return sum(uuid in self._states for uuid in self._uuids), len(self._uuids)

    progress_async = twin(progress)

    def revoke(self) -> None:
        """As AsyncResult.revoke, for every member."""
        self._source.revoke(self._uuids)

    revoke_async = twin(revoke)

    def _look(self) -> bool:
        found = self._read(self._open)
        for uuid in self._open:
            state = found.get(uuid)
            if state is not None:
                raise_if_failed(state)
            elif self._sent and not self._leading:
                raise self._expired(uuid)
        self._open = [uuid for uuid in self._open if uuid not in self._states]
        return all(uuid in self._states for uuid in self._uuids)

    def _value(self) -> R:
        return cast(R, [self._result_of(self._states[uuid]) for uuid in self._uuids])

    def _awaited(self) -> Sequence[str]:
        return self._open

    def _describe(self) -> tuple[str, str, str]:
        done = len(self._uuids) - sum(uuid not in self._states for uuid in self._uuids)
        return (
            f"{self.uuid or 'the group'}",
            f"{done} of {len(self._uuids)} finished",
            self.results[0].queue,
        )


class ChainResult(Waitable[R]):
    """The result of the last step of a chain. `steps` has the result of each."""

    def __init__(
        self, source: ResultSource, steps: Sequence[AsyncResult[Any] | GroupResult[Any]]
    ) -> None:
        super().__init__(source)
        self.steps = tuple(steps)
        self._at = 0  # the first step that is not known to be finished
        for step in self.steps[1:]:
            if isinstance(step, GroupResult):
                step._sent = False
            else:
                step._chain = self

    @property
    def uuid(self) -> str:
        return self.steps[-1].uuid

    def revoke(self) -> None:
        """As AsyncResult.revoke, for every step."""
        uuids = [
            uuid
            for step in self.steps
            for uuid in (step._uuids if isinstance(step, GroupResult) else (step.uuid,))
        ]
        self._source.revoke(uuids)

    revoke_async = twin(revoke)

    def _look(self) -> bool:
        last = self.steps[-1]
        if self._at < len(self.steps) - 1 and _finished(last):
            self._at = len(self.steps) - 1
        while self._at < len(self.steps):
            try:
                if not _alone(self.steps[self._at]):
                    return False
            except ResultExpired:
                # A step that was not reached yet has no state, as in Go; the first has one from the start.
                if self._at == 0:
                    raise
                return False
            self._at += 1
        return True

    def _is_past(self, step: AsyncResult[Any]) -> bool:
        """Whether its turn is over. Raises what keeps it from ever coming."""
        return self._look() or self._at > self.steps.index(step)

    def _value(self) -> R:
        return cast(R, self.steps[-1]._value())

    def _awaited(self) -> Sequence[str]:
        at = min(self._at, len(self.steps) - 1)
        if isinstance(self.steps[at], GroupResult) and self.steps[at] is not self.steps[-1]:
            # The callback ends also when a member fails (if a Go program ran that, the next look finds it): so a thousand
            # members need not be listened to.
            at += 1
        return (*self.steps[at]._awaited(), *self.steps[-1]._awaited())

    def _describe(self) -> tuple[str, str, str]:
        current = self.steps[min(self._at, len(self.steps) - 1)]
        what, state, queue = current._describe()
        return f"{self.uuid} (step {self._at + 1} of {len(self.steps)}: {what})", state, queue


class ChordResult(ChainResult[R]):
    """The result of a chord's callback; `group` are the members, `callback` is the callback."""

    @property
    def group(self) -> GroupResult[Any]:
        return cast("GroupResult[Any]", self.steps[-2])

    @property
    def callback(self) -> AsyncResult[Any]:
        return cast("AsyncResult[Any]", self.steps[-1])


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


def _finished(step: AsyncResult[Any] | GroupResult[Any]) -> bool:
    """Whether the step has succeeded. That it has no state, or failed, is found out in its turn."""
    try:
        return _alone(step)
    except (TaskFailed, ResultExpired):
        return False


def _alone(step: AsyncResult[Any] | GroupResult[Any]) -> bool:
    return step._look_alone() if isinstance(step, AsyncResult) else step._look()

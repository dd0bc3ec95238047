"""Results of groups, chains and chords, for threads and coroutines."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

from machinery_py.async_twins import twin
from machinery_py.call_threads import in_thread
from machinery_py.clock import Seconds, timeout_of
from machinery_py.errors import BackendUnavailable, ResultExpired, StateNotFound, TaskFailed
from machinery_py.results.async_results import (
    AsyncResult,
    ResultSource,
    Wait,
    Waitable,
    raise_if_failed,
)
from machinery_py.tasks.context import waiting_for_tasks, waiting_for_tasks_async
from machinery_py.tasks.linking import Plan
from machinery_py.tasks.states import State
from machinery_py.tasks.workflow import OnFailure, failure_of

LOOK = 250  # members of a group that are read at once

R = TypeVar("R", covariant=True)


class GroupResult(Waitable[R]):
    """Result of a group: a list, in its order. Iterating gives the AsyncResult of each member.

    Attributes:
        workflow: UUID of the workflow, for `server.workflow`; "" if it is not known here.
    """

    def __init__(
        self,
        source: ResultSource,
        uuid: str,
        uuids: Sequence[str],
        names: Sequence[str],
        *,
        queue: str = "",
        leading: Sequence[str] = (),
        workflow: str = "",
        on_failure: OnFailure = "abort",
    ) -> None:
        super().__init__(source)
        self.uuid = uuid
        self._queue = queue
        self._on_failure = on_failure
        self.workflow = workflow
        self._uuids = tuple(uuids)
        self._names = tuple(names)
        self._leading = tuple(leading)
        self._open = [*uuids, *leading]
        self._next = 0  # of those that are open, where the next look goes on
        self._sent = True  # False before its turn in a chain: then it may have no states

    @functools.cached_property
    def results(self) -> list[AsyncResult[Any]]:
        """The result of each member, in order."""
        return [
            AsyncResult(self._source, one, name=name, queue=self._queue)
            for one, name in zip(self._uuids, self._names, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._uuids)

    def __getitem__(self, index: int) -> AsyncResult[Any]:
        return self.results[index]

    def __iter__(self) -> Iterator[AsyncResult[Any]]:
        return iter(self.results)

    def as_completed(self, timeout: Seconds | None = None) -> AsCompleted:
        """Return an iterator over the results of the members as they end, for `async for`, too.

        While it is iterated it raises ResultTimeout if some have not ended in time; they go on.
        """
        return AsCompleted(self, timeout)

    def _get_all(self, timeout: Seconds | None) -> Any:
        for _ in self.as_completed(timeout):
            pass
        return self._values()

    async def _get_all_async(self, timeout: Seconds | None) -> Any:
        async for _ in self.as_completed(timeout):
            pass
        return self._values()

    def _values(self) -> list[Any]:
        """Return the value of each member, or its TaskFailed; all have ended."""
        values: list[Any] = []
        states = self._read(self._uuids)
        for uuid in self._uuids:
            try:
                raise_if_failed(states[uuid])
                values.append(self._result_of(states[uuid]))
            except TaskFailed as error:
                values.append(error)
        return values

    def progress(self) -> tuple[int, int]:
        """Return how many members have ended, and how many there are. Does not wait."""
        self._forget_failures()
        self._read(self._uuids)
        return sum(uuid in self._states for uuid in self._uuids), len(self._uuids)

    progress_async: Final = twin(progress)

    def revoke(self) -> None:
        """Revoke every member, as AsyncResult.revoke."""
        self._source.revoke(self._uuids)

    revoke_async: Final = twin(revoke)

    def _tasks(self) -> Sequence[str]:
        return (*self._uuids, *self._leading)

    def _look(self) -> bool:
        left = 0
        while self._open and not (left := self._look_at(0, LOOK)):
            pass
        return self._look_behind(left)

    def _forget_failures(self) -> None:
        failed = self._failed
        super()._forget_failures()
        if failed:
            open_ones = failed.union(self._open)
            self._open = [uuid for uuid in self._tasks() if uuid in open_ones]

    def _glance(self, count: int = LOOK) -> bool:
        """Look at so many members only."""
        return self._look_behind(self._look_at(0, count))

    def _look_behind(self, left: int) -> bool:
        """Look at some behind the first `left` that are open: a failure is found in its turn."""
        at = self._next if left <= self._next < len(self._open) else left
        self._next = at + self._look_at(at, LOOK)
        return all(uuid in self._states for uuid in self._uuids)

    def _look_at(self, start: int, count: int) -> int:
        """Look at some that are open, and return how many of them still are."""
        some = self._open[start : start + count]
        found = self._read(some)
        for uuid in some:
            state = found.get(uuid)
            if state is not None and state.state is State.FAILURE:
                if self._on_failure != "abort":
                    continue
                for one in (*self._read(self._leading).values(), state):  # the cause first
                    raise_if_failed(one)
            elif state is None and self._sent and not self._leading:
                raise self._expired(uuid)
        still = [uuid for uuid in some if uuid not in self._states]
        self._open[start : start + count] = still
        return len(still)

    def _value(self) -> R:
        known = self._read(self._uuids)  # asks only for what another thread has just forgotten
        states = [known[uuid] for uuid in self._uuids]
        if self._on_failure == "skip":
            states = [state for state in states if state.state is not State.FAILURE]
        values = [
            failure_of(state) if state.state is State.FAILURE else self._result_of(state)
            for state in states
        ]
        return cast(R, values)

    def _awaited(self) -> Sequence[str]:
        return self._open

    def _holding(self) -> Sequence[str]:
        return self._open or self._uuids

    def _describe(self) -> tuple[str, str, str]:
        done = len(self._uuids) - sum(uuid not in self._states for uuid in self._uuids)
        return (
            f"{self.uuid or 'the group'}",
            f"{done} of {len(self._uuids)} finished",
            self._queue,
        )


class AsCompleted:
    """Iterator of `GroupResult.as_completed`. Each iteration begins anew."""

    def __init__(self, group: GroupResult[Any], timeout: Seconds | None) -> None:
        self._group = group
        self._timeout = timeout_of(timeout)

    def __iter__(self) -> Iterator[AsyncResult[Any]]:
        group, wait = self._group, Wait(self._group, self._timeout)
        group._forget_failures()
        waiting = {one.uuid: one for one in group.results}
        while waiting:
            try:
                yield from self._listened(waiting, wait)
            except BackendUnavailable as error:
                time.sleep(wait.pause_of_outage(error))

    def _listened(
        self, waiting: dict[str, AsyncResult[Any]], wait: Wait
    ) -> Iterator[AsyncResult[Any]]:
        listener = self._group._source.backend.listener()
        try:
            listener.watch(waiting)
            while True:
                yield from self._ended(waiting)
                if not waiting:
                    return
                with waiting_for_tasks():
                    listener.wait(wait.next_pause())
        finally:
            listener.close()

    async def __aiter__(self) -> AsyncIterator[AsyncResult[Any]]:
        group, wait = self._group, Wait(self._group, self._timeout)
        group._forget_failures()
        waiting = {one.uuid: one for one in group.results}
        with group._source.waiters.waiter() as waiter:
            while waiting:
                try:
                    await in_thread(lambda: waiter.watch([*waiting]))
                    for one in await in_thread(lambda: self._ended(waiting)):
                        yield one
                    pause = await in_thread(wait.next_pause) if waiting else 0.0
                except BackendUnavailable as error:
                    pause = wait.pause_of_outage(error)
                if pause:
                    async with waiting_for_tasks_async():
                        await waiter.wait(pause)

    def _ended(self, waiting: dict[str, AsyncResult[Any]]) -> list[AsyncResult[Any]]:
        """Take those that have ended out of `waiting`, and return them."""
        states = self._group._states
        self._group._read([*waiting])
        ended = [waiting.pop(uuid) for uuid in [*waiting] if uuid in states]
        for one in ended:
            one._know([states[one.uuid]])
        return ended


class ChainResult(Waitable[R]):
    """Result of the last step of a chain.

    Attributes:
        steps: the result of each step.
        workflow: UUID of the workflow, for `server.workflow`.
    """

    def __init__(
        self,
        source: ResultSource,
        steps: Sequence[AsyncResult[Any] | GroupResult[Any]],
        workflow: str = "",
    ) -> None:
        super().__init__(source)
        self.workflow = workflow
        self.steps: tuple[AsyncResult[Any] | GroupResult[Any], ...] = tuple(steps)
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
        """Revoke every step, as AsyncResult.revoke."""
        self._source.revoke(self._tasks())

    revoke_async: Final = twin(revoke)

    def _tasks(self) -> Sequence[str]:
        return [uuid for step in self.steps for uuid in step._tasks()]

    def _look(self) -> bool:
        last = self.steps[-1]
        failed = False
        # An empty group at the end is over with the step before it.
        if self._at < len(self.steps) - 1 and last._awaited():
            try:
                if _alone(last):
                    self._at = len(self.steps) - 1
            except (TaskFailed, ResultExpired):  # it is raised in its turn
                failed = True
        while self._at < len(self.steps):
            step = self.steps[self._at]
            try:
                if isinstance(step, GroupResult) and isinstance(self._after(), AsyncResult):
                    # Its callback says when it is over, and that a member has failed.
                    is_over = step._glance(len(step._open) if failed else LOOK)
                else:
                    is_over = _alone(step)
                if not is_over:
                    return False
            except ResultExpired:
                # A step has no state before its turn, as in Go; the first has one from the start.
                if self._at == 0:
                    raise
                return False
            self._at += 1
        return True

    def _forget_failures(self) -> None:
        for step in {self.steps[min(self._at, len(self.steps) - 1)], self.steps[-1]}:
            step._forget_failures()

    def _is_past(self, step: AsyncResult[Any]) -> bool:
        """Return whether the step's turn is over. Raises the failure of a step before it."""
        self._forget_failures()
        return self._look() or self._at > self.steps.index(step)

    def _value(self) -> R:
        return cast(R, self.steps[-1]._value())

    def _after(self) -> AsyncResult[Any] | GroupResult[Any]:
        return self.steps[min(self._at + 1, len(self.steps) - 1)]

    def _awaited(self) -> Sequence[str]:
        last = self.steps[-1]
        if isinstance(last, AsyncResult):
            # It ends also when a step before it fails (the next look finds a failure in Go): so the
            # steps, perhaps a thousand, and the members of groups need not be watched.
            return last._awaited()
        at = min(self._at, len(self.steps) - 1)
        if isinstance(self.steps[at], GroupResult) and isinstance(self._after(), AsyncResult):
            at += 1
        return (*self.steps[at]._awaited(), *last._awaited())

    def _holding(self) -> Sequence[str]:
        step = self.steps[min(self._at, len(self.steps) - 1)]
        return (step.uuid,) if isinstance(step, AsyncResult) else step._holding()

    def _describe(self) -> tuple[str, str, str]:
        current = self.steps[min(self._at, len(self.steps) - 1)]
        what, state, queue = current._describe()
        return f"{self.uuid} (step {self._at + 1} of {len(self.steps)}: {what})", state, queue


class ChordResult(ChainResult[R]):
    """Result of a chord's callback. `group` is the result of the members."""

    @property
    def group(self) -> GroupResult[Any]:
        return cast("GroupResult[Any]", self.steps[-2])

    @property
    def callback(self) -> AsyncResult[Any]:
        return cast("AsyncResult[Any]", self.steps[-1])


def result_of(plan: Plan, source: ResultSource, queue: str) -> ChainResult[Any]:
    """Return the result of a workflow. `queue`: the default one."""
    queue = plan.queue or queue
    steps: list[AsyncResult[Any] | GroupResult[Any]] = []
    for step in plan.steps:
        if step.is_group:
            steps.append(
                GroupResult(
                    source,
                    step.group_uuid,
                    step.uuids,
                    step.names,
                    queue=queue,
                    leading=step.leading,
                    workflow=plan.uuid,
                    on_failure=step.on_failure,
                ).just_sent()
            )
        else:
            steps.append(AsyncResult(source, step.uuids[0], name=step.names[0], queue=queue))
    is_chord = len(steps) == 2 and plan.steps[0].is_group and not plan.steps[1].is_group
    return (ChordResult if is_chord else ChainResult)(source, steps, plan.uuid).just_sent()


def _alone(step: AsyncResult[Any] | GroupResult[Any]) -> bool:
    return step._look_alone() if isinstance(step, AsyncResult) else step._look()


def group_result(source: ResultSource, uuid: str) -> GroupResult[Any]:
    """Return the result of a group that is known to the backend.

    Raises:
        StateNotFound: it is not (any more).
    """
    group = source.backend.get_group(uuid)
    if group is None or group.plan:
        raise StateNotFound(uuid, f"no group {uuid}: it expired, or it was never sent")
    result = GroupResult[Any](source, uuid, group.task_uuids, [""] * len(group.task_uuids))
    result._sent = False  # it may be a step whose turn has not come
    return result

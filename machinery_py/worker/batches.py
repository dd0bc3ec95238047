"""Batches: calls of a task with `batch=…` that a worker gathers, and runs as one.

A call in a batch is a task like any other: it has a delivery, a state, retries and a settlement of
its own, and each settlement is committed or fenced by itself. A batch is nothing in the store, only
in this worker: losing it loses nothing.

    gathered    held by the session, RECEIVED; no slot, not begun
    submitted   the batch is full, or its first call has waited for `batch_within`
    running     the batch has a slot, and each call is STARTED
    over        each call has its own outcome, which follow_up (registry/outcomes.py) judges

| moment | what ends | each call |
|---|---|---|
| gathered, or submitted | its worker is killed | comes back with the lease; no strike, no try |
| the same | its worker is stopped | goes back to its queue at once |
| the same | it is revoked | ends as revoked; the others are run |
| running | its worker is killed | comes back with a strike, and then runs in a batch of its own |
| running | its task process dies | RETRY at once with a strike, and then in a batch of its own |
| running | its worker is stopped | if not over in time: goes back to its queue |
| running | it is revoked | runs on; it is not retried. Are all revoked, the run is ended |
| running | its lease is lost | runs on; it alone is fenced. Are all lost, the run is cancelled |
| running | the time limit | fails, or is retried by its own rules |
| over, before the commit | its worker is killed | comes back and runs again: at least once |

A call that failed before and has its last try runs alone, too: the fault of another call is not the
end of it.

Capacity: a batch needs one slot, and its calls count as one. Gathered calls count for nothing; each
batch task has fewer of them than `batch`. More is claimed than there are slots only as far as what
came last was of batches, so that other tasks of the queue are not held up here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from machinery_py.registry.outcomes import Batched, Failed, Outcome
from machinery_py.stores.base import Settlement
from machinery_py.tasks.signature import Signature, new_uuid
from machinery_py.worker.execution import Execution

NEWEST = 0.5  # weight of the newest claim in the share of calls that belong to batches


class BatchRun(Execution):
    """Run of several calls of one task. What ends it ends each of its calls.

    Its signature, delivery and context belong to the run; the delivery is that of its first call.

    Attributes:
        placed: the calls that are run: not one that its guard has stopped.
        refused: those of them whose arguments are wrong, which the function does not get.
    """

    __slots__ = ("placed", "refused")

    def __init__(self, calls: Sequence[Execution]) -> None:
        first = calls[0]
        super().__init__(
            first.app,
            first.hooks,
            first.delivery,
            first.worker,
            signature=Signature(name=first.signature.name, uuid=new_uuid("batch_")),
            task=first.task,
            session=first.session,
            calls=calls,
        )
        if first.task is not None:
            self.settings = first.task.settings
        self.placed = calls
        self.refused: dict[Execution, Failed] = {}
        for call in calls:
            call.noted = self.noted

    @property
    def is_guarded(self) -> bool:
        return any(call.is_guarded for call in self.calls)

    @property
    def is_over(self) -> bool:
        return all(call.is_over for call in self.calls)

    @property
    def listed(self) -> list[Execution]:
        """Return the calls in the order of the function's list."""
        return [call for call in self.placed if call not in self.refused]

    def begin(self) -> bool:
        """Begin the calls that were not handed back or revoked. False: there is none."""
        self.calls = self.placed = [call for call in self.calls if call.begin()]
        if self.calls:
            self.delivery = self.calls[0].delivery
            self.call_started = self.calls[0].call_started
        return bool(self.calls)

    def outcome(self, of: Callable[[int, Execution], Outcome]) -> Batched:
        """Return the outcome of each placed call: its refusal, or `of` its place in the list."""
        places = itertools.count()
        return _batched([self.refused.get(one) or of(next(places), one) for one in self.placed])

    def failed(self, error: BaseException) -> Outcome:
        self.error = error if isinstance(error, Exception) else None
        return self.outcome(lambda _, call: call.failed(error))

    def judged(self, outcome: Outcome) -> Outcome:
        ends = self._each(outcome)
        return _batched([call.judged(end) for call, end in zip(self.placed, ends, strict=True)])

    def settle(self, settlement: Settlement, *, unbegun: bool = False) -> bool:
        """End each call as this settlement ends the delivery of the first."""
        has_ended = False
        for call in self.calls:
            own = msgspec.structs.replace(
                settlement, delivery=call.delivery, uuid=call.signature.uuid
            )
            has_ended = call.settle(own, unbegun=unbegun) or has_ended
        return has_ended

    def finish(self, outcome: Outcome, **more: object) -> bool:
        """End each call by its own outcome."""
        del more  # about deliveries that are not run
        has_ended = False
        for call, end in zip(self.placed, self._each(outcome), strict=True):
            call.progress = self.progress
            has_ended = call.finish(end) or has_ended
        return has_ended

    def _each(self, outcome: Outcome) -> Sequence[Outcome]:
        return outcome.outcomes if isinstance(outcome, Batched) else [outcome] * len(self.placed)


def _batched(outcomes: Sequence[Outcome]) -> Batched:
    return Batched([one for one in outcomes if not isinstance(one, Batched)])


def placed_calls(execution: Execution) -> Sequence[Execution]:
    """Return the calls of a run: itself, unless it is a batch."""
    return execution.placed if isinstance(execution, BatchRun) else (execution,)


def alone(execution: Execution) -> Execution:
    """Return the run of this call without others."""
    return BatchRun([execution]) if execution.settings.batch else execution


class Batches:
    """The batches that one worker gathers. Belongs to one thread; moments are monotonic seconds."""

    def __init__(self) -> None:
        self._open: dict[str, list[Execution]] = {}  # by the task's name
        self._due: dict[str, float] = {}
        self._submitted: list[BatchRun] = []
        self._size = 0  # of the last batch that was opened
        self._share = 0.0  # calls of batches among the newest deliveries
        self._added = 0  # since the last claim

    def add(self, execution: Execution, now: float) -> BatchRun | None:
        """Return the run that is complete with this call; None if it waits for others."""
        settings, signature = execution.settings, execution.signature
        self._added += 1
        is_last_try = signature.retry_count <= 0 and signature.attempt > 1
        if is_last_try or execution.strikes:
            return self._submit([execution])
        name, self._size = signature.name, settings.batch
        calls = self._open.setdefault(name, [])
        calls.append(execution)
        if len(calls) >= settings.batch:
            return self._submit(self._taken(name))
        self._due.setdefault(name, now + settings.batch_within)
        return None

    def due(self, now: float) -> list[BatchRun]:
        """Return the batches that wait no longer, as runs."""
        names = [name for name, moment in self._due.items() if moment <= now]
        return [self._submit(self._taken(name)) for name in names]

    def due_in(self, now: float) -> float:
        """Return the seconds until `due` returns one; infinite if none waits."""
        return max(0.0, min(self._due.values()) - now) if self._due else math.inf

    def waiting(self) -> set[int]:
        """Return the ids of the gathered calls."""
        return {id(call) for calls in self._open.values() for call in calls}

    def _taken(self, name: str) -> list[Execution]:
        self._due.pop(name, None)
        return self._open.pop(name)

    def _submit(self, calls: list[Execution]) -> BatchRun:
        batch = BatchRun(calls)
        self._submitted.append(batch)
        return batch

    # What there is room for

    def claimed(self, count: int) -> None:
        """Note that so many deliveries came, and all of them were added or are no batch's."""
        if count and self._size:
            self._share += NEWEST * (self._added / count - self._share)
        self._added = 0

    def surplus(self, held: Mapping[int, Execution]) -> int:
        """Return how many of the held executions need no slot of their own."""
        if not self._size:
            return 0
        gathered = sum(number in held for number in self.waiting())
        counts = {batch: sum(id(call) in held for call in batch.calls) for batch in self._submitted}
        self._submitted = [batch for batch, count in counts.items() if count]
        return gathered + sum(max(0, count - 1) for count in counts.values())

    def wanted(self, free: int) -> int:
        """Return how many deliveries to claim, so that about `free` of them need a slot."""
        missing = max(self._size - 1, 0)
        if self._open:
            missing = sum(calls[0].settings.batch - len(calls) for calls in self._open.values())
        return free + int(min(missing, free * self._share / max(1.0 - self._share, 1e-3)))


def demand(held: Mapping[int, Execution], batches: Batches | None) -> tuple[int, float | None]:
    """Return the slots that the held executions need, and when the oldest that waits for one came.

    A batch needs one slot, and what is gathered none.
    """
    gathered = batches.waiting() if batches is not None else set[int]()
    slots = len(held) - (batches.surplus(held) if batches is not None else 0)
    waiting = [
        one.received_at
        for number, one in held.items()
        if not one.call_started and number not in gathered
    ]
    return min(slots, sum(not one.is_over for one in held.values())), min(waiting, default=None)

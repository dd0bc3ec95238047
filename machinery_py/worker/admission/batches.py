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
from typing import Any

from machinery_py.errors import BatchFailed
from machinery_py.registry.options import TaskSettings
from machinery_py.registry.outcomes import Batched, Outcome
from machinery_py.tasks.context import Context, Report
from machinery_py.tasks.signature import Signature, new_uuid
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.runner import Arguments, Run, misfit

NEWEST = 0.5  # weight of the newest claim in the share of calls that belong to batches


class BatchRun(Run):
    """Run of several calls of one task. What ends it ends each of its calls.

    Its signature belongs to the run; its context has the delivery of the first call.

    Attributes:
        refused: the placed calls whose arguments are wrong, which the function does not get.
    """

    __slots__ = ("_runs", "refused")

    def __init__(self, calls: Sequence[Execution]) -> None:
        first = calls[0]
        super().__init__(first)
        self.is_batch = True
        self.calls: Sequence[Execution] = calls
        self.listed: Sequence[Execution] = calls
        self.signature: Signature[Any] = Signature(
            name=first.signature.name, uuid=new_uuid("batch_")
        )
        if first.task is not None:
            self.settings: TaskSettings = first.task.settings
        self._runs = [Run(call) for call in calls]
        self.refused: dict[Run, Outcome] = {}
        for call in calls:
            call.noted = first.noted

    @property
    def is_over(self) -> bool:
        return all(call.is_over for call in self.calls)

    @property
    def placed(self) -> Sequence[Execution]:
        return [run.first for run in self._runs]

    def leave_out_unbegun(self) -> None:
        self._runs = [run for run in self._runs if run.first.call_started]
        self.calls = self.listed = self.placed
        self.first: Execution = self.calls[0]

    def pass_guard(self, on_lost: Callable[[], object] | None = None) -> bool:
        """Let each call in; False: none is."""
        for run in self._runs:
            if run.first.is_guarded:
                run.pass_guard(on_lost or self.cancel)
        self._runs = [run for run in self._runs if not run.is_over]
        self.listed = self.placed
        if not self.in_process:
            self.note_begun()
        return bool(self._runs)

    def arguments(self) -> Arguments | Outcome:
        rows: list[Any] = []
        for run in self._runs:
            found = run.arguments()
            if isinstance(found, tuple):
                rows += found[0]
            else:
                self.refused[run] = found
        self.listed = [run.first for run in self._runs if run not in self.refused]
        return ([rows], {}) if rows else self._outcome(lambda _, run: self.refused[run])

    def new_context(self, report: Report | None = None) -> Context:
        context = super().new_context(report)
        self.first.context = None  # it is of all calls
        context.calls = [call.signature for call in self.listed]
        return context

    # Its end: that of each placed call is its refusal, or by its place in the function's list

    def _outcome(self, of: Callable[[int, Run], Outcome]) -> Batched:
        places = itertools.count()
        return _batched([self.refused.get(one) or of(next(places), one) for one in self._runs])

    def succeeded(self, value: Any) -> Outcome:
        count = len(self.listed)
        if value is None:
            value = [None] * count
        elif not (isinstance(value, (list, tuple)) and len(value) == count):
            found = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
            text = f"a batch of {count} calls returned a {type(value).__name__}{found}"
            return self._outcome(lambda *_: misfit(f"{text} (a list of {count} results, or None)"))
        return self._outcome(lambda place, run: run.succeeded(value[place]))

    def failed(self, error: BaseException) -> Outcome:
        if not isinstance(error, BatchFailed):
            return self._outcome(lambda _, run: run.failed(error))
        count, errors = len(self.listed), error.errors
        results = [None] * count if error.results is None else list(error.results)
        if len(results) != count or not all(place in range(count) for place in errors):
            text = f"{error}, with {len(results)} results (it has {count} calls)"
            return self.failed(ValueError(text))
        return self._outcome(
            lambda place, run: (
                run.failed(errors[place]) if place in errors else run.succeeded(results[place])
            )
        )

    def judged(self, outcome: Outcome) -> Outcome:
        ends = self._each(outcome)
        return _batched([run.judged(end) for run, end in zip(self._runs, ends, strict=True)])

    def finish(self, outcome: Outcome) -> bool:
        """End each call by its own outcome."""
        ends = self._each(outcome)
        ended = [run.finish(end) for run, end in zip(self._runs, ends, strict=True)]
        return any(ended)

    def _each(self, outcome: Outcome) -> Sequence[Outcome]:
        return outcome.outcomes if isinstance(outcome, Batched) else [outcome] * len(self._runs)


def _batched(outcomes: Sequence[Outcome]) -> Batched:
    return Batched([one for one in outcomes if not isinstance(one, Batched)])


def run_of(execution: Execution) -> Run:
    """Return the run of this call without others."""
    return BatchRun([execution]) if execution.settings.batch else Run(execution)


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

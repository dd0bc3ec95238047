"""A workflow that was sent: its steps and how far they are, to look at, to cancel and to retry.

Who writes what, and what a crash leaves: docs/explanation/workflows.md.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from machinery_py.app import Application
from machinery_py.async_twins import twin
from machinery_py.bounds import STEP_ITEMS, in_steps
from machinery_py.errors import StateNotFound, WorkflowError
from machinery_py.revocation import WAITING_LIFE, revoke
from machinery_py.tasks.plans import PREFIX, RecordedStep, steps_in, workflow_name
from machinery_py.tasks.states import GroupMeta, State, TaskState
from machinery_py.worker.loops.chords import settle_ready_groups
from machinery_py.workflows.retry import members_of, retry

SHOWN = 20  # tasks of a step that its report holds
LOOK = 5_000  # states that `recent` looks through


class WorkflowProgress(NamedTuple):
    """How many tasks have ended, how many of them have failed, and how many there are."""

    done: int
    failed: int
    total: int


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a workflow.

    Attributes:
        uuid: of its task, or of its group.
        name: of its task, or the names of its members.
        total: how many tasks it has; those that are not in `counts` have not been sent.
        counts: how many of them are in each state.
        error, error_type: of a task that failed.
        attempt: the highest.
        parents, children: UUIDs of the steps before and after.
        tasks: up to 20 of its tasks, those that failed first.
    """

    uuid: str
    name: str
    is_group: bool
    total: int
    counts: Mapping[str, int]
    error: str = ""
    error_type: str = ""
    attempt: int = 1
    started_at: dt.datetime | None = None
    finished_at: dt.datetime | None = None
    parents: Sequence[str] = ()
    children: Sequence[str] = ()
    tasks: Sequence[TaskState] = ()

    def count(self, *states: State) -> int:
        """Return how many of its tasks are in one of these states."""
        return sum(self.counts.get(state, 0) for state in states)


class Workflow:
    """A workflow as it was when it was last read. `refresh` reads it again.

    Attributes:
        uuid: of the workflow.
        name: its first steps.
        created_at: when it was sent.
        is_cancelled: whether `cancel` was called.
    """

    def __init__(self, app: Application, record: GroupMeta) -> None:
        self._app = app
        self._steps = steps_in(record)
        self.uuid: str = record.group_uuid
        self.name: str = workflow_name(self._steps)
        self.created_at: dt.datetime = record.created_at
        self.is_cancelled: bool = False
        self._reports: Sequence[StepReport] = ()
        self.refresh()

    def refresh(self) -> None:
        """Read the states of all its tasks."""
        backend = self._app.store.backend
        self.is_cancelled = bool(backend.features.revocations and backend.revoked([self.uuid]))
        reports = [self._report(place) for place in range(len(self._steps))]
        self._reports = reports

    refresh_async: Final = twin(refresh)

    def tree(self) -> Sequence[StepReport]:
        """Return its steps in order, with the steps before and after each."""
        return self._reports

    @property
    def progress(self) -> WorkflowProgress:
        """How many tasks have ended, how many of them have failed, and how many there are."""
        failed = sum(one.count(State.FAILURE) for one in self._reports)
        good = sum(one.count(State.SUCCESS) for one in self._reports)
        return WorkflowProgress(good + failed, failed, sum(one.total for one in self._reports))

    @property
    def state(self) -> State:
        """FAILURE once it cannot succeed any more, SUCCESS when its last step has succeeded."""
        *before, last = self._reports
        if last.count(State.FAILURE):
            return State.FAILURE
        if last.count(State.SUCCESS) == last.total:
            return State.SUCCESS
        for one, after in zip(before, self._reports[1:], strict=True):
            if one.count(State.FAILURE) and after.count(*State) == after.count(State.PENDING):
                return State.FAILURE
        begun = any(one.count(*State) > one.count(State.PENDING) for one in self._reports)
        return State.STARTED if begun else State.PENDING

    def cancel(self) -> None:
        """Let nothing of it start any more, and ask its running tasks to stop; for good.

        Waiting tasks fail as revoked, and so does each later step when its turn comes; error
        callbacks are sent. May be repeated, and must be after an error.

        Raises:
            Unsupported: nothing was done; the result backend keeps no revocations.
            BackendUnavailable, PublishRefused, PublishUnknown: some of it may be done.
        """
        self._app.store.backend.revoke([self.uuid], WAITING_LIFE)
        arrived = False
        for step in reversed(self._steps):
            for uuids in in_steps(self._tasks_of(step)):
                states = self._app.store.backend.get_states(uuids)
                is_open = [one for one in uuids if one not in states or not states[one].is_finished]
                arrived = (is_open and revoke(self._app, is_open)) or arrived
        if arrived:
            settle_ready_groups(self._app)
        self.refresh()

    cancel_async: Final = twin(cancel)

    def retry(self) -> list[str]:
        """Send its failed tasks again, and go on from there; return their UUIDs.

        Results that are there stay, and the callback of a chord gets them with the new ones.

        Raises:
            WorkflowError: it was cancelled, is being retried by somebody else, or a message or
                result that is needed is not kept any more.
            BackendUnavailable, PublishRefused, PublishUnknown: some of it may be done; repeat it.
        """
        if self.is_cancelled:
            raise WorkflowError(f"workflow {self.uuid} was cancelled (send it anew)")
        settle_ready_groups(self._app)
        sent = retry(self._app, self.uuid, self._states)
        self.refresh()
        return sent

    retry_async: Final = twin(retry)

    def _states(self) -> Iterator[TaskState]:
        for step in self._steps:
            for uuids in in_steps(self._tasks_of(step)):
                yield from self._app.store.backend.get_states(uuids).values()

    def _tasks_of(self, step: RecordedStep) -> Sequence[str]:
        if not step.total:
            return (step.uuid,)
        return (*step.leading, *members_of(self._app, step.uuid))

    def _report(self, place: int) -> StepReport:
        step = self._steps[place]
        counts: Counter[str] = Counter()
        shown: list[TaskState] = []
        failed: TaskState | None = None
        attempt, begun, ended = 1, list[dt.datetime](), list[dt.datetime]()
        uuids = self._tasks_of(step)
        for some in in_steps(uuids):
            for state in self._app.store.backend.get_states(some).values():
                counts[state.state.value] += 1
                attempt = max(attempt, state.attempt)
                begun += [state.started_at] if state.started_at else []
                ended += [state.finished_at] if state.finished_at else []
                if state.state is State.FAILURE:
                    failed = failed or state
                    shown.insert(0, state)
                    del shown[SHOWN:]
                elif len(shown) < SHOWN:
                    shown.append(state)
        before, after = self._steps[max(0, place - 1) : place], self._steps[place + 1 : place + 2]
        return StepReport(
            uuid=step.uuid,
            name=step.name,
            is_group=step.total > 0,
            total=max(len(uuids), step.total, 1),
            counts=counts,
            error=failed.error if failed is not None else "",
            error_type=failed.error_type if failed is not None else "",
            attempt=attempt,
            started_at=min(begun, default=None),
            finished_at=max(ended, default=None),
            parents=[one.uuid for one in before],
            children=[one.uuid for one in after],
            tasks=shown,
        )

    def __repr__(self) -> str:
        return f"<Workflow {self.name} {self.uuid}>"


def find_workflow(app: Application, uuid: str) -> Workflow:
    """Return the workflow with this UUID, or to which the task or group with this UUID belongs.

    The start of a UUID is enough, of a workflow if one of its tasks has changed of late.

    Raises:
        StateNotFound: nothing is known of it (any more).
    """
    record = _record_of(app, uuid)
    if record is None and app.store.backend.features.listing:
        if uuid.startswith(PREFIX):
            whole = next(iter(recent_uuids(app, 1, beginning=uuid)), uuid)
        else:
            found = app.store.backend.find(uuid, 2)
            whole = found[0] if len(found) == 1 else uuid
        record = _record_of(app, whole) if whole != uuid else None
    if record is None:
        raise StateNotFound(
            uuid, f"no workflow of {uuid}: it expired, or {uuid} was sent outside of a workflow"
        )
    return Workflow(app, record)


def _record_of(app: Application, uuid: str) -> GroupMeta | None:
    backend = app.store.backend
    record = backend.get_group(uuid)
    if record is None or not record.plan:
        member = next(iter(record.task_uuids), uuid) if record is not None else uuid
        state = backend.get_states([member]).get(member)
        record = backend.get_group(state.root) if state is not None and state.root else None
    return record if record is not None and record.plan else None


def recent_uuids(app: Application, limit: int, *, beginning: str = PREFIX) -> list[str]:
    """Return the workflows of the tasks that have changed of late, the last changed first.

    Raises:
        Unsupported: the backend cannot list its states.
    """
    roots: dict[str, None] = {}
    place, looked = None, 0
    while looked < LOOK and len(roots) < limit:
        page = app.store.backend.list_states(after=place, limit=STEP_ITEMS)
        roots |= {one.root: None for _, one in page.found if one.root.startswith(beginning)}
        place, looked = page.end, looked + page.looked
        if place is None:
            break
    return list(roots)[:limit]


def recent_workflows(app: Application, limit: int) -> list[Workflow]:
    """Return the workflows of `recent_uuids`, those that are still known."""
    records = [app.store.backend.get_group(uuid) for uuid in recent_uuids(app, limit)]
    return [Workflow(app, one) for one in records if one is not None and one.plan]

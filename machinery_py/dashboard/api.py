"""The JSON API over one Server: each public method is a route."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec

from machinery_py.brokers.base import DeadLetter
from machinery_py.control.answers import ActiveTask
from machinery_py.control.client import TIMEOUT, ChosenWorkers
from machinery_py.control.orders import ANY
from machinery_py.dashboard.fleet import Fleet
from machinery_py.dashboard.live import Live
from machinery_py.dashboard.masking import SHORT, Masking, python_call
from machinery_py.dashboard.records import (
    Changed,
    Counted,
    Letter,
    Overview,
    ShownAttempt,
    ShownCheckpoint,
    ShownGroup,
    ShownMessage,
    ShownStep,
    ShownValue,
    ShownWorker,
    TaskDetail,
    TaskFilter,
    TaskRow,
    Tasks,
    WorkerDetail,
    WorkflowDetail,
    WorkflowRow,
)
from machinery_py.dashboard.routes import route, schema
from machinery_py.errors import ArgumentError, ConfigError, MachineryError, Unsupported
from machinery_py.inspection import (
    Count,
    ErrorSummary,
    KeptStep,
    LimitRow,
    QueueReport,
    TaskPage,
    limit_rows,
)
from machinery_py.inspection.calls import calls_of
from machinery_py.schedules.api import ScheduleReport
from machinery_py.signals import signal
from machinery_py.tasks.reasons import Reason
from machinery_py.tasks.signature import UNLIMITED, Arg, Signature
from machinery_py.tasks.states import FINISHED, ZERO_TIME, State, TaskState, state_named
from machinery_py.texts import MAX_ERROR, cut
from machinery_py.workflows.workflow import Workflow, find_workflow, recent_workflows

MOST = 1000  # tasks that one call lists or changes
STEP = 500  # tasks that one step of a bulk change takes
STEP_REVOKED = 200  # each of them is a write of its own
STEP_COUNTED = 5000
WITHIN = 0.2  # seconds that one step looks for tasks
ASKING = 1.0  # seconds that a worker has for an answer

Limit = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
Seconds = Annotated[int, msgspec.Meta(ge=1, le=3600)]
FewWorkflows = Annotated[int, msgspec.Meta(ge=1, le=100)]
Uuids = Annotated[Sequence[str], msgspec.Meta(max_length=MOST)]
Number = Annotated[int, msgspec.Meta(ge=0)]

#: States that a bulk change by a filter looks at.
_STATES = {
    "retry": (State.FAILURE,),
    "revoke": tuple(state for state in State if state not in FINISHED),
    "delete": FINISHED,
}
_SAME = ("queue", "attempt", "worker", "error_type", "progress", "started_at", "finished_at", "eta")


class HoldsMore(MachineryError):
    """The queue to purge holds more than was confirmed."""

    def __init__(self, queue: str, count: int, expected: int) -> None:
        self.count = count
        super().__init__(
            f"queue {queue!r}: found {count:,} messages, not {expected:,} (confirm again)"
        )


class Api:
    """The routes. Any thread may call them; each raises MachineryErrors."""

    def __init__(self, fleet: Fleet, masking: Masking, live: Live) -> None:
        self._fleet = fleet
        self._inspect = fleet.inspect
        self._masking = masking
        self._live = live

    @route("GET overview")
    def overview(self) -> Overview:
        """Return the state of the whole, at most a second old."""
        return self._live.overview()

    @route("GET history", "counts")
    def history(self, seconds: Seconds = 3600, step: Seconds = 60) -> Sequence[Count]:
        """Return how many tasks ended in each step of that time."""
        return self._inspect.history(seconds=seconds, step=step)

    @route("GET schema")
    def schema(self) -> dict[str, Any]:
        """Return the routes, and JSON Schemas of what they take and give."""
        return schema()

    # Queues

    @route("GET queues", "queues")
    def queues(self) -> Sequence[QueueReport]:
        """Return the queues."""
        return self._inspect.queues()

    @route("POST queues/pause")
    def pause(self, queue: str) -> Changed:
        """Let no worker take tasks from a queue."""
        self._inspect.pause(queue)
        return Changed()

    @route("POST queues/resume")
    def resume(self, queue: str) -> Changed:
        """Let workers take from a queue again."""
        self._inspect.resume(queue)
        return Changed()

    @route("POST queues/purge")
    def purge(self, queue: str, expected: Number) -> Changed:
        """Delete what waits in a queue.

        409 if that is clearly more than was confirmed.
        """
        found = [one for one in self._inspect.queues() if one.queue == queue]
        count = sum(one.waiting + one.delayed for one in found)
        if count > max(expected * 1.1, expected + 10):
            raise HoldsMore(queue, count, expected)
        return Changed(done=self._inspect.purge(queue))

    # Limits

    @route("GET limits", "limits")
    def limits(self) -> Sequence[LimitRow]:
        """Return the limits of tasks, and what runs and waits by them."""
        try:
            return limit_rows(self._inspect.limits())
        except (ConfigError, Unsupported):
            return []

    @route("POST limits/change")
    def change_limit(self, name: str, option: str, value: str) -> Changed:
        """Let a limit win over that of the code.

        For instance `rate` and "5/s".
        """
        options: Any = {option: _number(value) if option != "rate" else value}
        self._fleet.control.limit(name, **options)
        return Changed()

    @route("POST limits/reset")
    def reset_limit(self, name: str) -> Changed:
        """Let the limits of the code count again."""
        self._fleet.control.reset_limit(name)
        return Changed()

    # Tasks

    @route("GET tasks")
    def tasks(
        self,
        state: Sequence[str] = (),
        name: str = "",
        queue: str = "",
        worker: str = "",
        text: str = "",
        since: str = "",
        until: str = "",
        limit: Limit = 100,
        cursor: str = "",
    ) -> Tasks:
        """Return tasks that meet all conditions.

        Those that meet all conditions; see TaskFilter.
        """
        wanted = TaskFilter(
            name=name, queue=queue, worker=worker, text=text, since=since, until=until
        )
        page = self._search(wanted, _states(state), limit, cursor)
        calls = calls_of(page.tasks)
        rows = [self._row(one, calls.get(one.task_uuid, ())) for one in page.tasks]
        return Tasks(tasks=rows, cursor=page.cursor, looked=page.looked)

    def _search(
        self, wanted: TaskFilter, states: Sequence[State], limit: int, cursor: str
    ) -> TaskPage:
        return self._inspect.search(
            state=states,
            name=wanted.name,
            queue=wanted.queue,
            worker=wanted.worker,
            text=wanted.text,
            since=self._moment(wanted.since),
            until=self._moment(wanted.until),
            limit=limit,
            cursor=cursor,
            within=WITHIN,
        )

    def _moment(self, text: str) -> dt.datetime | None:
        """Read seconds ago, or an ISO time."""
        if not text:
            return None
        try:
            return self._fleet.app.now() - dt.timedelta(seconds=float(text))
        except (ValueError, OverflowError):
            pass
        try:
            return dt.datetime.fromisoformat(text)
        except ValueError:
            raise ArgumentError(
                f"time {text!r}: found neither seconds nor an ISO time with its zone "
                "(expected for instance 3600, 2026-01-31T12:00:00Z)"
            ) from None

    def _fields(self, state: TaskState, limit: int = SHORT) -> dict[str, Any]:
        values = [arg.value for arg in state.results]
        result = values[0] if len(values) == 1 else values
        return {
            **{name: getattr(state, name) for name in _SAME},
            "uuid": state.task_uuid,
            "name": state.task_name,
            "state": state.state.value,
            "error": cut(state.error, limit),
            "result": self._masking.text(result, limit=SHORT) if values else "",
            "created_at": state.created_at if state.created_at > ZERO_TIME else None,
        }

    def _row(self, state: TaskState, args: Sequence[Arg] = ()) -> TaskRow:
        # Without its name nobody knows whether a value is a secret.
        named = [(name or "?", arg) for name, arg in self._masking.args(state.task_name, args)]
        shown = (
            f"{name}={self._masking.text(arg.value) if name != '?' else '…'}" for name, arg in named
        )
        return TaskRow(**self._fields(state), args=cut(", ".join(shown), SHORT))

    @route("GET task")
    def task(self, uuid: str) -> TaskDetail:
        """Return all that is known of a task; the start of its UUID is enough."""
        report = self._inspect.task(uuid, ask=True)
        state, signature, group = report.state, report.signature, report.group
        args = self._masking.args(state.task_name, report.args or ())
        members = [self._row(one) for one in report.members]
        queue = "" if state.queue == self._fleet.app.config.default_queue else state.queue
        return TaskDetail(
            **self._fields(state, limit=MAX_ERROR),
            traceback=state.traceback,
            results=[self._value("", one) for one in state.results],
            notes={key: self._masking.text(one, key) for key, one in state.notes.items()},
            arguments=None if report.args is None else [self._value(*one) for one in args],
            message=self._message(signature, args) if signature else None,
            attempts=[ShownAttempt(**msgspec.structs.asdict(one)) for one in report.attempts],
            steps=[self._step(one) for one in report.steps],
            children=report.children,
            group=ShownGroup(uuid=group.group_uuid, members=members) if group else None,
            python=python_call(signature.name, args, queue) if signature else "",
            root=state.root,
            parent=state.parent,
            waits_for=report.waits_for,
        )

    @route("GET why", "reasons")
    def why(self, uuid: str) -> Sequence[Reason]:
        """Return what holds a task that has not ended, the most telling first.

        Workers are asked, for up to a second or two.
        """
        return self._inspect.why(uuid).reasons

    def _step(self, step: KeptStep) -> ShownCheckpoint:
        masked = [self._masking.masked(one.value, step.name) for one in step.results]
        return ShownCheckpoint(
            name=step.name,
            at=step.at,
            run=step.run,
            results=[
                self._value("", msgspec.structs.replace(one, value=value))
                for one, value in zip(step.results, masked, strict=True)
            ],
            error_type=step.error_type,
            error=cut(step.error, MAX_ERROR),
        )

    def _value(self, name: str, arg: Arg) -> ShownValue:
        return ShownValue(name=name, type=arg.type, value=self._masking.text(arg.value))

    def _message(
        self, signature: Signature[object], args: Sequence[tuple[str, Arg]]
    ) -> ShownMessage:
        left = signature.retry_count
        return ShownMessage(
            args=[self._value(name, arg) for name, arg in args],
            headers={key: self._masking.text(one, key) for key, one in signature.headers.items()},
            priority=signature.priority,
            retry_count=None if left == UNLIMITED else left,
            eta=signature.eta,
            group_uuid=signature.group_uuid,
        )

    @route("POST tasks/retry")
    def retry(
        self, uuids: Uuids = (), filter: TaskFilter | None = None, cursor: str = ""
    ) -> Changed:
        """Send failed tasks again.

        These, or step by step all that a filter finds.
        """
        return self._change("retry", self._inspect.retry, uuids, filter, cursor)

    @route("POST tasks/revoke")
    def revoke(
        self,
        uuids: Uuids = (),
        filter: TaskFilter | None = None,
        cursor: str = "",
        terminate: bool = False,
    ) -> Changed:
        """Revoke tasks.

        These, or as `tasks/retry`; with `terminate` those that run are ended. Of `uuids`, those
        that have ended are skipped.
        """

        def revoke(uuids: Sequence[str]) -> Sequence[str]:
            states = self._fleet.app.store.backend.get_states(uuids)
            ended = {uuid for uuid, state in states.items() if state.is_finished}
            rest = [uuid for uuid in uuids if uuid not in ended]
            if not rest:
                return []
            control = self._fleet.control
            return control.revoke(*rest, terminate=terminate, timeout=ASKING).uuids

        return self._change("revoke", revoke, uuids, filter, cursor)

    @route("POST tasks/signal")
    def signal(self, uuid: str, name: str, value: Any = None, key: str = "") -> Changed:
        """Give a task a signal.

        0 are done if it had one with the same key before.
        """
        return Changed(done=int(signal(self._fleet.app, uuid, name, value, key)))

    @route("POST tasks/delete")
    def delete(
        self, uuids: Uuids = (), filter: TaskFilter | None = None, cursor: str = ""
    ) -> Changed:
        """Forget the states of finished tasks.

        These, or as `tasks/retry`.
        """
        return self._change("delete", self._inspect.delete, uuids, filter, cursor)

    def _change(
        self,
        action: str,
        act: Callable[[Sequence[str]], Sequence[str]],
        uuids: Sequence[str],
        wanted: TaskFilter | None,
        cursor: str,
    ) -> Changed:
        if bool(uuids) == (wanted is not None):
            raise ArgumentError(f"{action}: expected uuids or a filter, and one of them only")
        looked, cursor_after = len(uuids), ""
        if wanted is not None:
            step = STEP_REVOKED if action == "revoke" else STEP
            page = self._search(wanted, _states_of(action, wanted), step, cursor)
            uuids = [one.task_uuid for one in page.tasks]
            looked, cursor_after = page.looked, page.cursor
        done = len(act(uuids)) if uuids else 0
        return Changed(done=done, skipped=len(uuids) - done, cursor=cursor_after, looked=looked)

    @route("POST tasks/count")
    def count(self, filter: TaskFilter, action: str, cursor: str = "") -> Counted:
        """Count what a change would find.

        `action`: retry, revoke or delete.
        """
        if action not in _STATES:
            raise ArgumentError(f"no action {action!r} (known: {', '.join(_STATES)})")
        page = self._search(filter, _states_of(action, filter), STEP_COUNTED, cursor)
        return Counted(count=len(page.tasks), cursor=page.cursor, looked=page.looked)

    @route("GET errors")
    def errors(self, since: str = "", name: str = "", queue: str = "") -> ErrorSummary:
        """Return failures by task and type of error."""
        return self._inspect.errors(
            since=self._moment(since), name=name, queue=queue, within=WITHIN
        )

    # Workflows

    @route("GET workflows", "workflows")
    def workflows(self, limit: FewWorkflows = 20) -> Sequence[WorkflowRow]:
        """Return the workflows whose tasks have changed of late, the last changed first."""
        return [WorkflowRow(**_facts(one)) for one in recent_workflows(self._fleet.app, limit)]

    @route("GET workflow")
    def workflow(self, uuid: str) -> WorkflowDetail:
        """Return a workflow.

        Found by its UUID, or that of a task or group in it.
        """
        found = find_workflow(self._fleet.app, uuid)
        steps = []
        for one in found.tree():
            facts: dict[str, Any] = msgspec.structs.asdict(one)
            facts |= {"error": cut(one.error, SHORT), "tasks": [self._row(it) for it in one.tasks]}
            steps.append(ShownStep(**facts))
        return WorkflowDetail(**_facts(found), steps=steps)

    @route("POST workflows/cancel")
    def cancel_workflow(self, uuid: str) -> Changed:
        """Let nothing of a workflow start any more, and ask its running tasks to stop."""
        found = find_workflow(self._fleet.app, uuid)
        is_open = found.progress.total - found.progress.done
        found.cancel()
        return Changed(done=is_open)

    @route("POST workflows/retry")
    def retry_workflow(self, uuid: str) -> Changed:
        """Send the failed tasks of a workflow again, and go on from there."""
        return Changed(done=len(find_workflow(self._fleet.app, uuid).retry()))

    # Dead letters

    @route("GET dead", "letters")
    def dead(self, queue: str = "", limit: Limit = 100) -> Sequence[Letter]:
        """Return the newest dead letters."""
        return [self._letter(one) for one in self._inspect.dead(limit=limit, queue=queue)]

    def _letter(self, letter: DeadLetter) -> Letter:
        facts: dict[str, Any] = msgspec.structs.asdict(letter)
        facts["body"] = self._masking.body(letter.body)
        return Letter(**facts)

    @route("POST dead/replay")
    def replay_dead(self, ids: Uuids) -> Changed:
        """Put dead letters back into their queues.

        Those that are no signature stay.
        """
        done = len(self._inspect.replay_dead(ids))
        return Changed(done=done, skipped=len(ids) - done)

    @route("POST dead/delete")
    def delete_dead(self, ids: Uuids) -> Changed:
        """Delete dead letters."""
        done = self._inspect.delete_dead(ids)
        return Changed(done=done, skipped=len(ids) - done)

    # Schedules

    @route("GET schedules", "schedules")
    def schedules(self) -> Sequence[ScheduleReport]:
        """Return the schedules."""
        return self._fleet.schedules.list(dropped=True)

    @route("POST schedules/pause")
    def pause_schedule(self, name: str) -> Changed:
        """Send no ticks of a schedule."""
        self._fleet.schedules.pause(name)
        return Changed()

    @route("POST schedules/resume")
    def resume_schedule(self, name: str) -> Changed:
        """Send the ticks of a schedule again."""
        self._fleet.schedules.resume(name)
        return Changed()

    @route("POST schedules/run")
    def run_schedule(self, name: str) -> Changed:
        """Send what a schedule sends, once, now."""
        self._fleet.schedules.run_now(name)
        return Changed()

    # Workers

    @route("GET workers", "workers")
    def workers(self) -> Sequence[ShownWorker]:
        """Return the workers that are alive."""
        now = self._fleet.app.now()
        return [
            ShownWorker(**msgspec.structs.asdict(one), age=(now - one.beat_at).total_seconds())
            for one in self._inspect.workers()
        ]

    @route("GET worker")
    def worker(self, name: str) -> WorkerDetail:
        """Ask a worker what it does.

        One that does not answer is no error.
        """
        asked = self._chosen(name, timeout=ASKING)
        try:
            stats = asked.stats()
            if not stats:
                silent = [f"{one}: no answer in {ASKING:g} s" for one in stats.missing]
                problems = [*stats.errors.values(), *silent, "there is no such worker"]
                return WorkerDetail(trouble=problems[0])
            active, queues = asked.active(), asked.queues()
        except Unsupported as error:
            return WorkerDetail(trouble=str(error))
        label = next(iter(stats))
        return WorkerDetail(
            stats=stats[label],
            active=[self._active(one) for one in active.get(label, ())],
            queues=queues.get(label, ()),
        )

    def _active(self, task: ActiveTask) -> ActiveTask:
        if not task.args:
            return task
        args = [arg for _, arg in self._masking.args(task.name, task.args)]
        return msgspec.structs.replace(task, args=args)

    @route("POST workers/shutdown")
    def shut_down(self, name: str) -> Changed:
        """Let a worker end in order."""
        self._chosen(name).shutdown()
        return Changed()

    @route("POST workers/concurrency")
    def set_concurrency(self, name: str, concurrency: Number) -> Changed:
        """Let a worker run so many tasks at a time."""
        self._chosen(name).set_concurrency(concurrency)
        return Changed()

    def _chosen(self, name: str, *, timeout: float = TIMEOUT) -> ChosenWorkers:
        if ANY in name:  # it would mean others, too; a worker may have such a name
            raise ArgumentError(f"worker {name!r}: expected the name of one worker, without a '*'")
        return self._fleet.control.workers(name, timeout=timeout)


def _facts(found: Workflow) -> dict[str, Any]:
    return {
        "uuid": found.uuid,
        "name": found.name,
        "state": found.state.value,
        "cancelled": found.is_cancelled,
        "created_at": found.created_at,
        **found.progress._asdict(),
    }


def _number(text: str) -> float | int | str:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text


def _states(words: Sequence[str]) -> list[State]:
    try:
        return [state_named(one) for one in words]
    except ValueError as error:
        raise ArgumentError(str(error)) from None


def _states_of(action: str, wanted: TaskFilter) -> list[State]:
    """Return the states that a bulk change looks at.

    Raises:
        ArgumentError: it changes no tasks in the states that the filter names.
    """
    named = _states(wanted.state)
    found = [one for one in _STATES[action] if one in named or not named]
    if not found:
        raise ArgumentError(
            f"{action}: found state {', '.join(named)} (expected {' or '.join(_STATES[action])})"
        )
    return found

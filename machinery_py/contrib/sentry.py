"""Reports to Sentry: exceptions of tasks, check-ins of schedules; docs/how-to/sentry.md.

A failure for good is one event. It is captured where the task raised, with the stack, breadcrumbs
and tags of its run, also in a task process; or by the worker, if there was no exception: the
arguments were refused, the process was lost, the task is stuck beyond its time limit.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from machinery_py.errors import (
    Ignore,
    Reject,
    Retry,
    RetryTaskLater,
    TaskFailed,
    TimeLimitExceeded,
)
from machinery_py.registry.outcomes import NOT_ITS_FAILURE, tries_left
from machinery_py.schedules.definition import Definition
from machinery_py.server import Server
from machinery_py.tasks.context import Context, current_task
from machinery_py.tasks.signature import HEADER_SCHEDULE, Signature
from machinery_py.values.json_values import shown
from machinery_py.worker.loops import task_log

try:
    import sentry_sdk
    from sentry_sdk.crons import capture_checkin
    from sentry_sdk.integrations.logging import ignore_logger
    from sentry_sdk.scope import use_isolation_scope
    from sentry_sdk.utils import capture_internal_exceptions, event_from_exception
except ImportError as _error:
    raise ImportError(
        "machinery_py.contrib.sentry needs sentry-sdk 2: pip install 'machinery_py[sentry]'"
    ) from _error

if TYPE_CHECKING:
    from sentry_sdk._types import MonitorConfig

_REPORTED = "sentry"  # in Context.handed_on: where it raised, the error was captured
_MACROS = ("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@hourly")
_SLUG = 50  # characters, Sentry's limit


def install(
    server: Server, *, arguments: bool = False, retries: bool = False, check_ins: bool = False
) -> None:
    """Report the failures of this Server's tasks to Sentry. Call it once, after `sentry_sdk.init`.

    Call both in the module of the Server, so that workers and task processes do, too.

    Args:
        arguments: show the beginning of each argument of the task.
        retries: also report tries that are followed by another, as warnings.
        check_ins: tell Sentry's monitors when a task of a schedule begins and ends.
    """
    reporter = _Reporter(server, arguments=arguments, retries=retries, check_ins=check_ins)
    server.around_task(reporter.run)
    server.on_failure(reporter.note_failure)
    ignore_logger(task_log.NAME)  # its lines of failures would be second events


class _Reporter:
    """The handlers of one Server."""

    def __init__(self, server: Server, *, arguments: bool, retries: bool, check_ins: bool) -> None:
        self._server = server
        self._arguments = arguments
        self._retries = retries
        self._check_ins = check_ins
        # Scopes of the runs that go on, by UUID and fence. Either `run` or `note_failure` takes it
        # out, and captures.
        self._open: dict[tuple[str, int], sentry_sdk.Scope] = {}

    def run(self, _: Signature[Any]) -> Iterator[None]:
        """Give a run a scope of its own, and capture what it raises."""
        ctx = current_task()
        run = ctx.uuid, ctx.fence
        self._check_in(ctx, "in_progress")
        with sentry_sdk.isolation_scope() as scope:
            scope.clear_breadcrumbs()
            self._describe(scope, ctx)
            self._open[run] = scope
            try:
                yield
            except BaseException as error:
                is_final = self._is_final(ctx, error)
                if is_final:  # before the run is taken out: `note_failure` may come meanwhile
                    ctx.hand_on({_REPORTED: "yes"})
                if self._open.pop(run, None) is not None and (is_final or self._retries):
                    self._capture(ctx, error, "error" if is_final else "warning")
                raise
            if self._open.pop(run, None) is not None:  # else its time was up
                self._check_in(ctx, "ok")

    def note_failure(self, ctx: Context, error: BaseException) -> None:
        """Capture a failure for good that `run` has not captured."""
        self._check_in(ctx, "error")
        scope = self._open.pop((ctx.uuid, ctx.fence), None)
        is_reported = scope is None and _REPORTED in ctx.handed_on
        if is_reported or getattr(error, "error_type", "") in NOT_ITS_FAILURE:
            return
        fresh = sentry_sdk.isolation_scope()
        with fresh if scope is None else use_isolation_scope(scope) as found:
            self._describe(found, ctx)
            self._capture(ctx, error)

    def _is_final(self, ctx: Context, error: BaseException) -> bool:
        """Return whether the task fails for good by this, as far as that is known in its thread."""
        if isinstance(error, (RetryTaskLater, Ignore)) or not isinstance(error, Exception):
            return False
        if not sentry_sdk.is_initialized():
            return False  # a task process; its worker may report it, without the stack
        if ctx.cancelled and not isinstance(error, TimeLimitExceeded):
            return False  # it may have been handed back; else `note_failure` captures it
        if isinstance(error, Reject):
            return not error.requeue
        if isinstance(error, Retry):
            return tries_left(ctx.signature, error.retries) <= 0
        task = self._server.get_registered_task(ctx.name)
        return ctx.retries_left <= 0 or not task.settings.may_retry(error)

    def _describe(self, scope: sentry_sdk.Scope, ctx: Context) -> None:
        scope.set_transaction_name(ctx.name, source="task")
        scope.set_tag("machinery.task", ctx.name)
        scope.set_tag("machinery.queue", ctx.queue)
        facts: dict[str, Any] = {
            "uuid": ctx.uuid,
            "attempt": ctx.attempt,
            "retries left": ctx.retries_left,
            "worker": ctx.worker,
            "group": ctx.signature.group_uuid,
        }
        if self._arguments:
            facts["arguments"] = [shown(one.value) for one in ctx.signature.args]
        scope.set_context("machinery", facts)

    def _capture(self, ctx: Context, error: BaseException, level: str = "error") -> None:
        if isinstance(error, (RetryTaskLater, Reject, Ignore)) and level != "error":
            return  # no failure: it was asked for
        if isinstance(error, Retry):
            error = error.__cause__ or error
        with capture_internal_exceptions():
            options = sentry_sdk.get_client().options
            mechanism = {"type": "machinery_py", "handled": False}
            event: Any
            event, hint = event_from_exception(error, options, mechanism)
            event["level"] = level
            values: list[Any] = event["exception"]["values"]
            for value in values:
                _hide_ours(value)
            if isinstance(error, TaskFailed):  # stands for one of another process
                values[-1].update(type=error.error_type or "TaskFailed", value=error.error)
            if "stacktrace" not in values[-1]:  # else Sentry groups by the texts
                event["fingerprint"] = [ctx.name, values[-1]["type"]]
            sentry_sdk.capture_event(event, hint)

    # Schedules

    def _check_in(self, ctx: Context, status: str) -> None:
        schedule = ctx.headers.get(HEADER_SCHEDULE)
        if not self._check_ins or not isinstance(schedule, str) or ctx.signature.group_uuid:
            return
        with capture_internal_exceptions():
            definition = self._server.declared.all().get(schedule)
            capture_checkin(
                monitor_slug=re.sub("[^a-z0-9_-]+", "-", schedule.lower())[:_SLUG],
                # The same for all runs of a task, in whatever process.
                check_in_id=uuid.uuid5(uuid.NAMESPACE_OID, ctx.uuid).hex,
                status=status,
                monitor_config=None if definition is None else _monitor(schedule, definition),
            )


def _monitor(name: str, definition: Definition) -> MonitorConfig | None:
    """Return what Sentry is to expect; None if it has no word for these times."""
    schedule = definition.schedule(name)
    spec = re.sub(r"^(CRON_)?TZ=\S+\s+", "", definition.spec)
    if schedule.every and schedule.every % 60 == 0:
        return {
            "schedule": {"type": "interval", "value": schedule.every // 60, "unit": "minute"},
            "timezone": "UTC",
        }
    if spec not in _MACROS and (len(spec.split()) != 5 or re.search(r"\bH\b|\?", spec)):
        return None
    return {"schedule": {"type": "crontab", "value": spec}, "timezone": schedule.zone or "UTC"}


def _hide_ours(exception: dict[str, Any]) -> None:
    """Remove our frames above those of the task, and the variables, with arguments, of others."""

    def is_ours(frame: dict[str, Any]) -> bool:
        return str(frame.get("module")).startswith("machinery_py.")

    frames = (exception.pop("stacktrace", None) or {}).get("frames", ())
    kept = list(itertools.dropwhile(is_ours, frames))
    for frame in filter(is_ours, kept):
        frame.pop("vars", None)
    if kept:
        exception["stacktrace"] = {"frames": kept}

"""The backend for `django.tasks`, which is in Django 6.0 and newer.

A Django task is registered on the Server when it is made, which its backend validates: a worker
knows those of each `tasks.py`. A message names a task; it never makes a worker import a module.

    call      the one argument of the message: args, kwargs, and with which `using` it was sent
    record    the call again, as the plan of a group without members' results: written in one
              step with the message, and kept for as long as the task's result
"""

# pyright: reportMissingImports=false
# The Python that we check with is too old for Django 6.

from __future__ import annotations

import builtins
import dataclasses
import datetime as dt
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import Any

from django.conf import settings
from django.db import close_old_connections
from django.tasks import (
    Task,
    TaskContext,
    TaskResult,
    TaskResultStatus,
    task_backends,
)
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import TASK_MAX_PRIORITY, TASK_MIN_PRIORITY, TaskError
from django.tasks.exceptions import TaskResultDoesNotExist
from django.tasks.signals import task_enqueued, task_finished, task_started
from django.utils import timezone
from django.utils.json import normalize_json

from machinery_py import errors
from machinery_py.contrib.django.project import DEFAULT, TASK_OPTIONS, queue_of, server_of
from machinery_py.errors import ConfigError, DecodeError, NameRefused
from machinery_py.names import check_uuid
from machinery_py.server import Server
from machinery_py.tasks.attempts import Attempt, attempts_of
from machinery_py.tasks.context import Context
from machinery_py.tasks.signature import new_uuid
from machinery_py.tasks.states import GroupMeta, State, TaskState
from machinery_py.tasks.workflow import result_value
from machinery_py.values.values import to_python
from machinery_py.wire.signatures import decode_signature

TASK_FAILED = "machinery_py.errors.TaskFailed"
RECORD = "group_django_"  # and the UUID of the task; users may be allowed to write `group_…`

STATUS = {
    State.PENDING: TaskResultStatus.READY,
    State.RECEIVED: TaskResultStatus.READY,
    State.STARTED: TaskResultStatus.RUNNING,
    State.RETRY: TaskResultStatus.READY,
    State.SUCCESS: TaskResultStatus.SUCCESSFUL,
    State.FAILURE: TaskResultStatus.FAILED,
}

_registering = threading.Lock()
_known: dict[str, Task] = {}  # by `module_path`: all that were made in this process


class MachineryBackend(BaseTaskBackend):
    """A backend whose tasks are run by `manage.py machinery worker`.

    OPTIONS are those of `settings.MACHINERY`, which counts if there are none, and `task_options`:
    options of each call, as `SendOptions`: `{"retries": 3, "time_limit": 60}`.
    """

    supports_defer = True
    supports_async_task = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self.server: Server = server_of(self.options, alias)

    @property
    def supports_get_result(self) -> bool:
        return self.server.backend.features.keeps

    @property
    def supports_priority(self) -> bool:
        return self._most > 0

    @property
    def _most(self) -> int:
        """The highest priority of a message that its queue respects; the lowest is 0."""
        if not self.server.broker.features.priorities:
            return 0
        if self.server.broker.features.name != "amqp":
            return int(TASK_MAX_PRIORITY - TASK_MIN_PRIORITY)
        most = self.server.config.amqp.queue_declare_args.get("x-max-priority", 0)
        return most if isinstance(most, int) else 0

    def validate_task(self, task: Task) -> None:
        """Check the task, and let this backend's Server know it."""
        super().validate_task(task)
        register(task, self.server, "" if task.queue_name == DEFAULT else task.queue_name)

    def enqueue(self, task: Task, args: Sequence[Any], kwargs: Mapping[str, Any]) -> TaskResult:
        """Send the call at once, also inside of a transaction.

        Raises:
            InvalidTask: this backend cannot run the task.
            TypeError, ValueError: an argument is no JSON.
            PublishRefused, PublishUnknown: as `Server.send_task`.
        """
        self.validate_task(task)
        now = self.server.now()
        call = {
            "args": _as_json(args),
            "kwargs": _as_json(kwargs),
            "backend": self.alias,
            "queue_name": task.queue_name,
            "priority": int(task.priority),
            "run_after": task.run_after.isoformat() if task.run_after is not None else None,
            "enqueued_at": now.isoformat(),
        }
        uuid = new_uuid()
        options = {**self.options.get(TASK_OPTIONS, {}), "uuid": uuid}
        options["queue"] = queue_of(task.queue_name, self.server.config)
        if task.run_after is not None:
            options["eta"] = _utc(task.run_after)
        if most := self._most:
            share = (task.priority - TASK_MIN_PRIORITY) / (TASK_MAX_PRIORITY - TASK_MIN_PRIORITY)
            options["priority"] = round(share * most)
        registered = self.server.get_registered_task(task.module_path)
        signature = registered.options(**options).signature(call)
        record = GroupMeta(
            group_uuid=RECORD + uuid, task_uuids=(uuid,), created_at=now, plan=json.dumps(call)
        )
        groups = (record,) if self.supports_get_result else ()
        self.server.app.submit((signature,), groups)
        result = _result(task, uuid, call, TaskResultStatus.READY)
        task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """Return the result of a call that any process has sent by this backend.

        Raises:
            TaskResultDoesNotExist: there is none, or no more, or this process does not know its
                task.
        """
        if not self.supports_get_result:
            return super().get_result(result_id)
        try:
            check_uuid(result_id)
        except (NameRefused, TypeError):
            raise TaskResultDoesNotExist(result_id) from None
        state = self.server.backend.get_states([result_id]).get(result_id)
        record = self.server.backend.get_group(RECORD + result_id)
        if state is None or record is None:
            raise TaskResultDoesNotExist(result_id)
        call = json.loads(record.plan)
        if call["backend"] != self.alias:
            raise TaskResultDoesNotExist(f"{result_id}: it is one of backend {call['backend']!r}")
        if (task := _known.get(state.task_name)) is None:
            raise TaskResultDoesNotExist(
                f"{result_id}: task {state.task_name!r} is not known here; is its module imported?"
            )
        return _result_of_state(_as_sent(task, call), call, state)


def server_of_alias(alias: str) -> Server:
    """Return the Server of the backend of that alias.

    Raises:
        ConfigError: it is no backend of ours.
    """
    backend = task_backends[alias] if alias in task_backends.settings else None
    if not isinstance(backend, MachineryBackend):
        ours = [one.alias for one in task_backends.all() if isinstance(one, MachineryBackend)]
        raise ConfigError(
            f"settings.TASKS: {alias!r} is no alias of a MachineryBackend "
            f"(there is {', '.join(ours) or 'none'})"
        )
    return backend.server


# Registering, and the run of a task in a worker


def register(task: Task, server: Server, queue: str = "") -> None:
    """Let the Server, and its workers, know the task. Again for the same task does nothing.

    Args:
        queue: tells which queue needs a worker for it; each call names its own.
    """
    path = task.module_path
    with _registering:
        if (known := _known.get(path)) is None or known.func is not task.func:
            _known[path] = task
        if server.is_task_registered(path):
            return
        if _finished not in server.app.hooks.on_end.get(State.FAILURE, ()):
            server.on_success(_finished)
            server.on_failure(_finished)
        runner = _runner(path, is_async=iscoroutinefunction(task.func))
        server.task(path, queue=queue)(runner)


def _runner(path: str, *, is_async: bool) -> Callable[..., Any]:
    async def run_async(context: Context, call: Any) -> Any:
        result = _started(path, context, call)
        await task_started.asend_robust(_sender(result), task_result=result)
        function, given = _called(result)
        return _as_json(await function(*given, **result.kwargs))

    def run(context: Context, call: Any) -> Any:
        result = _started(path, context, call)
        task_started.send_robust(_sender(result), task_result=result)
        function, given = _called(result)
        return _as_json(function(*given, **result.kwargs))

    return run_async if is_async else run


def _sender(result: TaskResult) -> type:
    return type(task_backends[result.backend])


def _called(result: TaskResult) -> tuple[Callable[..., Any], list[Any]]:
    context = [TaskContext(task_result=result)] if result.task.takes_context else []
    return result.task.func, [*context, *result.args]


def _started(path: str, context: Context, call: dict[str, Any]) -> TaskResult:
    """Return the result of a call that begins now."""
    now, before = dt.datetime.now(dt.timezone.utc), attempts_of(context.signature)
    return _result(
        _as_sent(_known[path], call),
        context.uuid,
        call,
        TaskResultStatus.RUNNING,
        started_at=_local(before[0].started_at if before else now),
        last_attempted_at=_local(now),
        errors=list(map(_error_of, before)),
        worker_ids=[*(one.worker for one in before), context.worker],
    )


def _finished(context: Context, given: Any) -> None:
    """Tell Django's receivers that a call has ended; in the worker, when that is stored."""
    task = _known.get(context.name)
    if task is None or len(context.signature.args) != 1:
        return
    arg = context.signature.args[0]
    call = to_python(arg.type, arg.value)
    backend = task_backends[call["backend"]]
    close_old_connections()
    try:
        if backend.supports_get_result:
            result = backend.get_result(context.uuid)
        else:
            result = _started(context.name, context, call)
            is_bad = isinstance(given, BaseException)
            status = TaskResultStatus.FAILED if is_bad else TaskResultStatus.SUCCESSFUL
            object.__setattr__(result, "status", status)
        if not isinstance(given, BaseException):
            task_finished.send_robust(type(backend), task_result=result)
            return
        try:
            raise given
        except BaseException:  # receivers ask `sys.exc_info`: Django's own logs the error
            task_finished.send_robust(type(backend), task_result=result)
    finally:
        close_old_connections()


# From our records to Django's


def _result_of_state(task: Task, call: Mapping[str, Any], state: TaskState) -> TaskResult:
    before: Sequence[Attempt] = ()
    if state.is_finished and state.message:
        try:
            before = attempts_of(decode_signature(state.message))
        except DecodeError:  # only what its failure needed is kept
            pass
    raised = list(map(_error_of, before))
    if state.state in (State.FAILURE, State.RETRY):
        raised.append(_error(state.error_type, state.traceback or state.error))
    began = [state.worker] if state.started_at is not None else []
    # The tries before a running one are not in its state; their workers are not known.
    unknown = [""] * (state.attempt - 1 - len(before)) if began else []
    result = _result(
        task,
        state.task_uuid,
        call,
        STATUS[state.state],
        started_at=_local(before[0].started_at if before else state.started_at),
        last_attempted_at=_local(state.started_at),
        finished_at=_local(state.finished_at),
        errors=raised,
        worker_ids=[*unknown, *(one.worker for one in before), *began],
    )
    if state.state is State.SUCCESS:
        object.__setattr__(result, "_return_value", result_value(state.results))
    return result


def _result(
    task: Task, uuid: str, call: Mapping[str, Any], status: TaskResultStatus, **known: Any
) -> TaskResult:
    nothing = {"started_at": None, "last_attempted_at": None, "finished_at": None}
    fields = {**nothing, "errors": [], "worker_ids": [], **known}
    return TaskResult(
        task=task,
        id=uuid,
        status=status,
        enqueued_at=_local(dt.datetime.fromisoformat(call["enqueued_at"])),
        args=call["args"],
        kwargs=call["kwargs"],
        backend=call["backend"],
        **fields,
    )


def _as_sent(task: Task, call: Mapping[str, Any]) -> Task:
    """Return the task with what `using` had changed. Not by `using`: settings may have changed."""
    run_after = call["run_after"]
    changes = {
        "backend": call["backend"],
        "queue_name": call["queue_name"],
        "priority": call["priority"],
        "run_after": dt.datetime.fromisoformat(run_after) if run_after is not None else None,
    }
    copy: Task = object.__new__(type(task))
    for field in dataclasses.fields(task):
        value = changes.get(field.name, getattr(task, field.name))
        object.__setattr__(copy, field.name, value)
    return copy


def _error_of(attempt: Attempt) -> TaskError:
    return _error(attempt.error_type, attempt.error)


def _error(error_type: str, text: str) -> TaskError:
    """Return an error as Django keeps it: its class has a path that can be imported."""
    if "." not in error_type:  # a builtin, one of ours, or a word for what befell the task
        home = next((one for one in (builtins, errors) if hasattr(one, error_type)), None)
        error_type = f"{home.__name__}.{error_type}" if home is not None else TASK_FAILED
    return TaskError(exception_class_path=error_type, traceback=text)


def _as_json(value: Any) -> Any:
    """Return the value as its JSON says it, so that it is the same before and after it travelled.

    Raises:
        TypeError, ValueError: it is no JSON.
    """
    return json.loads(json.dumps(normalize_json(value)))


def _utc(moment: dt.datetime) -> dt.datetime:
    """Return the moment in UTC. A naive one is in the default time zone."""
    if timezone.is_naive(moment):
        moment = timezone.make_aware(moment, timezone.get_default_timezone())
    return moment.astimezone(dt.timezone.utc)


def _local(moment: dt.datetime | None) -> dt.datetime | None:
    """Return the moment as `timezone.now()` would: naive, if USE_TZ is off."""
    if moment is None or settings.USE_TZ:
        return moment
    naive: dt.datetime = timezone.make_naive(moment, timezone.get_default_timezone())
    return naive


__all__ = ["MachineryBackend", "register", "server_of_alias"]

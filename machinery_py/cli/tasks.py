"""Commands on tasks: send, result, tasks, show, retry, revoke."""

from __future__ import annotations

import argparse
import json
import time
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from machinery_py.cli.control import print_answers
from machinery_py.cli.output import (
    ALL,
    NONE,
    ago,
    answer,
    clean_lines,
    confirm,
    fields,
    length,
    listing,
    many,
    moment,
    short_uuid,
    value_text,
)
from machinery_py.errors import ArgumentError, ResultExpired, TaskFailed
from machinery_py.inspection.calls import calls_of
from machinery_py.tasks.signature import HEADER_ATTEMPTS, UNLIMITED
from machinery_py.tasks.states import State, TaskState
from machinery_py.tasks.workflow import result_value

if TYPE_CHECKING:
    from machinery_py.inspection import KeptStep, TaskReport
    from machinery_py.registry.options import SendOptions
    from machinery_py.registry.task import Task
    from machinery_py.results.async_results import AsyncResult
    from machinery_py.server import Server
    from machinery_py.tasks.signature import Arg, Signature


MAX_CALL = 40  # characters of the arguments in a list

# Sending and waiting


def send(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery send`."""
    if args.delay is not None and args.eta is not None:
        raise ArgumentError("send: found --delay and --eta (expected one of the two)")
    name, *words = args.rest
    task = server.get_registered_task(name)
    positional, named = _arguments(task, words, args.kw)
    options: dict[str, Any] = {
        option: value
        for option in ("queue", "priority", "delay", "eta", "expires")
        if (value := getattr(args, option)) not in (None, "")
    }
    if args.header:
        options["headers"] = dict(_pair(one) for one in args.header)
    started = time.perf_counter()
    result = task.options(**cast("SendOptions", options)).send(*positional, **named)
    if args.wait:
        return _print_result(server, args, result, lambda _: time.perf_counter() - started)
    return answer(args, {"uuid": result.uuid}, result.uuid)


def _arguments(
    task: Task[..., Any], words: Sequence[str], named: Sequence[str]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that the words mean: JSON, or else the word itself."""
    try:
        hints = typing.get_type_hints(task.function)
    except Exception:  # user code: a name that is only there for type checkers
        hints = {}
    code = getattr(task.function, "__code__", None)
    names = list(code.co_varnames[: code.co_argcount]) if code is not None else []
    if task.call.takes_context:
        names = names[1:]
    kwargs: dict[str, Any] = {}
    for one in named:
        name, equals, text = one.partition("=")
        if not equals or not name.isidentifier():
            raise ArgumentError(f"--kw {one!r}: no name (expected NAME=JSON)")
        kwargs[name] = _value(text, hints.get(name))
    positional = [
        _value(text, hints.get(names[at]) if at < len(names) else None)
        for at, text in enumerate(words)
    ]
    return positional, kwargs


def _value(text: str, hint: Any) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if hint is str and not isinstance(value, str) else value


def result(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery result`."""
    return _print_result(server, args, server.result(server.inspect.find(args.rest[0])), _lifetime)


def _lifetime(state: TaskState) -> float | None:
    if state.finished_at is None or state.created_at.year <= 1:
        return None
    return (state.finished_at - state.created_at).total_seconds()


def _print_result(
    server: Server,
    args: argparse.Namespace,
    result: AsyncResult[Any],
    took: Callable[[TaskState], float | None],
) -> int:
    """Print the state of the task; return 1 if it has failed."""
    value: Any = None
    try:
        value = result.get(timeout=args.timeout) if args.wait else result.touch()
    except TaskFailed:
        pass  # the state says it
    try:
        state = result.get_state()
    except LookupError as error:
        raise ResultExpired(result.uuid, kept_for=server.kept_for) from error
    seconds = took(state)
    parts = [short_uuid(result.uuid), state.state]
    if state.state is State.FAILURE:
        parts.append(value_text(_outcome(state))[1:-1])
    elif state.state is State.SUCCESS:
        parts.append(value_text(value))
    if seconds is not None and state.is_finished:
        parts.append(f"({length(seconds)})")
    answer(args, {**_state_record(state), "seconds": seconds}, "  ".join(parts))
    return 1 if state.state is State.FAILURE else 0


# Listing


def tasks(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery tasks`."""
    found = server.inspect.tasks(
        state=args.state or None,
        name=args.name,
        since=args.since,
        queue=args.queue,
        limit=args.limit,
        worker=args.worker,
        text=args.text,
    )
    now, calls = server.now(), calls_of(found)
    columns: dict[str, Callable[[TaskState], str]] = {
        "UUID": lambda one: one.task_uuid,
        "STATE": lambda one: one.state,
        "NAME": lambda one: one.task_name,
        "ARGUMENTS": lambda one: _call(calls.get(one.task_uuid)),
        "QUEUE": lambda one: one.queue,
        "AGE": lambda one: ago(one.created_at, now),
        "ATTEMPT": lambda one: str(one.attempt),
        "RESULT": _outcome,
    }

    def record(state: TaskState) -> dict[str, Any]:
        known = calls.get(state.task_uuid)
        told = None if known is None else [one.value for one in known]
        return {**_state_record(state), "arguments": told}

    return listing(args, found, columns, right=("AGE", "ATTEMPT"), record=record)


def _call(args: Sequence[Arg] | None) -> str:
    """Return the arguments of a task for a cell."""
    if args is None:
        return NONE
    shown = (f"{one.name + '=' if one.name else ''}{value_text(one.value)}" for one in args)
    text = ", ".join(shown)
    return text if len(text) <= MAX_CALL else f"{text[: MAX_CALL - 1]}…"


def _outcome(state: TaskState) -> str:
    """Return the result, the error or the progress for a cell."""
    if state.error:
        kind = state.error_type.rpartition(".")[2]
        return f"{kind}: {state.error}" if kind else state.error
    if state.is_finished:
        return value_text(result_value(state.results)) if state.results else NONE
    return _progress(state) or NONE


def _progress(state: TaskState) -> str:
    return "{:g} of {:g}".format(*state.progress) if state.progress else ""


def show(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery show`."""
    report = server.inspect.task(args.rest[0], ask=True)
    state, signature = report.state, report.signature
    message = None if signature is None else _signature_record(signature)
    text = "" if args.json else _description(server, report)
    attempts = [msgspec.structs.asdict(one) for one in report.attempts]
    record = {
        "message": message,
        "arguments": None if report.args is None else [one.value for one in report.args],
        "attempts": attempts,
        "steps": _steps_record(report),
    }
    return answer(args, {**_state_record(state), **record}, text)


def why(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery why`."""
    found = server.inspect.why(args.rest[0], stack=args.stack)
    lines = "\n".join(clean_lines(str(found)))
    return answer(args, msgspec.to_builtins(found), lines)


def _steps_record(report: TaskReport) -> list[dict[str, Any]]:
    return [
        {**msgspec.structs.asdict(one), "results": [arg.value for arg in one.results]}
        for one in report.steps
    ]


def _description(server: Server, report: TaskReport) -> str:
    state, signature, now = report.state, report.signature, server.now()
    error = f"{state.error_type}: {state.error}" if state.error_type and state.error else ""
    rows = [
        ("task", state.task_uuid),
        ("name", state.task_name),
        ("state", state.state),
        ("queue", state.queue),
        ("attempt", str(state.attempt)),
        *(
            (f"try {one.number}", f"{moment(one.ended_at, now)}  {one.error_type}: {one.error}")
            for one in report.attempts
        ),
        ("worker", state.worker),
        ("sent", moment(state.created_at, now)),
        ("started", moment(state.started_at, now)),
        ("ended", moment(state.finished_at, now)),
        ("due", moment(state.eta, now)),
        *(
            (f"step {one.name}", f"{moment(one.at, now)}  {_end_of_step(one)}")
            for one in report.steps
        ),
        ("progress", _progress(state)),
        *(("note", f"{name} = {value_text(value)}") for name, value in state.notes.items()),
        ("error", error or state.error),
    ]
    if state.started_at and state.finished_at:
        rows.append(("took", length((state.finished_at - state.started_at).total_seconds())))
    rows += [
        ("argument", f"{arg.name + ' = ' if arg.name else ''}{value_text(arg.value)}")
        for arg in report.args or ()
    ]
    if signature is not None:
        left = signature.retry_count
        rows.append(("retries left", "no limit" if left == UNLIMITED else str(left)))
        rows += [
            ("header", f"{name}: {value}")
            for name, value in signature.headers.items()
            if name != HEADER_ATTEMPTS
        ]
    rows += [("result", value_text(arg.value)) for arg in state.results]
    trace = ["traceback", *(f"  {line}" for line in clean_lines(state.traceback))]
    return "\n".join([fields(rows), *(trace if state.traceback else [])])


def _end_of_step(step: KeptStep) -> str:
    if step.error:
        return f"{step.error_type}: {step.error}"
    return ", ".join(value_text(arg.value) for arg in step.results)


def _state_record(state: TaskState) -> dict[str, Any]:
    """Return a task state for JSON; the first year stands for an unknown time."""
    names = "state queue attempt worker error error_type traceback progress notes"
    times = {
        name: getattr(state, name) for name in ("created_at", "started_at", "finished_at", "eta")
    }
    return {
        "uuid": state.task_uuid,
        "name": state.task_name,
        **{name: getattr(state, name) for name in names.split()},
        **{name: None if at is None or at.year <= 1 else at for name, at in times.items()},
        "result": result_value(state.results),
        "results": [_arg_record(arg) for arg in state.results],
    }


def _signature_record(signature: Signature[object]) -> dict[str, Any]:
    names = "uuid name priority retry_count eta group_uuid"
    return {
        **{name: getattr(signature, name) for name in names.split()},
        "queue": signature.routing_key,
        "headers": dict(signature.headers),
        "args": [_arg_record(arg) for arg in signature.args],
    }


def _arg_record(arg: Any) -> dict[str, Any]:
    return {"name": arg.name, "type": arg.type, "value": arg.value}


# Acting


def retry(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery retry`."""
    if args.rest:
        uuids = [server.inspect.find(one) for one in args.rest]
        states = list(server.backend.get_states(uuids).values())
    else:
        states = server.inspect.tasks(
            state=args.state, name=args.name, since=args.since, queue=args.queue, limit=ALL
        )
    uuids = [one.task_uuid for one in states if one.state is State.FAILURE and one.message]
    if len(uuids) > 1:
        confirm(args, f"send {many(len(uuids), 'failed task')} again?")
    sent = server.inspect.retry(uuids, from_start=args.from_start) if uuids else []
    text = f"sent {many(len(sent), 'task')} again"
    if others := len(states) - len(sent):
        text += f"; {many(others, 'other')} cannot be (not failed, or the message is not kept)"
    return answer(args, {"retried": sent}, text)


def signal(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery signal`."""
    uuid, name, *values = args.rest
    if len(values) > 1:
        raise ArgumentError(f"{len(values)} values of a signal (expected one)")
    uuid = server.inspect.find(uuid)
    given = server.signal(uuid, name, _value(values[0], None) if values else None, key=args.key)
    text = f"task {uuid} has signal {name}" if given else f"it had signal {args.key} before"
    return answer(args, {"given": given}, text)


def revoke(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery revoke`."""
    headers = dict(_pair(one) for one in args.header) if args.header else None
    if not (args.rest or headers):
        raise ArgumentError("no task named (give UUIDs, or --header NAME=VALUE)")
    uuids = list(dict.fromkeys(server.inspect.find(one) for one in args.rest))
    if headers:
        pairs = " and ".join(f"{name}={value}" for name, value in headers.items())
        confirm(args, f"revoke all tasks with {pairs}?")
    elif len(uuids) > 1:
        confirm(args, f"revoke {many(len(uuids), 'task')}?")
    # Before: a revoked task that waits is finished soon.
    states = server.backend.get_states(uuids)
    finished = [one for one, state in states.items() if state.is_finished]
    done = server.control.revoke(
        *uuids, headers=headers, terminate=args.terminate, timeout=args.timeout
    )
    if not args.json:
        late = f"; {many(len(finished), 'task')} had ended before"
        count = len(set(done.uuids) - set(finished))
        print(f"revoked {many(count, 'task')}{late if finished else ''}")
    print_answers(done, args.timeout, as_json=args.json, finished=finished)
    return 1 if done.missing or done.errors else 0


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ArgumentError(f"--header {text!r}: no name (expected NAME=VALUE)")
    return name, value

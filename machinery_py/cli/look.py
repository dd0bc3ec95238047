"""Commands that look: queues, tasks, show, workers, config. Each listing is a table, or JSON with keys that stay."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from machinery_py.cli import apps, logs
from machinery_py.cli.tables import (
    NONE,
    ago,
    clean_lines,
    count,
    fields,
    length,
    moment,
    shorten,
    table,
    to_json,
    value_text,
)
from machinery_py.config.config import OPTIONS
from machinery_py.tasks.workflow import result_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from machinery_py.server import Server
    from machinery_py.tasks.signature import Signature
    from machinery_py.tasks.states import TaskState


def open_app(args: argparse.Namespace, command: str) -> Server:
    """The Server of a command that ends at once."""
    logs.configure_short()
    return apps.load(args.app, args.app_dir, command=command)


def queues(args: argparse.Namespace) -> int:
    """`machinery queues`."""
    server = open_app(args, "queues")
    found = server.inspect.queues()
    if args.json:
        print(to_json([msgspec.structs.asdict(one) for one in found]))
        return 0
    rows = [
        (
            f"{one.queue} (paused)" if one.paused else one.queue,
            count(one.waiting),
            count(one.running),
            count(one.delayed),
            count(one.failed),
            length(one.oldest) if one.oldest else NONE,
            count(one.per_minute),
        )
        for one in found
    ]
    print(
        table(
            ("QUEUE", "WAITING", "RUNNING", "DELAYED", "FAILED", "OLDEST", "PER MIN"),
            rows,
            right=range(1, 7),
        )
    )
    return 0


def tasks(args: argparse.Namespace) -> int:
    """`machinery tasks`."""
    server = open_app(args, "tasks")
    found = server.inspect.tasks(
        state=args.state or None,
        name=args.name,
        since=args.since,
        queue=args.queue,
        limit=args.limit,
    )
    if args.json:
        print(to_json([state_record(one) for one in found]))
        return 0
    now = server.now()
    rows = [
        (
            one.task_uuid,
            one.state,
            one.task_name,
            one.queue,
            ago(one.created_at, now),
            str(one.attempt),
            what_came_out(one),
        )
        for one in found
    ]
    print(table(("UUID", "STATE", "NAME", "QUEUE", "AGE", "ATTEMPT", "RESULT"), rows, right=(4, 5)))
    return 0


def what_came_out(state: TaskState) -> str:
    """The result, the error, or how far it is, for a cell."""
    if state.is_finished and not state.error:
        return value_text(result_value(state.results)) if state.results else NONE
    if state.error:
        return f"{_short_type(state.error_type)}{state.error}"
    return "{:g} of {:g}".format(*state.progress) if state.progress else NONE


def _short_type(error_type: str) -> str:
    return f"{error_type.rpartition('.')[2]}: " if error_type else ""


def state_record(state: TaskState) -> dict[str, Any]:
    """A task state for JSON."""
    record = {
        name: getattr(state, name)
        for name in (
            "state",
            "queue",
            "attempt",
            "worker",
            "error",
            "error_type",
            "traceback",
            "progress",
        )
    }
    times = {
        name: value if value is None or value.year > 1 else None
        for name in ("created_at", "started_at", "finished_at", "eta")
        for value in (getattr(state, name),)
    }
    return {
        "uuid": state.task_uuid,
        "name": state.task_name,
        **record,
        **times,
        "result": result_value(state.results),
        "results": [_arg(arg) for arg in state.results],
    }


def _arg(arg: Any) -> dict[str, Any]:
    return {"name": arg.name, "type": arg.type, "value": arg.value}


def show(args: argparse.Namespace) -> int:
    """`machinery show`."""
    server = open_app(args, "show")
    report = server.inspect.task(args.rest[0])
    state, signature = report.state, report.signature
    if args.json:
        message = None if signature is None else _signature_record(signature)
        print(to_json({**state_record(state), "message": message}))
        return 0
    now = server.now()
    rows = [
        ("task", state.task_uuid),
        ("name", state.task_name),
        ("state", state.state),
        ("queue", state.queue),
        ("attempt", str(state.attempt)),
        ("worker", state.worker),
        ("sent", moment(state.created_at, now)),
        ("started", moment(state.started_at, now)),
        ("ended", moment(state.finished_at, now)),
        ("due", moment(state.eta, now)),
        ("progress", "{:g} of {:g}".format(*state.progress) if state.progress else ""),
        (
            "error",
            f"{state.error_type}: {state.error}"
            if state.error_type and state.error
            else state.error,
        ),
    ]
    if state.started_at and state.finished_at:
        rows.append(("took", length((state.finished_at - state.started_at).total_seconds())))
    if signature is not None:
        rows += [
            ("argument", f"{arg.name + ' = ' if arg.name else ''}{value_text(arg.value)}")
            for arg in signature.args
        ]
        rows.append(("retries left", str(signature.retry_count)))
        rows += [("header", f"{name}: {value}") for name, value in signature.headers.items()]
    rows += [("result", value_text(arg.value)) for arg in state.results]
    print(fields((name, value) for name, value in rows if value not in ("", NONE)))
    if state.traceback:
        print("traceback")
        print("\n".join(f"  {line}" for line in clean_lines(state.traceback)))
    return 0


def _signature_record(signature: Signature[object]) -> dict[str, Any]:
    return {
        "uuid": signature.uuid,
        "name": signature.name,
        "queue": signature.routing_key,
        "priority": signature.priority,
        "retry_count": signature.retry_count,
        "eta": signature.eta,
        "headers": dict(signature.headers),
        "group_uuid": signature.group_uuid,
        "args": [_arg(arg) for arg in signature.args],
    }


def workers(args: argparse.Namespace) -> int:
    """`machinery workers`."""
    server = open_app(args, "workers")
    found = server.inspect.workers()
    if args.json:
        print(to_json([msgspec.structs.asdict(one) for one in found]))
        return 0
    now = server.now()
    rows = [
        (
            one.name,
            one.host,
            str(one.pid),
            ",".join(one.queues),
            count(one.holding),
            ago(one.started_at, now),
            ago(one.beat_at, now),
        )
        for one in found
    ]
    print(
        table(("WORKER", "HOST", "PID", "QUEUES", "HOLDS", "UP", "BEAT"), rows, right=(2, 4, 5, 6))
    )
    return 0


def config(args: argparse.Namespace) -> int:
    """`machinery config`."""
    server = open_app(args, "config")
    rows = list(_settings(server.config.redacted(), server.config.sources))
    if args.json:
        print(
            to_json(
                [
                    {"key": key, "value": value, "unit": unit, "source": source}
                    for key, value, unit, source in rows
                ]
            )
        )
        return 0
    cells: Sequence[tuple[str, str, str]] = [
        (key, shorten(f"{_setting(value)}{f' {unit}' if unit else ''}"), source)
        for key, value, unit, source in rows
    ]
    print(table(("SETTING", "VALUE", "FROM"), cells))
    return 0


def _settings(
    values: Mapping[str, object], sources: Mapping[str, str]
) -> Iterator[tuple[str, object, str, str]]:
    for key, value in values.items():
        yield (
            key,
            dict(value) if isinstance(value, Mapping) else value,
            getattr(OPTIONS[key], "unit", "") or "",
            sources[key],
        )


def _setting(value: object) -> str:
    if value in ("", {}):
        return NONE
    return value if isinstance(value, str) else value_text(value)

"""Commands that change something: send, result, retry, revoke, purge, pause, resume, dead. On more than one they ask first."""

from __future__ import annotations

import argparse
import json
import sys
import time
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from machinery_py.cli.look import open_app, state_record, what_came_out
from machinery_py.cli.tables import (
    ago,
    clean,
    clean_lines,
    fields,
    length,
    many,
    moment,
    short_uuid,
    table,
    to_json,
    value_text,
)
from machinery_py.errors import (
    ArgumentError,
    MachineryError,
    ResultExpired,
    TaskFailed,
    Unsupported,
    nearest,
)
from machinery_py.tasks.states import State, TaskState

if TYPE_CHECKING:
    from machinery_py.brokers.base import DeadLetter
    from machinery_py.registry.task import SendOptions, Task
    from machinery_py.results.async_results import AsyncResult
    from machinery_py.server import Server


ALL = 100_000  # the most that one command acts on


class Refused(MachineryError):
    """The question was not answered with yes."""


def confirm(args: argparse.Namespace, question: str) -> None:
    """Ask, unless --yes was given.

    Raises:
        Refused: the answer was no, or there is nobody to ask.
    """
    if args.yes:
        return
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise Refused(f"{question} (nobody to ask here: say --yes)")
    sys.stderr.write(f"{question} [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("nothing was done")


# Sending and waiting


def send(args: argparse.Namespace) -> int:
    """`machinery send`."""
    server = open_app(args, "send")
    name, *words = args.rest
    task = server.get_registered_task(name)
    positional, named = arguments(task, words, args.kw)
    options: SendOptions = {}
    if args.queue:
        options["queue"] = args.queue
    if args.delay is not None:
        options["delay"] = args.delay
    started = time.perf_counter()
    result = task.options(**options).send(*positional, **named)
    if args.wait:
        return _print_result(args, server, result, lambda _: time.perf_counter() - started)
    print(to_json({"uuid": result.uuid}) if args.json else result.uuid)
    return 0


def arguments(
    task: Task[..., Any], words: Sequence[str], named: Sequence[str]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that the words mean: JSON, else the word itself. Where the task wants a `str`, a word is one.

    Raises:
        ArgumentError: `--kw` without a name.
    """
    hints, names = _parameters(task)
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


def _parameters(task: Task[..., Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a task's parameters, and their names in order, without the Context."""
    try:
        hints = typing.get_type_hints(task.function)
    except Exception:  # user code: a name that is only there for type checkers
        hints = {}
    code = getattr(task.function, "__code__", None)
    names = list(code.co_varnames[: code.co_argcount]) if code is not None else []
    return hints, names[1:] if task.call.takes_context else names


def _value(text: str, hint: Any) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if hint is str and not isinstance(value, str) else value


def result(args: argparse.Namespace) -> int:
    """`machinery result`."""
    server = open_app(args, "result")
    return _print_result(args, server, server.result(server.inspect.find(args.rest[0])), _lifetime)


def _lifetime(state: TaskState) -> float | None:
    if state.finished_at is None or state.created_at.year <= 1:
        return None
    return (state.finished_at - state.created_at).total_seconds()


def _print_result(
    args: argparse.Namespace,
    server: Server,
    result: AsyncResult[Any],
    took: Callable[[TaskState], float | None],
) -> int:
    """Print how the task stands; 1 if it has failed."""
    value: Any = None
    try:
        value = result.get(timeout=args.timeout) if args.wait else result.touch()
    except TaskFailed:
        pass  # the state says it
    seconds = None
    try:
        state = result.get_state()
        seconds = took(state)
    except LookupError as error:
        raise ResultExpired(result.uuid, kept_for=server.kept_for) from error
    if args.json:
        print(to_json({**state_record(state), "seconds": seconds}))
    else:
        parts = [short_uuid(result.uuid), state.state]
        if state.state is State.FAILURE:
            parts.append(value_text(what_came_out(state))[1:-1])
        elif state.state is State.SUCCESS:
            parts.append(value_text(value))
        if seconds is not None and state.is_finished:
            parts.append(f"({length(seconds)})")
        print("  ".join(parts))
    return 1 if state.state is State.FAILURE else 0


# Tasks


def retry(args: argparse.Namespace) -> int:
    """`machinery retry`."""
    server = open_app(args, "retry")
    if args.rest:
        states = list(
            server.backend.get_states([server.inspect.find(one) for one in args.rest]).values()
        )
    else:
        states = server.inspect.tasks(
            state=args.state, name=args.name, since=args.since, queue=args.queue, limit=ALL
        )
    uuids = [one.task_uuid for one in states if one.state is State.FAILURE and one.message]
    if len(uuids) > 1:
        confirm(args, f"send {many(len(uuids), 'failed task')} again?")
    sent = server.inspect.retry(uuids) if uuids else []
    others = len(states) - len(sent)
    return _done(
        args,
        "retried",
        sent,
        f"sent {many(len(sent), 'task')} again"
        + (
            f"; {many(others, 'other')} cannot be (not failed, or the message is not kept)"
            if others
            else ""
        ),
    )


def revoke(args: argparse.Namespace) -> int:
    """`machinery revoke`."""
    server = open_app(args, "revoke")
    uuids = list(dict.fromkeys(server.inspect.find(one) for one in args.rest))
    if len(uuids) > 1:
        confirm(args, f"revoke {many(len(uuids), 'task')}?")
    server.revoke(uuids)
    return _done(args, "revoked", uuids, f"revoked {many(len(uuids), 'task')}")


def purge(args: argparse.Namespace) -> int:
    """`machinery purge`."""
    server = open_app(args, "purge")
    queue = args.rest[0]
    found = {stats.queue: stats.waiting + stats.delayed for stats in server.broker.stats()}
    if queue not in found:
        raise MachineryError(f"no queue {queue!r} (there is: {', '.join(sorted(found)) or 'none'})")
    if found[queue] > 1:
        confirm(
            args,
            f"delete {many(found[queue], 'task')} that {'wait' if found[queue] > 1 else 'waits'} in {queue!r}?",
        )
    deleted = server.inspect.purge(queue)
    if args.json:
        print(to_json({"queue": queue, "deleted": deleted}))
    else:
        print(f"deleted {many(deleted, 'task')} from {queue!r}")
    return 0


def declare(args: argparse.Namespace) -> int:
    """`machinery declare`."""
    server = open_app(args, "declare")
    made = server.broker.declare(args.rest or [server.config.default_queue])
    if args.json:
        print(to_json({"declared": list(made)}))
    else:
        print("\n".join(made) or "nothing to declare: this store makes its queues by itself")
    return 0


def pause(args: argparse.Namespace) -> int:
    """`machinery pause`. A queue that is not there yet may be paused: before a deployment, say."""
    if "" in args.rest:
        raise ArgumentError("pause: the name of a queue is empty")
    server = open_app(args, "pause")
    found = {stats.queue: stats for stats in server.broker.stats()}
    names = list(dict.fromkeys(args.rest))
    for name in names:
        server.inspect.pause(name)
        if name not in found:
            note(
                f"there was no queue {name!r} so far{nearest(name, found)}; it is paused for when there is"
            )
    waiting = [
        f"{name!r} ({many(found[name].waiting, 'task')} waiting)" if name in found else repr(name)
        for name in names
    ]
    return _done(args, "paused", names, f"paused {', '.join(waiting)}")


def resume(args: argparse.Namespace) -> int:
    """`machinery resume`."""
    server = open_app(args, "resume")
    paused = server.broker.paused()
    names = list(dict.fromkeys(args.rest))
    for name in names:
        server.inspect.resume(
            name
        )  # also where it seems not to be paused: somebody may do it just now
        if name not in paused:
            note(
                f"queue {name!r} was not paused (paused are: {', '.join(map(repr, sorted(paused))) or 'none'})"
            )
    return _done(args, "resumed", names, f"resumed {', '.join(map(repr, names))}")


def note(text: str) -> None:
    """Something that is worth knowing, and no error."""
    sys.stderr.write(f"machinery: {clean(text)}\n")


def _done(args: argparse.Namespace, key: str, uuids: Sequence[str], text: str) -> int:
    print(to_json({key: list(uuids)}) if args.json else text)
    return 0


# Dead letters


def dead_list(args: argparse.Namespace) -> int:
    """`machinery dead list`."""
    server = open_app(args, "dead list")
    letters = server.inspect.dead(limit=args.limit, queue=args.queue)
    if args.json:
        print(to_json([_letter_record(one) for one in letters]))
        return 0
    now = server.now()
    rows = [
        (
            one.id,
            one.reason,
            one.name,
            one.uuid,
            one.queue,
            ago(one.died_at, now),
            str(one.strikes),
            one.error,
        )
        for one in letters
    ]
    print(
        table(
            ("ID", "REASON", "NAME", "UUID", "QUEUE", "AGE", "STRIKES", "ERROR"),
            rows,
            right=(0, 5, 6),
        )
    )
    return 0


def dead_show(args: argparse.Namespace) -> int:
    """`machinery dead show`."""
    server = open_app(args, "dead show")
    one = server.inspect.dead_letter(args.rest[0])
    if args.json:
        print(to_json({**_letter_record(one), "body": one.body}))
        return 0
    rows = [
        ("id", one.id),
        ("reason", one.reason),
        ("error", one.error),
        ("task", one.uuid),
        ("name", one.name),
        ("queue", one.queue),
        ("died", moment(one.died_at, server.now())),
        ("strikes", str(one.strikes)),
        ("message", f"{len(one.body):,} bytes"),
    ]
    print(fields((name, value) for name, value in rows if value))
    print(
        "\n".join(f"  {line}" for line in clean_lines(one.body.decode("utf-8", "backslashreplace")))
    )
    return 0


def dead_replay(args: argparse.Namespace) -> int:
    """`machinery dead replay`."""
    server = open_app(args, "dead replay")
    ids = _letter_ids(args, server, "replay")
    sent = server.inspect.replay_dead(ids) if ids else []
    others = len(ids) - len(sent)
    return _done(
        args,
        "replayed",
        sent,
        f"put {many(len(sent), 'message')} back"
        + (f"; {many(others, 'other')} cannot be: no task signature" if others else ""),
    )


def dead_delete(args: argparse.Namespace) -> int:
    """`machinery dead delete`."""
    server = open_app(args, "dead delete")
    ids = _letter_ids(args, server, "delete")
    deleted = server.inspect.delete_dead(ids) if ids else 0
    print(to_json({"deleted": deleted}) if args.json else f"deleted {many(deleted, 'dead letter')}")
    return 0


def _letter_ids(args: argparse.Namespace, server: Server, verb: str) -> list[str]:
    """Return the letters that are meant; asks when they are more than one."""
    if args.rest and args.all:
        raise Unsupported(f"dead {verb}: ids and --all exclude each other")
    if not args.rest and not args.all:
        raise Unsupported(
            f"dead {verb}: which? name ids, or --all (see: machinery dead list {args.app})"
        )
    if args.all:
        ids = [one.id for one in server.inspect.dead(limit=ALL, queue=args.queue)]
    else:
        ids = list(dict.fromkeys(server.inspect.dead_letter(one).id for one in args.rest))
    if len(ids) > 1:
        confirm(args, f"{verb} {many(len(ids), 'dead letter')}?")
    return ids


def _letter_record(one: DeadLetter) -> dict[str, Any]:
    return {
        "id": one.id,
        "uuid": one.uuid,
        "name": one.name,
        "queue": one.queue,
        "reason": one.reason,
        "error": one.error,
        "strikes": one.strikes,
        "died_at": one.died_at,
        "size": len(one.body),
    }

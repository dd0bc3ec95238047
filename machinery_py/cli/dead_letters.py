"""Commands on dead letters: dead; dead show, replay, delete."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from machinery_py.cli.output import (
    ALL,
    ago,
    answer,
    clean_lines,
    confirm,
    fields,
    listing,
    many,
    moment,
)
from machinery_py.errors import ArgumentError
from machinery_py.inspection import typed

if TYPE_CHECKING:
    from machinery_py.brokers.base import DeadLetter
    from machinery_py.server import Server


def dead(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery dead`."""
    letters = server.inspect.dead(limit=args.limit, queue=args.queue)
    now = server.now()
    columns: dict[str, Callable[[DeadLetter], str]] = {
        "ID": lambda one: one.id,
        "REASON": lambda one: one.reason,
        "NAME": lambda one: one.name,
        "UUID": lambda one: one.uuid,
        "QUEUE": lambda one: one.queue,
        "AGE": lambda one: ago(one.died_at, now),
        "STRIKES": lambda one: str(one.strikes),
        "ERROR": lambda one: one.error,
    }
    return listing(args, letters, columns, right=("ID", "AGE", "STRIKES"), record=_record)


def dead_show(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery dead show`."""
    one = server.inspect.dead_letter(args.rest[0])
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
    body = [f"  {line}" for line in clean_lines(one.body.decode("utf-8", "backslashreplace"))]
    return answer(args, {**_record(one), "body": one.body}, "\n".join([fields(rows), *body]))


def dead_replay(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery dead replay`."""
    ids = _chosen(server, args, "replay")
    sent = server.inspect.replay_dead(ids, from_start=args.from_start) if ids else []
    text = f"put {many(len(sent), 'message')} back"
    if others := len(ids) - len(sent):
        text += f"; {many(others, 'other')} cannot be: no task signature"
    return answer(args, {"replayed": sent}, text)


def dead_delete(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery dead delete`."""
    ids = _chosen(server, args, "delete")
    deleted = server.inspect.delete_dead(ids) if ids else 0
    return answer(args, {"deleted": deleted}, f"deleted {many(deleted, 'dead letter')}")


def _chosen(server: Server, args: argparse.Namespace, verb: str) -> list[str]:
    """Return the ids of the letters that are meant; ask when there are several."""
    if args.rest and args.all:
        raise ArgumentError(f"dead {verb}: ids and --all exclude each other")
    if not args.rest and not args.all:
        seen = typed(server.app, "dead", module=args.app)
        raise ArgumentError(f"dead {verb}: no ids (name them, or say --all; see: {seen})")
    if args.all:
        ids = [one.id for one in server.inspect.dead(limit=ALL, queue=args.queue)]
    else:
        ids = list(dict.fromkeys(server.inspect.dead_letter(one).id for one in args.rest))
    if len(ids) > 1:
        confirm(args, f"{verb} {many(len(ids), 'dead letter')}?")
    return ids


def _record(one: DeadLetter) -> dict[str, Any]:
    names = "id uuid name queue reason error strikes died_at"
    return {**{name: getattr(one, name) for name in names.split()}, "size": len(one.body)}

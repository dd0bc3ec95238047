"""Command that gives orders to workers: control."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from machinery_py.cli.output import clean, clean_lines, length, note, shorten, to_json
from machinery_py.control.answers import Answers, Pong, Revoked, ThreadStack
from machinery_py.control.orders import CHANGES, KINDS, arguments
from machinery_py.errors import ArgumentError, nearest

if TYPE_CHECKING:
    from machinery_py.server import Server

REVOKING = ("find", "terminate")  # orders of `machinery revoke`


def control(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery control`; 1 if a worker has not answered, or could not do it."""
    name, *words = args.rest
    kind, given = _order(name, words)
    workers = server.control.workers(*args.worker, timeout=args.timeout)
    if kind in CHANGES:
        answers: Answers[Any] = workers.change(kind, **given)
    else:
        answers = getattr(workers, kind)(**given)
    print_answers(answers, args.timeout, as_json=args.json)
    if not (answers or answers.errors or answers.missing):
        note("there is no such worker")
    return 1 if answers.missing or answers.errors or not answers else 0


def print_answers(
    answers: Answers[Any], timeout: float, *, as_json: bool, finished: Sequence[str] = ()
) -> None:
    """Print answers, and which workers did not answer.

    `finished`: of the tasks that are revoked, those that had ended before.
    """
    if as_json:
        found: dict[str, Any] = {
            "answers": answers,
            "missing": answers.missing,
            "errors": answers.errors,
        }
        if isinstance(answers, Revoked):
            found = {"revoked": answers.uuids, "finished": finished, **found}
        print(to_json(msgspec.to_builtins(found)))
        return
    for worker, value in answers.items():
        print(f"{clean(worker)}:")
        print("\n".join(f"  {line}" for line in _lines(value)))
    for worker, error in answers.errors.items():
        note(f"{worker}: {error}")
    for worker in answers.missing:
        note(f"{worker}: no answer in {length(timeout)}")


def _order(name: str, words: list[str]) -> tuple[str, dict[str, Any]]:
    """Return an order, and its arguments by name.

    Raises:
        ArgumentError: there is no such order, or it takes others.
    """
    kind = name.replace("-", "_")
    known = [one.replace("_", "-") for one in KINDS if one not in REVOKING]
    if name not in known:
        raise ArgumentError(
            f"no order is called {name!r}{nearest(name, known)} (known: {', '.join(known)})"
        )
    fields = KINDS[kind].__struct_fields__
    if len(words) != len(fields):
        expected = " ".join(field.upper() for field in fields) or "no argument"
        raise ArgumentError(f"order {name!r}: found {len(words)} arguments (expected {expected})")
    given = dict(zip(fields, words, strict=True))
    if "level" in given:
        given["level"] = given["level"].upper()
    return kind, msgspec.structs.asdict(arguments(kind, given, strict=False))


def _lines(value: object) -> list[str]:
    """Return an answer as lines of text."""
    if isinstance(value, list):
        return [line for item in value for line in _lines(item)] or ["none"]
    if isinstance(value, Pong):
        return [length(value.seconds)]
    if isinstance(value, ThreadStack):
        task = f" runs {value.task}" if value.task else ""
        return [clean(f"{value.thread}{task}"), *clean_lines(value.stack.rstrip())]
    if isinstance(value, dict):
        return [clean(f"{key} = {shorten(str(one))}") for key, one in value.items()] or ["none"]
    if isinstance(value, msgspec.Struct):
        facts = msgspec.to_builtins(value)
        return [clean("  ".join(f"{key}={shorten(str(one))}" for key, one in facts.items()))]
    return ["done" if value is None else clean(str(value))]

"""Command on a workflow: flow."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from machinery_py.cli.output import answer, confirm, many
from machinery_py.errors import ArgumentError
from machinery_py.tasks.states import State
from machinery_py.texts import cut

if TYPE_CHECKING:
    from machinery_py.server import Server
    from machinery_py.workflows.workflow import StepReport, Workflow

WIDEST = 30  # of a step's name


def flow(server: Server, args: argparse.Namespace) -> int:
    """Run `machinery flow`. Returns 1 if the workflow has failed."""
    uuid, *words = args.rest
    if words not in ([], ["cancel"], ["retry"]):
        raise ArgumentError(f"flow: {' '.join(words)!r} (expected nothing, cancel or retry)")
    found = server.workflow(uuid)
    if words == ["cancel"]:
        progress = found.progress
        confirm(args, f"cancel {many(progress.total - progress.done, 'task')} of {found.name}?")
        found.cancel()
    elif words == ["retry"]:
        sent = found.retry()
        return answer(args, {"sent": sent}, f"sent {many(len(sent), 'task')} again")
    answer(args, _record(found), "\n".join(_lines(found)))
    return 1 if found.state is State.FAILURE else 0


def _lines(found: Workflow) -> Sequence[str]:
    steps, ended = found.tree(), _ended(found.tree())
    state = f"{found.state}, cancelled" if found.is_cancelled else found.state
    labels = [f"{one.name} ×{one.total}" if one.is_group else one.name for one in steps]
    width = min(WIDEST, max(map(len, labels)))
    marks = ["├─"] * (len(steps) - 1) + ["└─"]
    return [
        f"{found.name}  {ended} of {many(len(steps), 'step')}  {state}",
        *(
            f"{mark} {label:<{width}}  {_standing(one)}"
            for mark, label, one in zip(marks, labels, steps, strict=True)
        ),
    ]


def _ended(steps: Sequence[StepReport]) -> int:
    """Return how many steps are over."""
    return sum(one.count(State.SUCCESS, State.FAILURE) == one.total for one in steps)


def _standing(step: StepReport) -> str:
    if not step.counts or (step.total == 1 and step.counts.get(State.PENDING) and step.parents):
        return "not started"
    each = [f"{step.counts[one]} {one}" for one in State if step.counts.get(one)]
    unsent = step.total - sum(step.counts.values())
    text = ", ".join([*each, *([f"{unsent} not started"] if unsent else [])])
    text = text if step.is_group else next(iter(step.counts))
    if step.error:
        text += cut(f" ({step.error_type}: {step.error})", 200)
    return f"{text}, try {step.attempt}" if step.attempt > 1 else text


def _record(found: Workflow) -> dict[str, Any]:
    names = [name for name in found.tree()[0].__struct_fields__ if name != "tasks"]
    return {
        "uuid": found.uuid,
        "name": found.name,
        "state": found.state,
        "cancelled": found.is_cancelled,
        "created_at": found.created_at,
        **found.progress._asdict(),
        "steps": [
            {**{name: getattr(one, name) for name in names}, "counts": dict(one.counts)}
            for one in found.tree()
        ],
    }

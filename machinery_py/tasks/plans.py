"""The record of a workflow: its steps and their UUIDs.

It is kept as a group without a callback (`GroupMeta.plan`): it is written in one step with the
first messages, and kept as long as a result of one of its members is. A step that is a group names
that group alone, which knows its members.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Sequence

import msgspec

from machinery_py.errors import DecodeError
from machinery_py.tasks.states import GroupMeta
from machinery_py.texts import cut
from machinery_py.values.malformed import MALFORMED

# How the UUID of a workflow begins: it is that of a group, which users may be allowed to write.
PREFIX = "group_flow_"
NAMED = 3  # steps that a workflow's name is made of
LONGEST_NAME = 120  # bytes
SAMPLE = 64  # members of a large group that keep the record


class RecordedStep(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A step of the outermost chain.

    Attributes:
        uuid: of the task, or of the group.
        name: of the task; of a group the names of its members.
        total: how many members a group has; 0: it is a task.
        leading: UUIDs of the tasks in front of the last one in members that are chains.
    """

    uuid: str
    name: str
    total: int = 0
    leading: Sequence[str] = ()


class WorkflowPlan(msgspec.Struct, frozen=True, gc=False):
    """The steps, in order."""

    steps: Sequence[RecordedStep]


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(WorkflowPlan).decode


def record_of(
    uuid: str, steps: Sequence[RecordedStep], tasks: Sequence[Sequence[str]], *, now: dt.datetime
) -> GroupMeta:
    """Return the record of a workflow.

    Args:
        tasks: UUIDs of the tasks of each step.
    """
    # The last task of a chain is PENDING from the start. A group has no such task.
    awaited = tasks[-1:] if not steps[-1].total else tasks
    keepers = [uuid for one in awaited for uuid in (*one[:: len(one) // SAMPLE + 1], *one[-1:])]
    plan = _encode(WorkflowPlan(steps)).decode()
    members = tuple(dict.fromkeys(keepers))
    return GroupMeta(group_uuid=uuid, task_uuids=members, created_at=now, plan=plan)


def steps_in(record: GroupMeta) -> Sequence[RecordedStep]:
    """Return the steps of a record.

    Raises:
        DecodeError: it is the record of no workflow.
    """
    try:
        return _decode(record.plan).steps
    except MALFORMED as error:
        raise DecodeError(f"{record.group_uuid} is no record of a workflow: {error}") from None


def group_label(names: Sequence[str]) -> str:
    """Return the names of a group's members, the most frequent first."""
    return ", ".join(name for name, _ in Counter(names).most_common(NAMED)) or "nothing"


def workflow_name(steps: Sequence[RecordedStep]) -> str:
    """Return what a workflow is called: its first steps."""
    named = [f"{one.name} ×{one.total}" if one.total else one.name for one in steps[:NAMED]]
    return cut(" | ".join([*named, *(["…"] if len(steps) > NAMED else [])]), LONGEST_NAME)

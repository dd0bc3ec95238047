"""Chain, group and chord: signatures linked so that the workers need not know workflows.

A chain is linked by OnSuccess; a group by GroupUUID and GroupTaskCount on its members; a chord by
ChordCallback on each member. All of it is Go Machinery's, so a Go worker can run any part. Go has
no nesting: here a group as a step of a chain is the OnSuccess list of the step before it, and the
step behind it is its chord's callback.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import msgspec

from machinery_py.errors import WorkflowError
from machinery_py.tasks.plans import PREFIX, RecordedStep, group_label, record_of
from machinery_py.tasks.signature import (
    HEADER_COLLECT,
    HEADER_LAST,
    HEADER_ROOT,
    HEADER_UNIQUE,
    Arg,
    Chain,
    Result,
    Signature,
    Step,
    new_uuid,
    sender_of,
    steps_of,
)
from machinery_py.tasks.states import GroupMeta
from machinery_py.values.values import from_result

R = TypeVar("R", covariant=True)
S = TypeVar("S")


class GroupedResult(Result[R], Protocol[R]):
    """Result of `Group.send`: see results.GroupResult."""

    @property
    def results(self) -> Sequence[Result[Any]]: ...
    @property
    def workflow(self) -> str: ...
    def progress(self) -> tuple[int, int]: ...
    def progress_async(self) -> Coroutine[Any, Any, tuple[int, int]]: ...
    def __iter__(self) -> Iterator[Result[Any]]: ...
    def __len__(self) -> int: ...


class Group(Step[R]):
    """Calls that run beside each other. Its result is the list of theirs, in this order.

    `group | callback` is a chord: the callback gets the results as its last arguments.

    Raises:
        WorkflowError: it has no member, or a member is a bare group.
    """

    __slots__ = ("steps",)
    is_group = True

    def __init__(self, members: Sequence[Step[Any]]) -> None:
        members = steps_of(members)
        if not members:
            raise WorkflowError("a group needs at least one member: this one is empty")
        for member in members:
            last = member.steps[-1] if isinstance(member, Chain) else member
            if last.is_group:
                raise WorkflowError(
                    "a member of a group ends in a group: "
                    "put a task behind that one, to gather its results"
                )
        self.steps: tuple[Step[Any], ...] = tuple(members)

    def send(self) -> GroupedResult[R]:
        """Publish it through the Server whose tasks it is made of."""
        return cast("GroupedResult[R]", sender_of(self.steps).send(self))

    async def send_async(self) -> GroupedResult[R]:
        """`send` for coroutines."""
        return cast("GroupedResult[R]", await sender_of(self.steps).send_async(self))

    def __repr__(self) -> str:
        return f"group({', '.join(map(repr, self.steps))})"


def chain(*steps: Step[Any], pass_results: bool = True) -> Chain[Any]:
    """Steps that run one after the other.

    Args:
        pass_results: False keeps each result from the next step's arguments (Go's `Immutable`).
    """
    if not pass_results:
        steps = tuple(_keep_results(step) for step in steps)
    return Chain(steps)


def _keep_results(step: Step[Any]) -> Step[Any]:
    match step:
        case Signature():
            return step.replace(immutable=True)
        case Group():
            return Group([_keep_results(member) for member in step.steps])
        case Chain():
            return Chain([_keep_results(member) for member in step.steps])
        case _:
            return step


def group(*members: Step[S] | Iterable[Step[S]]) -> Group[list[S]]:
    """Calls that run beside each other; given one by one, or as one iterable."""
    flat: list[Step[Any]] = []
    for member in members:
        flat.extend(member if isinstance(member, Iterable) else [member])
    return Group(flat)


def chord(
    members: Group[Any] | Iterable[Step[Any]], callback: Step[S], *, collect: bool = False
) -> Chain[S]:
    """Return a group with a callback; its results, in order, are the callback's last arguments.

    Args:
        members: a group, or its members as one iterable.
        callback: a signature, or a chain, whose first step it is.
        collect: pass one list instead of many arguments. Ours alone: a Go worker passes many.

    Raises:
        WorkflowError: as `group` and `chain`.
    """
    if isinstance(members, Signature | Chain):
        raise WorkflowError(
            f"{members!r} cannot be the members of a chord (expected a group, or a list)"
        )
    both: Chain[S] = Chain((members if isinstance(members, Group) else group(members), callback))
    first = both.steps[1]
    if not collect or not isinstance(first, Signature):
        return both
    return Chain((both.steps[0], first.with_headers(**{HEADER_COLLECT: "1"}), *both.steps[2:]))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow, linked.

    Attributes:
        first: what is to be published now; the rest travels inside it.
        groups: every group in it, to be known to the backend before any member ends.
        awaited: the last tasks of the chains that begin now: their states exist from the start.
        steps: for each step of the outermost chain, the UUIDs of its tasks, whose states are the
            state of the step, and whether the step is a group.
        uuid: of the workflow; the last of `groups` is its record.
    """

    first: Sequence[Signature[Any]]
    groups: Sequence[GroupMeta]
    awaited: Sequence[Signature[Any]]
    steps: Sequence[PlannedStep]
    uuid: str = ""


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the outermost chain: its `uuids` in order.

    With each goes the list of tasks that lead to it inside a member of a group.
    """

    uuids: Sequence[str]
    names: Sequence[str]
    leading: Sequence[str] = ()
    is_group: bool = False
    group_uuid: str = ""


def link(step: Step[Any], *, now: dt.datetime) -> Plan:
    """Link a workflow for sending. UUIDs that are missing are made; those given are kept."""
    linker = _Linker(now)
    steps = step.steps if isinstance(step, Chain) else (step,)
    first, planned = linker.link_steps(steps, begins=True)
    uuid = new_uuid(PREFIX)
    return Plan(
        first=[one.with_headers(**{HEADER_ROOT: uuid}) for one in first],
        groups=(*linker.groups, _record(uuid, planned, now)),
        awaited=tuple(one.with_headers(**{HEADER_ROOT: uuid}) for one in linker.awaited),
        steps=planned,
        uuid=uuid,
    )


def _record(uuid: str, planned: Sequence[PlannedStep], now: dt.datetime) -> GroupMeta:
    steps = [
        RecordedStep(one.group_uuid, group_label(one.names), len(one.uuids), one.leading)
        if one.is_group
        else RecordedStep(one.uuids[0], one.names[0])
        for one in planned
    ]
    return record_of(uuid, steps, [one.uuids for one in planned], now=now)


class _Linker:
    """Goes through a workflow from its end to its start."""

    def __init__(self, now: dt.datetime) -> None:
        self.now = now
        self.groups: list[GroupMeta] = []
        self.awaited: list[Signature[Any]] = []

    def link_steps(
        self, steps: Sequence[Step[Any]], member_of: _Membership | None = None, *, begins: bool
    ) -> tuple[tuple[Signature[Any], ...], tuple[PlannedStep, ...]]:
        """Link these steps; the last one belongs to `member_of`, if given.

        `begins`: the first is sent now.
        """
        planned: list[PlannedStep] = []
        after: tuple[Signature[Any], ...] = ()
        last = ""
        for index in range(len(steps) - 1, -1, -1):
            step = steps[index]
            if isinstance(step, Group):
                after, plan = self._link_group(step, after, begins=begins and index == 0)
            elif isinstance(step, Signature):
                prefix = "chord_" if index and isinstance(steps[index - 1], Group) else "task_"
                if last:
                    step = step.with_headers(**{HEADER_LAST: last})
                after, plan = self._link_task(
                    step, after, member_of if index == len(steps) - 1 else None, prefix
                )
                if index and index == len(steps) - 1:
                    last = after[0].uuid
                    if begins:
                        self.awaited.append(after[0])
            else:
                raise WorkflowError(
                    f"{step!r} cannot be a step (expected a signature, group or chain)"
                )
            planned.append(plan)
        return after, tuple(reversed(planned))

    def _link_task(
        self,
        task: Signature[Any],
        after: tuple[Signature[Any], ...],
        member_of: _Membership | None,
        prefix: str,
    ) -> tuple[tuple[Signature[Any], ...], PlannedStep]:
        if task.headers.get(HEADER_UNIQUE):
            raise WorkflowError(
                f"{task.name}: options(unique=…) has no place in a chain, group or chord: "
                "its steps are sent in any case (send the task by itself, or make it exclusive)"
            )
        # Go overwrites OnSuccess here; callbacks of the user's own are kept.
        task = (
            task.with_uuid(prefix).replace(on_success=(*task.on_success, *after))
            if after
            else task.with_uuid(prefix)
        )
        if member_of is not None:
            task = task.replace(
                group_uuid=member_of.group_uuid,
                group_task_count=member_of.total,
                chord_callback=member_of.callback,
            )
        return (task,), PlannedStep(uuids=(task.uuid,), names=(task.name,))

    def _link_group(
        self, step: Group[Any], after: tuple[Signature[Any], ...], *, begins: bool
    ) -> tuple[tuple[Signature[Any], ...], PlannedStep]:
        membership = _Membership(new_uuid("group_"), len(step.steps), after[0] if after else None)
        heads: list[Signature[Any]] = []
        uuids: list[str] = []
        names: list[str] = []
        leading: list[str] = []
        for member in step.steps:
            inner = member.steps if isinstance(member, Chain) else (member,)
            first, planned = self.link_steps(inner, membership, begins=begins)
            heads.extend(first)
            uuids.append(planned[-1].uuids[0])
            names.append(planned[-1].names[0])
            for plan in planned[:-1]:
                leading.extend((*plan.uuids, *plan.leading))
        self.groups.append(
            GroupMeta(
                group_uuid=membership.group_uuid, task_uuids=tuple(uuids), created_at=self.now
            )
        )
        return tuple(heads), PlannedStep(
            uuids=uuids,
            names=names,
            leading=leading,
            is_group=True,
            group_uuid=membership.group_uuid,
        )


class _Membership(msgspec.Struct, frozen=True):
    """Fields that the members of one group share."""

    group_uuid: str
    total: int
    callback: Signature[Any] | None


def chord_callback(callback: Signature[Any], results: Sequence[Sequence[Arg]]) -> Signature[Any]:
    """The callback with its group's results, in order, behind its own arguments.

    Nothing is added when the *callback* is immutable, as in Go. With HEADER_COLLECT the results
    come as one list: None for a member without a result, a list for a member with several.

    Raises:
        ArgumentError: a result cannot stand in a list.
    """
    if callback.immutable:
        return callback
    if callback.headers.get(HEADER_COLLECT):
        return callback.with_args(after=(Arg.of([result_value(result) for result in results]),))
    return callback.with_args(after=tuple(arg for result in results for arg in result))


def result_value(results: Sequence[Arg]) -> Any:
    """Return a task's results as a value: None for none, the value for one, a tuple for several."""
    if len(results) == 1:
        return from_result(results[0].type, results[0].value)
    return tuple(from_result(arg.type, arg.value) for arg in results) if results else None

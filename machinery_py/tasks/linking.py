"""Linking of chains, groups and chords, so that the workers need not know workflows.

A chain is linked by OnSuccess; a group by GroupUUID and GroupTaskCount on its members; a chord by
ChordCallback on each member. All of it is Go Machinery's, so a Go worker can run any part. Go has
no nesting: here a group as a step of a chain is the OnSuccess list of the step before it, and the
step behind it is its chord's callback.

Where Go has room for one callback and a group has several (the members of a group behind it, those
of `then` and `catch`), a signature of the task JOIN stands for them. No worker runs it: when the
group is settled, its callbacks are sent, or fail, in that one step (worker/loops/chords.py). A
group that is the last step of a member is followed by a JOIN too, whose result is the group's list.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from machinery_py.errors import WorkflowError
from machinery_py.tasks.lineage import last_header
from machinery_py.tasks.mailboxes import FAILED
from machinery_py.tasks.plans import PREFIX, RecordedStep, group_label, record_of
from machinery_py.tasks.signature import (
    HEADER_COLLECT,
    HEADER_LAST,
    HEADER_ON_FAILURE,
    HEADER_REST,
    HEADER_ROOT,
    HEADER_UNIQUE,
    Chain,
    Signature,
    Step,
    new_uuid,
)
from machinery_py.tasks.states import GroupMeta
from machinery_py.tasks.workflow import JOIN, Group, OnFailure, chord_callback

LONG = 4999  # steps of a chain; Go reads 10,000 levels, two a step, and one of what is in the last
PIECE = 500  # steps of a longer one that travel together


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow, linked.

    Attributes:
        first: what is to be published now; the rest travels inside it.
        groups: every group in it, to be known to the backend before any member ends.
        awaited: the last tasks of the chains that begin now: their states exist from the start.
        steps: for each step of the outermost chain, the UUIDs of its tasks, whose states are the
            state of the step, and whether the step is a group.
        uuid: of the workflow; the last of `groups` is its record.
        rests: what is in none of `first`, and is kept beside: the later pieces of a long chain.
    """

    first: Sequence[Signature[Any]]
    groups: Sequence[GroupMeta]
    awaited: Sequence[Signature[Any]]
    steps: Sequence[PlannedStep]
    uuid: str = ""
    rests: Sequence[Rest] = ()

    @property
    def queue(self) -> str:
        """The queue that it begins in; empty: the default one."""
        return self.first[0].routing_key if self.first else ""


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """The steps behind a step of a long chain, and the tasks whose states keep their record."""

    uuid: str
    steps: Sequence[Signature[Any]]
    tasks: Sequence[str]


class PlannedStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the outermost chain: its `uuids` in order.

    With each goes the list of tasks that lead to it inside a member of a group; with a group what
    a failed member does to it.
    """

    uuids: Sequence[str]
    names: Sequence[str]
    leading: Sequence[str] = ()
    is_group: bool = False
    group_uuid: str = ""
    on_failure: OnFailure = "abort"


def link(
    step: Step[Any],
    *,
    now: dt.datetime,
    role: Signature[Any] | None = None,
    may_cut: bool = False,
    queue: str = "",
) -> Plan:
    """Link a workflow for sending. UUIDs that are missing are made; those given are kept.

    Args:
        queue: of members that are sent now and name none; "": they get it later.
        role: a task that its last task takes the place of, see `_taking_over`.
        may_cut: leave the later pieces of a long chain to `rests`.
    """
    linker = _Linker(
        now, may_cut=may_cut, uuid=new_uuid(PREFIX) if role is None else "", queue=queue
    )
    steps = step.steps if isinstance(step, Chain) else (step,)
    first, planned = linker.link_steps(steps, role, begins=True)
    sent = {one.uuid for one in first}
    plan = Plan(
        first=first,
        groups=tuple(linker.groups),
        awaited=tuple(one for one in linker.awaited if one.uuid not in sent),
        steps=planned,
        rests=linker.rests,
    )
    return plan if role is not None else _recorded(plan, linker.uuid, now)


def _recorded(plan: Plan, uuid: str, now: dt.datetime) -> Plan:
    """Return the plan with the record of its workflow, if it is more than one task."""
    made = [one for one in plan.steps if one.uuids]
    if not made or (len(made) == 1 and not made[0].is_group):
        return plan
    steps = [
        RecordedStep(one.group_uuid, group_label(one.names), len(one.uuids), one.leading)
        if one.is_group
        else RecordedStep(one.uuids[0], one.names[0])
        for one in made
    ]
    record = record_of(uuid, steps, [one.uuids for one in made], now=now)
    return msgspec.structs.replace(
        plan,
        first=[
            one if one.headers.get(HEADER_ROOT) == uuid else one.with_headers(**{HEADER_ROOT: uuid})
            for one in plan.first
        ],
        groups=(*plan.groups, record),
        awaited=[one.with_headers(**{HEADER_ROOT: uuid}) for one in plan.awaited],
        uuid=uuid,
    )


def link_callbacks(
    task: Signature[Any], *, now: dt.datetime
) -> tuple[Signature[Any], Sequence[GroupMeta]]:
    """Link the chains and groups among a single task's callbacks; return it with their groups."""
    if not (task.on_success or task.on_error):
        return task, ()
    linker = _Linker(now)
    return linker.with_callbacks(task), linker.groups


def is_linked(callbacks: Iterable[Step[Any]]) -> bool:
    """Return whether no chain or group is among these callbacks, nor among theirs."""
    todo = list(callbacks)
    while todo:
        one = todo.pop()
        if not isinstance(one, Signature):
            return False
        # From the wire come linked ones alone, in a Lazy.
        for nested in (one.on_success, one.on_error):
            if type(nested) is tuple:
                todo += nested
    return True


_GATHER: Signature[Any] = Signature(name=JOIN, headers={HEADER_COLLECT: "1"})


def _is_single(task: Signature[Any]) -> bool:
    return not (task.on_success or task.on_error or task.headers.get(HEADER_UNIQUE))


def _is_plain(steps: Sequence[Step[Any]]) -> bool:
    return all(isinstance(step, Signature) and not step.on_success for step in steps)


class _Linker:
    """Goes through a workflow from its end to its start."""

    def __init__(
        self, now: dt.datetime, *, may_cut: bool = False, uuid: str = "", queue: str = ""
    ) -> None:
        self.now = now
        self.uuid = uuid  # of the workflow
        self._queue = queue
        self._headers = {HEADER_ROOT: uuid}
        self.rests: list[Rest] = []
        self._may_cut = may_cut
        self.groups: list[GroupMeta] = []
        self.awaited: list[Signature[Any]] = []
        self._errors: dict[int, Sequence[Signature[Any]]] = {}

    def link_steps(
        self, steps: Sequence[Step[Any]], role: Signature[Any] | None = None, *, begins: bool
    ) -> tuple[tuple[Signature[Any], ...], tuple[PlannedStep, ...]]:
        """Link these steps; the last one takes over `role`, if given.

        `begins`: the first is sent now.
        """
        if role is not None and isinstance(steps[-1], Group):
            # The group has the role's error callbacks. A task that waits is told in any case, also
            # if this last task is revoked; perhaps twice.
            told = [one for one in role.on_error if one.name == FAILED]
            steps = (*steps, _GATHER.replace(on_error=told))
        # Members of chords are looked for in what follows a failed task, which a cut would hide.
        may_cut = self._may_cut and role is None and len(steps) > LONG and _is_plain(steps)
        planned: list[PlannedStep] = []
        after: tuple[Signature[Any], ...] = ()
        last = ""
        for index in range(len(steps) - 1, -1, -1):
            step = steps[index]
            if isinstance(step, Group):
                after, plan = self._link_group(step, after, begins=begins and index == 0)
            elif isinstance(step, Signature):
                prefix = "chord_" if index and isinstance(steps[index - 1], Group) else "task_"
                is_last = index == len(steps) - 1
                if last:
                    step = step.with_headers(**{HEADER_LAST: last})
                after, plan = self._link_task(step, after, role if is_last else None, prefix)
                if begins if index == 0 else prefix == "task_":  # it is no chord's callback
                    after = (_for_go(after[0]),)
                if index and is_last:
                    last = last_header(after[0])
                    if begins:
                        self.awaited.append(after[0])
            else:
                raise WorkflowError(
                    f"{step!r} cannot be a step (expected a signature, group or chain)"
                )
            planned.append(plan)
            if may_cut and index and not (len(steps) - index) % PIECE:
                after = (self._cut(after[0], planned[0].uuids[:1]),)
        return after, tuple(reversed(planned))

    def _cut(self, task: Signature[Any], last: Sequence[str]) -> Signature[Any]:
        """Keep what follows this task beside it: so no message has more than a piece."""
        rest = Rest(uuid=new_uuid("group_rest_"), steps=task.on_success, tasks=(task.uuid, *last))
        self.rests.append(rest)
        return task.replace(on_success=()).with_headers(**{HEADER_REST: rest.uuid})

    def _link_task(
        self,
        task: Signature[Any],
        after: tuple[Signature[Any], ...],
        role: Signature[Any] | None,
        prefix: str,
    ) -> tuple[tuple[Signature[Any], ...], PlannedStep]:
        if task.headers.get(HEADER_UNIQUE):
            raise WorkflowError(
                f"{task.name}: options(unique=…) has no place in a chain, group or chord: "
                "its steps are sent in any case (send the task by itself, or make it exclusive)"
            )
        task = self.with_callbacks(task)
        if role is not None:
            task = _taking_over(task, role)
        task = task.with_uuid(prefix)
        if after:  # Go overwrites OnSuccess here; callbacks of the user's own are kept
            task = task.replace(on_success=(*task.on_success, *after))
        return (task,), PlannedStep(uuids=(task.uuid,), names=(task.name,))

    def _link_group(
        self, step: Group[Any], after: tuple[Signature[Any], ...], *, begins: bool
    ) -> tuple[tuple[Signature[Any], ...], PlannedStep]:
        callbacks = [one.with_uuid("chord_") for one in self.callbacks(step.on_success)]
        after = (*after, *callbacks)
        if not step.steps:
            heads = tuple(chord_callback(one, []).fixed() for one in after)
            return heads, PlannedStep(uuids=(), names=(), is_group=True)
        membership = Signature[Any](
            name="",
            group_uuid=new_uuid("group_"),
            group_task_count=len(step.steps),
            chord_callback=self._callback(step, after),
        )
        heads_: list[Signature[Any]] = []
        uuids: list[str] = []
        names: list[str] = []
        leading: list[str] = []
        for member in step.steps:
            if begins and self.uuid and isinstance(member, Signature) and _is_single(member):
                joined = self._joined(member, membership)
                heads_.append(joined)
                uuids.append(joined.uuid)
                names.append(joined.name)
                continue
            inner = member.steps if isinstance(member, Chain) else (member,)
            first, planned = self.link_steps(inner, membership, begins=begins)
            heads_.extend(first)
            uuids.append(planned[-1].uuids[0])
            names.append(planned[-1].names[0])
            for plan in planned[:-1]:
                leading.extend((*plan.uuids, *plan.leading))
        self.groups.append(
            GroupMeta(
                group_uuid=membership.group_uuid, task_uuids=tuple(uuids), created_at=self.now
            )
        )
        return tuple(heads_), PlannedStep(
            uuids=uuids,
            names=names,
            leading=leading,
            is_group=True,
            group_uuid=membership.group_uuid,
            on_failure=step.on_failure,
        )

    def _joined(self, member: Signature[Any], group: Signature[Any]) -> Signature[Any]:
        """Return a single member that is sent now: as `_taking_over` and `_recorded`, in one."""
        headers = {**member.headers, HEADER_ROOT: self.uuid} if member.headers else self._headers
        return member.replace(
            uuid=member.uuid or new_uuid(),
            routing_key=member.routing_key or self._queue,
            group_uuid=group.group_uuid,
            group_task_count=group.group_task_count,
            chord_callback=group.chord_callback,
            headers=headers,
        )

    def _callback(self, step: Group[Any], after: Sequence[Signature[Any]]) -> Signature[Any] | None:
        """Return the chord callback that stands for all that follows the group."""
        on_error = self.errors(step.on_error)
        if not after and not on_error:
            return None
        if len(after) == 1 and not on_error:
            callback = after[0]
            if callback.is_fixed and all(one.is_fixed for one in callback.on_success):
                callback = callback.replace(immutable=True)  # as in `_for_go`
        else:
            callback = Signature[Any](
                name=JOIN, uuid=new_uuid("chord_"), on_success=after, on_error=on_error
            )
        if step.on_failure == "abort":
            return callback
        return callback.with_headers(**{HEADER_ON_FAILURE: step.on_failure})

    def with_callbacks(self, task: Signature[Any]) -> Signature[Any]:
        """Return it with the chains and groups among its callbacks linked."""
        if is_linked((task,)):
            return task
        return task.replace(
            on_success=self.callbacks(task.on_success), on_error=self.errors(task.on_error)
        )

    def callbacks(self, given: Sequence[Step[Any]]) -> Sequence[Signature[Any]]:
        return tuple(head for one in given for head in self._heads(one))

    def errors(self, given: Sequence[Step[Any]]) -> Sequence[Signature[Any]]:
        """Link error callbacks: each is one task, though all steps of a chain may have it."""
        for one in given:
            if id(one) not in self._errors:
                self._errors[id(one)] = self._heads(one)
        return tuple(head for one in given for head in self._errors[id(one)])

    def _heads(self, callback: Step[Any]) -> Sequence[Signature[Any]]:
        if isinstance(callback, Signature):
            return (self.with_callbacks(callback),)
        steps = callback.steps if isinstance(callback, Chain) else (callback,)
        return self.link_steps(steps, begins=False)[0]


def _for_go(task: Signature[Any]) -> Signature[Any]:
    """Return the task so that a Go worker, which does not know `fixed`, passes no results on."""
    if task.on_success and all(one.is_fixed for one in task.on_success):
        return task.replace(immutable=True)
    return task


def _taking_over(task: Signature[Any], role: Signature[Any]) -> Signature[Any]:
    """Return the task in the place of another: a member of its group, or what its result becomes.

    The role has the fields for it; a group's have no name.
    """
    return task.replace(
        uuid=role.uuid or task.uuid,
        group_uuid=role.group_uuid,
        group_task_count=role.group_task_count,
        chord_callback=role.chord_callback,
        immutable=task.immutable or role.immutable,
        on_success=(*task.on_success, *role.on_success),
        headers={**task.headers, **role.headers},
    )

"""Retry of a workflow: its failed tasks are sent again, and their chords go on with the others.

A chord that failed has been settled. It is made anew from the group's members, and the members
that have succeeded arrive again. Each step may be the last one before a crash:

    1  claim    nobody else retries this workflow, for LONGEST seconds
    2  spare    the group's members, under a name of their own
    3  purge    the group and its arrivals are forgotten
    4  group    the group, with the results and arrivals of the members that have succeeded
    5  purge    the spare; then members that have ended since step 4 was read arrive
    6  replay   the failed tasks, with PENDING for them and for those that failed with them

    crash after 2 to 5: the tasks are FAILURE as before; the next retry begins anew, and finds the
    members in the group or in the spare. After 6 the workflow goes on by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from machinery_py.app import Application
from machinery_py.backends.base import Change, Rider
from machinery_py.backends.listings import COMPLETE
from machinery_py.bounds import STEP_ITEMS, in_steps
from machinery_py.errors import MachineryError, Unsupported, WorkflowError
from machinery_py.inspection.replay import anew, behind_steps, mend, replay
from machinery_py.registry.outcomes import CHORD_FAILED, STEP_FAILED, Arrived, followers
from machinery_py.tasks.context import on_behalf_of
from machinery_py.tasks.signature import Signature, new_uuid
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.tasks.workflow import JOIN, is_tolerant
from machinery_py.texts import get_logger
from machinery_py.wire.signatures import decode_signature

logger = get_logger(__name__)

LONGEST = 60.0  # seconds that a retry may take until somebody else may begin one

_CAUSE = re.compile(r"(?:step|chord member) \S+ (\S+) failed")

#: Errors of tasks that never ran, since another one had failed.
FOLLOWED = (STEP_FAILED, CHORD_FAILED)


def retry(app: Application, uuid: str, read: Callable[[], Iterable[TaskState]]) -> list[str]:
    """Send the failed tasks of a workflow again; return their UUIDs.

    Args:
        read: reads the states of its tasks.

    Raises:
        Unsupported: the result backend keeps no claims.
        WorkflowError: somebody else retries it, or something that is needed is not kept.
        BackendUnavailable, PublishRefused, PublishUnknown: some of it may be done; repeat it.
    """
    backend, name, token = app.store.backend, f"retry {uuid}", new_uuid("").encode()
    if not backend.features.claims:
        raise Unsupported(
            f"workflow {uuid} cannot be retried: the {backend.features.name} backend keeps no "
            f"claims, and two programs could retry it at once ({COMPLETE}, or send it anew)"
        )
    taken = Rider(name=name, expected=None, body=token, life=LONGEST)
    if not backend.amend(taken) and backend.claims([name]) != [token]:
        raise WorkflowError(f"workflow {uuid} is being retried (wait up to {LONGEST:g} s)")
    try:
        states = list(read())
        _check_causes(uuid, states)
        return _retry(app, uuid, list(filter(_has_failed, states)))
    finally:
        try:
            backend.amend(Rider(name=name, expected=token, body=None, life=LONGEST))
        except MachineryError as error:
            logger.debug("the claim of a retry is kept for %g s: %s", LONGEST, error)


def _check_causes(uuid: str, states: Sequence[TaskState]) -> None:
    """Refuse to retry what failed with a task that is not among these: it would wait for ever.

    Raises:
        WorkflowError: such a task is in a workflow that took the place of a task of this one.
    """
    known = {one.task_uuid for one in states}
    for one in filter(_has_failed, states):
        cause = _CAUSE.match(one.error) if one.error_type in FOLLOWED else None
        if cause is not None and cause[1] not in known:
            raise WorkflowError(
                f"workflow {uuid} cannot be retried: {cause[1]} has failed, which is in a workflow "
                "that took the place of one of its tasks (send it anew)"
            )


def _has_failed(state: TaskState) -> bool:
    return state.state is State.FAILURE


def _retry(app: Application, uuid: str, states: Sequence[TaskState]) -> list[str]:
    gone = {one.task_uuid for one in states if one.error_type in FOLLOWED}
    failed: list[Signature[Any]] = []
    for state in states:
        if state.task_uuid not in gone:
            if not state.message:
                raise WorkflowError(
                    f"workflow {uuid} cannot be retried: {state.task_name} {state.task_uuid} has "
                    f"failed ({state.error}), and its message is not kept (send it anew)"
                )
            failed.append(decode_signature(state.message))
    if gone and not failed:
        last = next(one for one in states if one.task_uuid in gone)
        raise WorkflowError(
            f"workflow {uuid} cannot be retried: {last.task_name} {last.task_uuid} has failed "
            f"({last.error}), and no task that made it fail is known any more (send it anew)"
        )
    again = [anew(one) for one in failed if not _went_on(app, one, gone)]
    pairs = behind_steps(app, again, whole=True)
    for one, _ in pairs:
        for arrival in _arrivals_after(app, one):
            _make_anew(app, arrival)
    mended = mend(one for one in states if one.task_uuid in gone)
    return replay(app, pairs, mended) if pairs else []


def _went_on(app: Application, signature: Signature[Any], gone: set[str]) -> bool:
    """Return whether a chord has gone on without the task, or without what follows it."""
    for member, callback in followers(signature):
        called = [callback, *(callback.on_success if callback.name == JOIN else ())]
        if is_tolerant(callback) and not any(one.uuid in gone for one in called):
            group = app.store.backend.get_group(member.group_uuid)
            if group is not None and group.chord_triggered:
                return True
    return False


def _arrivals_after(app: Application, signature: Signature[Any]) -> Iterator[Arrival]:
    """Yield the arrival of each member of a chord that this task is, or that follows it."""
    seen: set[str] = set()
    with on_behalf_of(signature, queue=signature.routing_key):
        for member, _ in followers(signature):
            if member.group_uuid not in seen:
                seen.add(member.group_uuid)
                yield from app.arrivals([Arrived(member=member, ok=True)])


def members_of(app: Application, group_uuid: str) -> Sequence[str]:
    """Return the members of a group, also if a retry was cut off while it made the group anew."""
    for name in (group_uuid, _spare(group_uuid)):
        group = app.store.backend.get_group(name)
        if group is not None and group.task_uuids:
            return group.task_uuids
    return ()


def _spare(group_uuid: str) -> str:
    return "group_retry_" + group_uuid.removeprefix("group_")


def _make_anew(app: Application, like: Arrival) -> None:
    """Make a settled chord wait again for those of its members that have not succeeded."""
    backend, uuid = app.store.backend, like.group_uuid
    spare, group, members = _spare(uuid), backend.get_group(uuid), members_of(app, uuid)
    if not members:
        raise WorkflowError(f"{uuid} cannot go on: its members are not known any more")
    if group is not None and not group.chord_triggered and backend.get_group(spare) is None:
        return  # it waits: nobody has settled it, or an earlier retry has made it anew
    backend.apply([Change(key=spare, groups=[_group(app, spare, members)])])
    good = _succeeded(app, members)
    backend.purge_group_meta(uuid)
    for start in range(0, max(1, len(good)), STEP_ITEMS):
        some = good[start : start + STEP_ITEMS]
        groups = () if start else (_group(app, uuid, members),)
        backend.apply([_arriving(like, some, groups)])
    backend.purge_group_meta(spare)
    known = {one.task_uuid for one in good}
    # Those that ended while the group was not there have arrived nowhere. Twice does no harm.
    late = [one for one in _succeeded(app, members) if one.task_uuid not in known]
    if late:
        backend.apply([_arriving(like, late)])


def _arriving(
    like: Arrival, states: Sequence[TaskState], groups: Sequence[GroupMeta] = ()
) -> Change:
    """Return the change by which these arrive; their results are kept for the chord again."""
    return Change(
        key=like.group_uuid,
        groups=groups,
        states=states,
        force=True,
        arrivals=[msgspec.structs.replace(like, task_uuid=one.task_uuid) for one in states],
    )


def _group(app: Application, uuid: str, members: Sequence[str]) -> GroupMeta:
    return GroupMeta(group_uuid=uuid, task_uuids=tuple(members), created_at=app.now())


def _succeeded(app: Application, uuids: Sequence[str]) -> list[TaskState]:
    return [
        state
        for some in in_steps(uuids)
        for state in app.store.backend.get_states(some).values()
        if state.state is State.SUCCESS
    ]

"""How states and groups are changed: what is decided about a change, and what is then written.

Which state follows which, and what it keeps of the one before, is asked of `states.advance`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from machinery_py.backends.redis.documents import _lines, state_of
from machinery_py.tasks.states import TaskState, advance
from machinery_py.wire.states import encode_state
from tests.models.redis import Hash, Redis, WrongType, Zset

LONG = 7 * 86400  # seconds
LEFT = 30_000_000  # µs
RATES_LIFE = 3700  # seconds
GOS_MUTEX = "TriggerChordMutex"  # there while Go fires a group

Arrived = tuple[str, str, int, bool, str]


@dataclass(frozen=True)
class Row:
    """Facts about a task. `state`: None without a document; `left`: as its companion says."""

    state: TaskState | None
    left: TaskState | None
    run: int
    epoch: int
    mark: str
    is_there: bool

    def is_final(self) -> bool:
        return self.state is not None and self.state.is_finished


@dataclass(frozen=True)
class NewState:
    """A state as a script takes it, with more. `uuid`: as in our keys; `kept`: seconds."""

    uuid: str
    state: TaskState
    queue: str
    kept: int


@dataclass(frozen=True)
class Change:
    key: str
    mark: str
    epoch: int
    force: bool
    fires: str
    states: Sequence[NewState]
    groups: Sequence[tuple[str, str]]
    arrivals: Sequence[Arrived]
    outbox: str


@dataclass
class Batch:
    """What one script has decided, and has to note at its end."""

    rows: dict[str, Row] = field(default_factory=dict)
    fires: set[str] = field(default_factory=set)
    listed: dict[str, str] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    arrived: dict[str, list[Arrived]] = field(default_factory=dict)


Plan = list[tuple[NewState, Row]]


def changes_of(flat: Sequence[Any], states: Sequence[Any]) -> dict[int, Change]:
    """The changes of C, by their places in it, with their states of S."""
    return {at + 1: change_of(flat[at : at + 10], states) for at in range(0, len(flat), 10)}


def change_of(row: Sequence[Any], states: Sequence[Any]) -> Change:
    key, mark, epoch, force, fires, first, last, groups, arrivals, outbox = row
    new = [state_from(*states[at - 1 : at + 11]) for at in range(first, last, 12)]
    return Change(key, mark, epoch, force, fires, new, groups or (), arrivals or (), outbox)


def state_from(
    uuid: str,
    word: str,
    run: int,
    head: str,
    created: str,
    tail: str,
    named: bool,
    lines: str,
    whole: bool,
    sticky: bool,
    queue: str,
    kept: str,
) -> NewState:
    state = state_of(
        uuid, (head + created + tail).encode("latin-1"), f"{run}\n0\n\n{lines}".encode("latin-1")
    )
    return NewState(uuid, state, queue, int(kept))


def document(uuid: str) -> str:
    return uuid if len(uuid) > 2 else f"mpy:k:{{{uuid}}}"


def companion(uuid: str) -> str:
    return f"mpy:m:{{{uuid}}}"


def life_key(uuid: str) -> str:
    return f"mpy:l:{{{uuid}}}"


def group_keys(uuid: str) -> tuple[str, str]:
    return f"mpy:g:{{{uuid}}}", f"mpy:h:{{{uuid}}}"


def own_text(redis: Redis, uuid: str, field: str = "TaskUUID") -> str | None:
    """The document of a task or group; what somebody else keeps there is refused."""
    text = redis.get(document(uuid))
    if text is not None and not is_of(text, uuid, field):
        raise WrongType(f"{document(uuid)} holds {text!r}")
    return text


def free_text(redis: Redis, uuid: str, field: str = "TaskUUID") -> str | None:
    """As own_text; the name of a queue is refused as well."""
    text = own_text(redis, uuid, field)
    if (
        text is None
        and len(uuid) > 2
        and any(redis.exists(f"mpy:{{{uuid}}}:{key}") for key in "ncs")
    ):
        raise WrongType(f"{uuid} is a queue")
    return text


def is_of(text: str, uuid: str, field: str) -> bool:
    try:
        found = json.loads(text.encode("latin-1"))[field]
    except (ValueError, KeyError, TypeError):
        return False
    return found.encode().decode("latin-1") == uuid


# Tasks


def row_of(redis: Redis, batch: Batch, uuid: str) -> Row:
    """What is stored, or what this batch will store."""
    if uuid in batch.rows:
        return batch.rows[uuid]
    text, kept = free_text(redis, uuid), redis.get(companion(uuid))
    ours = None if kept is None else kept.encode("latin-1")
    state = None if text is None else state_of(uuid, text.encode("latin-1"), ours)
    left = None if ours is None else state_of(uuid, encode_state(TaskState(task_uuid=uuid)), ours)
    run, epoch, mark, *_ = (kept or "0\n0\n").split("\n")
    return Row(state, left, int(run), int(epoch), mark, text is not None or kept is not None)


def after(row: Row, state: TaskState) -> TaskState | None:
    """The state after this one, or None if it may not follow."""
    if row.state is not None:
        return advance(row.state, state)
    left = row.left or state
    same_run = left.run == state.run
    return msgspec.structs.replace(
        state,
        queue=state.queue or left.queue,
        worker=state.worker or left.worker,
        started_at=state.started_at or (left.started_at if same_run else None),
        progress=state.progress or (left.progress if same_run else None),
    )


def check_documents(redis: Redis, changes: Iterable[Change]) -> None:
    for change in changes:
        for one in change.states:
            free_text(redis, one.uuid)


def decide(redis: Redis, batch: Batch, change: Change) -> tuple[str, Plan]:
    """Settled, already or fenced; and the states that it writes."""
    own = row_of(redis, batch, change.key) if change.epoch else None
    if own is not None and own.is_there and own.epoch != change.epoch:
        return ("a" if change.mark and own.mark == change.mark else "f"), []
    plan: Plan = []
    new: dict[str, Row] = {}
    for one in change.states:
        uuid, state = one.uuid, one.state
        row = new.get(uuid) or row_of(redis, batch, uuid)
        decides = uuid == change.key and uuid not in new
        new_state = state if change.force else after(row, state)
        if (
            decides
            and change.mark
            and row.mark == change.mark
            and (new_state is None or is_same_step(row, state))
        ):
            return "a", []
        if new_state is not None:
            mark = change.mark if decides and change.mark else row.mark
            new[uuid] = Row(new_state, None, state.run, row.epoch, mark, True)
            plan.append((one, new[uuid]))
        elif decides:
            return "f", []
    if change.fires:
        if change.fires in batch.fires or not may_fire(redis, change.fires):
            return "f", []
        batch.fires.add(change.fires)
    for group, _ in change.groups:
        free_text(redis, group, "GroupUUID")
    for group, *_ in change.arrivals:
        redis.expect(group_keys(group)[0], Hash)
        redis.expect(group_keys(group)[1], set)
        if not redis.exists(group_keys(group)[0]):
            redis.expect("mpy:partial", Zset)
    batch.rows.update(new)
    return "s", plan


def is_same_step(row: Row, state: TaskState) -> bool:
    return row.state is not None and row.state.state is state.state and row.run == state.run


def write(
    redis: Redis, batch: Batch, one: NewState, row: Row, *, for_a_chord: bool, expire: int
) -> None:
    assert row.state is not None
    uuid, state = one.uuid, row.state
    kept = one.kept
    if state.is_finished and for_a_chord:
        if kept != expire:
            redis.keep(life_key(uuid), str(kept), seconds=LONG)
        kept = max(kept, LONG)
    redis.keep(document(uuid), encode_state(state).decode("latin-1"), seconds=kept)
    lines = f"{row.run}\n{row.epoch}\n{row.mark}\n".encode("latin-1") + _lines(state)
    redis.keep(companion(uuid), lines.decode("latin-1"), seconds=kept)
    batch.listed[uuid] = "mpy:done" if state.is_finished else "mpy:open"
    if state.is_finished:
        batch.finished.append(state.state.value + (one.queue or state.queue))
        redis.published.append(companion(uuid))


# Groups


def has_fired(redis: Redis, group: str) -> bool:
    return "fired" in redis.fields(group_keys(group)[0])


def may_fire(redis: Redis, group: str) -> bool:
    """Go may be at it, or have done it; but of a group with a failed member it tells nobody."""
    redis.expect(group_keys(group)[0], Hash)
    text = own_text(redis, group, "GroupUUID")
    if (text is None and not redis.exists(group_keys(group)[0])) or has_fired(redis, group):
        return False
    if "failed" in redis.fields(group_keys(group)[0]):
        return True
    return not (text and '"ChordTriggered":true' in text) and not redis.exists(GOS_MUTEX)


def fire(redis: Redis, group: str, expire: int) -> None:
    """The group is settled; from now on its members are kept no longer than others."""
    hash_key, set_key = group_keys(group)
    redis.unscore("mpy:ready", group)
    leave_incomplete(redis, group)
    redis.write(hash_key, {"fired": "1"})
    text = redis.get(document(group))
    if text is not None:
        redis.keep(document(group), triggered(text), keep_expiry=True)
    redis.expire(hash_key, expire)
    redis.expire(set_key, expire)
    for member in redis.members(set_key):
        life = life_of(redis, member, expire)
        redis.expire(document(member), life)
        redis.expire(companion(member), life)


def life_of(redis: Redis, uuid: str, expire: int) -> int:
    """Seconds that a member is kept once its chord is settled."""
    own = redis.keys.get(life_key(uuid))
    return int(own) if isinstance(own, str) else expire


def leave_to_go(redis: Redis, change: Change, expire: int) -> None:
    """If Go has settled the group that the change may not fire, it is ready no more."""
    if change.fires and not redis.exists(GOS_MUTEX) and not may_fire(redis, change.fires):
        hash_key, set_key = group_keys(change.fires)
        redis.expect(set_key, set)
        redis.unscore("mpy:ready", change.fires)
        redis.expire(hash_key, expire)
        redis.expire(set_key, expire)


def leave_incomplete(redis: Redis, group: str) -> None:
    """What is complete can do without: where somebody keeps something else, that stays."""
    if isinstance(redis.keys.get("mpy:partial"), Zset):
        redis.unscore("mpy:partial", group)


def triggered(text: str) -> str:
    return re.sub('"ChordTriggered":false', '"ChordTriggered":true', text, count=1)


def note_group(redis: Redis, group: str, arrived: Sequence[Arrived], now: int) -> None:
    hash_key, set_key = group_keys(group)
    _, _, total, _, callback = arrived[-1]
    is_first = not {"total", "callback"} & redis.fields(hash_key).keys()
    redis.write(hash_key, {"total": str(total), "callback": callback})
    failed = [member for _, member, _, ok, _ in arrived if not ok]
    if failed and "failed" not in redis.fields(hash_key):
        redis.write(hash_key, {"failed": failed[0]})
    complete = "failed" in redis.fields(hash_key) or 0 < total <= len(redis.members(set_key))
    if callback and complete and not has_fired(redis, group):
        redis.score("mpy:ready", group, 0)
        leave_incomplete(redis, group)
        redis.persist(hash_key)
        redis.persist(set_key)
    elif group not in redis.scores("mpy:ready"):
        redis.expire(hash_key, LONG)
        redis.expire(set_key, LONG)
        if is_first and callback and not has_fired(redis, group):
            redis.score("mpy:partial", group, now + LEFT)


# A batch


def commit(redis: Redis, batch: Batch, change: Change, plan: Plan, now: int, expire: int) -> None:
    if change.fires:
        fire(redis, change.fires, expire)
    for_a_chord = any(
        callback and not has_fired(redis, group) for group, _, _, _, callback in change.arrivals
    )
    for one, row in plan:
        write(redis, batch, one, row, for_a_chord=for_a_chord, expire=expire)
        if change.force:  # it starts anew
            redis.unscore("mpy:done", one.uuid)
    for group, text in change.groups:
        if not redis.exists(document(group)):
            redis.keep(
                document(group), triggered(text) if has_fired(redis, group) else text, seconds=LONG
            )
            redis.score("mpy:groups", group, now + expire * 1_000_000)
    for arrived in change.arrivals:
        group, member, *_ = arrived
        if redis.add(group_keys(group)[1], member):
            batch.arrived.setdefault(group, []).append(arrived)
    if change.outbox:
        redis.keep(f"mpy:o:{{{change.key}}}", change.outbox)
        redis.score("mpy:outbox", change.key, now)


def finish(redis: Redis, batch: Batch, now: int) -> None:
    """Note in the listings, the rates and the groups what the batch has written."""
    for uuid, listing in batch.listed.items():
        if listing == "mpy:done":
            redis.unscore("mpy:open", uuid)
        redis.score(listing, uuid, now)
    rates = f"mpy:rate:{now // 1_000_000}"
    for name in batch.finished:
        before = redis.fields(rates)
        redis.write(rates, {name: str(int(before.get(name, "0")) + 1)})
        if name not in before:
            redis.expire(rates, RATES_LIFE)
    for group, arrived in batch.arrived.items():
        note_group(redis, group, arrived, now)
    batch.listed, batch.finished, batch.arrived = {}, [], {}


def apply_all(redis: Redis, batch: Batch, changes: Sequence[Change], now: int, expire: int) -> str:
    """Decide about all, then write; a letter each."""
    check_documents(redis, changes)
    decided = [decide(redis, batch, change) for change in changes]
    for change, (verdict, _) in zip(changes, decided, strict=True):
        if verdict != "s":
            leave_to_go(redis, change, expire)
    for change, (verdict, plan) in zip(changes, decided, strict=True):
        if verdict == "s":
            commit(redis, batch, change, plan, now, expire)
    finish(redis, batch, now)
    return "".join(verdict for verdict, _ in decided)

"""States, groups and what else a result backend keeps, as rows: written once for stores of rows.

    kind           id           row
    task           UUID         state, mark, epoch; kept by `chord open` while a chord wants it.
                                Listed, finished, by "S" or "F" for its state, and its queue
    group          UUID         its record, swept when no member has a state any more
    chord          group UUID   the set of members that have come in
    chord open     group UUID   from an arrival until the chord is settled, a week at most
    chord ready    group UUID   callback, failed member; listed. Empty and not listed: it is settled
    outbox         key          messages still to be published by another store's broker
    record         name         of a schedule
    records                     written with each of these: its version is theirs
    claim          name         of a unique task
    revoked        UUID
    checkpoint     UUID, name   kept by the row of its task

Outboxes and ready chords are listed by their time below 0: the oldest comes first.

No arrival reads or writes the group's record: a chord of 10,000 members costs each one step of the
same size.

Limits: a chord of which no member arrives for a week may lose results.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import ClassVar, TypeVar

import msgspec

from machinery_py.backends.base import (
    CONFLICT,
    FENCED,
    REVOKED_LIFE,
    SETTLED,
    Backend,
    BackendFeatures,
    Begun,
    Change,
    Keeping,
    Listener,
    OutboxBackend,
    ReadyGroup,
    Records,
    Rider,
    Verdict,
)
from machinery_py.backends.listings import Count, Listing, Place, counts_of
from machinery_py.backends.transactional import decide, is_over
from machinery_py.bounds import CHECKPOINTS, in_steps
from machinery_py.clock import micros
from machinery_py.fences import fence_after
from machinery_py.rows.contract import NO_ROW, PAGE, Facts, Key, StoredRow, Write
from machinery_py.rows.draft import Draft, carry_out, read
from machinery_py.rows.messages import REVOKED, Join, MessageRows, MessageStep, TopicListener
from machinery_py.tasks.signature import RunNumber
from machinery_py.tasks.states import FINISHED, Arrival, GroupMeta, State, TaskState
from machinery_py.texts import get_logger
from machinery_py.values.malformed import MALFORMED
from machinery_py.wire.bodies import MSGPACK, Bodies, TaskBody, encode

logger = get_logger(__name__)

EXPIRE_IN = 3600.0  # seconds that a finished task is kept
CHORD_LIFE = 7 * 86400.0  # seconds without an arrival until a chord's results may expire
LOOK = 10_000  # states that one step of a listing looks at
SWEEP, SOON = 60.0, 0.05  # seconds between two looks for what has expired; if more is known
SWEPT = 1000  # rows deleted in one step
LOOKED = 200  # old groups in one step

CHECKPOINT, WITH_TASK = "checkpoint", 600_000_000  # µs; then as long as the task's row
TASK, GROUP, OUTBOX, RECORD, CLAIM = "task", "group", "outbox", "record", "claim"
CHORD, OPEN, READY = "chord", "chord open", "chord ready"
RECORDS = Key("records", "")

_decode_ready = msgspec.msgpack.Decoder(tuple[bytes, str]).decode
_decode_bodies = msgspec.msgpack.Decoder(tuple[bytes, ...]).decode

T = TypeVar("T")


class RowsBackend(Backend, OutboxBackend):
    """Rows of a store, which belongs to whoever made it."""

    features: BackendFeatures = BackendFeatures(name="rows", claims=True, checkpoints=True)
    bodies: ClassVar[Bodies] = MSGPACK  # of tasks and groups

    def __init__(self, rows: MessageRows, *, expire_in: float = EXPIRE_IN) -> None:
        self.rows = rows
        self.expire_in = expire_in
        self._latest = 0  # of the moments in the listings
        self._swept: StoredRow | None = None  # the last group that was looked at

    def is_entered(self) -> bool:
        return self.rows.is_entered()

    def now(self) -> dt.datetime:
        return self.rows.clock.now()

    # Changes

    def apply(self, changes: Sequence[Change]) -> list[Verdict]:
        keys = [key for change in changes for key in keys_of(change)]

        def plan(draft: Draft) -> list[Verdict]:
            tasks: dict[str, TaskBody] = {}
            return [self.plan(change, draft, tasks) for change in changes]

        return self._carry_out(keys, plan)

    def _carry_out(self, keys: Iterable[Key], plan: Callable[[Draft], T]) -> T:
        return carry_out(self.rows, keys, plan)[0]

    def plan(
        self, change: Change, draft: Draft, tasks: dict[str, TaskBody] | None = None
    ) -> Verdict:
        """Add a change to a draft that has read `keys_of(change)`.

        Args:
            tasks: those of earlier changes of the same draft.
        """
        rows = {} if tasks is None else tasks
        for state in change.states:
            uuid = state.task_uuid
            if uuid not in rows and (there := draft.row(Key(TASK, uuid))) is not None:
                rows[uuid] = self.bodies.decode_task(there.body)
        verdict, new = decide(change, rows)
        if verdict is not SETTLED:
            return verdict
        if change.riders and not all(_holds(one, draft) for one in change.riders):
            return CONFLICT
        if change.fires and not self._fire(change.fires, draft):
            return FENCED
        for rider in change.riders:
            self._ride(rider, draft)
        for state in new:
            uuid = state.task_uuid
            row = rows.get(uuid)
            if row is None:
                row = rows[uuid] = TaskBody()
            row.state = state
            if uuid == change.key and change.mark:
                row.mark = change.mark
            self._save(Key(TASK, uuid), row, draft)
        for meta in change.groups:
            self._add_group(meta, draft)
        for arrival in change.arrivals:
            self._arrive(arrival, draft)
        if change.outbox:
            # Below 0, as of chords that are ready: the oldest is listed first.
            write = Write(body=encode(change.outbox), facts=Facts(at=-draft.read_at))
            draft.write[Key(OUTBOX, change.key)] = write
        return SETTLED

    def _save(self, key: Key, row: TaskBody, draft: Draft) -> None:
        """Write a task whose row the draft has read."""
        state, there, life, name = row.state, draft.found[key], 0.0, ""
        if state is None:
            life = self.expire_in
        elif state.state in FINISHED:
            life = state.life(self.expire_in)
            name = state.state[0] + state.queue  # for `finished_since`
            draft.tell += (key.id,)
        # For the listings of tasks: never one moment twice, so that it never goes back. What is
        # looked at once it is old has the true one: a clock may have been ahead.
        at = draft.read_at
        self._latest = at = at if at > self._latest else self._latest + 1
        draft.write[key] = Write(
            body=self.bodies.encode_task(state, row.mark, row.epoch),
            expires_in=round(life * 1e6) if life or state is None else None,
            facts=Facts(at=at, name=name),
            kept_by=None if there is None else there.kept_by,
        )

    def _add_group(self, meta: GroupMeta, draft: Draft) -> None:
        key = Key(GROUP, meta.group_uuid)
        row = draft.row(key)
        is_whole = row is not None and self.bodies.decode_group(row.body).task_uuids
        if key not in draft.write and not is_whole:
            draft.write[key] = self._group(meta, draft)

    def _group(self, meta: GroupMeta, draft: Draft) -> Write:
        return Write(body=self.bodies.encode(meta), facts=Facts(at=draft.read_at))

    def _arrive(self, arrival: Arrival, draft: Draft) -> None:
        group = arrival.group_uuid
        # If a member was faster than the group, `_add_group` completes it.
        meta = self._group(GroupMeta(group_uuid=group), draft)
        draft.create = {**draft.create, Key(GROUP, group): meta}
        if not arrival.callback:
            return
        member, wanted_by = Key(TASK, arrival.task_uuid), Key(OPEN, group)
        there = draft.row(member)
        if there is not None and member not in draft.write:  # its state was written before
            self._save(member, self.bodies.decode_task(there.body), draft)
        if (write := draft.write.get(member)) is not None:
            draft.write[member] = msgspec.structs.replace(write, kept_by=wanted_by)
        failed = "" if arrival.ok else arrival.task_uuid
        life = round(max(CHORD_LIFE, self.expire_in) * 1e6)
        draft.joins += (
            Join(
                set=Key(CHORD, group),
                member=arrival.task_uuid,
                whole=1 if failed else arrival.total or 2**31,
                ready=Key(READY, group),
                write=Write(
                    body=encode((arrival.callback, failed)),
                    facts=Facts(at=-draft.read_at),
                ),
                beside={wanted_by: Write(body=b"", expires_in=life)},
            ),
        )

    def _fire(self, group_uuid: str, draft: Draft) -> bool:
        """Settle the group; return whether that was not done before."""
        group, ready = draft.row(Key(GROUP, group_uuid)), draft.row(Key(READY, group_uuid))
        if group is None or _is_fired(self.bodies.decode_group(group.body), ready):
            return False
        if Key(READY, group_uuid) in draft.write:
            return False
        draft.write[Key(READY, group_uuid)] = Write(body=b"")
        draft.write[Key(CHORD, group_uuid)] = draft.write[Key(OPEN, group_uuid)] = None
        return True

    # Epochs and outboxes

    def begin(self, keys: Sequence[tuple[str, RunNumber]]) -> list[Begun]:
        wanted = [key for uuid, _ in keys for key in (Key(TASK, uuid), Key(OUTBOX, uuid))]
        fence = self.rows.fences(len(keys)) if keys else 0

        def plan(draft: Draft) -> list[Begun]:
            rows: dict[str, TaskBody] = {}
            begun: list[Begun] = []
            for number, (uuid, run) in enumerate(keys):
                if uuid not in rows:
                    there = draft.row(Key(TASK, uuid))
                    rows[uuid] = self.bodies.decode_task(there.body) if there else TaskBody()
                row = rows[uuid]
                if is_over(row.state, run):
                    outbox = _outbox_in(draft.row(Key(OUTBOX, uuid)))
                    begun.append(Begun(epoch=row.epoch, finished=True, outbox=outbox))
                    continue
                row.epoch = fence_after(row.epoch, fence + number)
                self._save(Key(TASK, uuid), row, draft)
                begun.append(Begun(epoch=row.epoch))
            return begun

        return self._carry_out(wanted, plan)

    def outboxes(self, keys: Sequence[str]) -> list[Sequence[bytes]]:
        return [_outbox_in(row) for row in self.rows.read([Key(OUTBOX, key) for key in keys])]

    def clear_outbox(self, sent: Sequence[tuple[str, Sequence[bytes]]]) -> None:
        def plan(draft: Draft) -> None:
            for key, bodies in sent:
                if _outbox_in(draft.row(Key(OUTBOX, key))) == tuple(bodies):
                    draft.write[Key(OUTBOX, key)] = None

        self._carry_out([Key(OUTBOX, key) for key, _ in sent], plan)

    def unsent(
        self, limit: int, *, older_than: float, skip: int = 0
    ) -> list[tuple[str, Sequence[bytes]]]:
        before = micros(self.now()) - round(older_than * 1e6)
        old = takewhile(lambda row: -_at(row) <= before, self.rows.list_all(OUTBOX))
        return [(row.key.id, _outbox_in(row)) for row in islice(old, skip, skip + limit)]

    def settled_by(self, uuids: Sequence[str]) -> list[str]:
        rows = self.rows.read([Key(TASK, uuid) for uuid in uuids])
        return ["" if row is None else self.bodies.decode_task(row.body).mark for row in rows]

    # Records of schedules, claims of unique tasks

    def _ride(self, rider: Rider, draft: Draft) -> None:
        """Let the record hold what a rider brings."""
        write, key = draft.write, _ridden(rider)
        if rider.body is None:
            write[key] = None
        elif rider.life:
            write[key] = Write(body=rider.body, expires_in=round(rider.life * 1e6))
        else:
            write[key] = Write(body=rider.body, facts=Facts(at=0))
        if not rider.life:
            write[RECORDS] = Write(body=b"")

    def records(self, known: str = "") -> Records:
        [changed] = self.rows.read([RECORDS])  # first: a change meanwhile is read once more
        version, bodies = str(changed.version if changed else NO_ROW), None
        if version != known:
            bodies = {row.key.id: row.body for row in self.rows.list_all(RECORD)}
        return Records(now=self.now(), version=version, bodies=bodies)

    def claims(self, names: Sequence[str]) -> list[bytes | None]:
        rows = self.rows.read([Key(CLAIM, name) for name in names])
        return [None if row is None else row.body for row in rows]

    def release(self, claims: Sequence[tuple[str, bytes]]) -> None:
        found = self.rows.read([Key(CLAIM, name) for name, _ in claims])
        held = [
            row
            for row, (_, body) in zip(found, claims, strict=True)
            if row is not None and row.body == body
        ]
        if held:
            self.rows.forget(held)

    # Checkpoints

    def plan_checkpoints(self, keeping: Keeping, step: MessageStep) -> None:
        """Add checkpoints to a step, which is a Conflict if one of them is there."""
        for name, body in keeping.rows.items():
            key = _checkpoint(keeping.uuid, name)
            step.expect[key] = NO_ROW
            step.write[key] = _kept_with_task(keeping.uuid, body, WITH_TASK)

    def keep_checkpoints(self, keeping: Keeping) -> Verdict:
        keys = [_checkpoint(keeping.uuid, name) for name in keeping.rows]

        def plan(draft: Draft) -> Verdict:
            there = draft.row(Key(TASK, keeping.uuid))
            task = TaskBody() if there is None else self.bodies.decode_task(there.body)
            if task.epoch != keeping.epoch or task.mark == keeping.mark:
                return FENCED
            if any(draft.found[key] for key in keys):
                return CONFLICT
            self.plan_checkpoints(keeping, draft)
            return SETTLED

        return self._carry_out([Key(TASK, keeping.uuid), *keys], plan)

    def checkpoints(self, uuid: str) -> dict[str, bytes]:
        return {_name_of(row): row.body for row in self._checkpoints(uuid)}

    def _checkpoints(self, uuid: str) -> list[StoredRow]:
        # Of two generations at most: a run drops those before its own.
        ids = self.rows.ids(CHECKPOINT, prefix=_checkpoint(uuid, "").id, items=2 * CHECKPOINTS)
        found = self.rows.read([Key(CHECKPOINT, id) for id in ids]) if ids else ()
        return [row for row in found if row is not None]

    def drop_checkpoints(self, uuid: str, names: Sequence[str]) -> None:
        gone = (_checkpoint(uuid, name) for name in names)
        self.rows.commit([MessageStep(write=dict.fromkeys(gone))])

    def end_checkpoints(self, uuid: str, life: float) -> None:
        expires_in = round(life * 1e6)
        if 0 < expires_in <= WITH_TASK:
            return  # they go with the task's row
        steps: list[MessageStep] = []
        for row in self._checkpoints(uuid):
            if not expires_in:
                steps.append(MessageStep(write={row.key: None}))
                continue
            # Another one may have dropped it since: it does not come back.
            later: dict[Key, Write | None] = {row.key: _kept_with_task(uuid, row.body, expires_in)}
            steps.append(MessageStep(expect={row.key: row.version}, write=later))
        for some in in_steps(steps):
            self.rows.commit(some)

    # Reading

    def get_states(self, uuids: Sequence[str]) -> dict[str, TaskState]:
        states: dict[str, TaskState] = {}
        for row in self.rows.read([Key(TASK, uuid) for uuid in uuids]):
            if row is not None and (state := self.bodies.decode_task(row.body).state) is not None:
                states[row.key.id] = state
        return states

    def get_group(self, group_uuid: str) -> GroupMeta | None:
        group, ready = self.rows.read([Key(GROUP, group_uuid), Key(READY, group_uuid)])
        if group is None:
            return None
        meta = self.bodies.decode_group(group.body)
        return msgspec.structs.replace(meta, chord_triggered=_is_fired(meta, ready))

    def ready_groups(self, limit: int) -> list[ReadyGroup]:
        found: list[ReadyGroup] = []
        for row in islice(self.rows.list_all(READY), limit):
            callback, failed = _decode_ready(row.body)
            found.append(ReadyGroup(group_uuid=row.key.id, callback=callback, failed_member=failed))
        return found

    def list_states(
        self,
        *,
        states: Collection[State] = (),
        name: str = "",
        since: dt.datetime | None = None,
        after: Place | None = None,
        limit: int = 100,
    ) -> Listing:
        found: list[tuple[Place, TaskState]] = []
        looked, end = 0, after
        for row in self._listed(after):
            if since is not None and _at(row) < micros(since):
                return Listing(found=found, end=None, looked=looked)
            if len(found) >= limit or looked >= LOOK:
                return Listing(found=found, end=end, looked=looked)
            one = self._state_in(row)
            end, looked = (_at(row), row.key.id), looked + 1
            fits = one is not None and one.state in (states or State)
            if one is not None and fits and name in ("", one.task_name):
                found.append((end, one))
        return Listing(found=found, end=None, looked=looked)

    def _state_in(self, row: StoredRow) -> TaskState | None:
        """Return the state in a row that is listed; of a stranger's row none."""
        try:
            return self.bodies.decode_task(row.body).state
        except MALFORMED as error:
            logger.warning("task %s is left out: its state cannot be read: %s", row.key.id, error)
            return None

    def _listed(self, after: Place | None) -> Iterator[StoredRow]:
        """Yield the rows of tasks behind a place, the last changed first."""
        last = None if after is None else _placeholder(*after)
        while page := self.rows.list(TASK, after=last):
            yield from page
            last = page[-1]

    def find(self, prefix: str, limit: int = 2) -> list[str]:
        return self.rows.ids(TASK, prefix=prefix, items=limit)

    def finished_since(self, moment: dt.datetime, step: int = 3600) -> list[Count]:
        counts = self.rows.count(TASK, since=micros(moment), step=step * 1_000_000)
        return counts_of(
            (begun_at // 1_000_000, name[1:], number * (name[0] == "S"), number * (name[0] == "F"))
            for (name, begun_at), number in counts.items()
            if name
        )

    # Forgetting

    def revoke(self, uuids: Sequence[str], life: float = REVOKED_LIFE) -> None:
        write = Write(body=b"", expires_in=round(life * 1e6)) if life > 0 else None
        if uuids:
            self.rows.commit([MessageStep(write={Key(REVOKED, uuid): write for uuid in uuids})])

    def revoked(self, uuids: Sequence[str]) -> set[str]:
        rows = self.rows.read([Key(REVOKED, uuid) for uuid in uuids])
        return {row.key.id for row in rows if row is not None}

    def purge_state(self, task_uuid: str) -> None:
        gone = [Key(TASK, task_uuid), *(row.key for row in self._checkpoints(task_uuid))]
        self.rows.commit([MessageStep(write=dict.fromkeys(gone))])

    def _delete_finished(self, states: Sequence[TaskState]) -> None:
        tasks = read(self.rows, [Key(TASK, one.task_uuid) for one in states])
        there = [row for row in tasks.values() if row is not None]
        chords = read(self.rows, [row.kept_by for row in there if row.kept_by is not None])
        steps: list[MessageStep] = []
        for row in there:
            state = self.bodies.decode_task(row.body).state
            if state is None or not state.is_finished:
                continue
            expect = {row.key: row.version}
            if row.kept_by is not None:
                if chords[row.kept_by] is not None:
                    continue
                expect[row.kept_by] = NO_ROW
            steps.append(MessageStep(expect=expect, write={row.key: None}))
        self.rows.commit(steps)

    def purge_group_meta(self, group_uuid: str) -> None:
        self.rows.commit([MessageStep(write=_no_group(group_uuid))])

    def listener(self) -> Listener:
        return RowsListener(self.rows.listen())

    def tend(self) -> float:
        """As the contract says, a step each of what has expired and of old groups: others wait."""
        return SOON if self.rows.expire(SWEPT) or self._sweep_groups() else SWEEP

    def _sweep_groups(self) -> bool:
        """Look at the next old groups, and forget those that nobody needs.

        Returns whether there are more like them.
        """
        page = self.rows.list(GROUP, after=self._swept, items=LOOKED) if self._swept else []
        if not page:
            start = _placeholder(micros(self.now()) - round(self.expire_in * 1e6), "")
            page = self.rows.list(GROUP, after=start, items=LOOKED)
        self._swept = page[-1] if page else None
        members = {row.key.id: self._members_in(row) for row in page}
        keys = [Key(kind, group) for group in members for kind in (OPEN, READY)]
        # Where members have states, the first one mostly has, and all groups are asked at once.
        keys += [Key(TASK, uuids[0]) for uuids in members.values() if uuids]
        found = read(self.rows, keys)
        steps: list[MessageStep] = []
        for row in page:
            group, uuids = row.key.id, members[row.key.id]
            ready = found[Key(READY, group)]
            if found[Key(OPEN, group)] is not None or (ready is not None and ready.facts):
                continue  # its callback is to be sent
            if any(found[Key(TASK, uuid)] for uuid in uuids[:1]) or self._has_states(uuids[1:]):
                continue
            seen = NO_ROW if ready is None else ready.version
            expect = {row.key: row.version, Key(READY, group): seen, Key(OPEN, group): NO_ROW}
            steps.append(MessageStep(expect=expect, write=_no_group(group)))
        self.rows.commit(steps)
        return bool(steps) and len(page) == LOOKED

    def _members_in(self, row: StoredRow) -> Sequence[str]:
        """Return the tasks of an old group; of a stranger's row none, so that it is forgotten."""
        try:
            return self.bodies.decode_group(row.body).task_uuids
        except MALFORMED:  # raised, it would end the house-keeping of all workers
            return ()

    def _has_states(self, uuids: Sequence[str]) -> bool:
        """Return whether any of the tasks has a state."""
        return any(
            any(self.rows.read([Key(TASK, uuid) for uuid in uuids[start : start + PAGE]]))
            for start in range(0, len(uuids), PAGE)
        )


class RowsListener(Listener):
    """A listener to tasks: each is a topic of its own."""

    def __init__(self, topics: TopicListener) -> None:
        self._topics = topics

    def watch(self, uuids: Iterable[str]) -> None:
        self._topics.watch(uuids)

    def unwatch(self, uuids: Iterable[str]) -> None:
        self._topics.unwatch(uuids)

    def wait(self, timeout: float) -> None:
        self._topics.wait(timeout)

    def wake(self) -> None:
        self._topics.wake()

    def close(self) -> None:
        self._topics.close()


def keys_of(change: Change) -> list[Key]:
    """Return the rows that a change is decided by."""
    keys: list[Key] = []
    for state in change.states:  # a comprehension would be a call of its own, once a task
        keys.append(Key(TASK, state.task_uuid))
    if change.arrivals:
        keys += [Key(TASK, one.task_uuid) for one in change.arrivals if one.callback]
    if change.groups:
        keys += [Key(GROUP, meta.group_uuid) for meta in change.groups]
    if change.riders:
        keys += map(_ridden, change.riders)
    if change.fires:
        keys += [Key(GROUP, change.fires), Key(READY, change.fires)]
    return keys


def _checkpoint(uuid: str, name: str) -> Key:
    return Key(CHECKPOINT, f"{uuid}\n{name}")  # no UUID has a line break


def _name_of(row: StoredRow) -> str:
    return row.key.id.partition("\n")[2]


def _kept_with_task(uuid: str, body: bytes, expires_in: int) -> Write:
    return Write(body=body, expires_in=expires_in, kept_by=Key(TASK, uuid))


def _ridden(rider: Rider) -> Key:
    return Key(CLAIM if rider.life else RECORD, rider.name)


def _holds(rider: Rider, draft: Draft) -> bool:
    """Return whether the record holds what a rider expects, perhaps by an earlier change."""
    key = _ridden(rider)
    row = draft.row(key)
    there = draft.write.get(key, row)
    return (None if there is None else there.body) == rider.expected


def _outbox_in(row: StoredRow | None) -> Sequence[bytes]:
    return () if row is None else _decode_bodies(row.body)


def _is_fired(meta: GroupMeta, ready: StoredRow | None) -> bool:
    return meta.chord_triggered or (ready is not None and not ready.body)


def _no_group(uuid: str) -> dict[Key, Write | None]:
    return dict.fromkeys(Key(kind, uuid) for kind in (GROUP, CHORD, OPEN, READY))


def _at(row: StoredRow) -> int:
    return row.facts.at if row.facts is not None else 0


def _placeholder(at: int, uuid: str) -> StoredRow:
    """Return a row that stands for the place behind which a page begins."""
    return StoredRow(key=Key(TASK, uuid), body=b"", version=NO_ROW, facts=Facts(at=at))

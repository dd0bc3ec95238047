"""The steps of the backend and settlement machines: each script with arguments from small pools."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from machinery_py.backends.redis import scripts as redis_scripts
from machinery_py.backends.redis.documents import Changes
from machinery_py.clock import moment_of
from machinery_py.connections.redis.client import raw
from machinery_py.stores import redis as settlement_scripts
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import ZERO_TIME, Arrival, GroupMeta, State, TaskState
from machinery_py.wire.states import encode_group, encode_state
from tests.models import backend, settlement
from tests.models.broker_rules import Arrivals, keys_in, packed
from tests.models.machine import (
    QUEUES,
    START,
    Due,
    Fate,
    Messages,
    Passed,
    Pick,
    ScriptMachine,
    Session1,
    Token,
)
from tests.models.states import GOS_MUTEX, group_keys

TASKS = (
    "task_1",
    "task_2",
    "x",
    "jobs",
)  # one is so short that Go's key is not used, one is the name of a queue
GROUPS = {
    "group_1": (2, b"callback"),
    "group_2": (1, b""),
    "g": (0, b"\xffcallback"),
}  # (total, callback)
MOMENTS = (None, moment_of(START), moment_of(START + 90_000_000))
EXPIRES = (3600, 900_000)  # seconds: less than a chord is kept, and more

Task = st.sampled_from(TASKS)
GroupUuid = st.sampled_from(sorted(GROUPS))
Expire = st.sampled_from(EXPIRES)
Words = st.sampled_from(list(State))
States = st.builds(
    TaskState,
    task_uuid=Task,
    task_name=st.sampled_from(["", "add", 'a"b\u00e9']),
    state=Words,
    run=st.sampled_from([0, 0, 0, 1, 2]),
    results=st.sampled_from([(), (Arg(type="string", value='"State":"PENDING","CreatedAt":"x"'),)]),
    error=st.sampled_from(["", '"TaskName":"no"']),
    created_at=st.sampled_from([ZERO_TIME, *MOMENTS[1:]]),
    queue=st.sampled_from(["", "jobs"]),
    progress=st.sampled_from([None, None, (1.0, 2.5)]),
    started_at=st.sampled_from(MOMENTS),
    eta=st.sampled_from([None, None, moment_of(START + 1000_000_000_000)]),
    worker=st.sampled_from(["", "", "w1", "w2"]),
    keep_for=st.sampled_from([None, None, 59.5, 1_000_000]),
)
Marks = States.filter(lambda state: not state.is_finished)
Deliveries = st.lists(st.tuples(Task, st.integers(0, 1)), min_size=1, max_size=3)
NewChange = st.fixed_dictionaries(
    {
        "key": Task,
        "mark": st.sampled_from(["", "m1", "m2"]),
        "epoch": st.sampled_from([0, 0, 0, 1, 2]),
        "force": st.sampled_from([False] * 5 + [True]),
        "fires": st.sampled_from(["", "", "", "", *GROUPS]),
        "states": st.lists(States, max_size=2),
        "groups": st.lists(GroupUuid, max_size=1),
        "arrivals": st.lists(st.tuples(GroupUuid, Task, st.booleans()), max_size=2),
        "outbox": st.sampled_from([b"", b"", b"\xc0out"]),
    }
)


def rows_last(reply: Any) -> Any:
    """Replies of which the last part is packed."""
    return [[*one[:-1], packed(one[-1])] for one in reply] if reply != "WRONGTYPE" else reply


def ready(reply: Any) -> Any:
    """The reply of READY, with the keys that its texts name."""
    return reply if reply == "WRONGTYPE" else [reply[0], keys_in(reply[1])]


class StateRules(ScriptMachine):
    """What both machines share."""

    def changes(self, drawn: list[dict[str, Any]], expire: int) -> Changes:
        changes = Changes(moment_of(self.now), expire)
        for one in drawn:
            self.add(changes, one)
        return changes

    def add(self, changes: Changes, drawn: dict[str, Any]) -> int:
        """Add a change; its place."""
        groups = [
            GroupMeta(group_uuid=group, task_uuids=TASKS[:2]) for group in drawn.get("groups", ())
        ]
        arrivals = [
            Arrival(
                group_uuid=group,
                task_uuid=task,
                total=GROUPS[group][0],
                ok=ok,
                callback=GROUPS[group][1],
            )
            for group, task, ok in drawn.get("arrivals", ())
        ]
        epoch = self.epoch(drawn.get("epoch", 0))
        return changes.add(**{**drawn, "epoch": epoch, "groups": groups, "arrivals": arrivals})

    @rule(passed=Passed, deliveries=Deliveries)
    def tasks_begin(self, passed: int, deliveries: list[tuple[str, int]]) -> None:
        now = self.passed(passed)
        begun = self.run(redis_scripts.BEGIN, backend.begin, now, "mpy:fence", deliveries)
        if begun != "WRONGTYPE":
            self.epochs += [epoch for epoch, _, _ in begun]

    @rule(state=States)
    def go_writes_a_state(self, state: TaskState) -> None:
        if len(state.task_uuid) > 2 and state.task_uuid not in QUEUES:
            text = encode_state(state).decode("latin-1")
            self.beside.both("SET", state.task_uuid, text, "EX", "3600")

    @rule(group=GroupUuid.filter(lambda uuid: len(uuid) > 2), triggered=st.booleans())
    def go_writes_a_group(self, group: str, triggered: bool) -> None:
        meta = GroupMeta(group_uuid=group, task_uuids=TASKS[:2], chord_triggered=triggered)
        self.beside.both("SET", group, encode_group(meta).decode(), "EX", "3600")

    @rule(
        key=st.sampled_from(["task_1", "group_1", "group_2"]),
        kind=st.sampled_from(["list", "set", "string", *["none"] * 3]),
    )
    def spoil_a_document(self, key: str, kind: str) -> None:
        self.spoil(key, kind)

    @rule(kind=st.sampled_from(["list", "none", "none", "none"]))
    def spoil_the_incomplete_groups(self, kind: str) -> None:
        self.spoil("mpy:partial", kind)

    @rule(group=GroupUuid, kind=st.sampled_from(["list", "none"]), passed=Passed)
    def look_at_a_spoilt_group(self, group: str, kind: str, passed: int) -> None:
        """Somebody keeps something else under the key of a group, while others are looked at."""
        key = group_keys(group)[0]
        self.spoil(key, kind)
        self.run(redis_scripts.PARTIAL, backend.partial, self.passed(passed + 60_000_000), 9)
        self.run(redis_scripts.READY, backend.ready, 1, reading=ready)
        self.spoil(key, "none")

    @rule(is_at_it=st.booleans())
    def go_fires_a_group(self, is_at_it: bool) -> None:
        self.beside.both(*(("SET", GOS_MUTEX, "1") if is_at_it else ("DEL", GOS_MUTEX)))

    @rule(passed=Passed, group=GroupUuid, state=States, expire=Expire, messages=Messages)
    def fire(
        self, passed: int, group: str, state: TaskState, expire: int, messages: list[Any]
    ) -> None:
        now = self.passed(passed)
        self._fire({"key": group, "fires": group, "states": [state]}, now, expire, messages)

    @rule(
        passed=Passed,
        state=States,
        group=GroupUuid,
        ok=st.booleans(),
        expire=Expire,
        messages=Messages,
    )
    def end_a_task(
        self, passed: int, state: TaskState, group: str, ok: bool, expire: int, messages: list[Any]
    ) -> None:
        drawn = {
            "key": state.task_uuid,
            "states": [state],
            "arrivals": [(group, state.task_uuid, ok)],
        }
        self._fire(drawn, self.passed(passed), expire, messages)

    def _fire(self, drawn: dict[str, Any], now: str, expire: int, messages: list[Any]) -> None:
        changes = self.changes([drawn], expire)
        queues, rows = self.messages(messages)
        self.run(
            settlement_scripts.FIRE,
            settlement.fire,
            now,
            expire,
            queues,
            rows,
            changes.changes,
            changes.states,
        )


class BackendMachine(StateRules):
    """All scripts of the backend."""

    @rule(passed=Passed, expire=Expire, drawn=st.lists(NewChange, min_size=1, max_size=3))
    def apply(self, passed: int, expire: int, drawn: list[dict[str, Any]]) -> None:
        now = self.passed(passed)
        changes = self.changes(drawn, expire)
        self.run(redis_scripts.APPLY, backend.apply, now, expire, changes.changes, changes.states)

    @rule(
        passed=st.sampled_from([0, 0, 1_000_000, 60_000_000, 4_000_000_000]),
        limit=st.integers(1, 2),
        since=st.integers(-5, 5),
        bare=st.booleans(),
    )
    def look(self, passed: int, limit: int, since: int, bare: bool) -> None:
        now = self.passed(passed)
        self.run(redis_scripts.STATES, backend.states, TASKS, bare, reading=packed)
        self.run(redis_scripts.MARKS, backend.marks, TASKS)
        self.run(redis_scripts.READY, backend.ready, limit, reading=ready)
        self.run(redis_scripts.PARTIAL, backend.partial, now, limit)
        self.run(redis_scripts.UNSENT, backend.unsent, now, limit - 1, limit, 1_000_000)
        self.run(
            redis_scripts.RATES, backend.rates, now, self.now // 1_000_000 + since, 2, "mpy:rate:"
        )
        self.run(redis_scripts.REVOKED, backend.revoked, TASKS)

    @rule(
        sets=st.sampled_from([["mpy:open", "mpy:done"], ["mpy:open"], ["mpy:done"]]),
        behind=st.none() | st.tuples(st.integers(-5, 5), Task | st.just("")),
        low=st.integers(-8, 2),
        size=st.integers(1, 3),
        limit=st.integers(1, 3),
        words=st.lists(st.sampled_from(["SUCCESS", "PENDING"]), max_size=2),
        name=st.sampled_from(["", '"add"', '"no"']),
    )
    def find(
        self,
        sets: list[str],
        behind: tuple[int, str] | None,
        low: int,
        size: int,
        limit: int,
        words: list[str],
        name: str,
    ) -> None:
        at, uuid = ("", "") if behind is None else (str(self.now + behind[0] * 500_000), behind[1])
        place = sets, at, uuid, self.now + low * 500_000, size
        self.run(redis_scripts.FIND, backend.find, *place, limit, words, name, reading=rows_last)

    @rule(rows=st.lists(st.tuples(Task, Expire), max_size=2, unique_by=lambda row: row[0]))
    def delete(self, rows: list[tuple[str, int]]) -> None:
        self.run(redis_scripts.DELETE, backend.delete, rows, "mpy:done")

    @rule(
        passed=Passed,
        seconds=st.sampled_from([1, 3 * 86400, 366 * 86400]),
        uuids=st.lists(Task, max_size=2),
    )
    def revoke(self, passed: int, seconds: int, uuids: list[str]) -> None:
        self.run(redis_scripts.REVOKE, backend.revoke, self.passed(passed), seconds, uuids)

    @rule(sent=st.lists(st.tuples(Task, st.sampled_from([b"\xc0out", b"other"])), max_size=2))
    def clear(self, sent: list[tuple[str, bytes]]) -> None:
        self.run(redis_scripts.CLEAR, backend.clear, [(key, raw(outbox)) for key, outbox in sent])

    @rule(tasks=st.lists(Task, max_size=2), groups=st.lists(GroupUuid, max_size=1))
    def forget(self, tasks: list[str], groups: list[str]) -> None:
        self.run(redis_scripts.FORGET_TASK, backend.forget, tasks, groups)

    @rule(
        passed=st.sampled_from(
            [0, 3_599_000_000, 3_601_000_000, 86_400_000_000, 8 * 86_400_000_000]
        ),
        expire=Expire,
    )
    def tend(self, passed: int, expire: int) -> None:
        self.run(redis_scripts.TEND, backend.tend, self.passed(passed), expire)


class SettlementMachine(Arrivals, StateRules):
    """Messages and states together."""

    @rule(
        passed=Passed,
        token=Token,
        expire=Expire,
        messages=Messages,
        states=st.lists(States, max_size=2),
        force=st.booleans(),
        groups=st.lists(GroupUuid, max_size=1),
    )
    def submit(
        self,
        passed: int,
        token: str,
        expire: int,
        messages: list[Any],
        states: list[TaskState],
        force: bool,
        groups: list[str],
    ) -> None:
        now = self.passed(passed)
        drawn = (
            [{"key": f"submit {token}", "states": states, "force": force, "groups": groups}]
            if states or groups
            else []
        )
        changes = self.changes(drawn, expire)
        queues, rows = self.messages(messages)
        self.run(
            settlement_scripts.SUBMIT,
            settlement.submit,
            now,
            expire,
            token,
            [],
            queues,
            rows,
            changes.changes,
            changes.states,
        )

    @rule(
        passed=Passed,
        session=Session1,
        expire=Expire,
        ends=st.lists(
            st.tuples(Pick, Fate, Due, st.one_of(st.none(), NewChange), Messages),
            min_size=1,
            max_size=3,
        ),
        marks=st.lists(st.tuples(Pick, Marks), max_size=2),
        twice=st.booleans(),
    )
    def settle(
        self, passed: int, session: str, expire: int, ends: list[Any], marks: list[Any], twice: bool
    ) -> None:
        now, session = self.passed(passed), self.holder(session)
        ends = [*ends, *ends] if twice else ends
        changes = self.changes([], expire)
        flat: list[object] = []
        for pick, fate, left, change, messages in ends:
            place = self.add(changes, change) if change else 0
            more: object = False
            if messages or fate != "done":
                rows = [
                    (QUEUES.index(one[0]), *row[1:])
                    for one, row in zip(messages, self.messages(messages)[1], strict=True)
                ]
                more = (max(0, left or 0), raw(b"head"), rows)
            flat += (*self.delivery(session, pick), fate, place, more)
        seen: list[object] = []
        for pick, state in marks:
            place = changes.add(key=state.task_uuid, states=[state])
            seen += (*self.delivery(session, pick), place)
        self.run(
            settlement_scripts.SETTLE,
            settlement.settle,
            now,
            expire,
            session,
            self.keys,
            flat,
            seen,
            changes.changes,
            changes.states,
        )

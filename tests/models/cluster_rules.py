"""The steps of the Redis Cluster machines: tasks, groups, listings, schedules, a queue, locks."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import rule

from machinery_py.backends.base import Change
from machinery_py.backends.redis import cluster_scripts as scripts
from machinery_py.backends.redis import scripts as redis_scripts
from machinery_py.backends.redis.cluster_documents import (
    SCRIPTS,
    Effect,
    framed,
    name_of,
    parts_of,
    prefix_of,
    record_key,
)
from machinery_py.brokers.redis import scripts as broker_scripts
from machinery_py.brokers.redis.cluster import name_of_move
from machinery_py.clock import moment_of
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.keys import queue_keys
from machinery_py.connections.redis.slots import local_key
from machinery_py.tasks.states import Arrival, GroupMeta, TaskState
from machinery_py.wire.states import encode_group, encode_state
from tests.models import backend, cluster
from tests.models.backend_rules import GROUPS, TASKS, Expire, GroupUuid, NewChange, States, Task
from tests.models.beside import unpacked
from tests.models.broker_rules import BrokerMachine
from tests.models.machine import BODIES, Passed, Pick
from tests.models.messages import DELAYED
from tests.models.redis import Zset
from tests.models.slots import ClusterMachine

BRACED = "a{b}%"  # takes the place of "jobs", which no queue is called here
MODELS = {
    "state": cluster.change,
    "replay": cluster.change,
    "group": cluster.keep_group,
    "arrival": cluster.arrive,
    "fired": cluster.look_at,
}
AGES = st.sampled_from(
    [0, 0, 0, 0, scripts.NOTED_FOR, scripts.NOTED_FOR + 1]
)  # µs since the note of a record

Boxes = st.sampled_from([(), (b"\xc0out",), (b"other", b"")])


def uuid_of(drawn: str) -> str:
    return BRACED if drawn == "jobs" else drawn


def renamed(state: TaskState) -> TaskState:
    return msgspec.structs.replace(state, task_uuid=uuid_of(state.task_uuid))


def group_meta(uuid: str) -> GroupMeta:
    return GroupMeta(group_uuid=uuid, task_uuids=TASKS[:2])


def scored(reply: Any) -> Any:
    """The reply of GO_DUE, with numbers for scores."""
    if reply == "WRONGTYPE":
        return reply
    now, rows, left = reply
    return [now, [[body, float(score)] for body, score in rows], left]


class ClusterBackendMachine(ClusterMachine):
    """Tasks, groups, what follows from a change, listings, schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.effects: list[Effect] = []  # that were made, carried out or not

    def at(self, uuid: str) -> bytes:
        return prefix_of(name_of(uuid))

    def carry_out(self, effect: Effect) -> None:
        self.run_at(
            prefix_of(effect.name),
            SCRIPTS[effect.kind],
            MODELS[effect.kind],
            *unpacked(effect.argument),
        )

    @rule(passed=Passed, expire=Expire, drawn=NewChange, box=Boxes, age=AGES, crash=Pick)
    def change(
        self,
        passed: int,
        expire: int,
        drawn: dict[str, Any],
        box: tuple[bytes, ...],
        age: int,
        crash: int,
    ) -> None:
        """And some of what follows from it."""
        now = self.passed(passed)
        change = Change(
            key=uuid_of(drawn["key"]),
            mark=drawn["mark"],
            epoch=self.epoch(drawn["epoch"]),
            force=drawn["force"],
            fires=drawn["fires"],
            states=[renamed(state) for state in drawn["states"]],
            groups=[group_meta(group) for group in drawn["groups"]],
            arrivals=[
                Arrival(
                    group_uuid=group,
                    task_uuid=uuid_of(task),
                    total=GROUPS[group][0],
                    ok=ok,
                    callback=GROUPS[group][1],
                )
                for group, task, ok in drawn["arrivals"]
            ],
            outbox=box,
        )
        parts = parts_of(change, moment_of(self.now), now, expire)
        if parts.own is not None:
            reply = self.run_at(
                prefix_of(parts.name),
                scripts.CHANGE,
                cluster.change,
                now,
                expire,
                parts.own.changes,
                parts.own.states,
                raw(parts.record) if parts.record else "",
                parts.held,
                self.now - age,
            )
            if reply[0] != "s":
                return
        self.effects += parts.effects
        for effect in parts.effects[:crash]:
            self.carry_out(effect)

    @rule(pick=Pick)
    def carry_out_again(self, pick: int) -> None:
        if self.effects:
            self.carry_out(self.effects[-1 - pick % len(self.effects)])

    @rule(passed=Passed, task=Task, run=st.integers(0, 1), ahead=st.sampled_from([-1, 1]))
    def begin(self, passed: int, task: str, run: int, ahead: int) -> None:
        name, now = name_of(uuid_of(task)), self.passed(passed)
        values = now, int(now) + ahead, [(name, run)], run
        begun = self.run_at(self.at(uuid_of(task)), redis_scripts.BEGIN, backend.begin, *values)
        if begun != "WRONGTYPE":
            self.epochs += [epoch for epoch, _, _ in begun]
        self.run_at(self.at(uuid_of(task)), redis_scripts.MARKS, backend.marks, [name])

    @rule(
        passed=Passed,
        expire=Expire,
        group=GroupUuid,
        tasks=st.lists(Task, min_size=1, max_size=2, unique=True),
        ok=st.sampled_from([True, True, False]),
    )
    def a_group_is_flagged_and_fired(
        self, passed: int, expire: int, group: str, tasks: list[str], ok: bool
    ) -> None:
        self.run_at(
            self.at(group),
            scripts.GROUP,
            cluster.keep_group,
            group,
            raw(encode_group(group_meta(group))),
        )
        for task in tasks:
            row = (group, name_of(uuid_of(task)), GROUPS[group][0], ok, raw(GROUPS[group][1]))
            self.run_at(self.at(group), scripts.ARRIVE, cluster.arrive, row)
        self.flag(group)
        fires = {
            "key": group,
            "mark": "",
            "epoch": 0,
            "force": False,
            "fires": group,
            "states": [],
            "groups": [],
            "arrivals": [],
        }
        self.change(passed, expire, fires, (), 0, 9)

    @rule(group=GroupUuid)
    def flag(self, group: str) -> None:
        self.run_at(self.at(group), scripts.FLAG, cluster.flag, group)

    @rule(group=GroupUuid)
    def look_at(self, group: str) -> None:
        self.run_at(self.at(group), scripts.LOOK_AT, cluster.look_at, group)

    @rule(group=GroupUuid, task=Task)
    def forget(self, group: str, task: str) -> None:
        self.run_at(self.at(group), scripts.FORGET_GROUP, cluster.forget_group, group)
        self.run_at(
            self.at(uuid_of(task)), scripts.FORGET_TASK, cluster.forget_task, name_of(uuid_of(task))
        )

    @rule(task=Task, seconds=Expire)
    def loosen(self, task: str, seconds: int) -> None:
        self.run_at(
            self.at(uuid_of(task)), scripts.LOOSEN, cluster.loosen, name_of(uuid_of(task)), seconds
        )

    @rule(key=st.sampled_from([*TASKS, *GROUPS]), box=Boxes)
    def sent(self, key: str, box: tuple[bytes, ...]) -> None:
        name = name_of(uuid_of(key))
        self.run_at(
            prefix_of(name), scripts.SENT, cluster.sent, raw(record_key(name)), raw(framed(box))
        )

    # What Go does, and others

    @rule(state=States)
    def go_writes_a_state(self, state: TaskState) -> None:
        if len(state.task_uuid) > 2 and state.task_uuid != "jobs":
            self.beside.both(
                "SET", state.task_uuid, encode_state(state).decode("latin-1"), "EX", "3600"
            )

    @rule(group=GroupUuid.filter(lambda uuid: len(uuid) > 2), triggered=st.booleans())
    def go_writes_a_group(self, group: str, triggered: bool) -> None:
        text = encode_group(
            msgspec.structs.replace(group_meta(group), chord_triggered=triggered)
        ).decode()
        self.beside.both("SET", group, text, "EX", "3600")

    @rule(
        key=st.sampled_from(["task_1", "group_1", "group_2"]),
        kind=st.sampled_from(["list", "set", "string", *["none"] * 3]),
    )
    def spoil_a_document(self, key: str, kind: str) -> None:
        self.spoil(key, kind)

    # Schedules


class ClusterQueueMachine(ClusterMachine, BrokerMachine):
    """A queue with the scripts of one Redis, and Go's delayed set, which is in another slot."""

    names = ("jobs",)
    prefix = queue_keys("jobs")[1].encode()
    theirs = queue_keys(DELAYED)[1].encode()

    def key(self, name: str) -> str:
        return local_key(self.prefix, name.encode()).decode()

    def run(self, script: Any, model: Any, *values: Any, **more: Any) -> Any:
        return self.run_local(self.prefix, script, model, *values, **more)

    @rule(
        passed=Passed,
        bodies=st.lists(
            st.tuples(st.sampled_from(BODIES), st.sampled_from([-1_000_000, 0, 20_000_000]))
        ),
    )
    def go_delays(self, passed: int, bodies: list[tuple[bytes, int]]) -> None:
        self.passed(passed)
        if not isinstance(self.model.keys.get(DELAYED, Zset()), Zset):
            self.spoil(DELAYED, "none")
        for body, due in bodies:
            self.beside.both("ZADD", DELAYED, f"{self.now + due}000", body.decode("latin-1"))

    @rule(kind=st.sampled_from(["list", "none", "none"]))
    def spoil_what_is_delayed(self, kind: str) -> None:
        self.spoil(DELAYED, kind)

    @rule(
        passed=Passed,
        limit=st.integers(1, 3),
        level=st.sampled_from([0, 0, 3]),
        late=st.sampled_from([0, 0, 0, 1]),
        crash=Pick,
    )
    def move(self, passed: int, limit: int, level: int, late: int, crash: int) -> None:
        """What is due in Go's set comes to its queue; a crash is followed by another mover."""
        found = self.run_at(
            self.theirs,
            broker_scripts.GO_DUE,
            cluster.due,
            self.passed(passed),
            limit,
            reading=scored,
        )
        if found == "WRONGTYPE":
            return
        rows = [
            (body.encode("latin-1"), self.beside.ask("ZSCORE", DELAYED, body).encode())
            for body, _ in found[1]
        ]
        moves = [(name_of_move(*row), (0, level, 0, raw(b""), 0, raw(row[0]))) for row in rows]
        for _ in range(1 + (crash == 0)):
            reply = self.run(
                broker_scripts.TAKE_IN,
                cluster.take_in,
                str(self.now + late),
                *self.keys,
                moves,
                self.now,
            )
        if reply not in (0, "WRONGTYPE") and crash != 1:
            self.gone(rows)

    @rule(
        passed=Passed,
        body=st.sampled_from(BODIES),
        level=st.sampled_from([0, 0, 3]),
        crash=st.integers(0, 2),
    )
    def what_go_delayed_is_moved(self, passed: int, body: bytes, level: int, crash: int) -> None:
        self.spoil(DELAYED, "none")
        self.go_delays(passed, [(body, 0)])
        self.move(0, 3, level, 0, crash)

    @rule(
        bodies=st.lists(
            # Redis 7 and Redis 8 write the same score differently.
            st.tuples(
                st.sampled_from(BODIES),
                st.sampled_from([b"5", b"1.79e+18", b"1790000000000000000"]),
            ),
            max_size=2,
        )
    )
    def moved_by_another(self, bodies: list[tuple[bytes, bytes]]) -> None:
        self.gone(bodies)

    def gone(self, rows: list[tuple[bytes, bytes]]) -> None:
        self.run_at(
            self.theirs,
            broker_scripts.GO_GONE,
            cluster.gone,
            [(raw(body), raw(score)) for body, score in rows],
        )

"""Redis Cluster scripts check before they write, notice a full Redis, and wait for their slot."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from redis.exceptions import ResponseError

from machinery_py.backends.base import sending_key
from machinery_py.backends.redis import cluster_scripts as cluster
from machinery_py.backends.redis.cluster_documents import (
    SCHEDULES,
    claim_key,
    claim_name,
    claim_prefix,
    prefix_of,
    record_key,
)
from machinery_py.backends.redis.cluster_steps import PREFIXES
from machinery_py.backends.redis.documents import Changes
from machinery_py.brokers.redis import scripts
from machinery_py.connections.redis.client import raw
from machinery_py.connections.redis.keys import queue_keys
from machinery_py.connections.redis.scripts import Script, pack
from machinery_py.connections.redis.slots import clustered, slot_of
from machinery_py.locks import redis as locks
from machinery_py.tasks.states import GroupMeta, State, TaskState
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.states import encode_group
from tests.models.machine import START
from tests.models.slots import ClusterBeside
from tests.models.test_scripts import CLUSTER, DAY, LATE, NOW, half_done, message
from tests.support.private import free_port
from tests.support.private_redis import BUS
from tests.support.servers import RedisServer

TASK, GROUP, SHARD, QUEUE = (
    prefix_of("task_1"),
    prefix_of("group_1"),
    PREFIXES[0],
    queue_keys("jobs")[1].encode(),
)
GOS_SET = queue_keys("delayed_tasks")[1].encode()
UNIQUE, CLAIM = claim_prefix("claimed"), claim_key("claimed")
SENT = [
    record_key(claim_name(sending_key("claimed", token))) for token in ("t1", "t2")
]  # the records of what goes with it
RECORD = raw(b"\0\0\0\1\x90effects")


def change(**more: Any) -> tuple[list[object], list[object]]:
    made = Changes(DAY, 3600)
    made.add(**more)
    return made.changes, made.states


ENDED = change(key="task_1", mark="m", states=[TaskState(task_uuid="task_1", state=State.SUCCESS)])
FIRED = change(key="group_1", fires="group_1")
MOVES = [
    ("move 1", message("late")),
    ("move 2", message("high", level=3)),
    ("move 0", message("was moved")),
]

# Where each runs, and with what, on a Redis in which it finds everything that it works on.
CALLS: dict[str, tuple[bytes, tuple[Any, ...]]] = {
    "cluster FLAG": (prefix_of("group_3"), ("group_3",)),
    "cluster CHANGE": (TASK, (NOW, 3600, *ENDED, RECORD, True, int(NOW))),
    "cluster CHANGE of a group": (GROUP, (NOW, 3600, *FIRED, RECORD, False, int(NOW))),
    "cluster GROUP": (
        prefix_of("group_2"),
        ("group_2", raw(encode_group(GroupMeta(group_uuid="group_2", task_uuids=[])))),
    ),
    "cluster ARRIVE": (GROUP, (("group_1", "task_2", 2, False, raw(b"callback")),)),
    "cluster LOOK_AT": (GROUP, ("group_1",)),
    "cluster FORGET_GROUP": (GROUP, ("group_1",)),
    "cluster FORGET_TASK": (TASK, ("task_1",)),
    "cluster LOOSEN": (TASK, ("task_1", 60)),
    "cluster SENT": (prefix_of("task_2"), (raw(b"mpy:o:{task_2}"), raw(b"\0\0\0\1\x90"))),
    "cluster AMEND": (
        SCHEDULES,
        (NOW, "nightly", raw(b"old"), raw(b"new"), raw(b"mpy:{mpy:records}:o:1"), RECORD, int(NOW)),
    ),
    "cluster CLAIM": (UNIQUE, (raw(CLAIM),)),
    "cluster AMEND_CLAIM": (
        UNIQUE,
        (NOW, raw(CLAIM), raw(b"mine"), raw(b"next"), 600, raw(SENT[1]), RECORD, int(NOW)),
    ),
    "cluster RELEASE": (UNIQUE, (raw(CLAIM), raw(b"mine"))),
    "cluster NOTE": (SHARD, (NOW, ["task_1", "task_3"])),
    "cluster DROP": (SHARD, ([("task_1", str(START))],)),
    "cluster RECORDS": (SHARD, (NOW, 10, 0)),
    "cluster LIST": (SHARD, (NOW, ["task_1"], ["SUCCESSjobs"], ["task_2"], True)),
    "cluster EXPIRE": (SHARD, (str(START + 4_000_000_000), 3600, 3600)),
    "broker GO_DUE": (GOS_SET, (NOW, 10)),
    "broker GO_GONE": (GOS_SET, ([(raw(b"late"), str(LATE * 1000))],)),
    "broker TAKE_IN": (QUEUE, (NOW, queue_keys("jobs"), MOVES, int(NOW))),
    "locks ACQUIRE_IN_CLUSTER": (b"mpy:{other}:", (NOW, "other", "bb", 100_000)),
}
LOCAL = {
    "broker TAKE_IN",
    "locks ACQUIRE_IN_CLUSTER",
}  # these are run by the driver of a slot
SCRIPTS = CLUSTER
NEEDS_ROOM = {
    "cluster FLAG",
    "cluster CHANGE",
    "cluster CHANGE of a group",
    "cluster GROUP",
    "cluster ARRIVE",
    "cluster AMEND",
    "cluster AMEND_CLAIM",
    "cluster NOTE",
    "broker TAKE_IN",
    "locks ACQUIRE_IN_CLUSTER",
}
GOS = ("jobs", "delayed_tasks", "task_1", "group_1", "group_2", "group_3")


@pytest.fixture
def beside(redis_node: RedisServer) -> Iterator[ClusterBeside]:
    beside = ClusterBeside(redis_node.url)
    yield beside
    beside.ask("CONFIG", "SET", "maxmemory", "0")
    beside.close()


def script_of(name: str) -> Script:
    module, attribute = SCRIPTS[name.removesuffix(" of a group")]
    script: Script = vars(module)[attribute]
    return clustered(script) if name in LOCAL else script


def evaluate(beside: ClusterBeside, prefix: bytes, script: Script, values: Any) -> str:
    """What it was refused with, or "" if it was carried out."""
    beside.prefix = prefix
    try:
        beside.evaluate(script, pack(values))
    except ResponseError as error:
        return f"{type(error).__name__} {error}"
    return ""


def call(beside: ClusterBeside, name: str) -> str:
    return evaluate(beside, CALLS[name][0], script_of(name), CALLS[name][1])


def fill(beside: ClusterBeside) -> None:
    """Fill a cluster for the scripts.

    An open task with a companion, a group with one member done, a record, a schedule, a claim,
    listings, and messages.
    """
    start = str(START)
    open_task = change(key="task_1", states=[TaskState(task_uuid="task_1")])
    groups = {
        uuid: raw(encode_group(GroupMeta(group_uuid=uuid, task_uuids=["task_1"])))
        for uuid in ("group_1", "group_3")
    }
    steps: list[tuple[bytes, Script, Any]] = [
        (TASK, cluster.CHANGE, (start, 3600, *open_task, "", False, 0)),
        (
            prefix_of("task_2"),
            cluster.CHANGE,
            (start, 3600, *change(key="task_2", outbox=b""), RECORD, False, START),
        ),
        (GROUP, cluster.GROUP, ("group_1", groups["group_1"])),
        (prefix_of("group_3"), cluster.GROUP, ("group_3", groups["group_3"])),
        (GROUP, cluster.ARRIVE, (("group_1", "task_1", 1, True, raw(b"callback")),)),
        (GROUP, cluster.FLAG, ("group_1",)),
        (
            SCHEDULES,
            cluster.AMEND,
            (start, "nightly", raw(b""), raw(b"old"), raw(b""), raw(b""), 0),
        ),
        (
            UNIQUE,
            cluster.AMEND_CLAIM,
            (start, raw(CLAIM), raw(b""), raw(b"mine"), 600, raw(SENT[0]), RECORD, START),
        ),
        (SHARD, cluster.NOTE, (start, ["task_1"])),
        (SHARD, cluster.LIST, (start, ["task_2"], ["SUCCESSjobs"], ["task_1"], False)),
        (
            QUEUE,
            clustered(scripts.PUT),
            (start, "", [], [queue_keys("jobs")], [message("1")]),
        ),
        (QUEUE, clustered(scripts.TAKE_IN), (start, queue_keys("jobs"), MOVES[2:], START)),
        (b"mpy:{lock}:", clustered(locks.ACQUIRE_IN_CLUSTER), (start, "lock", "aa", 100_000)),
    ]
    for prefix, script, values in steps:
        assert evaluate(beside, prefix, script, values) == ""
    beside.ask("ZADD", "delayed_tasks", str(LATE * 1000), "late")


def test_each_script_is_called() -> None:
    assert {name.removesuffix(" of a group") for name in CALLS} == set(SCRIPTS)


@pytest.mark.parametrize("name", CALLS)
def test_a_script_that_finds_another_type_changes_nothing(beside: ClusterBeside, name: str) -> None:
    for key, command in itertools.product(
        GOS, (("HSET", "somebody", "else's"), ("SET", "somebody else's"))
    ):
        beside.ask("FLUSHDB")
        fill(beside)
        beside.ask("DEL", key)
        beside.ask(command[0], key, *command[1:])
        before, expires = beside.dump()

        refused = call(beside, name)

        after, expires_now = beside.dump()
        assert not refused or "WRONGTYPE" in refused
        assert (after[key], key in expires_now) == (before[key], key in expires)
        if refused:
            assert after == before, f"{name} was refused for {key}, and has changed something"


@pytest.mark.parametrize("name", CALLS)
def test_script_that_finds_another_type_at_a_key_of_ours_stops(
    beside: ClusterBeside, name: str
) -> None:
    fill(beside)

    assert half_done(beside, lambda: call(beside, name)) == []


@pytest.mark.parametrize("name", CALLS)
def test_full_redis_refuses_whole_scripts_except_those_that_free(
    beside: ClusterBeside, name: str
) -> None:
    fill(beside)
    before, _ = beside.dump()
    beside.ask("CONFIG", "SET", "maxmemory", "1")

    refused = call(beside, name)

    beside.ask("CONFIG", "SET", "maxmemory", "0")
    if name in NEEDS_ROOM:
        assert "used memory > 'maxmemory'" in refused
        assert beside.dump()[0] == before
    else:
        assert refused == ""


def test_no_script_is_begun_while_its_slot_moves(
    beside: ClusterBeside, redis_node: RedisServer
) -> None:
    """The guard, which is never there, has Redis ask for it at the other node."""
    fill(beside)
    before, _ = beside.dump()
    with RedisServer(port=free_port(besides=BUS), config={"cluster-enabled": "yes"}) as target:
        redis_node.cli("CLUSTER", "MEET", "127.0.0.1", target.port)
        id = str(target.cli("CLUSTER", "MYID"))
        wait_until(
            lambda: id in str(redis_node.cli("CLUSTER", "NODES")),
            HANG,
            "a node that has met the other",
        )
        for name, (prefix, _) in CALLS.items():
            redis_node.cli("CLUSTER", "SETSLOT", slot_of(prefix), "MIGRATING", id)
            refused = call(beside, name)
            redis_node.cli("CLUSTER", "SETSLOT", slot_of(prefix), "STABLE")

            assert refused.startswith(("AskError", "ResponseError ASK ")), name
            assert beside.dump()[0] == before
    redis_node.cli("CLUSTER", "FORGET", id)

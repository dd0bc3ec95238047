"""Memcache as Go Machinery sees it: keys, servers, documents, expiries, against Go's recordings."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from machinery_py import Config, Group, Server, Signature, State, group
from machinery_py.backends.base import FENCED, SETTLED, Change
from machinery_py.backends.memcached.backend import MemcacheBackend
from machinery_py.backends.memcached.documents import CHORD_LIFE, LONGEST_KEY, key_of
from machinery_py.config.server_urls import parse_memcache_url
from machinery_py.connections.memcached.client import MemcacheDriver
from machinery_py.errors import NameRefused
from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import Arrival, GroupMeta, TaskState
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.states import decode_group, decode_state, encode_group, encode_state
from machinery_py.worker.loops.go_groups import GoGroupPoller
from tests.backends.memcached.case import put, time_left
from tests.support.servers import MemcachedServer

GOLDEN = Path(__file__).parents[2] / "wire" / "golden"


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / name).read_text("utf-8").splitlines()]


SHARDS = lines("crc32_memcache.jsonl")
STATES = [
    line
    for line in lines("task_states.jsonl")
    if line["kind"] == "task_state"
    and line["key"]
    and decode_state(line["wire"].encode()).task_uuid == line["key"]
]
WRITTEN = [
    line for line in STATES if key_of(line["key"]) == line["key"].encode()
]  # Go writes the others to other stores
GROUPS = [line for line in lines("task_states.jsonl") if line["kind"] == "group_meta"]
DECODED = [
    line
    for line in lines("state_decode.jsonl")
    if "payload" in line and line["kind"] == "task_state"
]


@pytest.fixture
def driver(empty_memcached: MemcachedServer) -> Iterator[MemcacheDriver]:
    driver = MemcacheDriver(parse_memcache_url(empty_memcached.url))
    yield driver
    driver.close()


@pytest.fixture
def backend(driver: MemcacheDriver) -> MemcacheBackend:
    return MemcacheBackend(driver)


def read(driver: MemcacheDriver, key: str) -> bytes:
    return driver.fetch([key.encode()], doing="testing")[key.encode()].value


def write(driver: MemcacheDriver, key: str, value: bytes) -> None:
    assert driver.send([put(key.encode(), value, b"3600")], doing="testing") == [b"STORED"]


def without_ours(document: bytes) -> bytes:
    """As somebody who knows nothing of the last field sees it."""
    fields = json.loads(document)
    assert list(fields)[-1] == "machinery_py"
    head, _, _ = document.rpartition(b',"machinery_py":')
    return head + b"}"


@pytest.mark.parametrize("line", SHARDS, ids=[line["key"][:30] for line in SHARDS])
def test_a_key_lies_on_the_server_where_go_puts_it(line: dict[str, Any]) -> None:
    if "error" in line:
        assert key_of(line["key"]).startswith(b"mpy:sha256:")  # Go refuses it
        return
    for count, index in line["index"].items():
        driver = MemcacheDriver([("127.0.0.1", 1)] * int(count))
        assert driver.server_of(key_of(line["key"])) == index
        assert key_of(line["key"]) == line["key"].encode()


def test_key_that_memcached_refuses_is_hashed() -> None:
    for name in (
        "",
        "with space",
        "tab\t",
        "new\r\nline",
        "x" * (LONGEST_KEY + 1),
        "mpy:c:group",
        "\x7f",
        "\ud800" * 90,
    ):
        key = key_of(name)
        assert key.startswith(b"mpy:sha256:")
        assert len(key) <= LONGEST_KEY
    assert key_of("x" * LONGEST_KEY) == b"x" * LONGEST_KEY
    assert key_of("x" * LONGEST_KEY, b"mpy:c:").startswith(b"mpy:c:sha256:")
    assert key_of("a") != key_of("a", b"mpy:c:")


@pytest.mark.parametrize("line", STATES, ids=[line["name"] for line in STATES])
def test_a_state_is_written_as_go_writes_it(
    driver: MemcacheDriver,
    backend: MemcacheBackend,
    empty_memcached: MemcachedServer,
    line: dict[str, Any],
) -> None:
    state = decode_state(line["wire"].encode())
    backend.apply([Change(key=state.task_uuid, mark="m", states=(state,), outbox=(b"more",))])

    key = key_of(line["key"])
    kept = driver.fetch([key], doing="testing")[key].value

    assert decode_state(kept) == state  # with the field that nobody asked for
    assert decode_state(without_ours(kept)) == state
    assert list(json.loads(without_ours(kept))) == list(json.loads(line["wire"]))
    assert backend.get_state(line["key"]) == state
    expected = 3600 if state.is_finished else CHORD_LIFE  # Go: 3600 for all
    assert expected - 5 <= time_left(empty_memcached, [key])[key] <= expected


@pytest.mark.parametrize("line", GROUPS, ids=[line["name"] for line in GROUPS])
def test_a_group_is_written_as_go_writes_it(
    driver: MemcacheDriver, backend: MemcacheBackend, line: dict[str, Any]
) -> None:
    group = decode_group(line["wire"].encode())
    backend.apply([Change(key="x", groups=(group,))])

    kept = read(driver, line["key"])

    assert decode_group(kept) == group
    assert list(json.loads(without_ours(kept))) == list(json.loads(line["wire"]))
    assert backend.get_group(line["key"]) == group


@pytest.mark.parametrize("line", GROUPS, ids=[line["name"] for line in GROUPS])
def test_a_group_that_go_wrote_is_read(
    driver: MemcacheDriver, backend: MemcacheBackend, line: dict[str, Any]
) -> None:
    write(driver, line["key"], line["wire"].encode())

    assert backend.get_group(line["key"]) == decode_group(line["wire"].encode())
    assert (
        backend.trigger_chord(line["key"])
        is not decode_group(line["wire"].encode()).chord_triggered
    )
    assert backend.trigger_chord(line["key"]) is False
    assert json.loads(read(driver, line["key"]))["ChordTriggered"] is True


@pytest.mark.parametrize("line", WRITTEN, ids=[line["name"] for line in WRITTEN])
def test_state_written_by_go_is_read_with_its_finality(
    driver: MemcacheDriver, backend: MemcacheBackend, line: dict[str, Any]
) -> None:
    state = decode_state(line["wire"].encode())
    write(driver, line["key"], line["wire"].encode())
    assert backend.get_state(line["key"]) == state

    late = TaskState(task_uuid=line["key"], state=State.FAILURE, error="late")
    backend.apply([Change(key=line["key"], mark="m", epoch=7, states=(late,))])

    assert (backend.get_state(line["key"]).error == "late") is not state.is_finished


@pytest.mark.parametrize("line", DECODED, ids=[line["name"] for line in DECODED])
def test_document_that_go_refuses_is_no_state_and_stays(
    driver: MemcacheDriver, backend: MemcacheBackend, line: dict[str, Any]
) -> None:
    body = line["payload"].encode()
    write(driver, "u", body)
    known = backend.get_states(["u"])
    assert bool(known) is (line["ok"] and line["value"]["State"] in list(State))

    if not known:
        with pytest.raises(NameRefused, match="'u'"):
            backend.begin([("u", 0)])
        with pytest.raises(NameRefused, match="'u'"):
            backend.apply(
                [
                    Change(
                        key="u",
                        mark="m",
                        epoch=1,
                        states=(TaskState(task_uuid="u", state=State.SUCCESS),),
                    )
                ]
            )
        assert read(driver, "u") == body
        return
    (begun,) = backend.begin([("u", 0)])
    if not begun.finished:
        done = TaskState(task_uuid="u", state=State.SUCCESS)
        assert backend.apply([Change(key="u", mark="m", epoch=begun.epoch, states=(done,))]) == [
            SETTLED
        ]
    assert backend.get_state("u").is_finished


def test_a_go_worker_that_finishes_a_task_of_ours_is_believed(
    driver: MemcacheDriver, backend: MemcacheBackend
) -> None:
    backend.apply(
        [Change(key="task_1", states=(TaskState(task_uuid="task_1", task_name="add", queue="q"),))]
    )
    (begun,) = backend.begin([("task_1", 0)])
    write(
        driver,
        "task_1",
        b'{"TaskUUID":"task_1","TaskName":"","State":"SUCCESS","Results":[{"Type":"int64","Value":3}],'
        b'"Error":"","CreatedAt":"0001-01-01T00:00:00Z","TTL":0}',
    )

    late = TaskState(task_uuid="task_1", state=State.FAILURE)
    assert backend.apply([Change(key="task_1", mark="m", epoch=begun.epoch, states=(late,))]) != [
        SETTLED
    ]

    assert [arg.value for arg in backend.get_state("task_1").results] == [3]
    assert backend.begin([("task_1", 0)])[0].finished is True


def test_a_result_that_looks_like_our_field_is_a_result(
    driver: MemcacheDriver, backend: MemcacheBackend
) -> None:
    body = b'{"TaskUUID":"task_1","TaskName":"","State":"SUCCESS",'
    body += b'"Results":[{"Type":"json","Value":{"a":1,"machinery_py":"eA=="}}],'
    body += b'"Error":"\\",\\"machinery_py\\":\\"","CreatedAt":"0001-01-01T00:00:00Z","TTL":0}'
    write(driver, "task_1", body)
    before = backend.get_state("task_1")
    assert before.results[0].value == {"a": 1, "machinery_py": "eA=="}

    backend.apply([Change(key="task_1", states=(before,), force=True)])

    assert backend.get_state("task_1") == before


def test_an_application_leaves_gos_documents(
    empty_memcached: MemcachedServer, driver: MemcacheDriver
) -> None:
    server = Server(Config(broker="memory://", result_backend=empty_memcached.url))

    @server.task
    def add(a: int, b: int) -> int:
        return a + b

    with server.new_worker(concurrency=2):
        result = group(add.signature(1, 2), add.signature(3, 4)).send()
        assert result.get(timeout=HANG) == [3, 7]
        document = json.loads(read(driver, result[0].uuid))
        meta = json.loads(read(driver, result.uuid))
    assert (document["TaskName"], document["State"], document["Results"]) == (
        "add",
        "SUCCESS",
        [{"Type": "int64", "Value": 3}],
    )
    assert meta["TaskUUIDs"] == [one.uuid for one in result]
    assert meta["GroupUUID"] == result.uuid
    server.close()


# Chords that Go shares

MEMBERS = ("task_1", "task_2")


def arrival(member: str, *, ok: bool = True) -> Arrival:
    return Arrival(
        group_uuid="group_1", task_uuid=member, total=len(MEMBERS), ok=ok, callback=b"{}"
    )


def go_ends(driver: MemcacheDriver, member: str, *, ok: bool = True) -> None:
    state = State.SUCCESS if ok else State.FAILURE
    write(
        driver,
        member,
        encode_state(TaskState(task_uuid=member, state=state, error="" if ok else "no")),
    )


def go_settles(driver: MemcacheDriver) -> None:
    write(
        driver,
        "group_1",
        encode_group(GroupMeta(group_uuid="group_1", task_uuids=MEMBERS, chord_triggered=True)),
    )


def we_end(backend: MemcacheBackend, member: str) -> None:
    state = TaskState(task_uuid=member, state=State.SUCCESS)
    assert backend.apply(
        [Change(key=member, mark="m", states=(state,), arrivals=(arrival(member),))]
    ) == [SETTLED]


def look_until_forgotten(poller: GoGroupPoller) -> None:
    def is_over() -> bool:
        if poller.due_in() == 0.0:
            poller.poll()
        return poller.due_in() == math.inf

    wait_until(is_over, HANG, "the group is forgotten")


@pytest.fixture
def poller(backend: MemcacheBackend) -> GoGroupPoller:
    """A worker's, which has run the first member of a group."""
    backend.apply([Change(key="g", groups=(GroupMeta(group_uuid="group_1", task_uuids=MEMBERS),))])
    we_end(backend, MEMBERS[0])
    poller = GoGroupPoller(backend)
    poller.note([arrival(MEMBERS[0])])
    return poller


def test_chord_go_ended_but_did_not_settle_is_settled_here(
    driver: MemcacheDriver, backend: MemcacheBackend, poller: GoGroupPoller
) -> None:
    go_ends(driver, MEMBERS[1])

    look_until_forgotten(poller)

    assert [(one.group_uuid, one.failed_member) for one in backend.ready_groups(9)] == [
        ("group_1", "")
    ]
    assert backend.apply([Change(key="group_1", fires="group_1")]) == [SETTLED]
    assert json.loads(read(driver, "group_1"))["ChordTriggered"] is True


def test_a_chord_that_go_has_settled_is_not_settled_again(
    driver: MemcacheDriver, backend: MemcacheBackend, poller: GoGroupPoller
) -> None:
    go_ends(driver, MEMBERS[1])
    go_settles(driver)

    look_until_forgotten(poller)

    assert backend.ready_groups(9) == []
    assert backend.apply([Change(key="group_1", fires="group_1")]) == [FENCED]


def test_a_ready_chord_that_go_has_settled_is_no_longer_ready(
    driver: MemcacheDriver, backend: MemcacheBackend
) -> None:
    backend.apply([Change(key="g", groups=(GroupMeta(group_uuid="group_1", task_uuids=MEMBERS),))])
    for member in MEMBERS:
        we_end(backend, member)
    assert len(backend.ready_groups(9)) == 1
    go_settles(driver)

    assert backend.apply([Change(key="group_1", fires="group_1")]) == [FENCED]

    assert backend.ready_groups(9) == []


def test_chord_go_flagged_with_a_failed_member_is_settled_here(
    driver: MemcacheDriver, backend: MemcacheBackend, poller: GoGroupPoller
) -> None:
    go_ends(driver, MEMBERS[1], ok=False)
    go_settles(driver)  # and tells nobody

    look_until_forgotten(poller)

    assert [one.failed_member for one in backend.ready_groups(9)] == [MEMBERS[1]]
    assert backend.apply([Change(key="group_1", fires="group_1")]) == [SETTLED]
    assert backend.ready_groups(9) == []


def test_worker_fires_a_chord_whose_member_ended_in_go(
    empty_memcached: MemcachedServer, driver: MemcacheDriver
) -> None:
    server = Server(Config(broker="memory://", result_backend=empty_memcached.url))
    server.register_task("one", lambda: 1)
    server.register_task("total", lambda *parts: sum(parts))
    members = [Signature.of("one"), Signature.of("one").replace(routing_key="of_go")]

    result = server.send_chord(Group(members) | Signature.of("total"))
    of_go = result.group.results[1].uuid
    write(
        driver,
        of_go,
        encode_state(TaskState(task_uuid=of_go, state=State.SUCCESS, results=(Arg.of(2),))),
    )
    with server.new_worker(concurrency=2):
        assert result.get(timeout=HANG) == 3
    server.close()

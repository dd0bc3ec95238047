"""How workflows are linked: UUIDs, groups, OnSuccess and ChordCallback, as Go writes them."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py import Chain, Server, Signature, WorkflowError, chain, chord, group
from machinery_py.tasks.linking import Plan, link
from machinery_py.tasks.signature import HEADER_COLLECT, HEADER_LAST, Arg, Step
from machinery_py.tasks.workflow import chord_callback, result_value
from machinery_py.wire.signatures import decode_signature, encode_signature
from tests.wire.golden_files import lines

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
GOLDEN = {line["name"]: json.loads(line["wire"]) for line in lines("signatures.jsonl")}


def sig(name: str, **fields: Any) -> Signature[Any]:
    return Signature(name=name, **fields)


def add(a: int, b: int) -> Signature[Any]:
    return Signature.of("add", a, b)


def linked(step: Step[Any]) -> Plan:
    """Return the plan as it is for Go: without our record of the workflow."""
    plan = link(step, now=NOW)
    first = [one.replace(headers={}) for one in plan.first]
    return msgspec.structs.replace(plan, first=first, groups=plan.groups[:-1])


def wire(signature: Signature[Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(encode_signature(signature))
    return found


def shape(signature: dict[str, Any], ids: dict[str, str] | None = None) -> Any:
    """The message in a stable form: ids in order of appearance, and an empty list for null."""
    ids = {} if ids is None else ids

    def walk(value: Any, key: str = "") -> Any:
        if key in ("UUID", "GroupUUID") and value:
            return ids.setdefault(value, f"{value.partition('_')[0]} {len(ids)}")
        if isinstance(value, dict):
            return {inner: walk(one, inner) for inner, one in value.items()}
        if isinstance(value, list):
            return [walk(one) for one in value]
        return value

    found = walk(signature)
    return json.loads(json.dumps(found).replace("null", "[]").replace("{}", "[]"))


def without_ours(signature: dict[str, Any]) -> dict[str, Any]:
    """The message without our header."""
    headers = {
        key: value for key, value in (signature["Headers"] or {}).items() if key != HEADER_LAST
    }
    return {
        **signature,
        "Headers": headers,
        "OnSuccess": [without_ours(one) for one in signature["OnSuccess"] or ()],
    }


# As Go writes it


def test_a_chain_is_gos() -> None:
    plan = linked(chain(sig("a"), sig("b", uuid="task_given"), sig("c")))
    assert shape(without_ours(wire(plan.first[0]))) == shape(GOLDEN["new_chain_1"])
    assert [step.uuids[0] for step in plan.steps][1] == "task_given"


def test_a_group_is_gos() -> None:
    members = [add(1, 1), add(2, 2), add(5, 6)]
    plan = linked(group(one.replace(routing_key="machinery_tasks") for one in members))
    ours: dict[str, str] = {}
    gos: dict[str, str] = {}
    for number, member in enumerate(plan.first, 1):
        golden = GOLDEN.get(f"send_group_{number}")
        if golden is not None:
            assert shape(wire(member), ours) == shape(golden, gos)


def test_a_chord_is_gos() -> None:
    callback = Signature[Any](name="multiply", args=[Arg(type="int64", value=3)], routing_key="low")
    members = group(
        add(1, 1).replace(routing_key="machinery_tasks"),
        add(5, 5).replace(routing_key="machinery_tasks"),
    )
    plan = linked(chord(members, callback))
    assert shape(wire(plan.first[0])) == shape(GOLDEN["send_chord_1"])
    assert plan.first[0].chord_callback == plan.first[1].chord_callback


def test_a_callback_with_its_results_is_gos() -> None:
    callback = Signature[Any](
        name="strs", uuid="chord_1", routing_key="machinery_tasks", args=[Arg.of("own")]
    )
    filled = chord_callback(callback, [(Arg.of(7), Arg.of("x")), ()])
    assert shape(wire(filled)) == shape(GOLDEN["chord_callback_mixed"])


# UUIDs and groups


def test_uuids_name_their_kind() -> None:
    plan = linked(sig("a") | group(sig("b"), sig("c")) | sig("d") | sig("e"))
    a, members, d, e = plan.steps
    assert a.uuids[0].startswith("task_")
    assert all(uuid.startswith("task_") for uuid in members.uuids)
    assert d.uuids[0].startswith("chord_")
    assert e.uuids[0].startswith("task_")
    (meta,) = plan.groups
    assert meta.group_uuid.startswith("group_")
    assert (tuple(meta.task_uuids), meta.created_at) == (tuple(members.uuids), NOW)


def test_each_linking_makes_new_uuids_and_keeps_the_workflow() -> None:
    steps = sig("a") | sig("b")
    first, second = linked(steps), linked(steps)
    assert not {one.uuids[0] for one in first.steps} & {one.uuids[0] for one in second.steps}
    assert all(
        isinstance(one, Signature) and not one.uuid and not one.on_success for one in steps.steps
    )


def test_callbacks_of_the_users_own_are_kept_where_go_overwrites_them() -> None:
    plan = linked(chain(sig("a", on_success=(sig("mine"),)), sig("b", on_success=(sig("kept"),))))
    assert [one.name for one in plan.first[0].on_success] == ["mine", "b"]
    assert [one.name for one in plan.first[0].on_success[1].on_success] == ["kept"]


def test_members_know_their_group_and_the_callback() -> None:
    plan = linked(chord(group(sig("a"), sig("b")), sig("cb")))
    assert [one.group_task_count for one in plan.first] == [2, 2]
    assert {one.group_uuid for one in plan.first} == {plan.groups[0].group_uuid}
    assert {one.chord_callback.uuid for one in plan.first if one.chord_callback} == set(
        plan.steps[1].uuids
    )


def test_a_group_without_a_callback_has_none() -> None:
    plan = linked(group(sig("a"), sig("b")))
    assert [one.chord_callback for one in plan.first] == [None, None]


def test_a_step_behind_a_group_is_its_callback_and_goes_on() -> None:
    plan = linked(sig("a") | group(sig("b"), sig("c")) | sig("d") | sig("e"))
    (a,) = plan.first
    b, c = a.on_success
    assert (b.name, c.name) == ("b", "c")
    assert b.chord_callback is not None
    assert (b.chord_callback.name, [one.name for one in b.chord_callback.on_success]) == (
        "d",
        ["e"],
    )
    assert list(b.on_success) == []


def test_of_a_member_that_is_a_chain_the_last_step_is_the_member() -> None:
    plan = linked(group(sig("a") | sig("b") | sig("c"), sig("d")) | sig("cb"))
    head, d = plan.first
    assert (head.group_uuid, head.chord_callback) == ("", None)
    last = head.on_success[0].on_success[0]
    assert (last.name, last.group_uuid, last.group_task_count) == ("c", d.group_uuid, 2)
    assert tuple(plan.groups[0].task_uuids) == (last.uuid, d.uuid) == tuple(plan.steps[0].uuids)
    assert tuple(plan.steps[0].leading) == (head.uuid, head.on_success[0].uuid)


def test_a_chord_in_a_member_makes_two_groups() -> None:
    plan = linked(chord(group(group(sig("a"), sig("b")) | sig("inner"), sig("c")), sig("outer")))
    assert len(plan.groups) == 2
    a, b, c = plan.first
    assert a.group_uuid == b.group_uuid != c.group_uuid
    assert a.chord_callback is not None
    assert a.chord_callback.group_uuid == c.group_uuid
    assert a.chord_callback.chord_callback == c.chord_callback


def test_results_can_be_kept_back_everywhere() -> None:
    plan = linked(
        chain(sig("a"), group(sig("b") | sig("c"), sig("d")), sig("e"), pass_results=False)
    )
    (a,) = plan.first
    b, d = a.on_success
    assert all(
        one.immutable for one in (a, b, b.on_success[0], d, d.chord_callback) if one is not None
    )


def test_collect_is_a_header() -> None:
    plan = linked(chord(group(sig("a")), sig("cb"), collect=True))
    assert plan.first[0].chord_callback is not None
    assert plan.first[0].chord_callback.headers == {HEADER_COLLECT: "1"}


@pytest.mark.parametrize(
    "make",
    [
        chain,
        lambda: chord(sig("a"), sig("b")),
        lambda: chord([sig("a")], sig("b"), on_failure="never"),
    ],
)
def test_what_can_never_work_is_refused(make: Any) -> None:
    with pytest.raises(WorkflowError):
        make()


def test_chains_in_chains_are_one_chain() -> None:
    inner = sig("b") | sig("c")
    assert [one.name for one in (sig("a") | inner).steps] == ["a", "b", "c"]  # type: ignore[attr-defined]
    assert [one.name for one in chain(inner, sig("d")).steps] == ["b", "c", "d"]  # type: ignore[attr-defined]


def test_signature_without_a_server_cannot_send_itself() -> None:
    for step in (sig("a"), sig("a") | sig("b"), group(sig("a"))):
        with pytest.raises(WorkflowError, match="belong to no Server"):
            step.send()
    with pytest.raises(WorkflowError, match=r"without members .*use server\.send_group"):
        group().send()


def test_a_workflow_is_sent_by_the_first_that_has_a_server() -> None:
    server = Server("memory://")
    task = server.register_task("task", lambda: None)
    result = (sig("a") | group(sig("b"), task.signature())).send()
    assert result.uuid
    server.close()


# Results


@pytest.mark.parametrize(
    ("results", "value"),
    [
        ((), None),
        ((Arg.of(1),), 1),
        ((Arg.of(1), Arg.of("x")), (1, "x")),
        ((Arg(type="struct", value={"A": 1}),), {"A": 1}),
    ],
)
def test_results_are_none_one_or_a_tuple(results: tuple[Arg, ...], value: object) -> None:
    assert result_value(results) == value


def test_a_callback_may_take_nothing_or_a_list() -> None:
    results = [(Arg.of(1),), (), (Arg.of("a"), Arg.of("b"))]
    callback = Signature[Any](name="cb", args=(Arg.of("own"),))
    assert chord_callback(callback.replace(immutable=True), results).args == callback.args
    assert [arg.value for arg in chord_callback(callback, results).args] == ["own", 1, "a", "b"]
    (own, all_) = chord_callback(callback.with_headers(**{HEADER_COLLECT: "1"}), results).args
    assert own.value == "own"
    assert all_.type == "json"
    assert all_.value == [1, None, ["a", "b"]]


# Any workflow

STEPS = st.recursive(
    st.sampled_from("abc").map(sig),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(Chain),
        # A group in a group or at a member's end is refused; a task behind it makes it fit.
        st.lists(inner.map(lambda step: step | sig("x")), min_size=1, max_size=3).map(
            lambda members: group(members) | sig("cb")
        ),
    ),
    max_leaves=8,
)


@given(STEPS)
def test_linked_workflow_has_each_task_once_and_can_be_encoded(step: Step[Any]) -> None:
    plan = linked(step)

    seen: dict[str, Signature[Any]] = {}
    callbacks: set[str] = set()
    waiting = [decode_signature(encode_signature(one)) for one in plan.first]
    while waiting:
        one = waiting.pop()
        assert one.uuid
        assert one.uuid not in seen
        seen[one.uuid] = one
        waiting.extend(one.on_success)
        if one.chord_callback is not None and one.chord_callback.uuid not in callbacks:
            callbacks.add(one.chord_callback.uuid)
            waiting.append(one.chord_callback)

    for meta in plan.groups:
        members = [seen[uuid] for uuid in meta.task_uuids]
        assert {one.group_uuid for one in members} == {meta.group_uuid}
        assert {one.group_task_count for one in members} == {len(members)}
    planned = [uuid for one in plan.steps for uuid in (*one.uuids, *one.leading)]
    assert set(planned) <= set(seen)

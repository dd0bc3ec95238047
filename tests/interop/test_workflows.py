"""Workflows beyond Go's own, with steps that Go workers run: the table in wire-format.md."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from machinery_py import (
    Replace,
    Server,
    TaskFailed,
    WorkflowError,
    chain,
    chord,
    current_task,
    group,
)
from machinery_py.tasks import linking
from machinery_py.tasks.signature import Signature, Step
from machinery_py.tasks.states import State
from machinery_py.testing.waiting import HANG, wait_until
from tests.interop.conftest import Fleet
from tests.interop.fleet import call

#: Who runs the steps: one language, or both by turns.
TURNS = {"go": ("go", "go"), "go first": ("go", "python"), "python first": ("python", "go")}


@pytest.fixture
def server(fleet: Fleet) -> Server:
    """Return a server with a worker of each language, each with a queue of its own."""
    server = fleet.python()
    _register(server)
    fleet.go_worker("of_go")
    # Go sends `machinery.join` to the default queue.
    return fleet.python_worker(server, "of_python", "machinery_tasks")


def _register(server: Server) -> None:
    @server.task("listed")
    def listed(values: list[Any]) -> list[Any]:
        return values

    @server.task("counted")
    def counted(*values: Any) -> int:
        return len(values)

    @server.task("told")
    def told(error: str) -> str:
        failed = current_task().failed
        return f"{error} in {failed.task if failed is not None else 'Go'}"

    @server.task("give_way")
    def give_way(shape: str) -> None:
        raise Replace(_in_place(shape))


def add(queue: str, *numbers: int, **fields: Any) -> Signature[int]:
    return call("add", *(("int64", number) for number in numbers), routing_key=queue, **fields)


def total(queue: str) -> Signature[int]:
    return call("total", routing_key=queue)


def fail(queue: str, **fields: Any) -> Signature[None]:
    return call("fail", ("string", "no"), routing_key=queue, **fields)


def _in_place(shape: str) -> Step[Any]:
    match shape:
        case "task":
            return add("of_go", 1, 2)
        case "chain":
            return chain(add("of_go", 1, 2), add("of_go", 5))
        case "chord":
            return chain(group(add("of_go", 1, 1), add("of_go", 2, 2)), total("of_go"))
        case "group":
            return group(add("of_go", 1, 1), add("of_go", 2, 2))
        case _:
            return chain(fail("of_go"), add("of_go", 5))


def _forms(server: Server, one: str, two: str) -> dict[str, tuple[Step[Any], Any]]:
    """Return workflows by name, each with its result. `one` and `two` are queues."""
    tasks = server.app.registry.get
    first, second, third = add(one, 0, 10), add(two, 1, 10), add(one, 2, 10)
    both, doubled = group(first, second), call("mul", routing_key=two)
    listed = call("listed", routing_key="of_python")
    # A Go worker that sends a group may lose one of its other messages: see wire-format.md.
    before = add("of_python", 0, 10)
    return {
        "map": (tasks("echo_int64").options(queue=one).map([1, 2]) | total(two), 3),
        "starmap": (tasks("add").options(queue=two).starmap([(1, 2), (3, 4)]), [3, 7]),
        "results are kept": (chain(first, add(two, 1, 2), pass_results=False), 3),
        "fixed step": (chain(first, add(two, 1, 2).fixed()), 3),
        "fixed callback": (both | add(two, 1, 2).fixed(), 3),
        "empty group": (chain(group([]), total(one)), 0),
        "step before an empty group": (chain(first, group([]), total(two)), 0),
        "group behind a group": (both | group(add(one), doubled), [21, 110]),
        "and a step behind it": (chain(both, group(add(one), doubled), total(one)), 131),
        "group in a chain": (chain(before, group(add(one, 1), add(two, 2)), total(one)), 23),
        "group in a group": (group(both, third), [[10, 11], 12]),
        "group in a group in a group": (group(group(both, second), third), [[[10, 11], 11], 12]),
        "group behind a member": (
            group(chain(before, group(add(one, 1), add(two, 2))), third),
            [[11, 12], 12],
        ),
        "one list of a group in a group": (
            # If Go ended the last member, it would pass each result by itself.
            chord(group(both, add("of_python", 2, 10)), listed, collect=True),
            [[10, 11], 12],
        ),
        "two callbacks": (both.then(total(one), total(two)), [10, 11]),
        "skip": (
            chord([first, fail(two), add("of_python", 1, 1)], total(one), on_failure="skip"),
            12,
        ),
        "collect": (
            chord(
                [first, fail(two), add("of_python", 1, 1)],
                call("counted", routing_key="of_python"),
                on_failure="collect",
            ),
            3,
        ),
    }


def test_forms_end_alike_whoever_runs_their_steps(server: Server) -> None:
    sent = {}
    for turns, (one, two) in TURNS.items():
        for form, (step, wanted) in _forms(server, f"of_{one}", f"of_{two}").items():
            sent[turns, form] = server.send(step), wanted

    found = {name: result.get(timeout=HANG) for name, (result, _) in sent.items()}

    assert found == {name: wanted for name, (_, wanted) in sent.items()}


def test_callbacks_of_a_chord_run_when_go_ends_it(server: Server) -> None:
    told = call("told", routing_key="of_python")
    by_go = told.replace(uuid="of_a_task")
    by_python = told.replace(uuid="of_a_group")
    listed = call("listed", routing_key="of_python", uuid="of_success").with_headers(
        machinery_collect="1"
    )

    server.send(fail("of_go").catch(by_go))
    server.send(group(fail("of_go"), add("of_python", 1, 1)).catch(by_python))
    both = group(add("of_go", 1, 1), add("of_go", 2, 2))
    server.send(both.then(listed, total("of_go").replace(uuid="of_the_sum")))

    assert _end_of(server, "of_a_task") == "no in Go"
    assert _end_of(server, "of_a_group").endswith("no in fail")
    assert _end_of(server, "of_success") == [2, 4]
    assert _end_of(server, "of_the_sum") == 6


def _end_of(server: Server, uuid: str) -> Any:
    wait_until(lambda: server.backend.get_states([uuid]), what=uuid)
    return server.result(uuid).get(timeout=HANG)


def test_what_go_does_not_know_fails_in_words_or_waits(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = server.app.registry.get("add").options(queue="of_go").chunks([(1, 2), (3, 4)], 2)
    members = group(add("of_go", 1, 1), add("of_go", 2, 2))
    collected = chord(members, call("counted", ("int64", 1), routing_key="of_python"), collect=True)
    monkeypatch.setattr(linking, "LONG", 10)
    monkeypatch.setattr(linking, "PIECE", 4)
    long = server.send_chain(chain(add("of_go", 0, 1), *(add("of_go", 1) for _ in range(11))))

    with pytest.raises(TaskFailed, match="too many input arguments"):
        server.send(chunks).get(timeout=HANG)
    assert server.send(collected).get(timeout=HANG) == 1 + 2  # not one list
    assert long.steps[3].get(timeout=HANG) == 4  # the first piece; nobody goes on
    assert _state(server, long.uuid) is State.PENDING


def test_headers_of_kinship_end_at_a_step_in_go(server: Server) -> None:
    def sent(first: str, then: str, key: str) -> str:
        header = call("header", ("string", key), routing_key=f"of_{then}")
        flow = server.send(chain(call("none", routing_key=f"of_{first}"), header))
        return str(flow.get(timeout=HANG))

    keys = ["machinery_root", "machinery_parent", "machinery_origin"]
    found = {
        (one, key): sent(one, other, key)
        for (one, other), key in itertools.product([("go", "python"), ("python", "go")], keys)
    }

    assert [found["go", key] for key in keys] == ["", "", ""]
    assert found["python", "machinery_root"].startswith("group_flow_")
    assert found["python", "machinery_parent"].startswith("task_")
    assert found["python", "machinery_origin"] == "python"


def test_replaced_task_ends_with_its_workflow_in_go(server: Server) -> None:
    def sent(shape: str) -> Any:
        return server.send_task(call("give_way", ("string", shape), routing_key="of_python"))

    results = {shape: sent(shape) for shape in ("task", "chain", "chord", "group")}
    broken = sent("fail")

    ends = {shape: one.get(timeout=HANG) for shape, one in results.items()}
    assert ends == {"task": 3, "chain": 8, "chord": 6, "group": [2, 4]}
    assert _state(server, broken.uuid) is State.RETRY  # Go does not say that it ends with a step


def test_step_that_failed_in_go_cannot_be_retried(server: Server) -> None:
    def sent(queue: str) -> Any:
        flaky = call("flaky", ("string", queue), ("int64", 1), routing_key=queue)
        members = group(flaky, add("of_go", 1, 1), add("of_python", 2, 2))
        return server.send(members | total("of_go"))

    of_go, of_python = sent("of_go"), sent("of_python")
    for one in (of_go, of_python):
        wait_until(lambda: _state(server, one.uuid) is State.FAILURE, what="the chord has failed")  # noqa: B023
        wait_until(lambda: server.workflow(one.workflow).progress[0] == 4, what="all are over")  # noqa: B023

    with pytest.raises(WorkflowError, match="its message is not kept"):
        server.workflow(of_go.workflow).retry()
    server.workflow(of_python.workflow).retry()
    assert of_python.get(timeout=HANG) == 2 + 2 + 4


def test_go_worker_runs_a_cancelled_step(fleet: Fleet, server: Server) -> None:
    flow = server.send(chain(add("late", 1, 1), add("of_python", 5), add("of_go", 7)))
    other = server.send(chain(add("late", 1, 1), add("of_go", 5)))
    for one in (flow, other):
        server.workflow(one.workflow).cancel()
    fleet.go_worker("late")

    # Go writes over the state, and what it sends has no root; the record names the steps.
    wait_until(lambda: _state(server, other.uuid) is State.SUCCESS, what="the whole chain in Go")
    with pytest.raises(TaskFailed, match="revoked"):
        flow.get(timeout=HANG)
    assert server.workflow(flow.workflow).is_cancelled


def _state(server: Server, uuid: str) -> State | None:
    found = server.backend.get_states([uuid]).get(uuid)
    return found.state if found else None

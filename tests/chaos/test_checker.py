"""The checker must find the one thing that is wrong in each hand-made history."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest

from machinery_py.tasks.states import State
from tests.chaos.app import digest
from tests.chaos.checker import check
from tests.chaos.history import Final, Happened, History, Run, Sent, Settled, read_folder
from tests.chaos.plan import Call, fold

MEMBERS = ("m0", "m1", "m2")
RESULTS = (1, 2, 3)


def good() -> History:
    """A task, a chain of two, a chord of three, a failure with its callback: all correct."""
    calls = [
        Call(uuid="task", task="noop", args=(5,)),
        Call(uuid="first", task="step", args=(7,)),
        Call(uuid="second", task="step", args=(8,), follows="first"),
        *(
            Call(uuid=uuid, task="step", args=(number,))
            for uuid, number in zip(MEMBERS, RESULTS, strict=True)
        ),
        Call(uuid="chord", task="gather", args=(9,), gathers=MEMBERS),
        Call(uuid="chord-error", task="on_failure", args=(9,), catches="chord"),
        Call(uuid="broken", task="fails", args=(4,), fails=True),
        Call(uuid="broken-error", task="on_failure", args=(4,), catches="broken"),
        Call(uuid="flaky", task="flaky", args=(1, 6), retries=1),
    ]
    history = History(calls={call.uuid: call for call in calls})
    for uuid in ("task", "first", *MEMBERS, "broken", "flaky"):
        history.sent[uuid] = Sent(word="accepted", at=0.5)
    ran(history, "task", 1.0, [5])
    ran(history, "first", 1.0, [7])
    ran(history, "second", 2.0, [8, 7], result=fold(8, [7]))
    for uuid, number in zip(MEMBERS, RESULTS, strict=True):
        ran(history, uuid, 1.0 + number / 10, [number])
    ran(history, "chord", 3.0, [9, *RESULTS], result=fold(9, RESULTS))
    ran(history, "broken", 1.0, [4], error="planned failure 4")
    ran(history, "broken-error", 2.0, ["planned failure 4", 4], result=4)
    history.runs.append(Run(uuid="flaky", run=0, fence=1, worker="w1", start=1.0, end=1.01))
    history.settled.append(Settled(uuid="flaky", run=0, worker="w1", state="RETRY", at=1.02))
    ran(history, "flaky", 1.5, [1, 6], run=1, result=6)
    history.finished = len(history.states)
    return history


def ran(
    history: History,
    uuid: str,
    at: float,
    args: list[object],
    *,
    result: object = None,
    error: str = "",
    run: int = 0,
    worker: str = "w1",
) -> Run:
    """It ran once, and ended like this."""
    state = State.FAILURE if error else State.SUCCESS
    one = Run(
        uuid=uuid,
        run=run,
        fence=1,
        worker=worker,
        start=at,
        end=at + 0.01,
        ok=not error,
        settled=at + 0.02,
        digest=digest(args),
    )
    history.runs.append(one)
    history.settled.append(Settled(uuid=uuid, run=run, worker=worker, state=state, at=at + 0.02))
    history.states[uuid] = Final(
        state=state,
        results=() if error else (result if result is not None else args[-1],),
        error=error,
    )
    return one


def again(
    history: History,
    uuid: str,
    at: float,
    *,
    worker: str = "w2",
    fence: int = 2,
    settled: bool = True,
    same: bool = True,
) -> Run:
    """Its last execution once more; `settled`: it counts; `same`: not a second message."""
    before = next(one for one in reversed(history.runs) if one.uuid == uuid)
    one = Run(
        uuid=uuid,
        run=before.run,
        fence=fence,
        worker=worker,
        start=at,
        end=at + 0.01,
        ok=before.ok,
        digest=before.digest,
        again=same,
    )
    if settled:
        before.settled, one.settled = None, at + 0.02
    history.runs.append(one)
    return one


def lose_a_task(history: History) -> None:
    history.runs = [one for one in history.runs if one.uuid != "task"]
    history.settled = [one for one in history.settled if one.uuid != "task"]
    history.states["task"] = Final(state=State.PENDING)
    history.finished = len(history.states) - 1


def lose_a_task_that_a_task_sent(history: History) -> None:
    history.sent["child"] = Sent(word="accepted", parent="task")


def lose_a_callback(history: History) -> None:
    history.runs = [one for one in history.runs if one.uuid != "second"]
    history.settled = [one for one in history.settled if one.uuid != "second"]
    del history.states["second"]
    history.finished = len(history.states)


def run_a_task_that_nobody_sent(history: History) -> None:
    history.runs.append(Run(uuid="stranger", run=0, fence=1, worker="w1", start=1.0))


def settle_a_task_twice(history: History) -> None:
    history.settled.append(Settled(uuid="task", run=0, worker="w2", state="SUCCESS", at=2.0))


def count_an_end_too_many(history: History) -> None:
    history.finished = len(history.states) + 1


def fire_a_chord_twice(history: History) -> None:
    again(history, "chord", 4.0, fence=1)


def fire_a_chord_before_its_members_ended(history: History) -> None:
    next(one for one in history.runs if one.uuid == "chord").start = 1.15


def give_a_chord_results_in_another_order(history: History) -> None:
    next(one for one in history.runs if one.uuid == "chord").digest = digest([9, 2, 1, 3])


def repeat_a_task_without_a_fault(history: History) -> None:
    again(history, "task", 2.0)


def repeat_a_task_after_a_fault_of_another_worker(history: History) -> None:
    again(history, "task", 2.0)
    history.faults.append(Happened(kind="kill", worker="w9", start=1.005, end=1.005))


def give_two_executions_one_fence(history: History) -> None:
    again(history, "task", 1.005, fence=1)
    history.faults.append(Happened(kind="kill", worker="w1", start=1.002, end=1.002))


def settle_a_task_that_somebody_else_has(history: History) -> None:
    again(history, "task", 1.005, settled=False)
    history.faults.append(Happened(kind="kill", worker="w1", start=1.002, end=1.002))


def repeat_a_task_that_was_settled_before_the_fault(history: History) -> None:
    again(history, "task", 2.0, settled=False)
    history.faults.append(Happened(kind="kill", worker="w1", start=1.5, end=1.5))


def repeat_a_task_after_a_fault_that_explains_nothing(history: History) -> None:
    history.runs[0].settled = None
    again(history, "task", 2.0)
    history.faults.append(Happened(kind="scripts", worker="", start=1.005, end=1.005))


def let_a_state_go_back(history: History) -> None:
    history.samples["task"] = [
        (0, State.PENDING),
        (0, State.STARTED),
        (0, State.RECEIVED),
        (0, State.SUCCESS),
    ]


def let_a_final_state_change(history: History) -> None:
    history.samples["task"] = [(0, State.SUCCESS), (0, State.FAILURE)]


def let_a_run_go_back(history: History) -> None:
    history.samples["flaky"] = [(1, State.STARTED), (0, State.RETRY)]


def fail_a_good_task(history: History) -> None:
    history.states["task"] = Final(state=State.FAILURE, error="?")


def give_a_good_task_up(history: History) -> None:
    history.states["task"] = Final(state=State.FAILURE, error="3 workers died", error_type="Poison")
    history.strikes["task"] = 3


def store_another_result(history: History) -> None:
    history.states["second"] = Final(state=State.SUCCESS, results=(1,))


def charge_a_retry_to_the_task(history: History) -> None:
    history.runs.append(
        Run(uuid="flaky", run=2, fence=1, worker="w1", start=1.7, end=1.71, ok=True)
    )


def start_before_the_eta(history: History) -> None:
    history.sent["task"] = Sent(word="accepted", eta=1000.0)
    history.runs[0].started_at = 999.9


def leave_a_message_behind(history: History) -> None:
    history.left.append("1 held")


def let_a_worker_end_by_itself(history: History) -> None:
    history.incidents.append("w3 ended by itself with 1")


WRONG: dict[Callable[[History], None], str] = {
    lose_a_task: "lost",
    lose_a_task_that_a_task_sent: "lost",
    lose_a_callback: "lost",
    run_a_task_that_nobody_sent: "unexpected",
    settle_a_task_twice: "completed twice",
    count_an_end_too_many: "completed twice",
    fire_a_chord_twice: "chord fired twice",
    fire_a_chord_before_its_members_ended: "order",
    give_a_chord_results_in_another_order: "wrong arguments",
    repeat_a_task_without_a_fault: "unexplained repeat",
    repeat_a_task_after_a_fault_of_another_worker: "unexplained repeat",
    repeat_a_task_that_was_settled_before_the_fault: "unexplained repeat",
    repeat_a_task_after_a_fault_that_explains_nothing: "unexplained repeat",
    give_two_executions_one_fence: "fence",
    settle_a_task_that_somebody_else_has: "fence",
    let_a_state_go_back: "state went back",
    let_a_final_state_change: "state went back",
    let_a_run_go_back: "state went back",
    fail_a_good_task: "wrong outcome",
    give_a_good_task_up: "blamed",
    store_another_result: "wrong result",
    charge_a_retry_to_the_task: "retries",
    start_before_the_eta: "too early",
    leave_a_message_behind: "left behind",
    let_a_worker_end_by_itself: "worker",
}


def test_correct_history_passes() -> None:
    verdict = check(good())

    assert verdict.violations == []
    assert verdict.word == "PASSED"


@pytest.mark.parametrize(
    ("harm", "rule"), WRONG.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_checker_finds_each_broken_rule(harm: Callable[[History], None], rule: str) -> None:
    history = good()
    harm(history)

    verdict = check(history)

    assert rule in verdict.rules()
    assert verdict.word == "FAILED"
    assert rule in verdict.page("test")


#: A second run of "task" where messages may be doubled: same message?, the fault, explained?
DOUBLES: dict[str, tuple[bool, Happened | None, bool]] = {
    "no fault": (True, None, False),
    "a second message without a fault": (False, None, False),
    "a fault before it was sent": (
        False,
        Happened(kind="server", worker="", start=-2.0, end=-1.9),
        False,
    ),
    "a kill of the server while it was sent": (
        False,
        Happened(kind="server", worker="", start=-1.4, end=-1.3),
        True,
    ),
    "a reset of a worker while it was sent": (
        False,
        Happened(kind="reset", worker="w1", start=-1.4, end=-1.3),
        False,
    ),
    "a kill of the server after it was sent": (
        False,
        Happened(kind="server", worker="", start=-1.1, end=-1.0),
        False,
    ),
    "a reset of its worker while it ran": (
        True,
        Happened(kind="reset", worker="w1", start=1.005, end=1.005),
        True,
    ),
    "a reset of another worker while it ran": (
        True,
        Happened(kind="reset", worker="w9", start=1.005, end=1.005),
        False,
    ),
    "a reset of the second worker before that": (
        True,
        Happened(kind="reset", worker="w2", start=3.0, end=3.0),
        False,
    ),
}


@pytest.mark.parametrize(("same", "fault", "explained"), DOUBLES.values(), ids=DOUBLES)
def test_a_second_execution_where_messages_may_be_doubled(
    same: bool, fault: Happened | None, explained: bool
) -> None:
    history = good()
    history.doubles = True
    history.sent["task"] = Sent(word="accepted", at=-1.2, tried=-1.5)
    again(history, "task", 5.0, same=same)
    if fault is not None:
        history.faults.append(fault)

    verdict = check(history)

    assert verdict.rules() == (set() if explained else {"unexplained repeat"})


@pytest.mark.parametrize("forgets", [True, False])
def test_checker_explains_a_repeat_by_a_claim_that_was_forgotten(forgets: bool) -> None:
    history = good()
    history.forgets = forgets
    again(history, "task", 5.0)
    history.faults.append(Happened(kind="server", worker="", start=0.5, end=0.6))

    assert check(history).rules() == (set() if forgets else {"unexplained repeat"})


@pytest.mark.parametrize(
    ("fault", "explained"),
    [
        (Happened(kind="reset", worker="w1", start=1.005, end=1.01), True),
        (Happened(kind="reset", worker="w1", start=0.9, end=0.95), False),
        (Happened(kind="reset", worker="w9", start=1.005, end=1.01), False),
        (Happened(kind="server", worker="", start=1.015, end=1.3), True),
        (Happened(kind="server", worker="", start=1.05, end=1.1), False),
    ],
)
def test_checker_explains_a_double_follow_up_after_a_kill(fault: Happened, explained: bool) -> None:
    history = good()
    history.doubles = True
    again(history, "second", 9.0, same=False)
    history.faults.append(fault)

    assert check(history).rules() == (set() if explained else {"unexplained repeat"})


def test_checker_explains_a_double_after_two_returns() -> None:
    history = good()
    history.doubles = True
    first = next(one for one in history.runs if one.uuid == "task")
    first.again = True
    again(history, "task", 9.0)
    history.faults.append(Happened(kind="kill", worker="w7", start=0.7, end=0.7))
    moved = check(history)

    first.again = False
    fresh = check(history)

    assert moved.rules() == set()
    assert fresh.rules() == {"unexplained repeat"}


def test_repeat_after_a_kill_is_explained_with_its_recovery_time() -> None:
    history = good()
    first = history.runs[0]
    first.end, first.settled, history.settled[0] = (
        None,
        None,
        Settled(uuid="task", run=0, worker="w2", state="SUCCESS", at=1.7),
    )
    history.faults.append(Happened(kind="kill", worker="w1", start=1.005, end=1.006))
    again(history, "task", 1.505)

    verdict = check(history)

    assert verdict.violations == []
    assert str(verdict.figures["recovery after kill"]).startswith("p50 0.500 s, p99 0.500 s")


def test_a_chord_with_a_failed_member_must_fail_without_a_run() -> None:
    history = good()
    error = "planned failure 1"
    history.calls["m0"] = Call(uuid="m0", task="fails", args=(1,), fails=True)
    history.runs = [one for one in history.runs if one.uuid not in ("m0", "chord")]
    history.settled = [one for one in history.settled if one.uuid not in ("m0", "chord")]
    ran(history, "m0", 1.1, [1], error=error)
    history.states["chord"] = Final(
        state=State.FAILURE, error="chord member failed", error_type="ChordMemberFailed"
    )
    ran(history, "chord-error", 3.0, ["chord member failed", 9], result=9)
    history.finished = len(history.states)
    passed = check(history)

    ran(history, "chord", 3.0, [9, *RESULTS])
    failed = check(history)

    assert passed.violations == []
    assert "chord" in failed.rules()


def test_task_with_an_unknown_send_outcome_may_exist_or_not() -> None:
    history = good()
    history.sent["task"] = Sent(word="unknown")
    there = check(history)

    history.runs = [one for one in history.runs if one.uuid != "task"]
    history.settled = [one for one in history.settled if one.uuid != "task"]
    del history.states["task"]
    history.finished = len(history.states)
    absent = check(history)

    assert there.violations == absent.violations == []


def test_a_run_that_was_not_drained_says_nothing() -> None:
    history = good()
    history.drained = False

    assert check(history).word == "INVALID"


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_worker_that_ran_its_old_delivery_too_has_settled_the_new_one(
    order: tuple[int, int], tmp_path: pathlib.Path
) -> None:
    lines = [f"start\t{fence}.0\ttask\t0\t{fence}\tx\t1.0\tfirst" for fence in order]
    lines += [f"end\t{5 - fence}.0\ttask\t0\t{fence}\tok" for fence in order]
    (tmp_path / "ledger-w1").write_text("\n".join([*lines, "settled\t6.0\ttask\t0\tSUCCESS", ""]))
    history = good()
    history.runs = []

    read_folder(history, tmp_path)

    assert {one.fence: (one.end, one.settled) for one in history.runs} == {
        1: (4.0, None),
        2: (3.0, 6.0),
    }

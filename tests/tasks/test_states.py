"""Which state may follow which."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py.tasks.signature import Arg
from machinery_py.tasks.states import ZERO_TIME, State, TaskState, advance, state_named

P, RC, S, RT, OK, F = State
AT = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)
LATER = AT + dt.timedelta(seconds=5)


def state(word: State, run: int = 0, **fields: Any) -> TaskState:
    return TaskState(task_uuid="task_1", state=word, run=run, **fields)


@pytest.mark.parametrize("word", list(State))
def test_the_first_state_seen_may_be_any(word: State) -> None:
    assert advance(None, state(word)) == state(word)


FORWARD = {
    (P, RC),
    (P, S),
    (P, RT),
    (P, OK),
    (P, F),
    (RC, S),
    (RC, RT),
    (RC, OK),
    (RC, F),
    (S, RT),
    (S, OK),
    (S, F),
    (RT, OK),
    (RT, F),
}
AGAIN = {(P, P), (RC, RC), (S, S), (RT, RT)}


@pytest.mark.parametrize(
    ("before", "after"), [(a, b) for a in State for b in State], ids=lambda word: word.value
)
def test_state_only_goes_forward_within_a_run(before: State, after: State) -> None:
    found = advance(state(before), state(after))
    assert (found is not None) == ((before, after) in FORWARD | AGAIN)
    assert found is None or found.state is after


@pytest.mark.parametrize(
    ("before", "after"), [(a, b) for a in State for b in State], ids=lambda word: word.value
)
def test_next_run_starts_beside_unfinished_runs_by_policy(before: State, after: State) -> None:
    found = advance(state(before), state(after, run=1))
    # PENDING of a later run is what a replay writes, by force.
    assert (found is not None) == (before not in (OK, F) and after is not P)


@pytest.mark.parametrize(
    ("before", "after"), [(a, b) for a in State for b in State], ids=lambda word: word.value
)
def test_an_earlier_run_never_follows(before: State, after: State) -> None:
    assert advance(state(before, run=2), state(after, run=1)) is None


def test_fields_of_the_first_state_stay() -> None:
    first = state(P, task_name="add", created_at=AT, queue="mail")
    found = advance(first, state(S, created_at=LATER, started_at=LATER, worker="ada"))
    assert found is not None
    assert (found.task_name, found.created_at, found.queue, found.worker) == (
        "add",
        AT,
        "mail",
        "ada",
    )

    over = advance(
        found, state(OK, created_at=LATER, results=(Arg(type="int64", value=1),), finished_at=LATER)
    )
    assert over is not None
    assert (over.created_at, over.started_at, over.finished_at, over.worker) == (
        AT,
        LATER,
        LATER,
        "ada",
    )


def test_a_moment_that_was_not_known_is_taken_from_the_change() -> None:
    found = advance(state(P, created_at=ZERO_TIME), state(S, created_at=LATER))
    assert found is not None
    assert found.created_at == LATER


def test_progress_and_start_belong_to_their_run() -> None:
    running = state(S, progress=(3.0, 10.0), started_at=AT)
    same = advance(running, state(S))
    assert same is not None
    assert (same.progress, same.started_at) == ((3.0, 10.0), AT)
    over = advance(running, state(F, error="x"))
    assert over is not None
    assert over.progress == (3.0, 10.0)
    again = advance(running, state(RC, run=1))
    assert again is not None
    assert (again.progress, again.started_at) == (None, None)


def test_progress_moves_on_in_the_same_state() -> None:
    found = advance(state(S, progress=(3.0, 10.0)), state(S, progress=(4.0, 10.0)))
    assert found is not None
    assert found.progress == (4.0, 10.0)


CHANGES = st.lists(st.builds(state, st.sampled_from(list(State)), st.integers(0, 3)), max_size=30)
RANK = {P: 0, RC: 1, S: 2, RT: 3, OK: 4, F: 4}


@given(CHANGES)
def test_states_in_any_order_only_go_forward(
    changes: list[TaskState],
) -> None:
    current: TaskState | None = None
    for change in changes:
        after = advance(current, change)
        if after is None:
            continue
        if current is not None:
            assert not current.is_finished, "finished is final"
            assert (after.run, RANK[after.state]) >= (current.run, RANK[current.state])
        current = after


@given(CHANGES, st.sampled_from([OK, F]), st.integers(0, 3))
def test_nothing_follows_a_finished_state(changes: list[TaskState], word: State, run: int) -> None:
    finished = state(word, run)
    assert all(advance(finished, change) is None for change in changes)


@given(CHANGES)
def test_a_repeated_change_changes_nothing(changes: list[TaskState]) -> None:
    current: TaskState | None = None
    for change in changes:
        current = advance(current, change) or current
        repeated = advance(current, change)
        assert repeated is None or repeated == current


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("FAILURE", F),
        ("failed", F),
        ("Error", F),
        ("done", OK),
        (" ok", OK),
        ("running", S),
        ("queued", P),
        ("retrying", RT),
        ("received", RC),
    ],
)
def test_a_state_is_known_by_the_words_of_people(word: str, expected: State) -> None:
    assert state_named(word) is expected


def test_a_word_that_is_no_state_names_the_nearest() -> None:
    with pytest.raises(
        ValueError,
        match=r"no state 'failur' \(expected pending, .*, failure; did you mean 'failure'\?\)",
    ):
        state_named("failur")

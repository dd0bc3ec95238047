"""What must happen when a task has ended."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machinery_py.registry.outcomes import (
    Failed,
    FollowUp,
    Lost,
    Outcome,
    Postponed,
    Rejected,
    Retried,
    Succeeded,
    follow_up,
)
from machinery_py.tasks.backoff import MAX_DELAY
from machinery_py.tasks.signature import (
    HEADER_ATTEMPT,
    HEADER_ATTEMPTS,
    HEADER_POSTPONED,
    HEADER_RUN,
    UNLIMITED,
    Arg,
    Lazy,
    Signature,
)
from machinery_py.tasks.states import State
from machinery_py.wire.signatures import decode_signature, encode_signature

NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.timezone.utc)
ONE, TWO = Arg(type="int64", value=1), Arg(type="string", value="two")
CALLBACK = Signature[Any](name="then", args=(Arg(type="string", value="own"),))
CHORD = Signature[Any](name="chord", uuid="chord_1")


def ended(outcome: Outcome, **fields: Any) -> FollowUp:
    return follow_up(Signature(name="task", uuid="task_1", **fields), outcome, now=NOW)


def values(signature: Signature[Any]) -> list[object]:
    return [arg.value for arg in signature.args]


@pytest.mark.parametrize(
    ("results", "immutable", "expected"),
    [
        ((ONE,), False, ["own", 1]),
        ((ONE, TWO), False, ["own", 1, "two"]),
        ((), False, ["own"]),
        ((ONE,), True, ["own"]),
    ],
)
def test_results_are_appended_unless_the_callback_is_immutable(
    results: tuple[Arg, ...], immutable: bool, expected: list[object]
) -> None:
    then = ended(Succeeded(results), on_success=(CALLBACK, CALLBACK), immutable=immutable)
    assert then.state is State.SUCCESS
    assert list(then.results) == list(results)
    assert [values(one) for one in then.send] == [expected, expected]


@pytest.mark.parametrize("immutable", [True, False])
def test_immutable_callback_of_a_mutable_task_takes_the_results(
    immutable: bool,
) -> None:
    then = ended(Succeeded((ONE,)), on_success=(CALLBACK.replace(immutable=immutable),))
    assert values(then.send[0]) == ["own", 1]


@pytest.mark.parametrize("immutable", [True, False])
def test_error_text_is_the_first_argument_even_if_immutable(immutable: bool) -> None:
    callback = CALLBACK.replace(immutable=immutable)
    outcome = Failed(error="boom", error_type="ValueError", traceback="tb")
    then = ended(outcome, on_error=(callback,), immutable=immutable)
    assert (then.state, then.error, then.error_type, then.traceback) == (
        State.FAILURE,
        "boom",
        "ValueError",
        "tb",
    )
    assert values(then.send[0]) == ["boom", "own"]
    assert then.retry is None


def test_only_success_sends_on_success_and_only_failure_on_error() -> None:
    both: dict[str, Any] = {"on_success": (CALLBACK,), "on_error": (Signature[Any](name="catch"),)}
    assert [one.name for one in ended(Succeeded(()), **both).send] == ["then"]
    assert [one.name for one in ended(Failed(error="x"), **both).send] == ["catch"]
    assert ended(Failed(error="x"), retry_count=1, **both).send == ()
    assert ended(Postponed(error="x", delay=1), **both).send == ()


def test_a_counted_retry_keeps_everything_but_the_count() -> None:
    before = Signature[Any](
        name="task",
        uuid="task_1",
        args=(ONE,),
        routing_key="mail",
        group_uuid="group_1",
        group_task_count=2,
        priority=3,
        headers={"tenant": "acme"},
        retry_count=3,
        on_success=(CALLBACK,),
        on_error=(CALLBACK,),
        chord_callback=CHORD,
    )
    then = follow_up(before, Failed(error="away"), now=NOW, worker="w")

    assert (then.state, then.error, then.arrived) == (State.RETRY, "away", ())
    assert then.retry == before.replace(
        retry_count=2,
        retry_timeout=1,
        eta=NOW + dt.timedelta(seconds=1),
        headers={
            "tenant": "acme",
            HEADER_RUN: "1",
            HEADER_ATTEMPT: "2",
            HEADER_ATTEMPTS: '[[1,null,"2026-01-02T03:04:05Z","w","","away"]]',
        },
    )


def test_retries_wait_as_in_go() -> None:
    signature = Signature[Any](name="task", retry_count=6)
    delays: list[float] = []
    while (then := follow_up(signature, Failed(error="x"), now=NOW)).retry is not None:
        signature = then.retry
        assert signature.eta is not None
        delays.append((signature.eta - NOW).total_seconds())
    assert delays == [1, 2, 3, 5, 8, 13]
    assert (signature.retry_count, signature.attempt, signature.run) == (0, 7, 6)
    assert then.state is State.FAILURE


def test_a_failure_that_is_not_to_be_retried_is_final() -> None:
    then = ended(Failed(error="x", retryable=False), retry_count=9)
    assert (then.state, then.retry) == (State.FAILURE, None)


def test_a_postponed_run_is_not_counted() -> None:
    then = ended(Postponed(error="busy", delay=90.0), retry_count=2, retry_timeout=5)
    assert then.state is State.RETRY
    assert then.retry is not None
    assert (then.retry.retry_count, then.retry.retry_timeout) == (2, 5)
    assert (then.retry.attempt, then.retry.run) == (1, 1)
    assert then.retry.eta == NOW + dt.timedelta(seconds=90)


@pytest.mark.parametrize(("before", "pause"), [(0, 0), (1, 1), (2, 2), (4, 8), (99, 60)])
def test_task_that_is_put_back_again_and_again_waits_longer(before: int, pause: float) -> None:
    then = ended(Rejected(error="no"), retry_count=2, headers={"machinery_rejected": str(before)})
    assert (then.state, then.error_type, then.send) == (State.RETRY, "Rejected", ())
    assert then.retry is not None
    assert then.retry.eta == NOW + dt.timedelta(seconds=pause)
    assert (then.retry.retry_count, then.retry.attempt, then.retry.run) == (2, 1, 1)
    assert then.retry.rejected == before + 1


def test_a_back_off_decides_the_delay() -> None:
    signature = Signature[Any](name="task", retry_count=5, headers={HEADER_ATTEMPT: "2"})
    then = follow_up(signature, Failed(error="x"), now=NOW, backoff=[10, 60])
    assert then.retry is not None
    assert then.retry.eta == NOW + dt.timedelta(seconds=60)


@pytest.mark.parametrize(
    ("outcome", "arrives"),
    [
        (Succeeded((ONE,)), [("task_1", True)]),
        (Failed(error="x"), [("task_1", False)]),
        (Postponed(error="x", delay=1), []),
    ],
)
def test_chord_member_arrives_when_it_is_finished(
    outcome: Outcome, arrives: list[tuple[str, bool]]
) -> None:
    then = ended(outcome, chord_callback=CHORD, group_uuid="group_1", group_task_count=2)
    assert [(one.member.uuid, one.ok) for one in then.arrived] == arrives


@pytest.mark.parametrize("from_wire", [False, True])
def test_members_behind_a_task_that_failed_will_never_arrive(from_wire: bool) -> None:
    member = Signature[Any](
        name="m", uuid="m", chord_callback=CHORD, group_uuid="g", group_task_count=2
    )
    before = Signature[Any](name="b", uuid="b", on_success=(member.replace(uuid="m2"),))
    task = Signature[Any](
        name="task", uuid="task_1", on_success=(member.replace(uuid="m1"), before)
    )
    if from_wire:
        task = decode_signature(encode_signature(task))
        assert isinstance(task.on_success, Lazy)

    then = follow_up(task, Failed(error="x"), now=NOW)

    assert sorted((one.member.uuid, one.ok) for one in then.arrived) == [
        ("m1", False),
        ("m2", False),
    ]


def test_long_chain_without_groups_is_not_decoded() -> None:
    chain = Signature[Any](name="last", uuid="x")
    for _ in range(500):
        chain = Signature[Any](name="step", uuid="x", on_success=(chain,))
    task = decode_signature(encode_signature(chain))
    assert follow_up(task, Failed(error="x"), now=NOW).arrived == ()
    assert isinstance(task.on_success, Lazy)
    assert task.on_success._items is None


OUTCOMES = st.one_of(
    st.builds(
        Succeeded,
        st.lists(st.builds(lambda v: Arg(type="int64", value=v), st.integers(-9, 9)), max_size=3),
    ),
    st.builds(Failed, error=st.text(), retryable=st.booleans()),
    st.builds(Postponed, error=st.text(), delay=st.floats(0, 1e6)),
)


@given(OUTCOMES, st.integers(0, 5), st.booleans(), st.booleans(), st.integers(0, 99))
def test_outcomes_keep_their_invariants(
    outcome: Outcome, retries: int, immutable: bool, member: bool, run: int
) -> None:
    before = Signature[Any](
        name="task",
        uuid="task_1",
        retry_count=retries,
        immutable=immutable,
        on_success=(CALLBACK,),
        on_error=(CALLBACK,),
        headers={HEADER_RUN: str(run)},
        chord_callback=CHORD if member else None,
        group_uuid="g",
        group_task_count=1,
    )
    then = follow_up(before, outcome, now=NOW)

    final = then.state in (State.SUCCESS, State.FAILURE)
    assert (then.retry is None) == final
    assert (len(then.send) == 1) == final
    assert (len(then.arrived) == 1) == (final and member)
    if then.retry is not None:
        assert then.state is State.RETRY
        assert then.retry.uuid == before.uuid
        assert then.retry.run == run + 1
        assert 0 <= then.retry.retry_count <= retries
        assert then.retry.eta is not None
        assert then.retry.eta >= NOW
    assert then == follow_up(before, outcome, now=NOW)


# Retry


ASKED = Failed(error="boom", error_type="ValueError", traceback="tb")


def tries_of(signature: Signature[Any], outcome: Outcome, most: int = 20) -> list[Signature[Any]]:
    """The signatures of the first tries, the first one's included, if each ends like this."""
    tries = [signature]
    while len(tries) < most:
        then = follow_up(tries[-1], outcome, now=NOW)
        if then.retry is None:
            assert (then.state, then.error, then.error_type) == (
                State.FAILURE,
                "boom",
                "ValueError",
            )
            break
        assert (then.state, then.error) == (State.RETRY, "boom")
        tries.append(then.retry)
    return tries


@pytest.mark.parametrize(
    ("own", "asked", "tries"),
    [(0, None, 1), (2, None, 3), (10, 1, 2), (0, 3, 4), (5, 0, 1), (0, UNLIMITED, 20)],
)
def test_retry_counts_as_a_try_and_may_set_the_number(
    own: int, asked: int | None, tries: int
) -> None:
    found = tries_of(Signature(name="task", retry_count=own), Retried(failed=ASKED, retries=asked))

    assert [one.attempt for one in found] == list(range(1, tries + 1))


def test_retry_may_change_queue_arguments_and_moment() -> None:
    eta = NOW + dt.timedelta(hours=3)
    before = Signature[Any](name="task", uuid="task_1", args=(ONE,), retry_count=3, retry_timeout=5)

    then = ended(Retried(failed=ASKED, eta=eta, queue="slow", args=(TWO,)), retry_count=3)
    plain = follow_up(before, Retried(failed=ASKED, delay=0.5), now=NOW).retry
    own_pause = follow_up(before, Retried(failed=ASKED), now=NOW).retry

    assert then.retry is not None
    assert (then.retry.eta, then.retry.routing_key, then.retry.args) == (eta, "slow", (TWO,))
    assert plain is not None
    assert plain.headers[HEADER_ATTEMPT] == "2"
    assert plain == before.replace(
        eta=NOW + dt.timedelta(seconds=0.5), retry_count=2, headers=plain.headers
    )
    assert own_pause is not None
    assert (own_pause.eta, own_pause.retry_timeout) == (NOW + dt.timedelta(seconds=8), 8)


def test_task_without_a_limit_of_tries_never_fails_by_count() -> None:
    tries = tries_of(Signature(name="task", retry_count=UNLIMITED), ASKED, 60)

    assert len(tries) == 60
    assert {one.retry_count for one in tries} == {UNLIMITED}
    assert tries[-1].eta == NOW + dt.timedelta(seconds=MAX_DELAY)


def test_postponed_task_fails_at_its_limit() -> None:
    signature, outcome = Signature[Any](name="task"), Postponed(error="busy", delay=1, limit=2)
    for count in ("1", "2"):
        again = follow_up(signature, outcome, now=NOW).retry
        assert again is not None
        assert again.headers[HEADER_POSTPONED] == count
        signature = again

    then = follow_up(signature, outcome, now=NOW)
    endless = follow_up(signature, Postponed(error="busy", delay=1), now=NOW)

    assert (then.state, then.retry, signature.attempt) == (State.FAILURE, None, 1)
    assert then.error == "busy; postponed 2 times, which is its limit"
    assert endless.state is State.RETRY


def test_lost_process_is_a_strike_and_no_try() -> None:
    first = ended(Lost(error="gone"), retry_count=0, eta=NOW + dt.timedelta(hours=1))
    assert first.retry is not None
    second = follow_up(first.retry, Lost(error="gone"), now=NOW)

    assert (first.state, first.error, first.error_type) == (State.RETRY, "gone", "WorkerLost")
    assert first.retry.eta == NOW
    assert second.retry is not None
    assert (second.retry.strikes, second.retry.run, second.retry.attempt) == (2, 2, 1)

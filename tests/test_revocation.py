"""Revoking in steps: how long it is remembered, and who finishes when the revoker dies midway."""

from __future__ import annotations

import pytest

from machinery_py import State, TaskFailed
from machinery_py.backends.base import REVOKED_LIFE
from machinery_py.errors import BrokerUnavailable
from machinery_py.testing.flaky import FlakyStore
from tests.support.apps import Bench, bench

__all__ = ["bench"]

DAY = 86400.0


def test_revoked_task_due_days_later_does_not_run(bench: Bench) -> None:
    signature = (
        bench.note.options(delay=5 * DAY).signature("late").catch(bench.note.partial("caught"))
    )
    result = bench.server.send_task(signature)
    result.revoke()
    bench.drain()
    assert bench.calls == [("revoked", "caught")]

    bench.harness.advance(days=5, seconds=1)
    bench.server.app.store.tend()
    assert (
        bench.server.backend.get_states([result.uuid]) == {}
    )  # the result has expired: what followed must not follow again
    bench.drain()

    assert bench.calls == [("revoked", "caught")]
    assert [(one.waiting, one.delayed, one.running) for one in bench.server.inspect.queues()] == [
        (0, 0, 0)
    ]


def test_a_revoked_task_is_not_run_after_weeks_in_a_paused_queue(bench: Bench) -> None:
    queue = bench.server.config.default_queue
    results = [
        bench.note.send("plain"),
        bench.server.send_task(bench.note.signature("caught").catch(bench.note.partial("late"))),
    ]
    bench.server.inspect.pause(queue)
    for result in results:
        result.revoke()
    bench.harness.advance(days=30)
    bench.server.app.store.tend()
    bench.server.inspect.resume(queue)
    bench.drain()

    assert bench.calls == [("revoked", "late")]


def test_revocation_is_forgotten_days_after_its_message_came(bench: Bench) -> None:
    result = bench.note.send("never")
    result.revoke()
    bench.harness.advance(days=30)
    bench.drain()
    bench.server.backend.tend()
    assert bench.server.backend.revoked([result.uuid]) == {result.uuid}

    bench.harness.advance(seconds=REVOKED_LIFE + 1)
    bench.server.backend.tend()
    assert bench.server.backend.revoked([result.uuid]) == set()


@pytest.mark.parametrize("lose_reply", [False, True])
def test_a_revocation_that_was_cut_off_is_finished_by_the_worker(
    bench: Bench, lose_reply: bool
) -> None:
    signature = (
        bench.note.options(delay=5 * DAY).signature("late").catch(bench.note.partial("caught"))
    )
    result = bench.server.send_task(signature)
    stores = bench.server.app.stores
    stores.store = flaky = FlakyStore(stores.store)
    flaky.faults.next_call("fire", lose_reply=lose_reply)
    with pytest.raises(BrokerUnavailable):
        result.revoke()
    assert result.get_state().state is (State.FAILURE if lose_reply else State.PENDING)

    bench.harness.advance(days=5, seconds=1)
    bench.drain()

    assert bench.calls == [("revoked", "caught")]
    if not lose_reply:
        with pytest.raises(TaskFailed, match="revoked"):
            result.get(timeout=0)


def test_revoking_a_finished_task_changes_nothing(bench: Bench) -> None:
    result = bench.add.send(1, 2)
    bench.drain()
    result.revoke()
    assert result.get(timeout=0) == 3


def test_revoked_task_of_unknown_callbacks_waits_for_its_message(
    bench: Bench,
) -> None:
    """Go writes PENDING too; a chord must not wait for a member that nobody reports."""
    signature = bench.note.signature("never").catch(bench.note.partial("caught")).with_uuid()
    app = bench.server.app
    app.store.backend.set_state_pending(signature)
    app.store.broker.put([app.message(app.completed(signature))], token="")
    bench.server.revoke([signature.uuid])
    assert app.store.backend.get_state(signature.uuid).state is State.PENDING

    bench.drain()
    assert bench.calls == [("revoked", "caught")]
    assert app.store.backend.get_state(signature.uuid).error == "revoked"


def test_one_uuid_may_be_revoked_as_a_bare_text(bench: Bench) -> None:
    result = bench.note.send("never")

    bench.server.revoke(result.uuid)
    bench.drain()

    assert bench.calls == []
    assert result.get_state().state is State.FAILURE

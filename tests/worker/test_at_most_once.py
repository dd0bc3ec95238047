"""Tasks that are begun at most once: what is committed before the call, and what goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest

from machinery_py import Config, Server, State
from machinery_py.backends.base import Change, Verdict
from machinery_py.brokers.base import Delivery, Disposal, Fate
from machinery_py.stores.base import Mark, Session, Settlement
from machinery_py.testing.flaky import FlakyBackend, FlakyStore
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.worker.admission.at_most_once import EarlyStarts, begin_once
from machinery_py.worker.admission.intake import accept, peek
from machinery_py.worker.running.execution import Execution
from machinery_py.worker.running.hooks import WorkerHooks
from machinery_py.worker.running.runner import Run, run_here
from tests.support.apps import Bench, bench

__all__ = ["bench"]

QUEUE = "machinery_tasks"


class Once:
    """An early task on a store with faults, and its executions by hand."""

    def __init__(self, bench: Bench) -> None:
        self.server = bench.server
        self.store = FlakyStore(bench.server.app.store)
        self.store.backend = FlakyBackend(self.store.store.backend, self.store.faults)
        self.server.app.stores.store = self.store
        self.calls: list[int] = []
        self.task = self.server.task("once", ack="early")(lambda: self.calls.append(1))
        self.result = self.task.send()
        self.session: Session = self.store.open_session([QUEUE], worker="w")

    def claim(self, name: str = "w") -> Execution:
        """The next delivery, accepted or settled."""
        [delivery] = self.session.receive(1, 0.0)
        app = self.server.app
        execution = Execution(app, WorkerHooks(), delivery, name, session=self.session)
        peek(execution)
        accept(execution, {})
        return execution

    def settle(self, execution: Execution) -> None:
        assert execution.settlement is not None
        self.session.settle([execution.settlement])


@pytest.fixture
def once(bench: Bench) -> Iterator[Once]:
    once = Once(bench)
    yield once
    once.session.close()


def fate(execution: Execution) -> Fate | None:
    return execution.settlement.fate if execution.settlement is not None else None


def test_early_task_is_not_called_if_its_start_is_refused(once: Once) -> None:
    first = once.claim()
    once.store.next_call("settle")
    run_here(Run(first))

    assert (once.calls, fate(first)) == ([], Fate.BACK)
    once.settle(first)
    again = once.claim()
    run_here(Run(again))
    once.settle(again)
    assert once.calls == [1]
    assert once.result.get_state().state is State.SUCCESS


def test_early_task_whose_start_may_be_stored_ends_uncalled(once: Once) -> None:
    first = once.claim()
    once.store.next_call("settle", lose_reply=True)
    run_here(Run(first))
    once.settle(first)
    again = once.claim()
    once.settle(again)

    assert (once.calls, fate(first), fate(again)) == ([], Fate.BACK, Fate.DONE)
    state = once.result.get_state()
    assert (state.state, state.error_type) == (State.FAILURE, "WorkerLost")


def test_early_task_that_another_worker_has_begun_is_not_called(once: Once) -> None:
    first = once.claim("one")
    once.session.consumer.dispose([Disposal(delivery=first.delivery, fate=Fate.BACK)])
    second = once.claim("two")
    run_here(Run(second))
    run_here(Run(first))

    assert once.calls == [1]
    assert fate(first) is Fate.BACK
    once.settle(second)
    assert once.result.get_state().worker == "two"


@pytest.mark.parametrize("epoch", [0, 1])
def test_second_message_of_a_run_that_has_begun_is_not_called(once: Once, epoch: int) -> None:
    once.task.options(uuid=once.result.uuid).send()
    first, second = once.claim("one"), once.claim("two")
    second.delivery = msgspec.structs.replace(second.delivery, epoch=epoch)
    assert begin_once(first)
    run_here(Run(second))

    assert (once.calls, second.delivery.count, fate(second)) == ([], 1, Fate.DONE)
    assert second.settlement is not None
    # Where it has fenced the first, nobody else could write an end.
    wanted = [(State.FAILURE, "WorkerLost")] if epoch else []
    assert [(one.state, one.error_type) for one in second.settlement.states] == wanted


def test_early_task_is_not_called_if_its_state_cannot_be_read(once: Once) -> None:
    first = once.claim()
    once.store.next_call("get_states")
    run_here(Run(first))

    assert (once.calls, fate(first)) == ([], Fate.BACK)


class LateSession(Session):
    """A session whose marks are written however much later, without a look at who holds what."""

    def __init__(self, once: Once, meanwhile: Callable[[], None]) -> None:
        super().__init__(once.session.consumer)
        self.once = once
        self.meanwhile = meanwhile

    def receive(self, limit: int, timeout: float, order: Sequence[str] = ()) -> list[Delivery]:
        return self.once.session.receive(limit, timeout, order)

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        self.meanwhile()
        states = [mark.state for mark in marks]
        self.once.server.backend.apply([Change(key=states[0].task_uuid, states=states)])
        return []


def test_late_start_of_a_lost_delivery_is_not_called(once: Once) -> None:
    first = once.claim("one")

    def lose() -> None:
        once.session.consumer.dispose([Disposal(delivery=first.delivery, fate=Fate.BACK)])
        run_here(Run(once.claim("two")))

    first.session = LateSession(once, lose)
    run_here(Run(first))

    assert once.result.get_state().worker == "one"  # so it was written last
    assert once.calls == [1]
    assert fate(first) is Fate.BACK


def test_redelivery_waits_while_its_state_cannot_be_read(once: Once) -> None:
    once.session.settle([once.claim().end_of_delivery(Fate.BACK)])
    once.store.next_call("get_states")
    waits = once.claim()

    assert fate(waits) is Fate.LATER
    assert once.calls == []


def test_early_redelivery_without_a_state_is_not_called(once: Once) -> None:
    once.session.settle([once.claim().end_of_delivery(Fate.BACK)])
    once.server.backend.purge_state(once.result.uuid)
    again = once.claim()
    once.settle(again)

    state = once.result.get_state()
    assert (state.state, once.calls) == (State.FAILURE, [])
    assert state.error.startswith("its message came back, and its state is gone")


def test_early_tasks_without_a_backend_are_ended_before_their_call() -> None:
    server = Server(Config(broker="memory://null-and-early", result_backend="null"))
    held: list[int] = []

    @server.task(ack="early", retries=1, backoff=[0.0])
    def early() -> None:
        held.append(sum(one.running + one.waiting for one in server.broker.stats()))
        if len(held) == 1:
            raise ValueError("once more")

    after: list[str] = []
    server.register_task("after", lambda: after.append("called"))
    with server.new_worker(concurrency=1):
        (early.signature() | server.get_registered_task("after").signature()).send()
        wait_until(lambda: after == ["called"], HANG, what="the callback")
    assert held == [0, 0]


class NotingSession(LateSession):
    """A session that notes how many starts are committed at once."""

    def settle(
        self, settlements: Sequence[Settlement], marks: Sequence[Mark] = ()
    ) -> list[Verdict]:
        self.commits.append(len(marks))
        self.meanwhile()
        return self.once.session.settle(settlements, marks)

    commits: list[int]


def test_starts_that_wait_are_committed_together(once: Once) -> None:
    again = once.task.send()
    once.task.send()
    for uuid in (once.result.uuid, again.uuid):  # second messages of the first two
        once.task.options(uuid=uuid).send()
    first, *others = [once.claim(str(number)) for number in range(5)]
    starts, begun = EarlyStarts(), []
    threads = [
        threading.Thread(target=lambda one=one: begun.append((one.worker, starts.begin(one))))
        for one in others
    ]

    def let_others_come() -> None:
        if len(session.commits) == 1:
            for thread in threads:
                thread.start()
            wait_until(lambda: len(starts._waiting) == len(others), HANG, what="the others")

    session = NotingSession(once, let_others_come)
    session.commits = []
    for one in (first, *others):
        one.session = session
    assert starts.begin(first)
    for thread in threads:
        thread.join(HANG)

    assert sorted(begun) == [("1", True), ("2", True), ("3", False), ("4", False)]
    assert session.commits == [1, 2]
    assert [fate(one) for one in others] == [None, None, Fate.DONE, Fate.DONE]


def test_error_of_a_shared_start_reaches_each_of_them(once: Once) -> None:
    once.task.send()
    executions = [once.claim(), once.claim()]
    starts = EarlyStarts()
    ends: list[str] = []

    def begin(execution: Execution) -> None:
        try:
            starts.begin(execution)
        except ZeroDivisionError:
            ends.append("broken")

    second = threading.Thread(target=begin, args=(executions[1],))

    def break_down() -> None:
        if not second.is_alive():
            second.start()
            wait_until(lambda: len(starts._waiting) == 1, HANG, what="the other")
        raise ZeroDivisionError

    for one in executions:
        one.session = LateSession(once, break_down)
    begin(executions[0])
    second.join(HANG)
    assert ends == ["broken", "broken"]

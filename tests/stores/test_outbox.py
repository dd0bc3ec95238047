"""Messages and states in two stores: what is between their calls; and the null backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest

from machinery_py import Server, StateNotFound, Unsupported, group
from machinery_py.backends.base import SETTLED, Backend, Change, Rider
from machinery_py.backends.memory import MemoryBackend
from machinery_py.backends.null import NullBackend
from machinery_py.bounds import TOKEN_LIFE
from machinery_py.brokers.base import Message
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    PublishRefused,
    PublishUnknown,
)
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Submission
from machinery_py.stores.outbox import OUTBOX_AGE, TwoStores
from machinery_py.tasks.states import State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.claims import claim
from machinery_py.testing.conformance.fencing import drain, settlement, submit, uuid_of
from machinery_py.testing.conformance.schedules import amend
from machinery_py.testing.flaky import FlakyBackend, FlakyBroker
from machinery_py.testing.waiting import HANG


@pytest.fixture
def refusing(clock: ManualClock) -> tuple[TwoStores, FlakyBroker]:
    broker = FlakyBroker(MemoryBroker(MemoryRows(clock)))
    return TwoStores(broker, MemoryBackend(MemoryRows(clock)), clock), broker


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


def submission(*, replay: bool = False) -> Submission:
    message = Message(uuid="task_1", name="add", queue="q", body=b"{}")
    return Submission(
        token="t", messages=(message,), states=(TaskState(task_uuid="task_1"),), replay=replay
    )


def test_a_refused_submission_leaves_no_state(refusing: tuple[TwoStores, FlakyBroker]) -> None:
    store, broker = refusing
    broker.faults.next_call("put")

    with pytest.raises(BrokerUnavailable):
        store.submit(submission())

    with pytest.raises(StateNotFound):
        store.backend.get_state("task_1")


def test_a_refused_replay_leaves_the_finished_state(
    refusing: tuple[TwoStores, FlakyBroker],
) -> None:
    store, broker = refusing
    store.submit(
        Submission(
            token="first", messages=(), states=(TaskState(task_uuid="task_1", state=State.FAILURE),)
        )
    )
    broker.faults.next_call("put")

    with pytest.raises(BrokerUnavailable):
        store.submit(submission(replay=True))

    assert store.backend.get_state("task_1").state is State.FAILURE


class ExpiringTokens(dict[str, float]):
    """Lets another thread in between the look at an expired token and its removal."""

    enter: Callable[[], object] = staticmethod(lambda: None)

    def __getitem__(self, token: str) -> float:
        at = super().__getitem__(token)
        enter, self.enter = self.enter, lambda: None
        enter()
        return at


def test_threads_may_replay_together_when_tokens_have_expired(clock: ManualClock) -> None:
    store = TwoStores(MemoryBroker(MemoryRows(clock)), MemoryBackend(MemoryRows(clock)), clock)
    store.submit(submission(replay=True))
    tokens = store._submitter.replayed._seen = ExpiringTokens(store._submitter.replayed._seen)
    clock.advance(TOKEN_LIFE)
    other = threading.Thread(
        target=store.submit, args=(Submission(token="other", messages=(), replay=True),)
    )

    def enter() -> None:
        other.start()
        other.join(0.2)  # with a lock it waits for us

    tokens.enter = enter
    store.submit(Submission(token="one", messages=(), replay=True))
    other.join(HANG)

    assert sorted(tokens) == ["one", "other"]


class Entered(MemoryBroker):
    """Lets others do something before each `put`."""

    enter: Callable[[], object] = staticmethod(lambda: None)

    def put(self, messages: Sequence[Message], *, token: str) -> None:
        self.enter()
        super().put(messages, token=token)


def test_second_message_leaves_the_callback_to_its_publisher(clock: ManualClock) -> None:
    """Another worker takes a task whose state is written and whose callback is not on its queue."""
    broker, backend = Entered(MemoryRows(clock)), MemoryBackend(MemoryRows(clock))
    one, other = TwoStores(broker, backend, clock), TwoStores(broker, backend, clock)
    submit(one, "a", token="1")
    submit(one, "a", token="2")
    session, beside = (
        one.open_session(["q"], worker="one"),
        other.open_session(["q"], worker="other"),
    )
    (first,) = session.receive(1, 0)
    taken: list[object] = []
    broker.enter = lambda: taken.append(beside.receive(9, 0))  # type: ignore[method-assign]

    assert session.settle([settlement(first, callbacks=["c"])]) == [SETTLED]

    assert taken == [[]]
    assert drain(other, "c") == ["c"]
    beside.close()
    assert drain(other, "q") == []
    assert backend.unsent(9, older_than=0.0) == []


def test_redelivery_publishes_the_outbox_of_its_dead_owner(clock: ManualClock) -> None:
    memory, backend = MemoryBroker(MemoryRows(clock)), MemoryBackend(MemoryRows(clock))
    broker = FlakyBroker(memory)
    dying, other = TwoStores(broker, backend, clock), TwoStores(memory, backend, clock)
    submit(dying, "a")
    session = dying.open_session(["q"], worker="dying")
    (first,) = session.receive(1, 0)
    broker.faults.next_call("put")
    with pytest.raises(BrokerUnavailable):
        session.settle([settlement(first, callbacks=["c"])])
    for _ in range(2):  # it beats no more, and is given up at the second look
        clock.advance(11.0)
        other.broker.tend()

    heir = other.open_session(["q", "c"], worker="heir")

    assert [uuid_of(one) for one in (*heir.receive(9, 0), *heir.receive(9, 0))] == ["c"]
    assert session.settle([settlement(first, callbacks=["c"])]) != [SETTLED]
    assert backend.unsent(9, older_than=0.0) == []


class Full(MemoryBroker):
    """Has no room on queue `c`."""

    is_full = True

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        if self.is_full and any(one.queue == "c" for one in messages):
            error = PublishRefused("full")
            error.left = frozenset(range(len(messages)))
            raise error
        return super().put(messages, token=token)


def test_settlement_is_parked_once_when_its_first_try_failed(clock: ManualClock) -> None:
    inner, backend = Full(MemoryRows(clock)), MemoryBackend(MemoryRows(clock))
    broker = FlakyBroker(inner)
    store = TwoStores(broker, backend, clock)
    submit(store, "a")
    submit(store, "b", token="2")
    session = store.open_session(["q"], worker="w")
    first, second = session.receive(2, 0)
    batch = [settlement(first, callbacks=["c"]), settlement(second)]
    broker.faults.next_call("dispose")
    with pytest.raises(BrokerUnavailable):
        session.settle(batch)
    session.settle(batch)

    inner.is_full = False
    session.beat()

    assert len(inner.pending("c", 9)) == 1
    assert drain(store, "c") == ["c"]
    assert backend.unsent(9, older_than=0.0) == []
    session.close()
    assert drain(store, "q") == []


class PartlyFull(Full):
    """Puts all that is for other queues."""

    def put(self, messages: Sequence[Message], *, token: str) -> bool:
        waiting = [place for place, one in enumerate(messages) if one.queue == "c"]
        if not self.is_full or not waiting:
            return MemoryBroker.put(self, messages, token=token)
        MemoryBroker.put(self, [one for one in messages if one.queue != "c"], token=token)
        error = PublishRefused("full")
        error.left = frozenset(waiting)
        raise error


def test_left_outbox_is_sent_though_a_thousand_wait_for_room(clock: ManualClock) -> None:
    broker, backend = PartlyFull(MemoryRows(clock)), MemoryBackend(MemoryRows(clock))
    store = TwoStores(broker, backend, clock)

    def leave(key: str, queue: str) -> None:
        body = msgspec.json.encode(Message(uuid=key, name="n", queue=queue, body=b"{}"))
        backend.apply([Change(key=key, mark="m", outbox=[body])])

    for number in range(1234):
        leave(f"waiting_{number}", "c")
    leave("other", "free")

    for _ in range(2):
        clock.advance(OUTBOX_AGE + 1)
        store.tend()

    assert len(broker.pending("free", 9)) == 1
    assert len(backend.unsent(9999, older_than=0.0)) == 1234
    broker.is_full = False
    for _ in range(3):
        clock.advance(OUTBOX_AGE + 1)
        store.tend()
    assert backend.unsent(9, older_than=0.0) == []
    assert len(broker.pending("c", 9999)) == 1234


@pytest.mark.parametrize("call", ["put", "dispose"])
def test_claim_that_fails_behind_its_begin_is_given_back(clock: ManualClock, call: str) -> None:
    """The claim brings a task that ended with its callback unpublished, and one still to run."""
    broker, backend = FlakyBroker(MemoryBroker(MemoryRows(clock))), MemoryBackend(MemoryRows(clock))
    store = TwoStores(broker, backend, clock)
    submit(store, "a")
    dying = store.open_session(["q"], worker="dying")
    (first,) = dying.receive(1, 0)
    broker.faults.next_call("put")
    with pytest.raises(BrokerUnavailable):
        dying.settle([settlement(first, callbacks=["c"])])
    for _ in range(2):  # it beats no more, and is given up at the second look
        clock.advance(11.0)
        broker.tend()
    submit(store, "b")
    heir = store.open_session(["q"], worker="heir")
    broker.faults.next_call(call)

    with pytest.raises(BrokerUnavailable):
        heir.receive(9, 0)

    assert [uuid_of(one) for one in heir.receive(9, 0)] == ["b"]
    assert drain(store, "c") == ["c"]
    assert backend.unsent(9, older_than=0.0) == []
    heir.close()
    assert drain(store, "q") == ["b"]


def read_schedule(backend: Backend) -> bytes | None:
    return (backend.records().bodies or {}).get("a")


def read_claim(backend: Backend) -> bytes | None:
    return backend.claims(["a"])[0]


@pytest.mark.parametrize(
    ("change", "read", "later"),
    [(amend, read_schedule, (b"1", "t")), (claim, read_claim, (b"2", "u"))],
    ids=["schedule", "claim"],
)
@pytest.mark.parametrize(
    ("call", "lost"), [("put", False), ("put", True), ("clear_outbox", False), ("apply", True)]
)
def test_send_cut_off_behind_its_record_is_finished_by_another(
    clock: ManualClock,
    change: Callable[..., bool],
    read: Callable[[Backend], bytes | None],
    later: tuple[bytes, str],
    call: str,
    lost: bool,
) -> None:
    """The sender dies behind the change of the record: before, in or behind the publishing."""
    memory, hub = MemoryBackend(MemoryRows(clock)), MemoryRows(clock)
    broker, backend = FlakyBroker(MemoryBroker(hub)), FlakyBackend(memory)
    dying, other = TwoStores(broker, backend, clock), TwoStores(MemoryBroker(hub), memory, clock)
    (broker if call == "put" else backend).faults.next_call(call, lose_reply=lost)
    with pytest.raises((BrokerUnavailable, BackendUnavailable, PublishUnknown)):
        change(dying, "a", None, b"1", "t")

    assert read(memory) == b"1"
    assert not change(other, "a", None, *later)
    clock.advance(OUTBOX_AGE + 1.0)
    other.tend()

    # Twice at most on the queue; the second is known as done, by its UUID.
    assert set(drain(other, "q")) == {"t"}
    assert memory.unsent(9, older_than=0.0) == []


def test_null_backend_refuses_schedules_and_claims(clock: ManualClock) -> None:
    backend = NullBackend(clock)
    assert not backend.features.claims
    for name, ask in (
        ("schedules", backend.records),
        ("schedules", lambda: backend.amend(Rider(name="a", expected=None, body=b"1"))),
        ("keys of unique tasks", lambda: backend.claims(["a"])),
        ("keys of unique tasks", lambda: backend.release([("a", b"")])),
    ):
        with pytest.raises(Unsupported, match=f"the null backend keeps no {name}"):
            ask()


def test_null_backend_runs_tasks_and_refuses_results() -> None:
    server = Server(broker="memory://", result_backend="null")
    ran: list[int] = []
    task = server.register_task("task", ran.append)

    with server.new_worker(concurrency=1, burst=True):
        result = task.send(1)
        with pytest.raises(Unsupported, match="keeps no states"):
            result.get(timeout=5)
        with pytest.raises(Unsupported, match="cannot count the members of a group"):
            group(task.signature(2), task.signature(3)).send()
    worker = server.new_worker(concurrency=1, burst=True)
    assert worker.launch(signals=False) == 0

    assert ran == [1]
    server.close()

"""Sending to two stores: what is at once, what a worker may do in between, and what fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from machinery_py import PublishRefused, PublishUnknown
from machinery_py.backends.base import SETTLED
from machinery_py.backends.memory import MemoryBackend
from machinery_py.brokers.base import Message
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.brokers.putting import PutsAhead, Putting
from machinery_py.errors import BackendUnavailable, BrokerUnavailable, MachineryError, StoreUnusable
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Submission
from machinery_py.stores.outbox import TwoStores
from machinery_py.stores.sending import FRESH, SMALL
from machinery_py.tasks.signature import Signature, new_uuid
from machinery_py.tasks.states import GroupMeta, State, TaskState
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.fencing import settlement
from machinery_py.wire.signatures import encode_signature


class AheadBroker(MemoryBroker, PutsAhead):
    """Stores messages at once, or when they are waited for.

    Attributes:
        steps: what was begun and waited for, and each write of a state.
        refuses: raised by the next `wait`, which stores nothing.
        loses: raised by the next `wait`, which has stored it.
    """

    def __init__(self, hub: MemoryRows) -> None:
        super().__init__(hub)
        self.steps: list[str] = []
        self.refuses: MachineryError | None = None
        self.loses: MachineryError | None = None

    def begin_put(self, messages: Sequence[Message], *, token: str) -> Putting:
        self.steps.append("begin")
        if self.refuses is None:
            super().put(messages, token=token)
        return _Putting(self)


class _Putting(Putting):
    def __init__(self, broker: AheadBroker) -> None:
        self._broker = broker

    def wait(self) -> None:
        broker = self._broker
        broker.steps.append("wait")
        error, broker.refuses, broker.loses = broker.refuses or broker.loses, None, None
        if error is not None:
            raise error

    def close(self) -> None:
        self._broker.steps.append("close")


class Pair:
    """Two stores whose backend has just stored a state, so that the next send is at once.

    Attributes:
        before: called before each write to the backend.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.broker = AheadBroker(MemoryRows(self.clock))
        self.backend = MemoryBackend(MemoryRows(self.clock))
        self.store = TwoStores(self.broker, self.backend, self.clock)
        self.before: Callable[[], object] = lambda: None
        apply = self.backend.apply

        def noted(changes: object) -> object:
            self.broker.steps.append("state")
            self.before()
            return apply(changes)  # type: ignore[arg-type]

        self.backend.apply = noted  # type: ignore[method-assign, assignment]
        self.store.submit(submission("first"))
        self.broker.purge("q")
        self.broker.steps.clear()


@pytest.fixture
def pair() -> Pair:
    return Pair()


def submission(token: str = "t", *uuids: str, **more: object) -> Submission:
    uuids = uuids or (new_uuid(),)
    signatures = [Signature[None](name="add", uuid=uuid, routing_key="q") for uuid in uuids]
    messages = [
        Message(uuid=one.uuid, name="add", queue="q", body=encode_signature(one))
        for one in signatures
    ]
    states = [TaskState(task_uuid=uuid, task_name="add", queue="q") for uuid in uuids]
    return Submission(**{"token": token, "messages": messages, "states": states, **more})  # type: ignore[arg-type]


def raising(error: Exception) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


def test_state_is_written_while_the_message_is_on_its_way(pair: Pair) -> None:
    sent = submission()

    pair.store.submit(sent)

    assert pair.broker.steps == ["begin", "state", "wait", "close"]
    assert pair.backend.get_state(sent.messages[0].uuid).state is State.PENDING


@pytest.mark.parametrize(
    "sent",
    [
        submission("t", "chosen-by-somebody"),
        submission("t", new_uuid(), new_uuid()),
        submission(groups=[GroupMeta(group_uuid="group_1")]),
        submission(states=[TaskState(task_uuid=new_uuid(), message=b"x" * (SMALL + 1))]),
    ],
    ids=["chosen UUID", "several", "group", "large"],
)
def test_what_the_backend_may_refuse_is_sent_in_turn(pair: Pair, sent: Submission) -> None:
    pair.store.submit(sent)

    assert "begin" not in pair.broker.steps


def test_backend_that_has_not_answered_for_long_is_asked_first(pair: Pair) -> None:
    pair.clock.advance(FRESH)

    pair.store.submit(submission())
    assert pair.broker.steps == ["state"]

    pair.store.submit(submission("next"))
    assert pair.broker.steps == ["state", "begin", "state", "wait", "close"]


@pytest.mark.parametrize("ends", [State.SUCCESS, None], ids=["ended", "begun"])
def test_late_pending_changes_nothing_that_a_worker_wrote(pair: Pair, ends: State | None) -> None:
    session = pair.store.open_session(["q"], worker="w")
    sent = submission()
    uuid = sent.messages[0].uuid

    def run() -> None:
        pair.before = lambda: None
        [delivery] = session.receive(1, 0)
        if ends is not None:
            assert session.settle([settlement(delivery)]) == [SETTLED]

    pair.before = run
    pair.store.submit(sent)

    assert pair.backend.get_state(uuid).state is (ends or State.PENDING)


def test_task_begun_before_its_pending_ends_as_any_other(pair: Pair) -> None:
    session = pair.store.open_session(["q"], worker="w")
    taken = []

    def run() -> None:
        pair.before = lambda: None
        taken.extend(session.receive(1, 0))

    pair.before = run
    pair.store.submit(sent := submission())

    assert session.settle([settlement(one) for one in taken]) == [SETTLED]
    assert pair.backend.get_state(sent.messages[0].uuid).state is State.SUCCESS


def test_refused_message_has_its_pending_taken_back(pair: Pair) -> None:
    pair.broker.refuses = BrokerUnavailable("full")
    sent = submission()

    with pytest.raises(BrokerUnavailable):
        pair.store.submit(sent)

    assert pair.broker.steps == ["begin", "state", "wait", "close"]
    assert pair.backend.get_states([sent.messages[0].uuid]) == {}


def test_message_without_a_confirm_keeps_its_pending(pair: Pair) -> None:
    pair.broker.loses = PublishUnknown("no confirm")
    sent = submission()

    with pytest.raises(PublishUnknown):
        pair.store.submit(sent)

    assert pair.backend.get_state(sent.messages[0].uuid).state is State.PENDING


@pytest.mark.parametrize(
    ("failure", "permanent"), [(BackendUnavailable("gone"), False), (StoreUnusable("full"), True)]
)
def test_stored_message_whose_state_was_refused_is_unknown(
    pair: Pair, failure: MachineryError, permanent: bool
) -> None:
    pair.before = raising(failure)
    sent = submission()

    with pytest.raises(PublishUnknown, match="its state is not") as raised:
        pair.store.submit(sent)
    pair.before = lambda: None
    pair.store.submit(sent)  # as `send` does

    assert raised.value.permanent is permanent
    assert len(pair.broker.pending("q", 9)) == 1
    assert pair.backend.get_state(sent.messages[0].uuid).state is State.PENDING


def test_backend_that_failed_refuses_the_next_send(pair: Pair) -> None:
    pair.before = raising(BackendUnavailable("gone"))
    with pytest.raises(PublishUnknown):
        pair.store.submit(submission())

    with pytest.raises(BackendUnavailable):
        pair.store.submit(submission("next"))

    assert len(pair.broker.pending("q", 9)) == 1


def test_refusal_of_both_stores_is_a_refusal(pair: Pair) -> None:
    pair.before = raising(BackendUnavailable("gone"))
    pair.broker.refuses = PublishRefused("full")

    with pytest.raises(BackendUnavailable):
        pair.store.submit(submission())

    assert pair.broker.pending("q", 9) == []


def test_sender_cut_off_between_the_stores_leaves_nothing_open(pair: Pair) -> None:
    pair.before = raising(KeyboardInterrupt())  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        pair.store.submit(submission())

    assert pair.broker.steps == ["begin", "state", "close"]

"""Promises of every store about sessions that die while they hold deliveries.

Part of SettlementConformance.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from machinery_py.backends.base import FENCED, SETTLED
from machinery_py.brokers.base import Delivery, Fate, Message
from machinery_py.stores.base import Mark, Session, Settlement, Store, Submission
from machinery_py.tasks.states import Arrival, GroupMeta, State, TaskState
from machinery_py.testing.clocks import ManualClock

#: Opens a store. Each call returns a new handle on the same store, like a second process.
OpenStore = Callable[[], Store]


def body_of(uuid: str, *, run: int = 0, queue: str = "q") -> bytes:
    """Return the bytes of a signature as Go writes it."""
    return json.dumps(
        {
            "UUID": uuid,
            "Name": "add",
            "RoutingKey": queue,
            "ETA": None,
            "GroupUUID": "",
            "GroupTaskCount": 0,
            "Args": [],
            "Headers": {"machinery_run": str(run)} if run else {},
            "Priority": 0,
            "Immutable": False,
            "RetryCount": 0,
            "RetryTimeout": 0,
            "OnSuccess": None,
            "OnError": None,
            "ChordCallback": None,
            "BrokerMessageGroupId": "",
            "SQSReceiptHandle": "",
            "StopTaskDeletionOnError": False,
            "IgnoreWhenTaskNotRegistered": False,
        }
    ).encode()


def uuid_of(delivery: Delivery) -> str:
    return str(json.loads(delivery.body)["UUID"])


def message_of(
    uuid: str, *, run: int = 0, queue: str = "q", eta: dt.datetime | None = None
) -> Message:
    return Message(
        uuid=uuid, name="add", queue=queue, body=body_of(uuid, run=run, queue=queue), eta=eta
    )


def state_of(uuid: str, state: State = State.PENDING, **more: Any) -> TaskState:
    return TaskState(task_uuid=uuid, task_name="add", queue="q", state=state, **more)


def submit(store: Store, *uuids: str, token: str = "", **more: Any) -> None:
    store.submit(
        Submission(
            token=token,
            messages=[message_of(uuid) for uuid in uuids],
            states=[state_of(uuid) for uuid in uuids],
            **more,
        )
    )


def settlement(
    delivery: Delivery,
    state: State = State.SUCCESS,
    *,
    callbacks: Sequence[str] = (),
    run: int = 0,
    **more: Any,
) -> Settlement:
    """Return the settlement of a delivery, with its callbacks on the queue c."""
    uuid = uuid_of(delivery)
    return Settlement(
        delivery=delivery,
        uuid=uuid,
        name="add",
        states=(state_of(uuid, state, run=run), *(state_of(callback) for callback in callbacks)),
        send=tuple(message_of(callback, queue="c") for callback in callbacks),
        **more,
    )


def arrival(delivery: Delivery, total: int, *, ok: bool = True) -> Arrival:
    return Arrival(
        group_uuid="g", task_uuid=uuid_of(delivery), total=total, ok=ok, callback=b"callback"
    )


def drain(store: Store, queue: str) -> list[str]:
    """Return the tasks that wait on a queue, in order; they are put back."""
    session = store.open_session([queue], worker="drain")
    found = [uuid_of(delivery) for delivery in session.receive(10_000, 0)]
    session.close()
    return found


class StoreCase:
    """Fixtures of a store's suite, to be overridden."""

    #: Seconds without a beat after which the store gives a session up.
    lease: float = 10.0

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Return the clock of the store."""
        return ManualClock()

    @pytest.fixture
    def open_store(self, clock: ManualClock) -> OpenStore:
        raise NotImplementedError(f"{type(self).__name__}: override the fixture open_store")

    @pytest.fixture
    def store(self, open_store: OpenStore) -> Iterator[Store]:
        store = open_store()
        yield store
        store.close()

    @pytest.fixture
    def session(self, store: Store) -> Iterator[Session]:
        """Open a session on the queue q."""
        session = store.open_session(["q"], worker="w")
        yield session
        session.close()

    def crash_session(
        self, store: Store, session: Session, clock: ManualClock, survivors: Sequence[Session] = ()
    ) -> None:
        """Let a session die, as BrokerCase.crash_consumer does."""
        for _ in range(2):
            clock.advance(self.lease * 1.1)
            for survivor in survivors:
                assert survivor.beat()
            store.tend()

    def take_over(
        self, store: Store, session: Session, clock: ManualClock
    ) -> tuple[Session, Delivery]:
        """Let the session die; return its successor, and the delivery that it got."""
        self.crash_session(store, session, clock)
        heir = store.open_session(["q"], worker="heir")
        (delivery,) = heir.receive(1, 0)
        return heir, delivery


class _Life:
    """A task, its delivery, and the fences that it had. Each step leaves one message of it."""

    def __init__(self, store: Store, session: Session) -> None:
        self.store: Store = store
        self.session: Session = session
        self.run: int = 0
        self.fences: list[int] = []

    def send(self) -> None:
        submit(self.store, "a")
        self.take(self.session.receive(1, 0)[0])

    def take(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.fences.append(delivery.fence)

    def give_back(self) -> None:
        self._settle(fate=Fate.BACK)

    def retry(self) -> None:
        self._settle(state_of("a", State.RETRY, run=self.run), [message_of("a", run=self.run + 1)])
        self.run += 1

    def die(self) -> None:
        """Become a dead letter, which is replayed: run 0 again."""
        self._settle(state_of("a", State.FAILURE, run=self.run), fate=Fate.DEAD, reason="poison")
        self._replay()
        self.store.broker.take_dead([one.id for one in self.store.broker.dead_letters(limit=9)])

    def fail(self) -> None:
        """Fail, and be sent again by an operator: run 0 again."""
        self._settle(state_of("a", State.FAILURE, run=self.run))
        self._replay()

    def forget(self) -> None:
        """Fail, be forgotten, and be sent as if it were new."""
        self._settle(state_of("a", State.FAILURE, run=self.run))
        self.store.backend.purge_state("a")
        submit(self.store, "a")
        self.run = 0

    def _settle(
        self, state: TaskState | None = None, send: Sequence[Message] = (), **more: Any
    ) -> None:
        states = () if state is None else (state,)
        end = Settlement(
            delivery=self.delivery, uuid="a", name="add", states=states, send=send, **more
        )
        assert self.session.settle([end]) == [SETTLED]

    def _replay(self) -> None:
        self.run = 0
        self.store.submit(
            Submission(token="", messages=[message_of("a")], states=[state_of("a")], replay=True)
        )


class FencingConformance(StoreCase):
    """Sessions that lost their deliveries."""

    def test_worker_that_lost_the_delivery_changes_nothing(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        submit(store, "a")
        (old,) = session.receive(1, 0)
        heir, new = self.take_over(store, session, clock)
        late = settlement(
            old,
            State.FAILURE,
            callbacks=["zombie"],
            arrivals=[arrival(old, 1, ok=False)],
            groups=[GroupMeta(group_uuid="h", task_uuids=("zombie",))],
        )

        for _ in range(3):
            assert session.settle([late]) == [FENCED]

        assert store.backend.get_state("a").state is State.PENDING
        assert store.backend.get_states(["zombie"]) == {}
        assert store.backend.get_group("h") is None
        assert store.ready_groups() == []
        assert heir.settle([settlement(new, callbacks=["c"], arrivals=[arrival(new, 1)])]) == [
            SETTLED
        ]
        assert session.settle([late]) == [FENCED]
        assert drain(store, "c") == ["c"]
        assert [group.failed_member for group in store.ready_groups()] == [""]

    def test_one_of_dead_session_and_successor_settles(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        submit(store, "a")
        (old,) = session.receive(1, 0)
        self.crash_session(store, session, clock)
        verdicts = session.settle([settlement(old, callbacks=["c"])])

        heir = store.open_session(["q"], worker="heir")
        verdicts += heir.settle([settlement(new, callbacks=["c"]) for new in heir.receive(9, 0)])

        assert verdicts.count(SETTLED) == 1
        assert drain(store, "c") == ["c"]
        heir.close()
        assert drain(store, "q") == []

    def test_each_delivery_has_a_greater_fence(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        submit(store, "a")
        (delivery,) = session.receive(1, 0)
        numbers = [delivery.fence]
        for _ in range(3):
            session, delivery = self.take_over(store, session, clock)
            numbers.append(delivery.fence)

        assert numbers == sorted(set(numbers))
        assert session.settle([settlement(delivery)]) == [SETTLED]

    def test_fences_grow_whatever_becomes_of_a_task(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        """Through crashes, returns, retries, dead letters, replays, and a state that is gone."""
        life = _Life(store, session)
        life.send()
        for step in (life.give_back, life.retry, life.die, life.fail, life.forget, life.retry):
            step()
            found = life.session.receive(1, 0)
            assert found, (step, life.fences)
            life.take(found[0])
            life.take(self.crashed(life, clock))

        assert len(life.fences) == 13
        assert life.fences == sorted(set(life.fences))

    def crashed(self, life: _Life, clock: ManualClock) -> Delivery:
        life.session, delivery = self.take_over(life.store, life.session, clock)
        return delivery

    def test_fences_of_a_claim_follow_the_order_of_its_messages(
        self, store: Store, session: Session
    ) -> None:
        names = [f"task-{number}" for number in range(20)]
        submit(store, *names)
        found = [*session.receive(3, 0), *session.receive(20, 0)]
        fences = [delivery.fence for delivery in found]

        assert [uuid_of(delivery) for delivery in found] == names
        assert fences == sorted(set(fences))

    def test_fences_grow_where_the_clock_was_set_back(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        life = _Life(store, session)
        life.send()
        for _ in range(3):
            clock.set_back(3600.0)
            life.retry()
            life.take(session.receive(1, 0)[0])

        assert life.fences == sorted(set(life.fences))
        assert len(life.fences) == 4

    def test_worker_that_lost_the_delivery_sends_no_retry(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        submit(store, "a")
        (old,) = session.receive(1, 0)
        heir, new = self.take_over(store, session, clock)
        retry = Settlement(
            delivery=old,
            uuid="a",
            states=[state_of("a", State.RETRY)],
            send=[message_of("a", run=1)],
        )

        assert session.settle([retry]) == [FENCED]
        assert session.settle([Settlement(delivery=old, uuid="a", fate=Fate.BACK)]) == [FENCED]

        assert drain(store, "q") == []
        assert heir.settle([settlement(new)]) == [SETTLED]

    def test_session_that_was_given_up_goes_on_as_a_new_one(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        submit(store, "a")
        session.consumer.run_begins(session.receive(1, 0)[0])
        self.crash_session(store, session, clock)

        assert (session.beat(), session.beat()) == (False, True)

        (delivery,) = session.receive(1, 0)
        assert (delivery.strikes, delivery.redelivered) == (1, True)
        assert session.settle([settlement(delivery)]) == [SETTLED]

    def test_marks_of_a_lost_delivery_are_dropped(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        submit(store, "a")
        (old,) = session.receive(1, 0)
        heir, new = self.take_over(store, session, clock)

        session.settle(
            [], [Mark(delivery=old, state=state_of("a", State.STARTED, worker="zombie"))]
        )

        assert store.backend.get_state("a").state is State.PENDING
        heir.settle([], [Mark(delivery=new, state=state_of("a", State.STARTED, worker="heir"))])
        session.settle(
            [], [Mark(delivery=old, state=state_of("a", State.STARTED, worker="zombie"))]
        )
        assert store.backend.get_state("a").worker == "heir"

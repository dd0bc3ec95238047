"""Promises of every store about many large bodies: nothing is lost, refused or stuck by its size.

Part of SettlementConformance.
"""

from __future__ import annotations

import contextlib

import msgspec

from machinery_py.backends.base import SETTLED
from machinery_py.bounds import STEP_BYTES
from machinery_py.brokers.base import Delivery, Fate, Message
from machinery_py.errors import BrokerUnavailable
from machinery_py.stores.base import Firing, Session, Settlement, Store, Submission
from machinery_py.tasks.signature import Arg, Signature
from machinery_py.tasks.states import Arrival, GroupMeta, State
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.fencing import StoreCase, settlement, state_of, uuid_of
from machinery_py.testing.waiting import HANG, wait_until
from machinery_py.wire.signatures import encode_signature

SIZE = 900_000  # bytes; memcached takes no item of more than a megabyte
COUNT = 20  # more than MongoDB takes in one document
assert STEP_BYTES < COUNT * SIZE

_text = Arg(type="string", value="x" * SIZE)
_uuids = [f"large_{number}" for number in range(COUNT)]


def _message(uuid: str, queue: str = "q") -> Message:
    signature: Signature[object] = Signature(
        name="add", uuid=uuid, routing_key=queue, args=(_text,)
    )
    return Message(uuid=uuid, name="add", queue=queue, body=encode_signature(signature))


def _claim(session: Session, count: int) -> list[Delivery]:
    """Claim so many, in as many claims as the store wants; one that fails is repeated."""
    found: list[Delivery] = []

    def has_all() -> bool:
        with contextlib.suppress(BrokerUnavailable):
            found.extend(session.receive(count - len(found), 0.1))
        return len(found) >= count

    if count:
        wait_until(has_all, 2 * HANG, "all messages to be claimed")
    return sorted(found, key=lambda one: int(uuid_of(one).partition("_")[2]))


def _ended(delivery: Delivery) -> Settlement:
    uuid = uuid_of(delivery)
    arrival = Arrival(group_uuid="g", task_uuid=uuid, total=COUNT, ok=True, callback=b"callback")
    end = settlement(delivery, arrivals=[arrival])
    states = (state_of(uuid, State.SUCCESS, results=(_text,)),)
    return msgspec.structs.replace(end, states=states)


class BoundsConformance(StoreCase):
    """Many of the largest messages and results."""

    def _submit(self, store: Store) -> None:
        store.submit(
            Submission(
                token="large",
                messages=[_message(uuid) for uuid in _uuids],
                states=[state_of(uuid) for uuid in _uuids],
                groups=[GroupMeta(group_uuid="g", task_uuids=_uuids)],
            )
        )

    def test_many_large_messages_are_submitted_and_claimed(
        self, store: Store, session: Session
    ) -> None:
        self._submit(store)
        self._submit(store)  # after a lost reply

        found = _claim(session, COUNT)

        assert [uuid_of(one) for one in found] == _uuids
        assert all(len(one.body) > SIZE for one in found)
        assert session.receive(COUNT, 0) == []

    def test_many_large_results_are_settled_read_and_sent_on(
        self, store: Store, session: Session
    ) -> None:
        self._submit(store)
        ends = [_ended(one) for one in _claim(session, COUNT)]

        assert session.settle(ends) == [SETTLED] * COUNT

        states = store.backend.get_states(_uuids)
        assert [tuple(states[uuid].results) for uuid in _uuids] == [(_text,)] * COUNT
        assert [one.group_uuid for one in store.ready_groups()] == ["g"]
        results = store.backend.group_results("g")
        assert [len(str(one.results[0].value)) for one in results] == [SIZE] * COUNT
        # A backend that forgets keeps an outbox as one item, which may be no larger than a result.
        is_small = store.backend.features.forgets
        callbacks = [] if is_small else [f"callback_{number}" for number in range(6)]
        send = [_message(uuid, "c") for uuid in callbacks]
        assert store.fire(Firing(group_uuid="g", send=send))
        heir = store.open_session(["c"], worker="c")
        assert [uuid_of(one) for one in _claim(heir, len(send))] == callbacks
        heir.close()

    def test_many_large_deliveries_come_back_from_a_dead_session(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        self._submit(store)
        _claim(session, COUNT)
        self.crash_session(store, session, clock)

        heir = store.open_session(["q"], worker="heir")
        assert [uuid_of(one) for one in _claim(heir, COUNT)] == _uuids
        heir.close()

    def test_many_large_dead_letters_are_listed_and_taken(
        self, store: Store, session: Session
    ) -> None:
        self._submit(store)
        dead = [
            Settlement(delivery=one, fate=Fate.DEAD, reason="poison", uuid=uuid_of(one), name="add")
            for one in _claim(session, COUNT)
        ]
        assert session.settle(dead) == [SETTLED] * COUNT

        letters = store.broker.dead_letters(limit=99)
        assert sorted(one.uuid for one in letters) == sorted(_uuids)
        taken = store.broker.take_dead([one.id for one in letters])
        assert sum(len(one.body) for one in taken) > COUNT * SIZE
        assert store.broker.dead_letters(limit=99) == []

"""Promises of every store about claims, the keys of unique tasks.

A claim has one holder and is taken in one step with the messages.

class TestMyStore(ClaimConformance):
    @pytest.fixture
    def open_store(self, clock: ManualClock) -> OpenStore:
        return lambda: RowsStore(RowsBroker(MyRows()), RowsBackend(MyRows()))
"""

from __future__ import annotations

import functools

from machinery_py.backends.base import Rider
from machinery_py.stores.base import Session, Store, Submission
from machinery_py.tasks.states import State
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.fencing import (
    OpenStore,
    drain,
    message_of,
    state_of,
    uuid_of,
)
from machinery_py.testing.conformance.riders import RiderConformance
from machinery_py.testing.waiting import together

__all__ = ["ClaimConformance", "OpenStore", "claim"]


def claim(
    store: Store,
    name: str,
    expected: bytes | None,
    body: bytes | None,
    *uuids: str,
    life: float = 100.0,
    more: State | None = None,
) -> bool:
    """Change a claim, and send these tasks in the same step. `more`: a state of the task "old"."""
    states = [state_of(uuid) for uuid in uuids] + (
        [state_of("old", more)] if more is not None else []
    )
    return store.submit(
        Submission(
            token=f"unique {name} {uuids[0]}" if uuids else "",
            messages=[message_of(uuid) for uuid in uuids],
            states=states,
            riders=[Rider(name=name, expected=expected, body=body, life=life)],
        )
    )


class ClaimConformance(RiderConformance):
    """Tests of claims in Store.submit, Backend.amend, Backend.claims and Backend.release."""

    def test_store_declares_that_it_keeps_claims(self, store: Store) -> None:
        assert store.backend.claims(["a"]) == [None]

    def test_claim_is_made_changed_and_removed(self, store: Store) -> None:
        assert store.backend.claims(["a", "b"]) == [None, None]
        assert claim(store, "a", None, b"1")
        assert claim(store, "b", None, b"x")
        assert claim(store, "a", b"1", b"2")
        assert store.backend.claims(["b", "none", "a"]) == [b"x", None, b"2"]

        assert claim(store, "a", b"2", None)
        assert store.backend.claims(["a", "b"]) == [None, b"x"]

    def test_amend_with_another_expected_value_writes_nothing(
        self, store: Store, session: Session
    ) -> None:
        claim(store, "a", None, b"1")

        for expected in (None, b"0", b""):
            assert not claim(store, "a", expected, b"2", "t", more=State.FAILURE)
        assert not claim(store, "b", b"1", b"2", "t")
        assert not claim(store, "b", b"1", None)

        assert store.backend.claims(["a", "b"]) == [b"1", None]
        assert session.receive(9, 0) == []
        assert store.backend.get_states(["t", "old"]) == {}

    def test_messages_of_a_claim_come_with_all_states(self, store: Store, session: Session) -> None:
        assert claim(store, "a", None, b"1", "t", more=State.FAILURE)

        assert [uuid_of(delivery) for delivery in session.receive(9, 0)] == ["t"]
        found = store.backend.get_states(["t", "old"])
        assert {uuid: state.state for uuid, state in found.items()} == {
            "t": State.PENDING,
            "old": State.FAILURE,
        }

    def test_claim_and_record_of_one_name_are_two(self, store: Store) -> None:
        assert store.backend.amend(Rider(name="a", expected=None, body=b"record"))
        version = store.backend.records().version

        assert claim(store, "a", None, b"claim")

        records = store.backend.records()
        assert (records.bodies, records.version) == ({"a": b"record"}, version)
        assert store.backend.claims(["a"]) == [b"claim"]

    def test_claim_is_gone_after_its_life(self, store: Store, clock: ManualClock) -> None:
        assert claim(store, "a", None, b"1", life=100.0)
        assert claim(store, "b", None, b"1", life=100.0)
        clock.advance(60.0)
        assert claim(store, "b", b"1", b"2", life=100.0)
        clock.advance(60.0)

        assert store.backend.claims(["a", "b"]) == [None, b"2"]
        assert not claim(store, "a", b"1", b"2")
        assert claim(store, "a", None, b"3")
        store.tend()
        assert store.backend.claims(["a", "b"]) == [b"3", b"2"]

    def test_claim_is_released_only_if_unchanged(self, store: Store) -> None:
        claim(store, "a", None, b"1")
        claim(store, "b", None, b"1")
        claim(store, "c", None, b"1")

        store.backend.release([("a", b"1"), ("b", b"0"), ("none", b"1")])
        store.backend.release([])

        assert store.backend.claims(["a", "b", "c"]) == [None, b"1", b"1"]

    def test_bytes_are_read_back_unchanged(self, store: Store) -> None:
        body = bytes(range(256)) + b"\r\n" * 3
        assert claim(store, "a" * 64, None, body)
        assert store.backend.claims(["a" * 64]) == [body]
        store.backend.release([("a" * 64, body)])
        assert store.backend.claims(["a" * 64]) == [None]

    def test_second_process_reads_the_claim(self, store: Store, open_store: OpenStore) -> None:
        claim(store, "a", None, b"1")
        other = open_store()

        assert other.backend.claims(["a"]) == [b"1"]
        assert not claim(other, "a", None, b"2", "t")
        assert claim(other, "a", b"1", b"2", "t")
        assert store.backend.claims(["a"]) == [b"2"]

    def test_one_of_many_racing_senders_gets_the_claim(
        self, store: Store, open_store: OpenStore
    ) -> None:
        stores = [store, *(open_store() for _ in range(3))]

        def send(turn: int, index: int) -> bool:
            return claim(stores[index % 4], f"race {turn}", None, b"%d" % index, f"t{turn}-{index}")

        for turn in range(5):
            won = together(16, functools.partial(send, turn))
            assert won.count(True) == 1
            assert store.backend.claims([f"race {turn}"]) == [b"%d" % won.index(True)]
        assert len(drain(store, "q")) == 5

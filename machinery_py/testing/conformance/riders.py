"""Promises of every store about riders, the records that become true with something else.

Part of ClaimConformance. A store that changes records with submissions alone says so in its
`features`; then what is settled or fired with a rider is refused, and nothing of it is true.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from machinery_py.backends.base import (
    ALREADY,
    CONFLICT,
    FENCED,
    SETTLED,
    Change,
    Rider,
    Verdict,
)
from machinery_py.errors import Unsupported
from machinery_py.stores.base import Firing, Session, Settlement, Store
from machinery_py.tasks.states import GroupMeta, State
from machinery_py.testing.conformance.abilities import need_claims
from machinery_py.testing.conformance.fencing import (
    OpenStore,
    StoreCase,
    arrival,
    drain,
    message_of,
    settlement,
    state_of,
    submit,
)

RECORD = Rider(name="r", expected=b"0", body=b"1")
CLAIM = Rider(name="c", expected=None, body=b"mine", life=100.0)
STALE = Rider(name="r", expected=b"another", body=b"2")


def riding(ending: Settlement, *riders: Rider) -> Settlement:
    return msgspec.structs.replace(ending, riders=riders)


def records(store: Store) -> tuple[bytes | None, bytes | None]:
    """Return what the record r and the claim c hold."""
    return (store.backend.records().bodies or {}).get("r"), store.backend.claims(["c"])[0]


def settle(store: Store, session: Session, *endings: Settlement) -> Sequence[Verdict]:
    """Settle these; skip the rest of the test on a store that refuses it in words."""
    if store.backend.features.riders:
        return session.settle(endings)
    before = records(store)
    with pytest.raises(Unsupported, match="with what is sent, and with nothing else"):
        session.settle(endings)
    assert records(store) == before
    pytest.skip("this store changes records with submissions alone")


class RiderConformance(StoreCase):
    """Tests of the riders of Session.settle, Store.fire and Backend.apply."""

    @pytest.fixture(autouse=True)
    def claims_are_kept(self, store: Store) -> None:
        need_claims(store.backend)

    @pytest.fixture
    def kept(self, store: Store) -> Store:
        """Return the store, with the record r."""
        assert store.backend.amend(Rider(name="r", expected=None, body=b"0"))
        return store

    def test_settlement_and_riders_become_true_together(
        self, kept: Store, session: Session
    ) -> None:
        submit(kept, "t")
        [delivery] = session.receive(1, 0)
        ending = riding(settlement(delivery, callbacks=["next"]), RECORD, CLAIM)

        assert settle(kept, session, ending) == [SETTLED]

        assert records(kept) == (b"1", b"mine")
        assert kept.backend.get_state("t").state is State.SUCCESS
        assert drain(kept, "c") == ["next"]

    def test_conflict_refuses_its_settlement_alone(self, kept: Store, session: Session) -> None:
        submit(kept, "t", "u")
        one, other = session.receive(2, 0)
        refused = settlement(one, callbacks=["next"])

        found = settle(kept, session, riding(refused, CLAIM, STALE), settlement(other))

        assert found == [CONFLICT, SETTLED]
        assert records(kept) == (b"0", None)
        found_states = kept.backend.get_states(["t", "u", "next"])
        assert {uuid: one.state for uuid, one in found_states.items()} == {
            "t": State.PENDING,
            "u": State.SUCCESS,
        }
        assert drain(kept, "c") == []
        assert session.settle([riding(refused, RECORD)]) == [SETTLED]  # it was held all the time
        assert (records(kept)[0], drain(kept, "c")) == (b"1", ["next"])

    def test_conflict_leaves_the_delivery_to_the_next_worker(
        self, kept: Store, session: Session
    ) -> None:
        submit(kept, "t")
        [delivery] = session.receive(1, 0)
        assert settle(kept, session, riding(settlement(delivery), STALE)) == [CONFLICT]

        session.close()

        assert drain(kept, "q") == ["t"]

    def test_one_of_two_settlements_with_one_record_is_refused(
        self, kept: Store, session: Session
    ) -> None:
        submit(kept, "t", "u")
        endings = [riding(settlement(one), RECORD) for one in session.receive(2, 0)]

        assert settle(kept, session, *endings) == [SETTLED, CONFLICT]

        assert records(kept)[0] == b"1"
        assert kept.backend.get_state("u").state is State.PENDING

    def test_settlement_finds_the_record_as_the_one_before_left_it(
        self, kept: Store, session: Session
    ) -> None:
        submit(kept, "t", "u")
        one, other = session.receive(2, 0)
        second = Rider(name="r", expected=b"1", body=None)

        found = settle(
            kept,
            session,
            riding(settlement(one), RECORD),
            riding(settlement(other), second),
        )

        assert (found, records(kept)[0]) == ([SETTLED, SETTLED], None)

    def test_settlement_with_a_rider_is_known_when_repeated(
        self, kept: Store, session: Session
    ) -> None:
        submit(kept, "t")
        [delivery] = session.receive(1, 0)
        ending = riding(settlement(delivery, callbacks=["next"]), RECORD)
        assert settle(kept, session, ending) == [SETTLED]
        version = kept.backend.records().version

        assert session.settle([ending]) == [ALREADY]

        assert (records(kept)[0], kept.backend.records().version) == (b"1", version)
        assert drain(kept, "c") == ["next"]

    def test_fenced_settlement_writes_no_rider(
        self, kept: Store, session: Session, open_store: OpenStore
    ) -> None:
        submit(kept, "t")
        [delivery] = session.receive(1, 0)
        ended = Change(key="t", states=(state_of("t", State.FAILURE),))
        assert open_store().backend.apply([ended]) == [SETTLED]

        for rider in (RECORD, STALE):
            assert settle(kept, session, riding(settlement(delivery), rider)) == [FENCED]

        assert records(kept)[0] == b"0"
        assert drain(kept, "q") == []

    def test_group_fires_with_its_rider_or_not_at_all(self, kept: Store, session: Session) -> None:
        submit(kept, "t", groups=[GroupMeta(group_uuid="g", task_uuids=("t",))])
        [delivery] = session.receive(1, 0)
        session.settle([settlement(delivery, arrivals=(arrival(delivery, 1),))])
        firing = Firing(
            group_uuid="g",
            states=[state_of("next")],
            send=[message_of("next", queue="c")],
            riders=[RECORD],
        )
        if not kept.backend.features.riders:
            with pytest.raises(Unsupported, match="with what is sent, and with nothing else"):
                kept.fire(firing)
            assert (records(kept)[0], drain(kept, "c")) == (b"0", [])
            return

        assert not kept.fire(msgspec.structs.replace(firing, riders=[CLAIM, STALE]))
        assert (records(kept), drain(kept, "c")) == ((b"0", None), [])

        assert kept.fire(firing)
        assert not kept.fire(firing)
        assert (records(kept)[0], drain(kept, "c")) == (b"1", ["next"])

    def test_only_settled_changes_of_a_batch_write_their_records(self, kept: Store) -> None:
        changes = [
            Change(key="a", states=(state_of("a"),), riders=[STALE]),
            Change(key="b", states=(state_of("b"),), riders=[RECORD, CLAIM]),
            Change(key="d", states=(state_of("d"),), riders=[RECORD]),
        ]
        if not kept.backend.features.riders:
            with pytest.raises(Unsupported, match="with what is sent, and with nothing else"):
                kept.backend.apply(changes)
            return

        assert kept.backend.apply(changes) == [CONFLICT, SETTLED, CONFLICT]

        assert records(kept) == (b"1", b"mine")
        assert list(kept.backend.get_states(["a", "b", "d"])) == ["b"]

"""Promises of every store about checkpoints: kept once, by whom the delivery belongs to.

A store whose backend keeps none says so in its `features`; then each call raises Unsupported.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from machinery_py.backends.base import CONFLICT, FENCED, SETTLED, Keeping
from machinery_py.errors import Unsupported
from machinery_py.stores.base import Session, Store
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.fencing import (
    OpenStore,
    StoreCase,
    settlement,
    submit,
)


def keeping(uuid: str, **rows: bytes) -> Keeping:
    return Keeping(uuid=uuid, rows=rows)


class CheckpointConformance(StoreCase):
    """Tests of Session.keep, and of the checkpoints of a backend."""

    @pytest.fixture(autouse=True)
    def checkpoints_are_kept(self, store: Store) -> None:
        backend = store.backend
        if not backend.features.checkpoints:
            submit(store, "t")
            session = store.open_session(["q"], worker="w")
            [delivery] = session.receive(1, 5.0)
            for call in (
                lambda: backend.checkpoints("t"),
                lambda: backend.end_checkpoints("t", 1.0),
                lambda: session.keep(delivery, keeping("t", a=b"1")),
            ):
                with pytest.raises(Unsupported, match="keeps no checkpoints .put the results into"):
                    call()
            session.close()
            pytest.skip(f"{backend.features.name} keeps no checkpoints, and says so")

    @pytest.fixture
    def other(self, store: Store) -> Iterator[Session]:
        session = store.open_session(["q"], worker="other")
        yield session
        session.close()

    def test_checkpoints_are_there_for_every_process(
        self, store: Store, session: Session, open_store: OpenStore
    ) -> None:
        submit(store, "t", "u")
        [delivery, _] = session.receive(2, 5.0)

        assert session.keep(delivery, keeping("t", one=b"1", two=bytes(range(256)))) is SETTLED
        assert session.keep(delivery, keeping("t", **{"drei #3": b""})) is SETTLED

        kept = {"one": b"1", "two": bytes(range(256)), "drei #3": b""}
        assert open_store().backend.checkpoints("t") == kept
        assert store.backend.checkpoints("u") == {}

    def test_a_name_is_written_once(self, store: Store, session: Session) -> None:
        submit(store, "t")
        [delivery] = session.receive(1, 5.0)
        assert session.keep(delivery, keeping("t", one=b"1")) is SETTLED

        assert session.keep(delivery, keeping("t", one=b"another", two=b"2")) is CONFLICT

        assert store.backend.checkpoints("t") == {"one": b"1"}  # nor a part of it

    def test_tasks_have_checkpoints_of_their_own(self, store: Store, session: Session) -> None:
        submit(store, "t", "t 2")
        deliveries = session.receive(2, 5.0)

        for delivery, uuid in zip(deliveries, ("t", "t 2"), strict=True):
            assert session.keep(delivery, keeping(uuid, a=uuid.encode())) is SETTLED

        assert store.backend.checkpoints("t") == {"a": b"t"}
        assert store.backend.checkpoints("t 2") == {"a": b"t 2"}

    def test_worker_that_lost_the_delivery_keeps_nothing(
        self, store: Store, session: Session, other: Session, clock: ManualClock
    ) -> None:
        submit(store, "t")
        [mine] = session.receive(1, 5.0)
        assert session.keep(mine, keeping("t", one=b"1")) is SETTLED
        self.crash_session(store, session, clock, [other])
        [theirs] = other.receive(1, 5.0)

        assert session.keep(mine, keeping("t", two=b"mine")) is FENCED
        assert other.keep(theirs, keeping("t", two=b"theirs")) is SETTLED

        assert store.backend.checkpoints("t") == {"one": b"1", "two": b"theirs"}

    def test_delivery_that_is_over_keeps_nothing(self, store: Store, session: Session) -> None:
        submit(store, "t")
        [delivery] = session.receive(1, 5.0)
        assert session.settle([settlement(delivery)]) == [SETTLED]

        assert session.keep(delivery, keeping("t", one=b"1")) is FENCED

        assert store.backend.checkpoints("t") == {}

    def test_checkpoints_can_be_forgotten_at_once(self, store: Store, session: Session) -> None:
        submit(store, "t", "u")
        deliveries = session.receive(2, 5.0)
        for delivery, uuid in zip(deliveries, "tu", strict=True):
            session.keep(delivery, keeping(uuid, one=b"1", two=b"2"))

        store.backend.end_checkpoints("t", 0)
        store.backend.end_checkpoints("nobody", 0)

        assert store.backend.checkpoints("t") == {}
        assert store.backend.checkpoints("u") == {"one": b"1", "two": b"2"}

    def test_checkpoints_go_with_the_state(self, store: Store, session: Session) -> None:
        submit(store, "t")
        [delivery] = session.receive(1, 5.0)
        session.keep(delivery, keeping("t", one=b"1"))

        store.backend.purge_state("t")

        assert store.backend.checkpoints("t") == {}

    def test_many_checkpoints_are_read_at_once(self, store: Store, session: Session) -> None:
        submit(store, "t")
        [delivery] = session.receive(1, 5.0)
        rows = {f"step#{number}": b"x" * 1000 for number in range(1000)}
        for start in range(0, 1000, 20):
            some = dict(list(rows.items())[start : start + 20])
            assert session.keep(delivery, keeping("t", **some)) is SETTLED

        assert store.backend.checkpoints("t") == rows

    def test_checkpoints_expire_when_the_state_has(
        self, store: Store, session: Session, clock: ManualClock
    ) -> None:
        submit(store, "t")
        [delivery] = session.receive(1, 5.0)
        session.keep(delivery, keeping("t", one=b"1"))
        clock.advance(86_400.0)
        assert store.backend.checkpoints("t") == {"one": b"1"}  # as long as it is not over
        assert session.settle([settlement(delivery)]) == [SETTLED]

        store.backend.end_checkpoints("t", 3660.0)

        clock.advance(3000.0)
        assert store.backend.checkpoints("t") == {"one": b"1"}
        clock.advance(3600.0)
        store.tend()
        assert store.backend.checkpoints("t") == {}

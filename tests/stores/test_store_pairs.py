"""Settlement, schedule and claim contracts over each broker and backend (docs/reference/matrix.md).

`make matrix` (MACHINERY_TEST_PAIRS=1) and `make chaos` (MACHINERY_TEST_FULL=1) run every pair.
Otherwise each kind of broker and each kind of backend is in one of them. Memory and SQLite are one
kind: rows. One store for both: test_conformance.py of its folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from machinery_py.stores.base import Session, Store
from machinery_py.stores.outbox import TwoStores
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.checkpoints import CheckpointConformance
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.fencing import StoreCase
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from tests.matrix import stores, without_claims
from tests.stores.pair_case import ALL_PAIRS, PairClock, Place, Side, dies_at_once, open_side, place

#: Stores of one kind that are two all the same: a program may open two of them.
TWICE = {("memory", "memory"), ("amqp", "amqp")}
SETTLED = TWICE | {
    ("amqp", "sqlite"),
    ("memory", "memcache"),
    ("mongodb", "redis"),
    ("redis", "mongodb"),
}
RECORDED = {
    ("amqp", "redis"),
    ("memory", "memory"),
    ("redis", "mongodb"),
}
#: A backend that keeps none says so over any broker.
KEPT = {
    ("amqp", "amqp"),
    ("amqp", "redis"),
    ("amqp", "sqlite"),
    ("memory", "memcache"),
    ("redis", "mongodb"),
    ("redis", "postgresql"),
}
#: What the stand-in for MongoDB needs minutes for; a store of MongoDB alone runs it.
LARGE = {
    "test_many_large_results_are_settled_read_and_sent_on": None,
    "test_many_large_deliveries_come_back_from_a_dead_session": None,
    "test_many_large_dead_letters_are_listed_and_taken": None,
}


class Pair(StoreCase):
    @pytest.fixture
    def sides(self, broker_place: Place, backend_place: Place) -> Iterator[tuple[Side, Side]]:
        sides = open_side(broker_place), open_side(backend_place)
        yield sides
        for side in sides:
            side.close()

    @pytest.fixture
    def clock(self, sides: tuple[Side, Side]) -> PairClock:
        return PairClock(*(side.clock for side in sides))

    @pytest.fixture
    def open_store(self, sides: tuple[Side, Side], clock: PairClock) -> OpenStore:
        open_broker, open_backend = sides[0].open_broker, sides[1].open_backend
        assert open_broker is not None
        assert open_backend is not None
        return lambda: TwoStores(open_broker(), open_backend(), clock)

    def crash_session(
        self, store: Store, session: Session, clock: ManualClock, survivors: Sequence[Session] = ()
    ) -> None:
        if not dies_at_once(store, session):
            super().crash_session(store, session, clock, survivors)


_WITHOUT_CLAIMS = without_claims()
for (_broker, _backend), (_suite, _always) in itertools.product(
    itertools.product(*stores()),
    (
        (SettlementConformance, SETTLED),
        (ScheduleConformance, RECORDED),
        (ClaimConformance, RECORDED),
        (CheckpointConformance, KEPT),
    ),
):
    _pair = (_broker, _backend)
    if _suite is ClaimConformance and _backend in _WITHOUT_CLAIMS:
        continue  # test_refusals.py
    if _pair in _always or (ALL_PAIRS and (_broker != _backend or _pair in TWICE)):
        _name = f"Test{_suite.__name__}Of{_broker.capitalize()}And{_backend.capitalize()}"
        globals()[_name] = type(
            _name,
            (Pair, _suite),
            {
                "broker_place": place(_broker, "broker"),
                "backend_place": place(_backend, "backend"),
                **(LARGE if _pair == ("mongodb", "redis") and not ALL_PAIRS else {}),
            },
        )

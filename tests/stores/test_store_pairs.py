"""Settlement, schedule and claim contracts over each broker and backend (docs/reference/matrix.md).

Pairs with a class of their own run there. `make matrix` (MACHINERY_TEST_PAIRS=1) and `make chaos`
(MACHINERY_TEST_FULL=1) run all others; otherwise a few run, with each kind of store in one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest

from machinery_py.stores.base import Session, Store
from machinery_py.stores.outbox import TwoStores
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.conformance.claims import ClaimConformance
from machinery_py.testing.conformance.fencing import StoreCase
from machinery_py.testing.conformance.schedules import ScheduleConformance
from machinery_py.testing.conformance.settlement import OpenStore, SettlementConformance
from tests.matrix import stores
from tests.stores.pair_case import ALL_PAIRS, PairClock, Place, Side, dies_at_once, open_side, place

SETTLED_ELSEWHERE = frozenset(
    {
        ("memory", "memory"),
        ("sqlite", "sqlite"),
        ("redis", "redis"),
        ("mongodb", "mongodb"),
        ("memory", "sqlite"),
        ("mongodb", "memory"),
        ("memory", "mongodb"),
        ("memory", "memcache"),
        ("sqlite", "memcache"),
        ("memory", "amqp"),
        ("amqp", "amqp"),
    }
)
SCHEDULED_ELSEWHERE = frozenset(
    {
        ("memory", "memory"),
        ("sqlite", "sqlite"),
        ("redis", "redis"),
        ("mongodb", "mongodb"),
        ("memory", "redis"),
        ("memory", "sqlite"),
        ("memory", "mongodb"),
        ("memory", "amqp"),
    }
)
CLAIMED_ELSEWHERE = SCHEDULED_ELSEWHERE | {("memory", "memcache")}
SETTLED_ALWAYS = frozenset({("amqp", "sqlite"), ("redis", "mongodb"), ("mongodb", "redis")})
SCHEDULED_ALWAYS = frozenset({("amqp", "redis"), ("redis", "mongodb"), ("memory", "memcache")})
CLAIMED_ALWAYS = frozenset({("amqp", "redis")})


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


class Settlements(Pair, SettlementConformance):
    __test__ = False


class Schedules(Pair, ScheduleConformance):
    __test__ = False


class Claims(Pair, ClaimConformance):
    __test__ = False


for _broker, _backend in itertools.product(*stores()):
    for _suite, _elsewhere, _always in (
        (Settlements, SETTLED_ELSEWHERE, SETTLED_ALWAYS),
        (Schedules, SCHEDULED_ELSEWHERE, SCHEDULED_ALWAYS),
        (Claims, CLAIMED_ELSEWHERE, CLAIMED_ALWAYS),
    ):
        if (_broker, _backend) not in _elsewhere and (ALL_PAIRS or (_broker, _backend) in _always):
            _name = f"Test{_suite.__name__}Of{_broker.capitalize()}And{_backend.capitalize()}"
            globals()[_name] = type(
                _name,
                (_suite,),
                {
                    "__test__": True,
                    "broker_place": place(_broker, "broker"),
                    "backend_place": place(_backend, "backend"),
                },
            )

"""A worker's own view of its lease, by a clock that the test sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from machinery_py.backends.memory import MemoryBackend
from machinery_py.brokers.memory import MemoryBroker
from machinery_py.errors import BrokerUnavailable
from machinery_py.rows.memory import MemoryRows
from machinery_py.stores.base import Session
from machinery_py.stores.rows import RowsStore
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.flaky import FlakyStore
from machinery_py.worker.lease import WorkerLease

LEASE = 10.0


class Case:
    def __init__(self) -> None:
        self.clock = ManualClock()  # of the store and of the worker
        hub = MemoryRows(self.clock)
        broker = MemoryBroker(hub, lease=LEASE)
        self.store = FlakyStore(RowsStore(broker, MemoryBackend(hub)))
        self.session: Session = self.store.open_session(["q"], worker="w")
        self.lease = WorkerLease(self.session, LEASE, self.clock.monotonic)
        self.losses: list[float] = []
        self.lease.on_lost = lambda: self.losses.append(self.clock.monotonic())

    def stand_still(self, seconds: float, *, taken: bool) -> None:
        """Let time pass without a beat; `taken`: another worker looks for the dead meanwhile."""
        for _ in range(2):
            self.clock.advance(seconds / 2)
            if taken:
                self.store.broker.tend()


@pytest.fixture
def case() -> Iterator[Case]:
    case = Case()
    yield case
    case.store.close()


def test_within_the_lease_nobody_is_asked(case: Case) -> None:
    claimed_at = case.lease.now()
    case.stand_still(LEASE - 1.0, taken=False)
    case.store.next_call("beat", lose_reply=False)  # a beat would fail

    assert case.lease.holds(claimed_at)


def test_lease_over_by_the_clock_is_renewed_if_nobody_took_it(case: Case) -> None:
    claimed_at = case.lease.now()
    case.stand_still(3 * LEASE, taken=False)

    assert case.lease.holds(claimed_at)
    assert case.losses == []


def test_after_a_loss_only_later_claims_may_begin(case: Case) -> None:
    claimed_at = case.lease.now()
    case.stand_still(3 * LEASE, taken=True)

    assert not case.lease.holds(claimed_at)
    assert case.losses == [3 * LEASE]
    case.clock.advance(0.1)
    assert case.lease.holds(case.lease.now())
    assert not case.lease.holds(claimed_at)


def test_a_loss_that_the_beat_finds_counts_as_well(case: Case) -> None:
    claimed_at = case.lease.now()
    case.stand_still(3 * LEASE, taken=True)

    assert not case.lease.beat()
    assert not case.lease.holds(claimed_at)


def test_nothing_begins_while_a_lease_that_is_over_cannot_be_asked_for(case: Case) -> None:
    claimed_at = case.lease.now()
    case.stand_still(3 * LEASE, taken=False)

    case.store.next_call("beat", lose_reply=False)
    assert not case.lease.holds(claimed_at)

    assert case.lease.holds(claimed_at)


def test_a_beat_holds_from_when_it_was_asked_for(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_beat() -> bool:
        case.clock.advance(LEASE - 1.0)
        return True

    monkeypatch.setattr(case.session, "beat", slow_beat)
    assert case.lease.beat()
    case.clock.advance(2.0)

    def away() -> bool:
        raise BrokerUnavailable("away")

    monkeypatch.setattr(case.session, "beat", away)
    assert not case.lease.holds(0.0)

"""Suites that every store must pass. Subclass one, say how your store is opened and how its consumers die; run pytest.

    class TestMyBroker(BrokerConformance):
        @pytest.fixture
        def open_broker(self, clock: ManualClock) -> OpenBroker:
            return lambda: MyBroker("my://localhost", clock=clock)

    brokers      BrokerConformance
    backends     BackendConformance
    settlement   SettlementConformance
    locks        LockConformance
    schedules    ScheduleConformance: the records of schedules, and what is sent with them
    claims       ClaimConformance: the keys of unique tasks
    unique       UniqueConformance, and exclusive: ExclusiveConformance: such tasks of a Server on these stores
    workflows    WorkflowConformance: a Server on these stores with real workers; LinkedConformance for `eager`

No test asks which class it got. What a store cannot do it declares in its `features`; then the suite checks that it is
refused with Unsupported. A store whose time is its server's gives a `clock` whose `advance` moves that time (or waits).
"""

from __future__ import annotations

import pytest

# Before the suites are imported, so that their assertions say what was found.
_SUITES = (
    "leases",
    "pausing",
    "brokers",
    "groups",
    "changes",
    "backends",
    "fencing",
    "settlement",
    "schedules",
    "claims",
    "locks",
    "application",
    "unique",
    "exclusive",
    "tasks",
    "names",
    "messages",
    "queues",
    "workers",
    "chains",
    "workflows",
)
pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in _SUITES))

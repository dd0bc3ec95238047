"""Suites that every store must pass. Subclass one, override its fixtures, run pytest.

    class TestMyBroker(BrokerConformance):
        @pytest.fixture
        def open_broker(self, clock: ManualClock) -> OpenBroker:
            return lambda: MyBroker("my://localhost", clock=clock)

    brokers      BrokerConformance
    backends     BackendConformance
    settlement   SettlementConformance
    checkpoints  CheckpointConformance: what the steps of tasks have returned
    locks        LockConformance
    rows         RowsConformance: a store of rows, over which locks and limits are written
    messages_rows  MessageRowsConformance: those with messages, for a broker and a backend
    schedules    ScheduleConformance: the records of schedules, and the messages sent with them
    claims       ClaimConformance: the keys of unique tasks
    unique       UniqueConformance: unique tasks of a Server on these stores
    steps        StepConformance: steps of tasks of a Server on these stores
    exclusive    ExclusiveConformance: exclusive tasks of a Server on these stores
    workflows    WorkflowConformance: a Server on these stores with real workers;
                 LinkedConformance for `eager`

No test depends on the class of a store. A store declares in its `features` what it cannot do; then
the suite checks that the call raises Unsupported. A store that uses its server's time overrides
`clock` with one whose `advance` moves that time, or waits.
"""

from __future__ import annotations

import pytest

# Before the suites are imported, so that pytest rewrites their assertions.
_SUITES = (
    "abilities",
    "leases",
    "pausing",
    "serving",
    "fairness",
    "topics",
    "brokers",
    "groups",
    "changes",
    "backends",
    "fencing",
    "bounds",
    "settlement",
    "schedules",
    "riders",
    "claims",
    "checkpoints",
    "locks",
    "rows",
    "message_case",
    "message_steps",
    "message_claims",
    "message_holds",
    "messages_rows",
    "application",
    "unique",
    "exclusive",
    "steps",
    "tasks",
    "endings",
    "names",
    "messages",
    "queues",
    "workers",
    "chains",
    "workflows",
)
pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in _SUITES))

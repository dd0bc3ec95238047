"""Promises of every store of rows with messages.

class TestMyRows(MessageRowsConformance):
    @pytest.fixture
    def open_rows(self, clock: ManualClock) -> OpenMessageRows:
        return lambda: MyRows("my://localhost", clock=clock)

Steps are in message_steps.py, claims in message_claims.py, holds in message_holds.py.
"""

from __future__ import annotations

from machinery_py.testing.conformance.message_case import LEASE, OpenMessageRows
from machinery_py.testing.conformance.message_claims import MessageClaimConformance
from machinery_py.testing.conformance.message_holds import HoldConformance
from machinery_py.testing.conformance.message_steps import MessageStepConformance

__all__ = ["LEASE", "MessageRowsConformance", "OpenMessageRows"]


class MessageRowsConformance(MessageStepConformance, MessageClaimConformance, HoldConformance):
    """Tests of every promise that MessageRows adds to Rows."""

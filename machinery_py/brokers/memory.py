"""Messages in this process: for tests, and the reference that the other brokers are compared with.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

from msgspec.structs import replace

from machinery_py.brokers.base import BrokerFeatures
from machinery_py.brokers.rows import RowsBroker


class MemoryBroker(RowsBroker):
    """Rows in memory."""

    features: BrokerFeatures = replace(
        RowsBroker.features, name="memory", durable=False, shared=False, embedded=True
    )

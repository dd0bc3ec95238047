"""States and groups in this process: for tests, and the reference for the other backends.

Limits: nothing survives the process, and no other process sees it.
"""

from __future__ import annotations

from msgspec.structs import replace

from machinery_py.backends.base import BackendFeatures
from machinery_py.backends.rows import RowsBackend


class MemoryBackend(RowsBackend):
    """Rows in memory."""

    features: BackendFeatures = replace(
        RowsBackend.features, name="memory", durable=False, shared=False, embedded=True
    )

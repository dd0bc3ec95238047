# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""A worker, in batches of a hundred."""

from __future__ import annotations

import uvloop

from benchmarks.peers.driving import IS_LATENCY, gate
from benchmarks.peers.pgqueuer.app import make

gate()


async def work():
    queue = await make()
    # Ends are written when a batch of them is full, or else ten times a second.
    await queue.qm.run(batch_size=1 if IS_LATENCY else 100)


uvloop.run(work())

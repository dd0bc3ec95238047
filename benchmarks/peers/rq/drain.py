# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""SimpleWorker, which runs jobs in its own process; the usual one forks for each.

Two processes are two of these.
"""

from __future__ import annotations

from rq import SimpleWorker

from benchmarks.peers.driving import gate
from benchmarks.peers.rq.app import connection, queue

gate()
SimpleWorker([queue], connection=connection).work(logging_level="WARNING")

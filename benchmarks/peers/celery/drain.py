# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Worker with the solo pool: tasks run in its own process. Two processes are two such workers."""

from __future__ import annotations

from benchmarks.peers.celery.app import app
from benchmarks.peers.driving import gate

gate()
app.worker_main(
    [
        "worker",
        "--pool=solo",
        "--loglevel=WARNING",
        "--without-gossip",
        "--without-mingle",
        "--without-heartbeat",
    ]
)

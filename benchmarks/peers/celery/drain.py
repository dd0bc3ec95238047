# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""A worker with the solo pool: one process without another for the tasks. Two processes are two of these."""

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

# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Worker with the prefork pool: each task runs in one of so many child processes."""

from __future__ import annotations

from benchmarks.peers.celery.app import app
from benchmarks.peers.driving import gate

processes = gate()
app.worker_main(
    [
        "worker",
        "--pool=prefork",
        f"--concurrency={processes}",
        "--loglevel=WARNING",
        "--without-gossip",
        "--without-mingle",
        "--without-heartbeat",
    ]
)

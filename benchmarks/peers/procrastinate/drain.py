# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""A worker as its command makes one, with ten jobs at a time."""

from __future__ import annotations

import logging

from benchmarks.peers.driving import gate
from benchmarks.peers.procrastinate.app import app

gate()
logging.disable(logging.INFO)
app.run_worker(concurrency=10, delete_jobs="never")

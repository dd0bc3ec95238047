# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""A consumer with one thread, which is its fastest here. Two processes are two of these."""

from __future__ import annotations

import logging

from benchmarks.peers.driving import gate
from benchmarks.peers.huey.app import huey

logging.getLogger("huey").setLevel(logging.WARNING)
gate()
huey.create_consumer(
    workers=1, worker_type="thread", periodic=False, check_worker_health=False
).run()

# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""Command `dramatiq` with four threads in each process and a large prefetch (200 messages).

With the default prefetch of two for each thread it sleeps most of the time.
"""

from __future__ import annotations

import os
import sys

os.environ["dramatiq_queue_prefetch"] = "200"  # noqa: SIM112  # before dramatiq is imported

from dramatiq import cli

import benchmarks.peers.dramatiq.app  # noqa: F401
from benchmarks.peers.driving import gate

processes = gate()
words = [
    "benchmarks.peers.dramatiq.app",
    "--processes",
    str(processes),
    "--threads",
    "4",
    "--skip-logging",
]
sys.argv = ["dramatiq", *words]
sys.exit(cli.main(cli.make_argument_parser().parse_args(words)))

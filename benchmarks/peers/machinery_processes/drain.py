"""`machinery worker --pool process`: one worker, with so many task processes."""

from __future__ import annotations

import sys

from benchmarks.peers.driving import gate
from machinery_py.cli.main import main

processes = gate()
sys.exit(
    main(
        [
            "worker",
            "benchmarks.peers.machinery.app",
            "--pool",
            "process",
            "-c",
            str(processes),
            "--log-level",
            "warning",
            "--no-banner",
        ]
    )
)

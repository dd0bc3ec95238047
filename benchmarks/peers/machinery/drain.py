"""`machinery worker`, the command, with its defaults."""

from __future__ import annotations

import sys

import benchmarks.peers.machinery.app  # noqa: F401
from benchmarks.peers.driving import gate
from machinery_py.cli.main import main

processes = gate()
sys.exit(
    main(
        [
            "worker",
            "benchmarks.peers.machinery.app",
            "-p",
            str(processes),
            "--log-level",
            "warning",
            "--no-banner",
        ]
    )
)

# mypy: ignore-errors
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportFunctionMemberAccess=false
"""`taskiq worker`, without parsing arguments by pydantic."""

from __future__ import annotations

import sys

from taskiq.cli.worker.args import WorkerArgs
from taskiq.cli.worker.run import run_worker

import benchmarks.peers.taskiq.app  # noqa: F401
from benchmarks.peers.driving import gate

if __name__ == "__main__":  # its processes are spawned
    processes = gate()
    sys.exit(
        run_worker(
            WorkerArgs.from_cli(
                [
                    "benchmarks.peers.taskiq.app:broker",
                    "--workers",
                    str(processes),
                    "--no-parse",
                    "--log-level",
                    "WARNING",
                    "--max-async-tasks",
                    "100",
                    "--max-prefetch",
                    "100",
                ]
            )
        )
    )

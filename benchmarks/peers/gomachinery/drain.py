"""A Go worker; two processes are two of these."""

from __future__ import annotations

import subprocess

from benchmarks.peers.driving import URL, gate
from tests.interop.golang import build

SLOTS = 10  # more are not faster here

program = build("v1")
gate()
subprocess.run(
    [program, "-broker", f"{URL}/0", "-backend", f"{URL}/0", "-drain", str(SLOTS)], check=True
)

"""A Python without fork, fcntl, resource and most signals runs tasks in threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
APP = """
from machinery_py import Server
server = Server("sqlite:///shop.db")

@server.task
def add(a: int, b: int) -> int:
    return a + b
"""
PROGRAM = """
import tests.support.windows
from machinery_py import Server
from machinery_py.cli.main import main

memory = Server("memory://")

@memory.task
def double(number: int) -> int:
    return 2 * number

worker = memory.new_worker(concurrency=2)
worker.start()
assert double.send(21).get(timeout=30) == 42
worker.stop()

assert main("send shop add 20 22".split()) == 0
assert main("worker shop --burst -c 1 --no-banner".split()) == 0
assert main("tasks shop".split()) == 0
assert main("worker shop -p 2".split()) == 2
"""


def test_tasks_run_where_there_is_no_fork_and_no_fcntl(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "SUCCESS" in done.stdout
    assert "--processes and --reload are not possible on Windows" in done.stderr

"""A process that imports the package once (a third of a second), then runs programs in forks.

    with WarmPython() as python:
        python.run("tests.system.crashing", "worker", "after-claim", environment=os.environ)

The child is its own process, with nothing but imported modules in it: it can be killed like
any other.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import pkgutil
import runpy
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from machinery_py.testing.waiting import HANG

ROOT = Path(__file__).parents[2]


class WarmPython:
    """Runs one program at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, module: str, *words: str, environment: Mapping[str, str], timeout: float = 2 * HANG
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m module words`, as `subprocess.run` would.

        Raises:
            subprocess.TimeoutExpired: it did not end in time, and was killed with the warm process.
        """
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            files = {name: f"{folder}/{name}" for name in ("stdout", "stderr")}
            program = {"module": module, "words": words, "environment": dict(environment), **files}
            process.stdin.write(json.dumps(program) + "\n")
            process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout)[0]:
                self.close()
                raise subprocess.TimeoutExpired([module, *words], timeout)
            code = int(process.stdout.readline())
            output, errors = (Path(file).read_text() for file in files.values())
        return subprocess.CompletedProcess([module, *words], code, output, errors)

    def close(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        return self._process


def serve() -> None:
    """Run what each line of stdin says, and answer with its exit code; a signal's is negative."""
    import machinery_py

    for module in pkgutil.walk_packages(machinery_py.__path__, "machinery_py."):
        if not any(part in module.name for part in (".testing", "__main__", ".django.")):
            importlib.import_module(module.name)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run(json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _run(program: dict[str, Any]) -> None:
    code: object = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(program[name], os.O_WRONLY | os.O_CREAT), number)
        os.environ.clear()
        os.environ.update(program["environment"])
        tempfile.tempdir = None
        sys.argv = [program["module"], *program["words"]]
        runpy.run_module(program["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve()

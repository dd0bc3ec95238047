"""A process that imports the package once (a third of a second), then runs programs in forks.

    with WarmPython() as python:
        python.run("tests.system.crashing", "worker", "after-claim", environment=os.environ)

The child is its own process, with nothing but imported modules in it: it can be killed like
any other.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from machinery_py.testing.waiting import HANG

ROOT = Path(__file__).parents[2]


class WarmPython:
    """Runs one program at a time. Another thread that calls `run` meanwhile waits."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._busy = threading.Lock()

    @property
    def is_busy(self) -> bool:
        return self._busy.locked()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        module: str,
        *words: str,
        environment: Mapping[str, str],
        folder: Path = ROOT,
        timeout: float = 2 * HANG,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m module words` in the folder, as `subprocess.run` would.

        Of the variables that Python itself reads, PYTHONDONTWRITEBYTECODE alone counts.

        Raises:
            subprocess.TimeoutExpired: it did not end in time, and was killed with the warm process.
        """
        with self._busy:
            return self._run(module, words, dict(environment), folder, timeout)

    def _run(
        self,
        module: str,
        words: Sequence[str],
        environment: dict[str, str],
        place: Path,
        timeout: float,
    ) -> subprocess.CompletedProcess[str]:
        process = self._start()
        assert process.stdin is not None and process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            files = {name: f"{folder}/{name}" for name in ("stdout", "stderr")}
            program = {"module": module, "words": words, "environment": environment, **files}
            program["folder"] = str(place)
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
    gc.freeze()  # a collection in a child copies no page of what is imported
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
        sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in os.environ
        os.chdir(program["folder"])
        sys.path[0] = program["folder"]
        sys.argv = [program["module"], *program["words"]]
        runpy.run_module(program["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end
        atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    serve()

"""A real Go Machinery, built once from `peer/`, that takes its orders as JSON lines."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from machinery_py.testing.waiting import HANG

SOURCES = Path(__file__).parent / "peer"
BUILT = Path(__file__).parents[2] / "build" / "interop"
BUILDING = 900.0  # seconds; a first build fetches and compiles all that Go Machinery needs
VERSIONS = ("v1", "v2")


class GoMissing(Exception):
    """There is no Go toolchain."""


class GoBroken(Exception):
    """The program cannot be built."""


def peer(version: str) -> Path:
    """Return the program. Skip the test without a Go toolchain; fail it if the build breaks."""
    try:
        return build(version)
    except GoMissing as missing:
        pytest.skip(f"left out: {missing}")
    except GoBroken as broken:
        pytest.fail(str(broken), pytrace=False)


def build(version: str) -> Path:
    """The program for Go Machinery v1 or v2; made anew when its sources or Go have changed.

    Raises:
        GoMissing, GoBroken
    """
    go = shutil.which("go")
    if go is None:
        raise GoMissing(
            "no Go toolchain here (install Go 1.23 or newer, and have `go` on the PATH)"
        )
    parts = (
        sorted(SOURCES.glob("*.go"))
        + sorted(SOURCES.glob("go.*"))
        + sorted((SOURCES / "v2").iterdir())
    )
    told = subprocess.run(
        [go, "version"], capture_output=True, text=True, check=True, timeout=HANG
    ).stdout
    digest = hashlib.sha256(
        told.encode() + b"".join(part.read_bytes() for part in parts)
    ).hexdigest()[:16]
    program = BUILT / f"peer-{version}-{digest}"
    if not program.exists():
        folder = BUILT / f"{version}-{digest}-{os.getpid()}"
        _copy(version, folder)
        # Under another name first: of two runs that build at once neither sees half a program.
        command = [go, "build", "-buildvcs=false", "-o", str(folder / "peer"), "."]
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=BUILDING,
            check=False,
            env={**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly", "GOWORK": "off"},
        )
        if done.returncode != 0:
            raise GoBroken(
                f"the Go peer for Go Machinery {version} cannot be built:\n{done.stderr[-4000:]}"
            )
        (folder / "peer").replace(program)
        shutil.rmtree(folder)
    return program


def _copy(version: str, folder: Path) -> None:
    """The sources for one version: only opening a server and the import paths differ."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in [*SOURCES.glob("*.go"), *SOURCES.glob("go.*")]:
        shutil.copy(source, folder)
    if version == "v2":
        for source in (SOURCES / "v2").iterdir():
            shutil.copy(source, folder)
        for source in folder.glob("*.go"):
            source.write_text(
                source.read_text().replace("RichardKnop/machinery/v1", "RichardKnop/machinery/v2")
            )


class GoError(Exception):
    """The Go side answered with an error."""


class Peer:
    """One Go process: a sender, a reader of results, and a worker after `ask("worker")`."""

    def __init__(self, version: str, *, broker: str, backend: str, **flags: object) -> None:
        words = [str(peer(version)), "-broker", broker, "-backend", backend]
        for name, value in flags.items():
            words += [f"-{name.replace('_', '-')}", str(value)]
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[dict[str, Any]]] = {0: queue.SimpleQueue()}
        self._ended = False
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._thread = threading.Thread(
            target=self._read, name="answers of the Go peer", daemon=True
        )
        self._thread.start()
        self._answer(0, HANG)

    def ask(self, op: str, *, timeout: float = HANG, **orders: object) -> Any:
        """What it answers.

        Raises:
            GoError: it answered with an error, or it has ended.
        """
        number = next(self._numbers)
        self._waiting[number] = queue.SimpleQueue()
        line = json.dumps({"id": number, "op": op, "timeout": timeout, **orders}) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except OSError as error:
            raise GoError(f"the Go peer has ended: {self._last_words()}") from error
        return self._answer(number, timeout + HANG)

    def result(self, uuid: str, timeout: float = HANG) -> list[Any]:
        """The results as a Go program gets them, less their types."""
        return [one["value"] for one in self.ask("result", uuid=uuid, timeout=timeout)]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._thread.join(HANG)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._waiting[answer["id"]].put(answer)
        self._ended = True
        for one in list(self._waiting.values()):
            one.put({"error": "the Go peer has ended"})

    def _answer(self, number: int, timeout: float) -> Any:
        if self._ended and self._waiting[number].empty():
            raise GoError(f"the Go peer has ended: {self._last_words()}")
        try:
            answer = self._waiting[number].get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"the Go peer gave no answer in {timeout:g} s") from None
        del self._waiting[number]
        if answer.get("error"):
            raise GoError(
                answer["error"] if not self._ended else f"{answer['error']}: {self._last_words()}"
            )
        return answer["ok"]

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        self._process.wait(HANG)
        return (
            self._process.stderr.read().decode(errors="replace")[-2000:]
            or f"exit code {self._process.returncode}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


if __name__ == "__main__":  # before the tests, whose time is limited: a first build takes minutes
    for one in VERSIONS:
        try:
            print(f"Go Machinery {one}: {build(one)}", flush=True)
        except (GoMissing, GoBroken) as trouble:
            print(
                f"Go Machinery {one}: {trouble}", flush=True
            )  # the tests say it again, and are left out or fail

"""A user's folder with a tasks.py, and `machinery` run in it as a real process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from machinery_py.testing.waiting import wait_until
from tests.support.warm import WarmPython

HANG = 60.0  # seconds; a guard against tests that hang, not a measurement

#: Runs commands without the third of a second that imports take; it ends with these tests.
_python = WarmPython()
_READ = {"PYTHONDONTWRITEBYTECODE"}  # by WarmPython

TASKS = '''
import logging, os, time
from pathlib import Path
from machinery_py import Server, current_task

server = Server()
HERE = Path(__file__).parent

@server.task
def add(a: int, b: int) -> int:
    return a + b

@server.task
def greet(name: str, *, lang: str = "en") -> str:
    return f"{lang}:{name}"

@server.task
def boom(text: str = "no") -> None:
    raise ValueError(text)

@server.task
def note(text: str) -> None:
    with open(HERE / "notes.txt", "a") as file:
        file.write(f"{text} {os.getpid()}\\n")

@server.task
def hold(name: str) -> str:
    """Runs until there is a file `<name>.go`."""
    with open(HERE / "notes.txt", "a") as file:
        file.write(f"{name} {os.getpid()}\\n")
    while not (HERE / f"{name}.go").exists():
        time.sleep(0.01)
    return name

@server.task
def chat(text: str) -> None:
    logging.getLogger("shop").warning("said %s", text)
    logging.getLogger("shop").warning("named", extra={"task_uuid": "mine"})
'''


class Running:
    """A `machinery` process that goes on; its output is collected in files."""

    def __init__(
        self,
        app: App,
        words: Sequence[str],
        env: dict[str, str],
        own_group: bool,
        program: Sequence[str] = ("-m", "machinery_py"),
        before: Sequence[str] = (),
    ) -> None:
        number = len(app.running)
        self.out_path, self.err_path = (
            app.folder.parent / f"{number}.{name}" for name in ("out", "err")
        )
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            self.process = subprocess.Popen(
                [*before, sys.executable, *program, *words],
                cwd=app.folder,
                env=env,
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                start_new_session=own_group,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def out(self) -> str:
        return self.out_path.read_text()

    @property
    def err(self) -> str:
        return self.err_path.read_text()

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until it has said this, on stdout or stderr."""
        wait_until(
            lambda: (self.out + self.err).count(text) >= times or self.process.poll() is not None,
            HANG,
            text,
        )
        assert (self.out + self.err).count(text) >= times, self.out + self.err

    def wait_ready(self) -> None:
        self.wait_for("Ready. Ctrl+C stops when the running tasks are done.\n")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(HANG)

    def close(self) -> None:
        """Kill it, and its worker processes."""
        below = children(self.pid)
        for pid in (self.pid, *below) if self.process.poll() is None else ():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.wait()
        wait_until(lambda: not any(map(is_alive, below)), HANG)

    @property
    def worker(self) -> int:
        """The only worker process of `machinery worker`."""
        (pid,) = filter(is_alive, children(self.pid))
        return pid

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()


class App:
    """The folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "shop"
        self.folder.mkdir()
        self.temporary = Path(
            tempfile.mkdtemp()
        )  # of the run's own folder; its path is short enough for sockets
        self.running: list[Running] = []
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith("MACHINERY_")
        }
        self.env |= {
            "HOME": str(folder),
            "TMPDIR": str(self.temporary),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.write("tasks.py", TASKS)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def run(
        self, *words: str, code: int | None = 0, warm: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, and look at its exit code unless `code` is None.

        `warm`: what it imports from outside of the folder may be imported before.
        """
        env = self.env | env
        own = {name for name, text in env.items() if text != os.environ.get(name)} - _READ
        if not warm or _python.is_busy or any(name.startswith("PYTHON") for name in own):
            done = subprocess.run(
                [sys.executable, "-m", "machinery_py", *words],
                cwd=self.folder,
                env=env,
                text=True,
                check=False,
                capture_output=True,
                timeout=HANG,
                stdin=subprocess.DEVNULL,
            )
        else:
            done = _python.run(
                "machinery_py", *words, environment=env, folder=self.folder, timeout=HANG
            )
        if code is not None:
            assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    def python(self, script: str) -> str:
        """Run a script of the user's; what it prints."""
        done = subprocess.run(
            [sys.executable, script],
            cwd=self.folder,
            env=self.env,
            text=True,
            check=True,
            timeout=HANG,
            stdout=subprocess.PIPE,
        )
        return done.stdout.strip()

    def json(self, *words: str, code: int | None = 0) -> Any:
        at = words.index("--") if "--" in words else len(words)
        return json.loads(self.run(*words[:at], "--json", *words[at:], code=code).stdout)

    def program(self, script: str, *words: str) -> Running:
        """Start a script of the user's that goes on."""
        process = Running(self, words, self.env, False, [script])
        self.running.append(process)
        return process

    def start(self, *words: str, own_group: bool = False, **env: str) -> Running:
        """Start a command that goes on."""
        process = Running(self, words, self.env | env, own_group)
        self.running.append(process)
        return process

    def container(self, *words: str) -> Running:
        """A command that goes on as process 1 of a container; `children` has its number."""
        before = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
        process = Running(self, words, self.env, False, before=before)
        self.running.append(process)
        return process

    def worker(self, *words: str, **env: str) -> Running:
        """A worker that is ready."""
        process = self.start("worker", "tasks", *words, own_group=False, **env)
        process.wait_ready()
        return process

    def send(self, *words: str) -> str:
        return self.run("send", "tasks", *words).stdout.strip()

    def state(self, uuid: str) -> str:
        return str(self.json("result", "tasks", uuid, code=None)["state"])

    @property
    def notes(self) -> list[tuple[str, int]]:
        """What `note` and `hold` wrote: text and process."""
        path = self.folder / "notes.txt"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(text, int(pid)) for text, pid in (line.rsplit(" ", 1) for line in lines)]

    def go(self, name: str) -> None:
        self.write(f"{name}.go", "")

    def close(self) -> None:
        for process in self.running:
            process.close()


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    """The direct children of a process, zombies too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)


@pytest.fixture
def app_in_a_folder(tmp_path: Path) -> Iterator[App]:
    folder = App(tmp_path)
    yield folder
    folder.close()

"""The pages of the documentation, cut into blocks, and how their commands are run.

A comment on the line before a block says what it is:

    <!-- not run: why -->            it is left alone
    <!-- file: NAME -->              it is written to that file
    <!-- background -->              its command goes on in the background
    <!-- stop: COMMAND -->           that background command is interrupted first
    <!-- repeat until it is so -->   its command is repeated until it prints what stands there

In what a command prints, `…` stands for anything. A UUID with a `…` in a command is the last one
that was printed.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from machinery_py.testing.waiting import wait_until
from tests.support.private import free_port

ROOT = pathlib.Path(__file__).parents[2]
HANG = 60.0  # seconds; a guard, nothing is measured with it

OTHERS = frozenset(
    {"docs/reference/config.md", "docs/reference/cli.md"}
)  # have tests of their own beside their code

_BLOCK = re.compile(
    r"(?P<marks>(?:<!-- [^\n]* -->\n)*)```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(r"<!-- (?P<word>[a-z ]+?)(?:: (?P<rest>[^\n]*))? -->")


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    marks: Mapping[str, str]

    @property
    def is_left_alone(self) -> bool:
        return "not run" in self.marks

    @property
    def file(self) -> str:
        return self.marks.get("file", "")

    def commands(self) -> list[tuple[str, str]]:
        """(command, what it prints) of a console block."""
        found: list[tuple[str, str]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], ""))
            else:
                command, output = found[-1]
                found[-1] = command, f"{output}{line}\n"
        return found


def page_names() -> list[str]:
    """Every page that is written by hand."""
    docs = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
    return ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "changelog.d/README.md", *docs]


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str = "") -> list[Block]:
    text = read(page)
    found = []
    for match in _BLOCK.finditer(text):
        marks = {mark["word"]: mark["rest"] or "" for mark in _MARK.finditer(match["marks"])}
        if language in ("", match["language"]):
            found.append(
                Block(
                    page,
                    text.count("\n", 0, match.start("text")) + 1,
                    match["language"],
                    match["text"],
                    marks,
                )
            )
    return found


def program(page: str) -> str:
    """The Python blocks of a page that are run, in order, each on its own line of the page."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        if block.is_left_alone or block.file:
            continue
        lines += [""] * (block.line - 1 - len(lines))
        lines += block.text.splitlines()
    return "\n".join(lines) + "\n" if lines else ""


def machinery_commands(text: str) -> Iterator[list[str]]:
    """The words behind `machinery`, of each `$ machinery …` line."""
    for line in re.findall(r"^\$ machinery (.*)$", text, re.MULTILINE):
        yield shlex.split(line, comments=True)


def mentioned_commands(text: str) -> Iterator[list[str]]:
    """The words behind `machinery` of each command inside a sentence, and of manage.py's.

    What is optional or open there is left out, and what stands for a number is one.
    """
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(r"`machinery ([^`\n]+)`", prose)
    found += re.findall(r"(?:`|^\$ )python manage\.py machinery ([^`\n]+)", text, re.MULTILINE)
    for line in found:
        told = re.sub(r"\[[^]]*\]|…", "", line)
        yield [
            re.sub("^(N|PORT)$", "2", word)
            for word in shlex.split(told, comments=True)
            if word not in ("&", "|")
        ]


def pattern_of(output: str) -> re.Pattern[str]:
    """What a command must print: these whole lines, with what differs from run to run left open."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    return re.compile(r"^" + r"[ ]*\n".join(map(_open, lines)) + r"[ ]*$", re.MULTILINE)


def _open(line: str) -> str:
    pattern = re.escape(line)
    pattern = re.sub(r"(\\ )+", r"[ ]+", pattern)  # columns are as wide as their cells
    pattern = pattern.replace("…", ".*")
    pattern = re.sub(r"task_[0-9a-f]+", "task_[0-9a-f]+", pattern)
    pattern = re.sub(r"worker\[ \]\+[\w\\-]+", r"worker[ ]+\\S+", pattern)
    pattern = re.sub(r"\d+\[ \]\+thread", r"\\d+[ ]+thread", pattern)
    return re.sub(r"\\\((\d+)\[ \]\+ms\\\)", r"\\([0-9.]+ m?s\\)", pattern)


def environment(folder: pathlib.Path, **more: str) -> dict[str, str]:
    """The environment of a fresh shell in the folder: no user settings, this venv's commands."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MACHINERY_", "PYTEST_", "COVERAGE_"))
    }
    path = os.pathsep.join([str(pathlib.Path(sys.executable).parent), kept.get("PATH", "")])
    return {**kept, "PATH": path, "TMPDIR": str(folder), "PYTHONUNBUFFERED": "1", **more}


@dataclass
class Shell:
    """The terminals of a page's reader; background programs end with them, as after Ctrl+C."""

    folder: pathlib.Path
    port: int = field(default_factory=free_port)
    background: list[tuple[str, subprocess.Popen[str], pathlib.Path]] = field(default_factory=list)
    uuid: str = ""  # the last one that was printed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for command, process, log in reversed(self.background):
            if error is not None:
                process.kill()
                process.wait(HANG)
                error.add_note(f"--- {command}\n{log.read_text()}")
            else:
                self._interrupt(command, process, log)

    def follow(self, page: str) -> None:
        """Do what the page says, from its top."""
        for block in blocks(page):
            if block.is_left_alone:
                continue
            for command in [rest for mark, rest in block.marks.items() if mark == "stop"]:
                self.stop(command)
            if block.file:
                (self.folder / block.file).write_text(block.text)
            elif block.language == "console":
                for command, output in block.commands():
                    self._do(block, command, output)

    def _do(self, block: Block, command: str, output: str) -> None:
        where = f"{block.page}:{block.line}: $ {command}"
        if "background" in block.marks or (
            command.startswith("machinery worker ") and "--burst" not in command
        ):
            self.start(command, output, where)
        elif "repeat until it is so" in block.marks:
            seen: list[str] = []

            def is_so() -> bool:
                seen[:] = [self.run(command)]
                return bool(pattern_of(output).fullmatch(seen[0].rstrip()))

            try:
                wait_until(is_so, HANG, where)
            except AssertionError as error:
                error.add_note(f"it printed:\n{seen[-1]}")
                raise
        else:
            printed = self.run(command)
            if output:
                assert pattern_of(output).search(printed), (
                    f"{where}\nprinted:\n{printed}\nand not:\n{output}"
                )

    def run(self, command: str) -> str:
        """Run it to its end; what it prints, on either stream."""
        done = subprocess.run(
            self._words(command),
            cwd=self.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG,
            check=False,
        )
        is_complaint = done.stdout.startswith("machinery: ")
        assert done.returncode == 0 or is_complaint, (
            f"$ {command}\nexit code {done.returncode}\n{done.stdout}"
        )
        self.uuid = ([self.uuid, *re.findall(r"task_[0-9a-f-]{36}", done.stdout)])[-1]
        return done.stdout

    def start(self, command: str, output: str, where: str) -> None:
        """Let it run on; returns when it has printed what stands there, or listens."""
        log = self.folder / f"terminal-{len(self.background) + 1}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                self._words(command),
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self.background.append((command, process, log))

        def is_up() -> bool:
            assert process.poll() is None, f"{where}\nhas ended:\n{log.read_text()}"
            return bool(pattern_of(output).search(log.read_text())) if output else self._listens()

        try:
            wait_until(is_up, HANG, where)
        except AssertionError as error:
            error.add_note(f"it printed:\n{log.read_text()}")
            raise

    def stop(self, start_of_command: str) -> None:
        """Ctrl+C in its terminal."""
        [one] = [entry for entry in self.background if entry[0].startswith(start_of_command)]
        self.background.remove(one)
        self._interrupt(*one)

    def _interrupt(self, command: str, process: subprocess.Popen[str], log: pathlib.Path) -> None:
        process.send_signal(signal.SIGINT)
        code = process.wait(HANG)
        if command.startswith("machinery"):
            assert code == 0, f"$ {command}\nexit code {code}\n{log.read_text()}"

    def _words(self, command: str) -> list[str]:
        # Somebody else may be using the page's port.
        command = re.sub(r"(localhost:|--port )(1025|8000)\b", rf"\g<1>{self.port}", command)
        words = shlex.split(re.sub(r"task_\w*…", self.uuid, command), comments=True)
        return [sys.executable, *words[1:]] if words[0] == "python" else words

    def _environment(self) -> dict[str, str]:
        return environment(self.folder, SMTP_PORT=str(self.port))

    def _listens(self) -> bool:
        try:
            with socket.create_connection(("localhost", self.port), timeout=1.0):
                return True
        except OSError:
            return False

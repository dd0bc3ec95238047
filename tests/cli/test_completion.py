"""`machinery completion`: the scripts, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from machinery_py.cli.completion import SHELLS
from machinery_py.cli.main import main

# As the shell calls it when TAB is pressed: the words, and the last of them is incomplete.
ASK_BASH = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
function_of_machinery=$(complete -p machinery | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function_of_machinery" machinery "${COMP_WORDS[$COMP_CWORD]}" ""
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def test_bash_completes_commands_options_and_choices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machinery.bash"
    path.write_text(script("bash", capsys))

    def completed(*words: str) -> set[str]:
        done = subprocess.run(
            ["bash", "--norc", "-c", ASK_BASH, "bash", str(path), "machinery", *words],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
        )
        assert not done.stderr
        return {word.strip() for word in done.stdout.splitlines()}

    assert {"worker"} == completed("wor") - {"workers"}
    assert {"show", "replay", "delete"} <= completed("dead", "")
    assert {"--queues", "--quiet"} & completed("worker", "--qu") == {"--queues"}
    assert {"--json", "--delay"} <= completed("send", "tasks", "--")
    assert completed("worker", "--pool", "") == {"thread", "process"}
    assert "--child" not in completed("worker", "--")  # ours, not for people


@pytest.mark.parametrize("shell", SHELLS)
def test_script_is_one_that_the_shell_reads(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "script"
    path.write_text(text := script(shell, capsys))

    assert "stall-timeout" in text and "--child" not in text
    if program := shutil.which(shell):
        subprocess.run([program, "-n", str(path)], check=True)


def test_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fsh"]) == 2

    assert "no completion for shell 'fsh'; did you mean 'fish'?" in capsys.readouterr().err
    assert main(["completion", "bash", "zsh"]) == 2

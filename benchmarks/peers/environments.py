"""An environment for each system, with the versions pinned in its requirements.txt.

It is made once, in a folder of the user.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.peers.systems import System

HERE = Path(__file__).resolve().parent
INSTALLING = 600.0  # seconds at most


class EnvironmentFailed(Exception):
    """It could not be made."""


def folder(system: System) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (
        cache / "machinery_py" / "peers" / f"{system.environment or system.name}-{system.version}"
    )


def python_of(system: System) -> Path:
    return Path(sys.executable) if system.is_ours else folder(system) / "bin" / "python"


def is_there(system: System) -> bool:
    """Whether it can be measured without installing anything."""
    if system.is_ours:
        return True
    installed = folder(system) / "requirements.txt"
    return installed.exists() and installed.read_bytes() == _requirements(system).read_bytes()


def make(system: System, say: Callable[[str], None]) -> None:
    """Make it if it is not there; needs a package index then.

    Raises:
        EnvironmentFailed: pip did not do it.
    """
    if is_there(system):
        return
    place, wanted = folder(system), _requirements(system)
    say(f"{system.name} {system.version}: making {place}")
    _run(system, _python_for(system), "-m", "venv", "--clear", "--symlinks", str(place))
    say(f"{system.name} {system.version}: installing")
    pip = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    _run(system, str(python_of(system)), *pip, "-r", str(wanted))
    # Last: without this file it is made anew.
    (place / "requirements.txt").write_bytes(wanted.read_bytes())


def _python_for(system: System) -> str:
    """Return a Python that it runs on: ours, if that is new enough."""
    if sys.version_info >= system.python:
        return sys.executable
    major, least = system.python
    for minor in range(least, least + 5):
        if found := shutil.which(f"python{major}.{minor}"):
            return found
    raise EnvironmentFailed(f"it needs Python {major}.{least}: no python{major}.{least} in PATH")


def _run(system: System, *command: str) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALLING, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailed(f"{system.name}: not installed after {INSTALLING:g} s") from error
    if done.returncode:
        raise EnvironmentFailed(f"{system.name}: {done.stderr.strip()[-2000:]}")


def _requirements(system: System) -> Path:
    return HERE / system.folder / system.requirements

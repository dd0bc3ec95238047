"""A Python with Django 6, which needs 3.12: this one, or one in build/ beside this checkout."""

from __future__ import annotations

import configparser
import fcntl
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
HOME = ROOT / "build" / "django6"
ASK = "import sys, django, redis, msgspec; sys.exit(django.VERSION < (6, 0))"
LONGEST = 300.0  # seconds of an installation; a guard


@functools.cache
def python_with_django_6() -> str:
    """Return its path, or "" if there is none on this machine and none can be made."""
    if _has_django_6(sys.executable):
        return sys.executable
    HOME.parent.mkdir(exist_ok=True)
    with open(HOME.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of this test run want it, too
        made = str(HOME / "bin" / "python")
        if not _has_django_6(made):
            newer = next(_newer_pythons(), "")
            if not newer or not _make(newer, made):
                return ""
    return made


def _has_django_6(python: str) -> bool:
    return os.path.exists(python) and _does(python, "-c", ASK)


def _newer_pythons() -> Iterator[str]:
    places = [shutil.which(f"python3.{minor}") for minor in (14, 13, 12)]
    versions = Path.home() / ".pyenv" / "versions"
    places += map(str, sorted(versions.glob("3.1[2-9].*/bin/python")))
    for place in filter(None, places):
        if _does(place, "-c", "import sys, venv; sys.exit(sys.version_info < (3, 12))"):
            yield place


def _make(newer: str, made: str) -> bool:
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    wanted = options["options"]["install_requires"].split("\n")
    needed = [one for one in wanted if one and ";" not in one]
    return _does(newer, "-m", "venv", "--without-pip", "--clear", str(HOME)) and _does(
        *(sys.executable, "-m", "pip", "--python", made, "install", "-q", "Django>=6", *needed)
    )


def _does(*words: str) -> bool:
    try:
        done = subprocess.run(words, capture_output=True, timeout=LONGEST, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0

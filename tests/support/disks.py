"""Disks that are soon full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """Make the folder one of a disk of this size. Where nobody may, skip; with CI set, fail."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False, text=True)
    if done.returncode:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no mount: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def grow(disk: Path, megabytes: int) -> None:
    """Give a small disk more room."""
    remount = ["mount", "-o", f"remount,size={megabytes}m", str(disk)]
    subprocess.run(remount, capture_output=True, check=True)

"""The files that say what consumers run: trusted folders, and reading a dead owner's file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from machinery_py.connections import session_files
from machinery_py.connections.session_files import (
    ALL,
    SessionFile,
    host_file,
    host_folder,
    ran,
    ran_by_the_dead,
)


@pytest.fixture(autouse=True)
def _host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_runs_of_live_and_dead_processes_are_known() -> None:
    file = host_file("redis")
    for id in (1, 2, 2**64 - 1):
        file.begins((id, ALL))
    file.ends((2, ALL))
    file.ends((77, ALL))
    left = {(1, ALL), (2**64 - 1, ALL)}

    assert ran(file.folder, file.key) == left
    assert ran_by_the_dead(file.folder) == set()
    file.abandon()
    assert ran(file.folder, file.key) == left
    assert ran_by_the_dead(file.folder) == left


def test_numbers_of_two_series_are_told_apart() -> None:
    file = host_file("redis")
    runs = [(number, series) for number in (1, 2**64 - 1) for series in (1, 2**64 - 2)]
    for run in (*runs, (7, 7)):
        file.begins(run)
    file.ends((7, 7))
    file.abandon()

    assert ran(file.folder, file.key) == set(runs)


@pytest.mark.parametrize("size", [0, 8 * session_files.SLOTS, 17 * session_files.SLOTS])
def test_file_of_another_version_says_nothing_of_what_ran(size: int) -> None:
    folder = host_folder("redis")
    Path(folder, "key").write_bytes(b"\1" * size)

    assert ran(folder, "key") is None
    assert ran_by_the_dead(folder) == set()


LOOK = """
import sys
from machinery_py.connections.session_files import look
print({look(sys.argv[1], key).value for key in sys.argv[2:]})
"""


def test_a_look_from_the_same_process_leaves_a_new_file_its_lock() -> None:
    """Whoever closes a file ends all locks that its process has on it."""
    folder, over = host_folder("redis"), threading.Event()

    def look() -> None:
        while not over.is_set():
            ran_by_the_dead(folder)

    other = threading.Thread(target=look)
    other.start()
    files = [SessionFile(folder) for _ in range(300)]
    over.set()
    other.join()
    keys = [file.key for file in files]
    seen = subprocess.run(
        [sys.executable, "-c", LOOK, folder, *keys],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert seen.stdout.strip() == "{'alive'}"
    for file in files:
        file.end()


def test_twins_that_run_beside_each_other_run_until_both_have_ended() -> None:
    file = host_file("redis")
    file.begins((1, ALL))
    file.begins((1, ALL))
    file.ends((1, ALL))
    assert ran(file.folder, file.key) == {(1, ALL)}
    file.ends((1, ALL))
    assert ran(file.folder, file.key) == set()


def test_runs_beyond_the_slots_are_not_noted() -> None:
    file = host_file("redis")
    for id in range(1, session_files.SLOTS + 10):
        file.begins((id, ALL))
    for id in range(1, session_files.SLOTS + 10):
        file.ends((id, ALL))
    file.begins((5, ALL))
    file.abandon()
    assert ran(file.folder, file.key) == {(5, ALL)}


def test_a_file_that_was_closed_is_gone() -> None:
    file = host_file("redis")
    file.begins((1, ALL))
    file.end()
    file.end()
    assert (ran(file.folder, file.key), os.listdir(file.folder)) == (None, [])


@pytest.mark.parametrize("fault", ["readable by others", "a link", "a file"])
def test_a_folder_that_others_could_have_made_is_not_trusted(fault: str, tmp_path: Path) -> None:
    folder = Path(host_folder("redis"))
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if fault == "readable by others":
        folder.mkdir()
        folder.chmod(0o755)
    elif fault == "a link":
        folder.symlink_to(elsewhere)
    else:
        folder.touch()

    file = host_file("redis")
    file.begins((1, ALL))

    assert host_folder("redis") == ""
    assert not file.notes_runs
    assert ran(file.folder, file.key) is None
    assert os.listdir(elsewhere) == []
    file.end()


def test_old_files_of_dead_sessions_are_removed_and_others_stay(tmp_path: Path) -> None:
    dead, alive = SessionFile(host_folder("redis")), SessionFile(host_folder("redis"))
    dead.abandon()
    for file in (dead, alive):
        os.utime(Path(file.folder, file.key), (1.0, 1.0))
    young = SessionFile(host_folder("redis"))
    young.abandon()

    session_files.sweep(alive.folder, (), forgotten=session_files.FORGOTTEN_ON_HOST)

    assert set(os.listdir(alive.folder)) == {alive.key, young.key}
    alive.end()

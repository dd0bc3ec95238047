"""Bells: who sleeps wakes, in whichever process; and none hangs longer than its owner."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from machinery_py.connections.sqlite import wakeup
from machinery_py.connections.sqlite.wakeup import Doorbell, ring
from machinery_py.testing.waiting import HANG, together
from tests.forking import forked


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "bells")


def sleep(bell: Doorbell) -> bool:
    """Wait for long; whether it was ended by something within a fraction of that."""
    deadline = time.monotonic() + HANG * 2
    with bell:
        while not bell.wait(deadline - time.monotonic()):
            if time.monotonic() > deadline - HANG:
                return False
    return True


def hanging(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def test_a_bell_hangs_only_while_its_owner_sleeps(folder: str) -> None:
    bell = Doorbell(folder, "q")
    assert hanging(folder) == []
    with bell:
        (name,) = hanging(folder)
        assert name.startswith(f"q-{os.getpid()}-")
        assert os.stat(folder).st_mode & 0o777 == 0o700
    assert hanging(folder) == []
    bell.close()
    bell.close()


def test_a_ring_between_hanging_and_sleeping_is_not_lost(folder: str) -> None:
    bell = Doorbell(folder, "q")
    with bell:
        ring(folder, {"q"})
        started = time.monotonic()
        assert bell.wait(HANG) is False
        assert time.monotonic() - started < wakeup.NAP / 2


def test_only_the_kind_that_is_meant_rings(folder: str) -> None:
    q, r = Doorbell(folder, "q"), Doorbell(folder, "r")
    with q, r:
        ring(folder, {"r"})
        started = time.monotonic()
        q.wait(0.05)
        assert time.monotonic() - started >= 0.04
        r.wait(HANG)
        assert time.monotonic() - started < wakeup.NAP


def test_many_rings_are_one(folder: str) -> None:
    bell = Doorbell(folder, "q")
    with bell:
        for _ in range(70_000):  # more than a pipe holds
            ring(folder, {"q"})
        bell.wait(HANG)
        started = time.monotonic()
        bell.wait(0.05)
        assert time.monotonic() - started >= 0.04


def test_wake_ends_this_wait_or_the_next(folder: str) -> None:
    bell = Doorbell(folder, "q")
    bell.wake()
    assert sleep(bell)
    assert together(2, lambda index: bell.wake() if index else sleep(bell))[0] is True
    assert bell.woken() is False


def test_a_wake_from_many_threads_is_never_lost(folder: str) -> None:
    bell = Doorbell(folder, "q")
    turns = 300
    done = threading.Semaphore(0)

    def work(index: int) -> None:
        for _ in range(turns):
            if index:
                bell.wake()
                assert done.acquire(timeout=HANG)
            else:
                assert sleep(bell)
                done.release()

    together(2, work)
    bell.close()


def test_ringing_where_nobody_sleeps_is_nothing(folder: str) -> None:
    ring(folder, {"q", "r"})
    assert not os.path.exists(folder)


def test_another_process_wakes_a_sleeper(folder: str) -> None:
    script = "import sys; from machinery_py.connections.sqlite.wakeup import ring; ring(sys.argv[1], {'q'})"
    bell = Doorbell(folder, "q")
    with bell:
        subprocess.run([sys.executable, "-c", script, folder], check=True)
        started = time.monotonic()
        bell.wait(HANG)
        assert time.monotonic() - started < wakeup.NAP / 2


def test_the_bell_of_a_dead_process_is_taken_down_when_it_is_old(folder: str) -> None:
    script = (
        "import os, sys; from machinery_py.connections.sqlite.wakeup import Doorbell\n"
        "with Doorbell(sys.argv[1], 'q'): os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, folder], check=True)
    ring(folder, {"q"})
    (name,) = hanging(folder)  # it may be just about to be opened

    old = time.time() - wakeup.STALE - 1
    os.utime(os.path.join(folder, name), (old, old))
    ring(folder, {"r"})
    assert hanging(folder) == [name]
    ring(folder, {"q"})
    assert hanging(folder) == []


def test_a_bell_that_was_taken_away_hangs_again(folder: str) -> None:
    bell = Doorbell(folder, "q")
    with bell:
        (name,) = hanging(folder)
        os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
        bell.wait(0.001)

        assert len(hanging(folder)) == 1
        ring(folder, {"q"})
        started = time.monotonic()
        bell.wait(HANG)
        assert time.monotonic() - started < wakeup.NAP / 2


def test_where_no_bell_can_hang_one_looks_often(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bell = Doorbell(str(tmp_path / "file" / "bells"), "q")
    with bell:
        started = time.monotonic()
        bell.wait(HANG)
        assert time.monotonic() - started < wakeup.NAP / 2
    bell.wake()
    with bell:
        assert bell.wait(HANG) is True


def test_a_child_that_is_forked_while_a_bell_is_closed_closes_no_other_file(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bell = Doorbell(folder, "q")
    close, others = os.close, list[int]()

    def close_and_fork(number: int) -> None:
        close(number)
        if not others:
            others.append(os.open(os.devnull, os.O_RDONLY))
            assert others == [number]
            forked(lambda: stat.S_ISCHR(os.fstat(number).st_mode))

    monkeypatch.setattr(os, "close", close_and_fork)
    bell.close()

    assert others
    close(others[0])


def test_a_forked_child_does_not_keep_the_bell_of_its_parent_alive(folder: str) -> None:
    script = """
import os, sys
from machinery_py.connections.sqlite.wakeup import Doorbell
bell = Doorbell(sys.argv[1], "q")
with bell:
    if os.fork() == 0:
        mine = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert not any("bells" in one for one in mine), mine
        bell.wake()
        assert bell.woken()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    assert not bell.woken()
    assert len(os.listdir(sys.argv[1])) == 1
"""
    subprocess.run([sys.executable, "-c", script, folder], check=True)

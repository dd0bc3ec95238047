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
from machinery_py.connections.sqlite.wakeup import Notifier, notify
from machinery_py.testing.waiting import HANG, together
from tests.support.forking import forked


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "bells")


def sleep(notifier: Notifier) -> bool:
    """Wait for long; whether it was ended by something within a fraction of that."""
    deadline = time.monotonic() + HANG * 2
    with notifier:
        while not notifier.wait(deadline - time.monotonic()):
            if time.monotonic() > deadline - HANG:
                return False
    return True


def hanging(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []


def test_a_bell_hangs_only_while_its_owner_sleeps(folder: str) -> None:
    notifier = Notifier(folder, "q")
    assert hanging(folder) == []
    with notifier:
        (name,) = hanging(folder)
        assert name.startswith(f"q-{os.getpid()}-")
        assert os.stat(folder).st_mode & 0o777 == 0o700
    assert hanging(folder) == []
    notifier.close()
    notifier.close()


def test_a_ring_between_hanging_and_sleeping_is_not_lost(folder: str) -> None:
    notifier = Notifier(folder, "q")
    with notifier:
        notify(folder, {"q": "!"})
        started = time.monotonic()
        assert notifier.wait(HANG) is False
        assert time.monotonic() - started < wakeup.RECHECK / 2


def test_only_the_kind_that_is_meant_rings(folder: str) -> None:
    q, r = Notifier(folder, "q"), Notifier(folder, "r")
    with q, r:
        notify(folder, {"r": "!"})
        started = time.monotonic()
        q.wait(0.05)
        assert time.monotonic() - started >= 0.04
        r.wait(HANG)
        assert time.monotonic() - started < wakeup.RECHECK


def test_many_rings_are_one(folder: str) -> None:
    notifier = Notifier(folder, "q")
    with notifier:
        for _ in range(70_000):  # more than a pipe holds
            notify(folder, {"q": "!"})
        notifier.wait(HANG)
        started = time.monotonic()
        notifier.wait(0.05)
        assert time.monotonic() - started >= 0.04


def test_waiter_for_nothing_does_not_poll(folder: str) -> None:
    notifier = Notifier(folder, "r")
    started = time.monotonic()
    notifier.wait(4 * wakeup.FALLBACK)
    assert time.monotonic() - started >= 3 * wakeup.FALLBACK
    assert notifier.heard == set()


def test_wake_ends_this_wait_or_the_next(folder: str) -> None:
    notifier = Notifier(folder, "q")
    notifier.wake()
    assert sleep(notifier)
    assert together(2, lambda index: notifier.wake() if index else sleep(notifier))[0] is True
    assert notifier.woken() is False


def test_a_wake_from_many_threads_is_never_lost(folder: str) -> None:
    notifier = Notifier(folder, "q")
    turns = 300
    done = threading.Semaphore(0)

    def work(index: int) -> None:
        for _ in range(turns):
            if index:
                notifier.wake()
                assert done.acquire(timeout=HANG)
            else:
                assert sleep(notifier)
                done.release()

    together(2, work)
    notifier.close()


def test_notify_without_a_waiter_does_nothing(folder: str) -> None:
    notify(folder, {"q": "!", "r": "!"})
    assert not os.path.exists(folder)


def test_another_process_wakes_a_sleeper(folder: str) -> None:
    script = (
        "import sys; from machinery_py.connections.sqlite.wakeup import notify; "
        "notify(sys.argv[1], {'q': '!'})"
    )
    notifier = Notifier(folder, "q")
    with notifier:
        subprocess.run([sys.executable, "-c", script, folder], check=True)
        started = time.monotonic()
        notifier.wait(HANG)
        assert time.monotonic() - started < wakeup.RECHECK / 2


def test_old_wakeup_socket_of_a_dead_process_is_removed(folder: str) -> None:
    script = (
        "import os, sys; from machinery_py.connections.sqlite.wakeup import Notifier\n"
        "with Notifier(sys.argv[1], 'q'): os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", script, folder], check=True)
    notify(folder, {"q": "!"})
    (name,) = hanging(folder)  # it may be just about to be opened

    old = time.time() - wakeup.STALE - 1
    os.utime(os.path.join(folder, name), (old, old))
    notify(folder, {"r": "!"})
    assert hanging(folder) == [name]
    notify(folder, {"q": "!"})
    assert hanging(folder) == []


def test_a_bell_that_was_taken_away_hangs_again(folder: str) -> None:
    notifier = Notifier(folder, "q")
    with notifier:
        (name,) = hanging(folder)
        os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
        notifier.wait(0.001)

        assert len(hanging(folder)) == 1
        notify(folder, {"q": "!"})
        started = time.monotonic()
        notifier.wait(HANG)
        assert time.monotonic() - started < wakeup.RECHECK / 2


def test_where_no_bell_can_hang_one_looks_often(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    notifier = Notifier(str(tmp_path / "file" / "bells"), "q")
    with notifier:
        started = time.monotonic()
        notifier.wait(HANG)
        assert time.monotonic() - started < wakeup.RECHECK / 2
    notifier.wake()
    with notifier:
        assert notifier.wait(HANG) is True


def test_child_forked_while_a_wakeup_closes_closes_no_other_file(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notifier = Notifier(folder, "q")
    close, others = os.close, list[int]()

    def close_and_fork(number: int) -> None:
        close(number)
        if not others:
            others.append(os.open(os.devnull, os.O_RDONLY))
            assert others == [number]
            forked(lambda: stat.S_ISCHR(os.fstat(number).st_mode))

    monkeypatch.setattr(os, "close", close_and_fork)
    notifier.close()

    assert others
    close(others[0])


def test_forked_child_does_not_hold_its_parents_wakeup_socket(folder: str) -> None:
    script = """
import os, sys
from machinery_py.connections.sqlite.wakeup import Notifier
notifier = Notifier(sys.argv[1], "q")
with notifier:
    if os.fork() == 0:
        mine = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert not any("bells" in one for one in mine), mine
        notifier.wake()
        assert notifier.woken()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    assert not notifier.woken()
    assert len(os.listdir(sys.argv[1])) == 1
"""
    subprocess.run([sys.executable, "-c", script, folder], check=True)

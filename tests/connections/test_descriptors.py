"""Descriptors of one process: what a forked child has, and how a foreign close is noticed."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator

import pytest

from machinery_py.connections import descriptors, forks
from tests.support.forking import forked


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    for end in ends:
        descriptors.keep(end)
    yield ends
    for end in ends:
        descriptors.drop(end)
        os.close(end)


def what(number: int) -> str:
    return os.readlink(f"/proc/self/fd/{number}")


def test_a_forked_child_has_the_null_device_in_their_place(pipe: tuple[int, int]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        descriptors.keep(ours)

        forked(lambda: {what(number) for number in (*pipe, ours.fileno())} == {os.devnull})

        assert what(pipe[0]).startswith("pipe:")
        ours.sendall(b"still there")
        assert theirs.recv(64) == b"still there"


def test_nothing_is_broken_when_their_owners_close_them(pipe: tuple[int, int]) -> None:
    ours, theirs = socket.socketpair()
    descriptors.keep(ours)
    ours.close()
    theirs.close()

    assert descriptors.broken() == []


def test_sockets_may_come_and_go_while_they_are_looked_at() -> None:
    """As connections of a task's threads, while its process tells its end."""
    enough = threading.Event()

    def connect() -> None:
        while not enough.is_set():
            pairs = [socket.socketpair() for _ in range(20)]
            for one in itertools.chain.from_iterable(pairs):
                descriptors.keep(one)
                one.close()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=connect)
    thread.start()
    try:
        for _ in range(20_000):
            assert descriptors.broken() == []
    finally:
        enough.set()
        thread.join()
        sys.setswitchinterval(interval)


def test_descriptor_closed_by_others_is_broken(pipe: tuple[int, int]) -> None:
    read = pipe[0]
    aside, other = os.dup(read), os.open(os.devnull, os.O_RDONLY)

    os.close(read)
    assert descriptors.broken() == [read]
    os.dup2(other, read)
    assert descriptors.broken() == [read]  # another file has its number

    os.dup2(aside, read)
    os.close(aside)
    os.close(other)
    assert descriptors.broken() == []


# Signals


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """What a handler of ours gets of SIGTERM and SIGINT."""
    seen: list[int] = []
    before = {
        number: forks.handle(number, lambda number, _: seen.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    yield seen
    for number, handler in before.items():
        signal.signal(number, handler)


def has_default_handlers() -> bool:
    return (
        signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    )


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_forked_child_has_the_default_handlers(handled: list[int], in_thread: bool) -> None:
    failures: list[BaseException] = []

    def fork() -> None:
        try:
            forked(has_default_handlers)
        except BaseException as error:
            failures.append(error)

    if in_thread:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    else:
        fork()

    assert not failures
    os.kill(os.getpid(), signal.SIGTERM)
    assert handled == [signal.SIGTERM]


def test_a_handler_that_the_user_has_set_goes_with_a_child(handled: list[int]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    forked(lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_IGN)


def test_child_that_is_ended_at_its_start_ends(handled: list[int]) -> None:
    for _ in range(20):
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        os.kill(child, signal.SIGTERM)

        assert os.waitpid(child, 0)[1] == signal.SIGTERM

"""`server.lock`: held while its holder lives, over processes; a loss is told."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from machinery_py import Config, Server, TaskFailed
from machinery_py.clock import boottime
from machinery_py.errors import BackendUnavailable, LockLost, LockNotAcquired
from machinery_py.limits.limiter import Limiter
from machinery_py.locks import waiting
from machinery_py.locks.base import Lock, LockHolding
from machinery_py.locks.keeper import Lease, LeaseKeeper
from machinery_py.locks.named import LockKeeper, NamedLock
from machinery_py.testing.waiting import HANG, together, wait_until
from tests.support.fixtures import url_of

#: Seconds, for a test that waits for a renewal; one that does not could lose it on a busy machine.
BRIEF = pytest.mark.parametrize("lease", [1.5])


def keepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "machinery-lock-keeper"]


def pass_time(seconds: float) -> None:
    end = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= end)


@pytest.fixture
def lease() -> float:
    return HANG


@pytest.fixture(params=["memory", "sqlite", "redis"])
def server(
    request: pytest.FixtureRequest, tmp_path: pathlib.Path, lease: float
) -> Iterator[Server]:
    server = Server(Config(broker=url_of(request.param, tmp_path / "m.db", request), lease=lease))
    yield server
    server.close()


def test_one_at_a_time(server: Server) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work(index: int) -> None:
        for _ in range(3):
            with server.lock("feed"):
                inside.append(index)
                most.append(len(inside))
                inside.pop()

    together(6, work)
    assert max(most) == 1
    assert len(most) == 18
    wait_until(lambda: not keepers())


@BRIEF
def test_lock_is_renewed_while_held_and_free_afterwards(server: Server) -> None:
    with server.lock("feed") as lock:
        ends = lock._held.ends  # type: ignore[union-attr]
        wait_until(lambda: boottime() > ends, what="its first lease is over")
        assert lock.held
        lock.check()
        assert lock.fence > 0
        with (
            pytest.raises(LockNotAcquired, match="lock 'feed': somebody else has it$"),
            server.lock("feed", blocking=False),
        ):
            pytest.fail("held twice")
        with (
            pytest.raises(LockNotAcquired, match="and had it for 0.1 s"),
            server.lock("feed", timeout=0.1),
        ):
            pytest.fail("held twice")
        with server.lock("another", blocking=False):
            pass
    with server.lock("feed", blocking=False) as again:
        assert again.fence > 0
    wait_until(lambda: not keepers())


def test_by_hand(server: Server) -> None:
    lock = server.lock("feed")
    assert lock.acquire()
    assert not server.lock("feed").acquire(blocking=False)
    assert not server.lock("feed").acquire(timeout=0.05)
    assert lock.release()
    assert not lock.release()
    with pytest.raises(LockLost):
        lock.check()
    with pytest.raises(LockLost):
        assert lock.fence


def test_acquire_waits_as_long_as_the_lock_says(server: Server) -> None:
    with server.lock("feed"):
        assert not server.lock("feed", blocking=False).acquire()
        assert not server.lock("feed", timeout=0.05).acquire()
        assert not asyncio.run(server.lock("feed", timeout=0.05).acquire_async())
        assert not server.lock("feed", timeout=60.0).acquire(timeout=0.05)
        assert not server.lock("feed", timeout=60.0).acquire(blocking=False)


FORKING = """
import os, sys
from machinery_py import Config, Server
from machinery_py.testing.waiting import wait_until

server = Server(Config(broker=sys.argv[1], lease=3.0))
mine = server.lock("parent")
assert mine.acquire()
child = os.fork()
if child == 0:
    code = 1
    try:
        assert not mine.held and not mine.release()
        with server.lock("child") as lock:
            before = lock._held.ends
            wait_until(lambda: lock._held.ends > before, what="it is renewed")
        code = 0
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert mine.held and mine.release()
server.close()
"""


@pytest.mark.parametrize("store", ["sqlite", "redis"])
def test_forked_child_renews_only_its_own_locks(
    store: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path
) -> None:
    url = url_of(store, tmp_path / "m.db", request)

    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKING, url], check=True, timeout=60.0)


def steal(server: Server, lock: NamedLock) -> None:
    """Take the lease away, as if the store had forgotten it."""
    assert lock._held is not None
    assert server.app.stores.lock.release(lock._held.held)


@pytest.mark.parametrize("kind", ["lock", "limiter"])
def test_long_wait_in_the_slot_of_a_task_is_warned_of_once(
    server: Server, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "WARN_AFTER", 0.1)
    monkeypatch.setattr(waiting, "_told", set())

    def guard() -> NamedLock | Limiter:
        return server.lock("feed") if kind == "lock" else server.limiter("feed", max_running=1)

    @server.task
    def work() -> None:
        with guard():
            pass

    with server.new_worker(concurrency=2), guard():
        results = [work.send(), work.send()]
        wait_until(lambda: "in its slot of the worker" in caplog.text)
    for result in results:
        result.get(timeout=HANG)

    told = [text for text in caplog.messages if "in its slot of the worker" in text]
    assert len(told) == 1
    assert f"work has waited 0 s for {kind} '" in told[0]


@BRIEF
def test_a_loss_is_told(server: Server) -> None:
    with pytest.raises(LockLost, match="lock 'feed' is not held"), server.lock("feed") as lock:
        steal(server, lock)
        wait_until(lambda: lock.lost)
        assert not lock.held
        with pytest.raises(LockLost):
            lock.check()


@BRIEF
def test_the_blocks_own_error_is_not_replaced(server: Server) -> None:
    with pytest.raises(ZeroDivisionError), server.lock("feed") as lock:
        steal(server, lock)
        wait_until(lambda: lock.lost)
        assert 1 / 0


def test_closing_the_server_ends_the_keeper(server: Server) -> None:
    lock = server.lock("feed")
    assert lock.acquire()
    server.close()
    assert not keepers()
    assert lock.lost


HOLDER = """
import sys, time
from machinery_py import Config, Server
server = Server(Config(broker=sys.argv[1], lease=float(sys.argv[2])))
with server.lock("feed"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_lock_expires_when_its_holder_is_killed_or_hangs(
    tmp_path: pathlib.Path, how: signal.Signals
) -> None:
    url = f"sqlite:///{tmp_path}/m.db"
    server = Server(Config(broker=url, lease=1.0))
    root = pathlib.Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url, "1.0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert not server.lock("feed").acquire(timeout=1.5)  # longer than a lease: it is renewed
    process.send_signal(how)
    with server.lock("feed", timeout=60):
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=60)
    if how is signal.SIGSTOP:
        assert "LockLost: lock 'feed' is not held" in said
    server.close()


class Away(Lock):
    """A lock store that does not answer for a while."""

    def __init__(self, inner: Lock) -> None:
        self.inner = inner
        self.away = threading.Event()
        self.asked = 0

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        return self.inner.acquire(name, ttl=ttl)

    def renew(self, held: LockHolding, *, ttl: float) -> bool:
        self.asked += 1
        if self.away.is_set():
            raise BackendUnavailable("away")
        return self.inner.renew(held, ttl=ttl)

    def release(self, held: LockHolding) -> bool:
        if self.away.is_set():
            raise BackendUnavailable("away")
        return self.inner.release(held)

    def close(self) -> None:
        self.inner.close()


def test_a_short_outage_loses_nothing_a_long_one_does() -> None:
    server = Server("memory://")
    store = Away(server.app.stores.lock)
    keeper = LockKeeper(lambda: store, lambda: 1.0)
    lock = NamedLock(keeper, "feed", timeout=None, blocking=True, outage=5.0)
    with lock:
        store.away.set()
        before = store.asked
        wait_until(lambda: store.asked > before)
        store.away.clear()
        pass_time(1.2)
        lock.check()
        store.away.set()
        wait_until(lambda: lock.lost)
        store.away.clear()
        store.inner.release(lock._held.held)  # type: ignore[union-attr]
        lock._held = None
        assert lock.acquire(blocking=False)
        store.away.set()  # the lock cannot be released, and ends by itself: the block was under it
    keeper.close()
    assert not keepers()


# Coroutines


def test_coroutines_take_turns_and_the_loop_goes_on(server: Server) -> None:
    inside, most = 0, 0

    async def work() -> None:
        nonlocal inside, most
        async with server.lock("feed", timeout=60):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1

    async def main() -> None:
        await asyncio.gather(*(work() for _ in range(5)))
        async with server.lock("feed"):
            with pytest.raises(LockNotAcquired):
                async with server.lock("feed", blocking=False):
                    pytest.fail("held twice")
            assert not await server.lock("feed").acquire_async(timeout=0.05)
        lock = server.lock("feed")
        assert await lock.acquire_async()
        assert await lock.release_async()

    asyncio.run(main())
    assert most == 1


def test_a_cancelled_wait_leaves_nothing_held(server: Server) -> None:
    async def main() -> None:
        for delay in (0.0, 0.001, 0.005, 0.02):
            lock = server.lock("feed")
            waiting = asyncio.ensure_future(lock.acquire_async())
            await asyncio.sleep(delay)
            waiting.cancel()
            try:
                await waiting
            except asyncio.CancelledError:
                pass
            else:
                await lock.release_async()
            assert await lock.acquire_async(timeout=0.0)
            assert await lock.release_async()

    asyncio.run(main())


class SlowLock(Lock):
    """A lock store whose answers come when `answer` is set."""

    def __init__(self, lock: Lock) -> None:
        self._lock = lock
        self.taken, self.answer = threading.Event(), threading.Event()

    def acquire(self, name: str, *, ttl: float) -> LockHolding | None:
        held = self._lock.acquire(name, ttl=ttl)
        self.taken.set()
        assert self.answer.wait(30.0)
        return held

    def renew(self, held: LockHolding, *, ttl: float) -> bool:
        return self._lock.renew(held, ttl=ttl)

    def release(self, held: LockHolding) -> bool:
        return self._lock.release(held)

    def close(self) -> None:
        self._lock.close()


def test_lock_taken_by_a_coroutine_cancelled_twice_is_given_back(server: Server) -> None:
    slow = SlowLock(server.app.stores.lock)
    other = Server(Config(broker="memory://", lease=30.0), lock=slow)

    async def use() -> None:
        async with other.lock("feed"):
            pytest.fail("it was cancelled")

    async def main() -> None:
        task = asyncio.create_task(use())
        await asyncio.to_thread(slow.taken.wait, 30.0)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert not server.lock("feed").acquire(blocking=False)
    slow.answer.set()

    assert server.lock("feed").acquire(timeout=20.0)  # of a lease of 30 s
    assert not other.app.locks._leases


def test_guard_of_a_task_cancelled_twice_is_given_back(server: Server) -> None:
    slow = SlowLock(server.app.stores.lock)
    other = Server(Config(broker="memory://", lease=30.0), lock=slow)

    @other.task(exclusive="wait", exclusive_key="feed")
    async def feed() -> None:
        pytest.fail("it was cancelled")

    with other.new_worker(concurrency=1, scheduler=False) as worker:
        result = feed.send()
        assert slow.taken.wait(30.0)
        [execution] = worker._live.executors.running()
        for _ in range(2):
            worker._live.executors.cancel(execution)
        slow.answer.set()
        wait_until(lambda: not worker._live.executors.running())
        wait_until(lambda: not other.app.locks._leases)

        with pytest.raises(TaskFailed, match="CancelledError"):
            result.get(timeout=20.0)
    other.close()


@BRIEF
def test_a_loss_is_told_to_coroutines(server: Server) -> None:
    async def main() -> None:
        async with server.lock("feed") as lock:
            steal(server, lock)
            while not lock.lost:
                await asyncio.sleep(0.01)

    with pytest.raises(LockLost):
        asyncio.run(main())


# What comes behind a lease


class _LostAtTheEnd(LeaseKeeper[None, None]):
    """Its holder gives the lease back while it is being renewed, and the store says: lost."""

    def _renew(self, leases: Sequence[Lease[None, None]], ttl: float) -> Sequence[bool]:
        self.give_back_soon(leases[0])
        return [False]

    def _release(self, leases: Sequence[Lease[None, None]]) -> bool:
        raise AssertionError("it was lost")


def test_what_waits_for_the_end_of_a_lease_is_done_after_its_loss_too() -> None:
    done = threading.Event()
    keeper = _LostAtTheEnd("test", lambda: 0.01)
    lease = Lease(None, None, time.monotonic(), name="feed")
    lease.then = done.set

    keeper.keep(lease)

    assert done.wait(10.0)
    assert lease.lost

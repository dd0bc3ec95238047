"""Slots of a worker: how many tasks run at a time, and what becomes of the slot of one that waits.

A task that waits for the result of another one (`result.get()` inside a task) would keep that one
from its slot, and a worker whose slots all have such tasks would stand still. So the slot is lent
to the next task. When the wait is over the task takes a slot again, before tasks that have not
begun. After TAKE_BACK seconds it goes on without one, as the tasks in the slots may need what it
holds; then the next slot that is given back vanishes.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable

from machinery_py.texts import get_logger
from machinery_py.worker.running.runner import Run

logger = get_logger(__name__)

MOST_LENT = 100  # slots lent at a time; each may cost a thread
TAKE_BACK = 1.0  # seconds that a task waits for a slot when its wait is over
LOOK_AGAIN = 0.02  # seconds; a slot may become free while a task begins to wait for it


class Slots:
    """Slots of one worker. May be used from any thread.

    Attributes:
        concurrency: how many there are; `resize` changes it.
        free: a token for each free slot.
        surplus: slots that are to vanish when they are given back.
        returning: tasks whose wait is over, and that need a slot.
        lent: runs that wait, and have lent their slots.

    Args:
        on_lent: called in the task's thread, before another task gets its slot.
    """

    def __init__(self, concurrency: int, on_lent: Callable[[Run], None]) -> None:
        self.concurrency: int = concurrency
        # A queue of tokens is a semaphore that costs a tenth of threading's.
        self.free: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(concurrency):
            self.free.put(None)
        self._on_lent = on_lent
        self.surplus: int = 0
        self.returning: collections.deque[threading.Event] = collections.deque()
        self.lent: set[Run] = set()
        self._warned: set[str] = set()  # names of tasks
        self._is_full_told = False
        self._lock = threading.Lock()

    def resize(self, concurrency: int) -> None:
        """Have so many slots from now on; what runs goes on."""
        with self._lock:
            self.surplus -= concurrency - self.concurrency
            self.concurrency = concurrency
            while self.surplus < 0:
                self.surplus += 1
                self.free.put(None)
            with contextlib.suppress(queue.Empty):
                while self.surplus > 0:
                    self.free.get(block=False)
                    self.surplus -= 1

    def give_back(self, run: Run) -> None:
        """Free the slot of a run that is over, unless it has lent it."""
        if run.waits:
            with self._lock:
                if run in self.lent:
                    self.lent.discard(run)
                    return
        self._give()

    def _give(self) -> None:
        with self._lock:
            if self.surplus > 0:
                self.surplus -= 1
            elif self.returning:
                self.returning.popleft().set()
            else:
                self.free.put(None)

    def wait_begins(self, run: Run) -> None:
        """Lend its slot: it waits for other tasks. Each call is followed by one of `wait_ends`."""
        name = run.signature.name
        with self._lock:
            run.waits += 1
            is_new = name not in self._warned
            self._warned.add(name)
            lends = run.waits == 1 and not run.is_over and len(self.lent) < MOST_LENT
            if lends:
                self.lent.add(run)
        if is_new:
            logger.warning(
                "task %s waits for the result of another task; its slot is lent meanwhile, to at "
                "most %d tasks (a chain, a chord, or `raise Replace(…)` waits for nothing)",
                name,
                MOST_LENT,
            )
        if lends:
            self._on_lent(run)
            self._give()
        elif run.waits == 1 and not self._is_full_told:
            self._is_full_told = True
            logger.warning(
                "%d tasks wait for others; further ones keep their slots, and may stop all "
                "(send them with a chain or a chord, or have more workers)",
                MOST_LENT,
            )

    def wait_ends(self, run: Run, *, at_once: bool = False) -> None:
        """Take a slot again for a task that has lent its own.

        Args:
            at_once: go on without, if none is free.
        """
        turn = self._turn(run)
        if turn is None:
            return
        ends = time.monotonic() + (0.0 if at_once else TAKE_BACK)
        while not self._is_back(turn):
            if time.monotonic() >= ends:
                self._go_on(turn)
                return
            turn.wait(LOOK_AGAIN)

    async def wait_ends_async(self, run: Run, *, at_once: bool = False) -> None:
        """`wait_ends` for coroutines. Cancelled, it goes on without."""
        import asyncio  # loaded by now: we are in a coroutine

        turn = self._turn(run)
        if turn is None:
            return
        ends = time.monotonic() + (0.0 if at_once else TAKE_BACK)
        try:
            while not self._is_back(turn) and time.monotonic() < ends:
                await asyncio.sleep(LOOK_AGAIN)
        finally:
            self._go_on(turn)

    def _turn(self, run: Run) -> threading.Event | None:
        """Return what is set when a slot is given to it; None if it needs none."""
        with self._lock:
            run.waits -= 1
            if run.waits or run not in self.lent:
                return None  # also a run that was over before its wait
            self.lent.discard(run)
            turn = threading.Event()
            self.returning.append(turn)
            return turn

    def _is_back(self, turn: threading.Event) -> bool:
        if turn.is_set():
            return True
        try:
            self.free.get(block=False)
        except queue.Empty:
            return False
        with self._lock:
            if turn in self.returning:
                self.returning.remove(turn)
                turn.set()
                return True
        self._give()  # it was given one at the same moment
        return True

    def _go_on(self, turn: threading.Event) -> None:
        """Run without a slot, unless it has got one."""
        with self._lock:
            if turn in self.returning:
                self.returning.remove(turn)
                self.surplus += 1

"""`-p N`: worker processes that are started again when they die. The supervisor imports none of the user's code.

A process says when it is ready, before it claims its first task, and when it ends by itself. One that dies in between was ended
by a task, and its exit code is the task's: it is replaced at once, so that poison costs the good tasks no pause. One that does
not become ready, or ends by itself, is replaced after pauses that double up to LONGEST_PAUSE. What a dead process ran is taken
over by the others: their maintenance finds dead workers. A process that cannot start at all (exit code 2 or 3) ends everything.

A process that is ready beats. One that is silent is killed and replaced, unless it computes: a task may hold the interpreter for
as long as it does that.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import threading
import time
from contextlib import ExitStack, suppress
from types import FrameType

from machinery_py.cli import health, orphans
from machinery_py.cli.output import READY, say
from machinery_py.cli.processes import (
    RUN,
    STOP,
    STOP_NOW,
    Child,
    Orders,
    ParentPipe,
    how_it_ended,
    readable,
)
from machinery_py.texts import get_logger

logger = get_logger(__name__)

FIRST_PAUSE = 0.5  # seconds before the second restart in a row; the first is at once
LONGEST_PAUSE = 30.0  # seconds
SHORTEST_LIFE = 0.5  # seconds between two starts of one of the N: so often at most, where a task ends each process at once
HEALTHY = 60.0  # seconds of life after which a failure is the first one again
PATIENCE = 5.0  # seconds beyond the shutdown timeout until a process that does not end is killed
SILENCE = 60.0  # seconds without a beat until a process is killed that does not compute
COMPUTES = 0.05  # of the processor; threads that only wait for the interpreter use less
GLANCE = 2.0  # seconds that count between two looks at a process; there are more where this one was stopped itself
DEFAULT_GRACE = 30.0  # seconds; until a process has told its shutdown timeout
CANNOT_START = (2, 3)


class _Slot:
    """One of the N: the process in it, and how its predecessors fared."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.child: Child | None = None
        self.started_at = 0.0
        self.start_at: float | None = (
            0.0  # when to start one; None: there is one, or there is no more to do
        )
        self.failures = 0  # in a row, each without a task's doing
        self.has_been_ready = False  # one of its processes
        self.is_ready = False
        self.is_over = False  # it has said that it ends by itself
        self.is_killed = False
        self.looked_at = 0.0
        self.silence = 0.0  # seconds without a beat
        self.used: float | None = None  # seconds of processor, at the last beat

    def start(self, words: list[str], pass_on: list[int]) -> None:
        self.child = Child(words, label=str(self.number), pass_on=pass_on)
        self.started_at = time.monotonic()
        self.start_at = None
        self.is_ready = self.is_over = self.is_killed = False

    def is_heard(self, child: Child) -> None:
        self.silence = 0.0
        self.used = child.used()

    def is_silent(self, child: Child) -> bool:
        """Whether it must be killed: it was ready, and nothing is heard of it any more."""
        now = time.monotonic()
        passed, self.looked_at = min(now - self.looked_at, GLANCE), now
        if not self.is_ready or self.is_over:
            return False
        self.silence += passed
        if self.silence >= SILENCE / 6:
            used = child.used()
            if used is None or self.used is None or used - self.used >= COMPUTES * self.silence:
                self.is_heard(child)
        return self.silence >= SILENCE

    def start_again(self) -> float:
        """Have another one started; the seconds until then."""
        now = time.monotonic()
        if self.is_ready and not self.is_over:
            self.failures = 0
        else:
            self.failures = 1 if now - self.started_at >= HEALTHY else self.failures + 1
        pause = pause_after(self.failures)
        self.start_at = max(now + pause, self.started_at + SHORTEST_LIFE)
        return pause


def pause_after(failures: int) -> float:
    """Seconds to wait before a process that has failed so often in a row is started again."""
    return 0.0 if failures <= 1 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 2, 10))


class Supervisor:
    """Runs in the main thread of a process of its own."""

    def __init__(self, args: argparse.Namespace, link: ParentPipe) -> None:
        self._args = args
        self._link = link
        self._place = health.place_of(args)
        self._slots = [_Slot(number) for number in range(1, args.processes + 1)]
        self._grace: float = (
            DEFAULT_GRACE if args.shutdown_timeout is None else args.shutdown_timeout
        )
        self._groups: list[orphans.ProcessGroup] = []  # of those that have ended
        self._level = RUN
        self._kill_at: float | None = None
        self._code = 0
        self._is_ready = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def run(self) -> int:
        """Until all have ended: 0 in good order, 1 when they were cut short, 2 or 3 when they cannot start."""
        previous = signal.getsignal(signal.SIGCHLD)
        signal.signal(signal.SIGCHLD, self._on_child)
        try:
            Orders(self._link).follow(self._on_order)
            health.clear(self._place)
            with ExitStack() as stack:
                if self._args.health_port is not None:
                    stack.enter_context(
                        health.serve(
                            self._args.health_host,
                            self._args.health_port,
                            self._is_live,
                            self._answers,
                        )
                    )
                while self._start_due() or self._running() or self._groups:
                    self._wait()
                    self._look()
            return self._code
        finally:
            for slot in self._running():
                assert slot.child is not None
                slot.child.kill()
            signal.signal(signal.SIGCHLD, previous)

    # Woken by: a child's end, a child's news, an order, or the time

    def _on_child(self, _: int, __: FrameType | None) -> None:
        self._wake()

    def _on_order(self, level: int) -> None:
        self._level = max(self._level, level)
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it is awake
            os.write(self._wake_write, b"!")

    def _wait(self) -> None:
        moments = [slot.start_at for slot in self._slots if slot.start_at is not None]
        if self._kill_at is not None and not all(slot.is_killed for slot in self._running()):
            moments.append(self._kill_at)
        timeout = min(
            [
                orphans.INTERVAL if self._groups else 1.0,
                *(max(0.0, moment - time.monotonic()) for moment in moments),
            ]
        )
        news = [
            slot.child.news
            for slot in self._running()
            if slot.child is not None and not slot.child.is_cut
        ]
        with suppress(OSError):
            if self._wake_read in readable([self._wake_read, *news], timeout):
                os.read(self._wake_read, 4096)

    # Starting

    def _running(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.child is not None]

    def _start_due(self) -> bool:
        """Start what is due; whether anything is still to be started."""
        if self._level:
            return False
        now = time.monotonic()
        for slot in self._slots:
            if slot.start_at is not None and slot.start_at <= now:
                self._start(slot)
        return any(slot.start_at is not None for slot in self._slots)

    def _start(self, slot: _Slot) -> None:
        args = self._args
        is_first = slot.number == 1 and not slot.started_at
        slot.start(
            args.argv if is_first else ["--no-banner", *args.argv],
            [] if args.reloaded is None else [args.reloaded],
        )

    # Looking

    def _look(self) -> None:
        self._obey()
        for group in self._groups:
            group.check()
        for slot in self._running():
            child = slot.child
            assert child is not None
            code = child.ended()  # before the news, which are complete then
            self._read_news(slot, child)
            if code is not None:
                child.close()
                slot.child = None
                self._groups.append(orphans.ProcessGroup(child.pid))
                health.forget(self._place, label=str(slot.number), pid=child.pid)
                self._has_ended(slot, child.pid, code)
            elif slot.is_silent(child):
                self._kill(slot, child, f"has been silent for {SILENCE:g} s")
        self._groups = [group for group in self._groups if not group.is_over]
        if not self._is_ready and all(slot.has_been_ready for slot in self._slots):
            self._is_ready = True
            self._link.tell(f"ready {self._grace}")
            if not self._args.no_banner:
                say(self._args, READY)

    def _read_news(self, slot: _Slot, child: Child) -> None:
        for line in child.read_news():
            word, _, value = line.partition(" ")
            slot.is_heard(child)
            if word == "ready":
                slot.is_ready = slot.has_been_ready = True
                if self._args.shutdown_timeout is None:
                    self._grace = float(value)
            elif word == "over":
                slot.is_over = True

    def _has_ended(self, slot: _Slot, pid: int, code: int) -> None:
        how = how_it_ended(code)
        if self._level or (self._args.burst and slot.is_over and code == 0):
            logger.debug("worker process %d (pid %d) has ended: %s", slot.number, pid, how)
            return
        if code in CANNOT_START and not slot.has_been_ready:
            logger.error(
                "worker process %d (pid %d) cannot start: %s; ending", slot.number, pid, how
            )
            self._code = self._code or code
            self._on_order(STOP)
            return
        if code >= 0 and slot.is_ready and not slot.is_over:
            how += " (a task ended it)"
        pause = slot.start_again()
        logger.log(
            logging.INFO if code == 0 and slot.is_over else logging.ERROR,
            "worker process %d (pid %d) has ended: %s; starting another one%s",
            slot.number,
            pid,
            how,
            f" in {pause:g} s" if pause else "",
        )

    def _kill(self, slot: _Slot, child: Child, why: str) -> None:
        if not slot.is_killed:
            slot.is_killed = True
            logger.error(
                "worker process %d (pid %d) %s: killing it; its tasks will run again",
                slot.number,
                child.pid,
                why,
            )
            child.process.kill()

    # Stopping

    def _obey(self) -> None:
        if not self._level:
            return
        now = time.monotonic()
        grace = self._grace
        if self._level == STOP_NOW:
            self._code = self._code or 1
            grace = 0.0
        # The second signal comes before the time of the first is up.
        self._kill_at = min(self._kill_at or math.inf, now + grace + PATIENCE)
        for slot in self._slots:
            slot.start_at = None
        for slot in self._running():
            assert slot.child is not None
            slot.child.order(self._level)
            if now >= self._kill_at:
                self._kill(slot, slot.child, "does not end")
                self._code = self._code or 1

    # Health

    def _is_live(self) -> bool:
        return self._level > RUN or bool(self._running())

    def _answers(self) -> bool:
        pids = {slot.child.pid for slot in self._running() if slot.child is not None}
        return bool(pids) and health.look(self._place, pids=pids).is_ready


def run(args: argparse.Namespace, link: ParentPipe) -> int:
    """`machinery worker -p N`."""
    assert threading.current_thread() is threading.main_thread()
    return Supervisor(args, link).run()

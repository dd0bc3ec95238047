"""Supervisor of worker processes, which starts them again. It imports no user code.

A process reports when it is ready, before it claims its first task, and when it ends by itself. If
it dies in between, a task has ended it, and the exit code is the task's: it is replaced at once, so
that poison costs the good tasks no pause. A process that does not become ready, or ends by itself,
is replaced after pauses that double up to LONGEST_PAUSE. The others take over what a dead process
ran: their maintenance finds dead workers. A process that cannot start at all, or says itself that
it cannot go on (exit code 2 or 3), ends everything.

A ready process gives signs of life. While a task holds its interpreter there are none: the process
is *stalled*, and lives. Its keeper (worker/keeper.py), a thread here, beats for its sessions, and
its heartbeat file says so. After `stall_timeout` it writes the stacks of its threads (SIGUSR1),
and STACKS_TIME later it is killed and replaced.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import time
from contextlib import ExitStack, suppress
from types import FrameType

from machinery_py.cli import health, orphans
from machinery_py.cli.output import READY, say
from machinery_py.cli.processes import (
    RUN,
    STACKS,
    STOP,
    STOP_NOW,
    Child,
    Orders,
    ParentPipe,
    how_it_ended,
    label_of,
    readable,
)
from machinery_py.texts import get_logger
from machinery_py.worker.keeper import DOUBTFUL, Keeper

logger = get_logger(__name__)

FIRST_PAUSE = 0.5  # seconds before the second restart in a row; the first is at once
LONGEST_PAUSE = 30.0  # seconds
SHORTEST_LIFE = 0.5  # seconds, at least, between two starts in one slot
HEALTHY = 60.0  # seconds of life after which a failure is the first one again
PATIENCE = 5.0  # seconds beyond the shutdown timeout until a process that does not end is killed
STACKS_TIME = 1.0  # seconds that a silent process has to write its stacks
DEFAULT_GRACE = 30.0  # seconds; until a process has reported its shutdown timeout
CANNOT_START = (2, 3)


class _Slot:
    """One of the N places for a process, with the history of its processes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.child: Child | None = None
        self.started_at = 0.0
        self.start_at: float | None = (
            0.0  # of the next process; None: there is one, or no more to do
        )
        self.failures = 0  # in a row, none of them caused by a task
        self.has_been_ready = False  # one of its processes
        self.is_ready = False
        self.is_over = False  # it has reported that it ends by itself
        self.is_worn = False  # it has reported that it is to be renewed
        self.is_killed = False
        self.answered_at = -math.inf  # its broker; a process that is stopped says nothing
        self.beat_at = 0.0  # of the next heartbeat that is written for it
        self.kill_at: float | None = None  # it has been asked for its stacks

    def start(self, words: list[str], pass_on: list[int], *, is_at_terminal: bool) -> None:
        self.child = Child(
            words, label=str(self.number), pass_on=pass_on, is_at_terminal=is_at_terminal
        )
        self.started_at = time.monotonic()
        self.start_at = None
        self.is_ready = self.is_over = self.is_worn = False
        self.is_killed = False
        self.answered_at = -math.inf
        self.kill_at = None

    def cannot_start(self) -> float:
        """Plan another try when the system gives no process; return the seconds until then."""
        self.failures = max(2, self.failures + 1)
        pause = pause_after(self.failures)
        self.start_at = time.monotonic() + pause
        return pause

    def start_again(self) -> float:
        """Plan the next start, and return the seconds until then."""
        now = time.monotonic()
        if self.is_ready and (self.is_worn or not self.is_over):
            self.failures = 0
        else:
            self.failures = 1 if now - self.started_at >= HEALTHY else self.failures + 1
        pause = pause_after(self.failures)
        self.start_at = max(now + pause, self.started_at + SHORTEST_LIFE)
        return pause


def pause_after(failures: int) -> float:
    """Return the seconds until a process that has failed so often in a row is started again."""
    return 0.0 if failures <= 1 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 2, 10))


class Supervisor:
    """The parent of the processes; runs in the main thread."""

    def __init__(self, args: argparse.Namespace, pipe: ParentPipe) -> None:
        self._args = args
        self._pipe = pipe
        self._place = health.place_of(args)
        self._slots = [_Slot(number) for number in range(1, args.processes + 1)]
        timeout: float | None = args.shutdown_timeout
        self._grace = DEFAULT_GRACE if timeout is None else timeout
        self._stall_timeout: float = args.stall_timeout or math.inf  # until one has reported it
        self._keeper = Keeper(patience=math.inf)  # a process that is silent for too long is killed
        self._groups: list[orphans.ProcessGroup] = []  # of those that have ended
        self._level = RUN
        self._kill_at: float | None = None
        self._code = 0
        self._is_ready = False
        self._orders = Orders(pipe)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def run(self) -> int:
        """Run until all have ended: 0 in good order, 1 cut short, 2 or 3 if they cannot start."""
        previous = signal.getsignal(signal.SIGCHLD)
        signal.signal(signal.SIGCHLD, self._on_child)
        try:
            self._orders.follow(self._on_order)
            health.clear(self._place)
            self._keeper.loop.start()
            host, port = self._args.health_host, self._args.health_port
            with ExitStack() as stack:
                if port is not None:
                    stack.enter_context(health.serve(host, port, self._is_live, self._is_answering))
                while self._start_due() or self._running() or self._groups:
                    self._wait()
                    self._check()
            return self._code
        finally:
            self._keeper.loop.stop()
            for _, child in self._running():
                child.kill()
            signal.signal(signal.SIGCHLD, previous)

    # Woken by a child's end, a child's line, an order, or the time

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
        moments += [
            slot.kill_at for slot, _ in self._running() if slot.kill_at and not slot.is_killed
        ]
        if self._kill_at is not None and not all(slot.is_killed for slot, _ in self._running()):
            moments.append(self._kill_at)
        now = time.monotonic()
        longest = orphans.INTERVAL if self._groups else 1.0
        timeout = min([longest, *(max(0.0, moment - now) for moment in moments)])
        # A pipe at its end, as after a task has closed it, would be readable for ever.
        news = [child.news.descriptor for _, child in self._running() if not child.news.is_at_end]
        with suppress(OSError):
            if self._wake_read in readable([self._wake_read, *news], timeout):
                os.read(self._wake_read, 4096)

    # Starting

    def _running(self) -> list[tuple[_Slot, Child]]:
        return [(slot, slot.child) for slot in self._slots if slot.child is not None]

    def _start_due(self) -> bool:
        """Start what is due; return whether anything is still to be started."""
        if self._level:
            return False
        now = time.monotonic()
        args = self._args
        for slot in self._slots:
            if slot.start_at is not None and slot.start_at <= now:
                is_first = slot.number == 1 and not slot.started_at
                words = args.argv if is_first else ["--no-banner", *args.argv]
                try:
                    slot.start(
                        words,
                        [] if args.reloaded is None else [args.reloaded],
                        is_at_terminal=args.processes == 1 and os.isatty(0),
                    )
                except OSError as error:
                    if not self._is_ready:
                        raise
                    # The others are well: they must not end with this one.
                    pause = slot.cannot_start()
                    logger.error(
                        "worker process %d cannot be started: %s; trying again in %g s",
                        slot.number,
                        error,
                        pause,
                    )
        return any(slot.start_at is not None for slot in self._slots)

    # Checking

    def _check(self) -> None:
        self._obey()
        for group in self._groups:
            group.check()
        for slot, child in self._running():
            code = child.ended()  # before its lines, which are complete then
            self._read_news(slot, child)
            if code is not None:
                child.close()
                slot.child = None
                self._keeper.forget(child.pid)
                self._groups.append(orphans.ProcessGroup(child.pid))
                health.forget(self._place, label=self._label(slot), pid=child.pid)
                self._has_ended(slot, child.pid, code)
            elif slot.is_ready and not slot.is_over and not self._level:
                self._check_silence(slot, child)
            else:
                slot.kill_at = None  # its moment would be waited for no more
        self._groups = [group for group in self._groups if not group.is_over]
        if not self._is_ready and all(slot.has_been_ready for slot in self._slots):
            self._is_ready = True
            self._pipe.tell(f"ready {self._grace}")
            if not self._args.no_banner:
                say(self._args, READY)

    def _label(self, slot: _Slot) -> str:
        return label_of(self._args, str(slot.number))

    def _check_silence(self, slot: _Slot, child: Child) -> None:
        silence, now = self._keeper.silence(child.pid), time.monotonic()
        if silence >= DOUBTFUL and now >= slot.beat_at:
            slot.beat_at = now + health.BEAT
            slot.answered_at = -math.inf
            health.beat_for(self._place, label=self._label(slot), pid=child.pid)
        why = f"has given no sign of life for {self._stall_timeout:g} s"
        if silence < self._stall_timeout:
            slot.kill_at = None
        elif slot.kill_at is None:
            logger.error("%s %s; its threads:", _which(slot, child.pid), why)
            child.process.send_signal(STACKS)
            slot.kill_at = now + STACKS_TIME
        elif now >= slot.kill_at:
            _kill(slot, child, why)

    def _read_news(self, slot: _Slot, child: Child) -> None:
        for line in child.read_news():
            word, _, value = line.partition(" ")
            if word == "sign":
                self._keeper.hear(child.pid, value)
            elif word == "ready":
                slot.is_ready = slot.has_been_ready = True
                grace, stall_timeout = map(float, value.split())
                if self._args.shutdown_timeout is None:
                    self._grace = grace
                self._stall_timeout = self._args.stall_timeout or stall_timeout
                at_most = f" (at most {self._grace:g} s; once more to stop now)"
                self._orders.follow(self._on_order, grace=at_most)
            elif word == "answering":
                slot.answered_at = time.monotonic() if value == "1" else -math.inf
            elif word in ("over", "worn"):
                slot.is_over = True
                slot.is_worn = word == "worn"

    def _has_ended(self, slot: _Slot, pid: int, code: int) -> None:
        which, how = _which(slot, pid), how_it_ended(code)
        is_burst_over = self._args.burst and slot.is_over and not slot.is_worn
        if self._level or (is_burst_over and code == 0):
            logger.debug("%s has ended: %s", which, how)
            return
        if code in CANNOT_START and (slot.is_over or not slot.has_been_ready):
            what = "cannot go on" if slot.has_been_ready else "cannot start"
            level = logging.DEBUG if self._args.processes == 1 else logging.ERROR  # it has said why
            logger.log(level, "%s %s: %s; ending", which, what, how)
            self._code = self._code or code
            self._on_order(STOP)
            return
        if code >= 0 and slot.is_ready and not slot.is_over:
            how += " (a task ended it)"
        pause = slot.start_again()
        level = logging.INFO if code == 0 and slot.is_over else logging.ERROR
        later = f" in {pause:g} s" if pause else ""
        logger.log(level, "%s has ended: %s; starting another one%s", which, how, later)

    # Stopping

    def _obey(self) -> None:
        if not self._level:
            return
        now = time.monotonic()
        grace = self._grace
        if self._level == STOP_NOW:
            self._code = self._code or 1
            grace = 0.0
        # The earlier one: a second signal shortens the time that the first has given.
        self._kill_at = min(self._kill_at or math.inf, now + grace + PATIENCE)
        for slot in self._slots:
            slot.start_at = None
        for slot, child in self._running():
            child.order(self._level)
            if now >= self._kill_at:
                _kill(slot, child, "does not end")
                self._code = self._code or 1

    # Health

    def _is_live(self) -> bool:
        return self._level > RUN or bool(self._running())

    def _is_answering(self) -> bool:
        since = time.monotonic() - health.MAX_AGE
        return all(slot.child is not None and slot.answered_at >= since for slot in self._slots)


def _which(slot: _Slot, pid: int) -> str:
    return f"worker process {slot.number} (pid {pid})"


def _kill(slot: _Slot, child: Child, why: str) -> None:
    if not slot.is_killed:
        slot.is_killed = True
        logger.error("%s %s: killing it; its tasks will run again", _which(slot, child.pid), why)
        child.process.kill()


def run(args: argparse.Namespace, pipe: ParentPipe) -> int:
    """Run `machinery worker`."""
    return Supervisor(args, pipe).run()

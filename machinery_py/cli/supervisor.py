"""Supervisor of worker processes, which starts them again. It imports no user code.

A process reports when it is ready, before it claims its first task, and when it ends by itself. If
it dies in between, a task has ended it, and the exit code is the task's: it is replaced at once, so
that poison costs the good tasks no pause. A process that does not become ready, or ends by itself,
is replaced after pauses that double up to LONGEST_PAUSE. One that was *retired*, by the order
`shutdown`, is not replaced; with the last one the supervisor ends. The others take over what a dead
process ran: their maintenance finds dead workers. A process that says itself that it cannot go on
(exit code 2 or 3) ends everything. So does, before any process was ready, one that says that it
cannot start, or MOST_FAILURES in one place that die without a word, such as an app that ends its
process when it is imported. With `--reload` the place is empty until a file changes.

A ready process gives signs of life. While a task holds its interpreter there are none: the process
is *stalled*, and lives. Its keeper (worker/control/keeper.py), a thread here, beats for its
sessions, and its heartbeat file says so. After `stall_timeout` the stacks of its threads are
logged, which it writes on SIGUSR1, and STACKS_TIME later it is killed and replaced.

A process that was told to end, or that ends by itself and hangs in an exit handler, is killed
PATIENCE after the shutdown timeout.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from machinery_py.cli import health, orphans, reload
from machinery_py.cli.output import READY, say
from machinery_py.cli.processes import (
    RUN,
    SIGNALS,
    STACKS_TIME,
    STOP,
    STOP_NOW,
    Child,
    Orders,
    label_of,
    readable,
)
from machinery_py.connections import proc
from machinery_py.texts import get_logger
from machinery_py.worker.control.keeper import DOUBTFUL, Keeper

if TYPE_CHECKING:
    from machinery_py.cli.metrics import ProcessCounts

logger = get_logger(__name__)

FIRST_PAUSE = 0.5  # seconds before the second restart in a row; the first is at once
LONGEST_PAUSE = 30.0  # seconds
SHORTEST_LIFE = 0.5  # seconds, at least, between two starts in one slot
HEALTHY = 60.0  # seconds of life after which a failure is the first one again
PATIENCE = 5.0  # seconds beyond the shutdown timeout until a process that does not end is killed
DEFAULT_GRACE = 30.0  # seconds; until a process has reported its shutdown timeout
LONGEST_WAIT = 1.0  # seconds between two checks
CANNOT_START = (2, 3)
MOST_FAILURES = 5  # in a row in one place, some 4 s, until none of the processes was ever ready


class _Slot:
    """One of the N places for a process, with the history of its processes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.child: Child | None = None
        self.start_at = 0.0  # of the next process; infinite: there is one, or no more to do
        self.failures = 0  # in a row, none of them caused by a task
        self.has_been_ready = False  # one of its processes
        self.is_retired = False  # by an order
        self.wants_banner = number == 1

    def pause(self, failures: int, *, shortest: float = 0.0) -> str:
        """Plan the next start, and return how soon that is, for the log."""
        self.failures = failures
        pause = pause_after(failures)
        self.start_at = time.monotonic() + max(pause, shortest)
        return f" in {pause:g} s" if pause else ""

    def start_again(self, child: Child) -> str:
        """Plan the next start after the end of this process; return how soon that is."""
        life = time.monotonic() - child.started_at
        failures = 1 if life >= HEALTHY else self.failures + 1
        if child.is_ready and (child.is_worn or not child.is_over):
            failures = 0
        return self.pause(failures, shortest=SHORTEST_LIFE - life)

    def renew(self) -> None:
        """Start it as for the first time, when the process that there may be has ended."""
        self.has_been_ready = self.is_retired = False
        self.wants_banner = self.number == 1
        if self.child is None:
            self.pause(0)
        elif self.child.stop_now_at == math.inf:
            self.child.stop_now_at = time.monotonic() + reload.GRACE
            self.child.kill_at = self.child.stop_now_at + PATIENCE


def pause_after(failures: int) -> float:
    """Return the seconds until a process that has failed so often in a row is started again."""
    return 0.0 if failures <= 1 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 2, 10))


class Supervisor:
    """The parent of the processes; runs in the main thread."""

    def __init__(self, args: argparse.Namespace, orders: Orders) -> None:
        self._args = args
        self._place = health.place_of(args)
        self._slots = [_Slot(number) for number in range(1, args.processes + 1)]
        self._files = reload.Files(args.app_dir or ".") if args.reload else None
        self._awaits_change = False
        self._grace = DEFAULT_GRACE if args.shutdown_timeout is None else args.shutdown_timeout
        self._stall_timeout = math.inf  # until a process has reported it
        # A process that is silent for too long is killed.
        self._keeper = Keeper(patience=math.inf, stacks_of=self._stacks_of)
        self._groups: list[orphans.ProcessGroup] = []  # of those that have ended
        self._counts: ProcessCounts | None = None
        self._level = RUN
        self._has_hung_up = False
        self._code = 0
        self._is_ready = False
        self._orders = orders
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def run(self) -> int:
        """Run until all have ended: 0 in good order, 1 cut short, 2 or 3 if they cannot start."""
        previous = signal.getsignal(signal.SIGCHLD)
        signal.signal(signal.SIGCHLD, lambda *_: self._wake())
        try:
            self._orders.follow(self._on_order, self._on_hangup)
            health.clear(self._place)
            self._keeper.loop.start()
            with ExitStack() as stack:
                if self._args.health_port is not None:
                    self._serve(self._args.health_port, stack)
                while self._has_work():
                    self._start_due()
                    self._wait()
                    self._check()
            return self._code
        finally:
            self._keeper.loop.stop()
            for _, child in self._running():
                child.kill()
                child.process.wait()
            signal.signal(signal.SIGCHLD, previous)

    def _serve(self, port: int, stack: ExitStack) -> None:
        from machinery_py.cli import http, metrics  # only who asks for a port pays

        host, self._counts = self._args.health_host, stack.enter_context(metrics.ProcessCounts())
        pages = http.Pages(self._is_answering, self._counts.page, self._is_live)
        stack.enter_context(http.serve(pages, host, port, option="--health-port"))

    def _has_work(self) -> bool:
        is_due = any(slot.start_at < math.inf for slot in self._slots)
        return is_due or bool(self._running() or self._groups) or self._awaits_change

    # Woken by a child's end, a child's line, an order, or the time

    def _on_order(self, level: int) -> None:
        self._level = max(self._level, level)
        self._wake()

    def _on_hangup(self) -> None:
        self._has_hung_up = True
        self._wake()

    def _wake(self) -> None:
        with suppress(OSError):  # full: it is awake
            os.write(self._wake_write, b"!")

    def _wait(self) -> None:
        now = time.monotonic()
        longest = orphans.INTERVAL if self._groups else LONGEST_WAIT
        moments = [slot.start_at for slot in self._slots]
        if self._files is not None and not self._level:
            moments.append(self._files.scan_at)
        timeout = max(0.0, min(longest, *(moment - now for moment in moments)))
        # One at its end, as after a task has closed it, would be readable for ever.
        news = [child.news.descriptor for _, child in self._running() if not child.news.is_at_end]
        with suppress(OSError):
            if self._wake_read in readable([self._wake_read, *news], timeout):
                os.read(self._wake_read, 4096)

    # Starting

    def _running(self) -> list[tuple[_Slot, Child]]:
        return [(slot, child) for slot in self._slots if (child := slot.child) is not None]

    def _start_due(self) -> None:
        now = time.monotonic()
        for slot in self._slots:
            if slot.start_at <= now and not self._level:
                self._start(slot)

    def _start(self, slot: _Slot) -> None:
        words = self._args.argv if slot.wants_banner else ["--no-banner", *self._args.argv]
        is_at_terminal = self._args.processes == 1 and os.isatty(0)
        try:
            slot.child = Child(words, label=str(slot.number), is_at_terminal=is_at_terminal)
        except OSError as error:
            if not self._is_ready and self._files is None:
                raise
            # The others are well: they must not end with this one.
            later = slot.pause(max(2, slot.failures + 1))
            logger.error(
                "worker process %d cannot be started: %s; trying again%s",
                slot.number,
                error,
                later,
            )
            return
        slot.start_at, slot.wants_banner = math.inf, False

    # Checking

    def _check(self) -> None:
        if self._level:
            self._obey()
        elif self._files is not None and self._files.have_changed():
            self._awaits_change = self._is_ready = False
            for slot in self._slots:
                slot.renew()
        if self._has_hung_up:
            self._has_hung_up = False
            logger.info("SIGHUP: the settings that may change while it runs are read again")
            for _, child in self._running():
                child.must_read_again = True
        if self._counts is not None:
            self._counts.tidy()
        for group in self._groups:
            group.check()
        for slot, child in self._running():
            code = child.process.poll()  # before its lines, which are complete then
            self._read_news(slot, child)
            if code is None:
                if child.must_read_again and child.is_ready:
                    child.read_again()
                self._check_time(slot, child)
                continue
            child.close()
            slot.child = None
            self._keeper.forget(child.pid)
            self._groups.append(orphans.ProcessGroup(child.pid))
            health.forget(self._place, label=self._label(slot), pid=child.pid)
            self._has_ended(slot, child, code)
        orphans.reap_inherited({child.pid for _, child in self._running()})
        self._groups = [group for group in self._groups if not group.is_over]
        if not self._is_ready and all(slot.has_been_ready for slot in self._slots):
            self._is_ready = True
            if not self._args.no_banner:
                say(self._args, READY)

    def _stacks_of(self, pid: int) -> str:
        return next((child.stacks() for _, child in self._running() if child.pid == pid), "")

    def _label(self, slot: _Slot) -> str:
        return label_of(self._args, str(slot.number))

    def _check_time(self, slot: _Slot, child: Child) -> None:
        """Ask a process to end, write its heartbeat, or kill it, when it is time to."""
        now, silence = time.monotonic(), self._keeper.silence(child.pid)
        if child.stop_now_at < math.inf:
            child.order(STOP if now < child.stop_now_at else STOP_NOW)
        if now >= child.kill_at:
            _kill(slot, child, "does not end")
        if not child.is_ready:
            return
        if silence >= DOUBTFUL and now >= child.beat_at:
            child.beat_at = now + health.BEAT
            child.answered_at = -math.inf
            health.beat_for(self._place, label=self._label(slot), pid=child.pid)
        why = f"has given no sign of life for {self._stall_timeout:g} s"
        if silence < self._stall_timeout:
            child.stacks_at = None
        elif child.stacks_at is None:
            logger.error("%s %s; its threads:", _which(slot, child), why)
            with suppress(OSError, ValueError):  # nobody reads it: the others must live on
                print(child.stacks(), end="", file=sys.stderr, flush=True)
            child.stacks_at = now
        elif now >= child.stacks_at + STACKS_TIME:  # the signal has not helped
            _kill(slot, child, why)

    def _read_news(self, slot: _Slot, child: Child) -> None:
        for line in child.news.read():
            word, _, value = line.partition(" ")
            if word == "sign":
                self._keeper.hear(child.pid, value)
            elif word == "ready":
                child.is_ready = slot.has_been_ready = True
                self._keeper.know(child.pid)
                with suppress(ValueError):  # user code has written into the socket
                    self._grace, self._stall_timeout = map(float, value.split())
                self._orders.grace = f" (at most {self._grace:g} s; once more to stop now)"
            elif word == "answering":
                child.answered_at = time.monotonic() if value == "1" else -math.inf
            elif word == "file" and self._files is not None:
                self._files.add(value)
            elif word in ("over", "worn", "retired"):
                child.is_over, child.is_worn = True, word == "worn"
                slot.is_retired |= word == "retired"
                child.kill_at = min(child.kill_at, time.monotonic() + self._grace + PATIENCE)

    def _has_ended(self, slot: _Slot, child: Child, code: int) -> None:
        which, how = _which(slot, child), proc.how_it_ended(code)
        is_burst_over = self._args.burst and child.is_over and not child.is_worn
        is_done = self._level or slot.is_retired
        if is_done or (is_burst_over and (code == 0 or child.is_killed)):
            is_lost = code < 0 and -code not in SIGNALS and not child.is_killed
            logger.log(logging.ERROR if is_lost else logging.DEBUG, "%s %s", which, how)
            self._code = self._code or int(child.is_killed or is_lost)
        elif child.stop_now_at < math.inf:
            slot.pause(0)
        elif why := self._why_hopeless(slot, child, code):
            if self._files is not None:
                self._awaits_change = True
                logger.error("%s %s (it %s); waiting until a file changes", which, why, how)
                return
            # If it is the only one, it has said why.
            is_said = self._args.processes == 1 and code in CANNOT_START
            level = logging.DEBUG if is_said else logging.ERROR
            logger.log(level, "%s %s (it %s); ending", which, why, how)
            self._code = self._code or (code if code in CANNOT_START else 1)
            self._on_order(STOP)
        else:
            if code >= 0 and child.is_ready and not child.is_over:
                how += " (a task ended it)"
            later = slot.start_again(child)
            level = logging.INFO if code == 0 and child.is_over else logging.ERROR
            logger.log(level, "%s %s; starting another one%s", which, how, later)

    def _why_hopeless(self, slot: _Slot, child: Child, code: int) -> str:
        """Say why its end is to end all, as another one would fail as well; "": it is not.

        Once a process was ready the app is known to work: later failures may be of this moment,
        and must not end those that are well.
        """
        if child.is_ready:
            return "cannot go on" if child.is_over and code in CANNOT_START else ""
        if any(one.has_been_ready for one in self._slots):
            return ""
        failures = slot.failures + 1
        if failures >= MOST_FAILURES and code not in CANNOT_START:
            return f"cannot start: {failures} in a row have ended before they were ready"
        return "cannot start" if code in CANNOT_START else ""

    # Stopping

    def _obey(self) -> None:
        now, is_now = time.monotonic(), self._level == STOP_NOW
        self._code = self._code or int(is_now)
        self._awaits_change = False
        for slot in self._slots:
            slot.start_at = math.inf
        for _, child in self._running():
            child.order(self._level)
            # The earlier one: a second signal shortens the time that the first has given.
            child.kill_at = min(child.kill_at, now + (0 if is_now else self._grace) + PATIENCE)

    # Health

    def _is_live(self) -> bool:
        return self._level > RUN or bool(self._running())

    def _is_answering(self) -> bool:
        since = time.monotonic() - health.MAX_AGE
        return all(
            slot.is_retired or (slot.child is not None and slot.child.answered_at >= since)
            for slot in self._slots
        )


def _which(slot: _Slot, child: Child) -> str:
    return f"worker process {slot.number} (pid {child.pid})"


def _kill(slot: _Slot, child: Child, why: str) -> None:
    if not child.is_killed:
        again = "" if child.is_over else "; its tasks will run again"
        logger.error("%s %s: killing it%s", _which(slot, child), why, again)
        child.kill()

"""`machinery worker`: one worker, from its signals to its exit code. With -p and --reload this is what runs in each child."""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from machinery_py.cli import health, leftovers, logs, reload
from machinery_py.cli.banner import READY, banner, say
from machinery_py.cli.guard import BROKEN, Guard
from machinery_py.cli.processes import STOP_NOW, Orders, ParentPipe
from machinery_py.errors import BackendUnavailable, BrokerUnavailable, MachineryError
from machinery_py.events import WorkerOnline
from machinery_py.texts import get_logger

if TYPE_CHECKING:
    from machinery_py.server import Server
    from machinery_py.worker.worker import Worker

logger = get_logger(__name__)


def worker(args: argparse.Namespace) -> int:
    """`machinery worker`; returns its exit code."""
    logs.configure(args.log_level, args.log_format)
    link = ParentPipe(args.child)
    try:
        if args.reload and args.reloaded is None:
            return reload.run(args, link)
        if args.processes > 1 and not link.is_numbered:
            from machinery_py.cli import supervisor

            return supervisor.run(args, link)
        return _work(args, link)
    except KeyboardInterrupt:  # asked to stop before there was anything to stop
        return 0


def _work(args: argparse.Namespace, link: ParentPipe) -> int:
    orders = Orders(link)
    leftovers.hold_lifeline()
    with reload.telling_files(args.reloaded):
        from machinery_py.cli import (
            apps,
        )  # loads the library; a signal may interrupt that from here on

        server = apps.load(args.app, args.app_dir)
    one = new_worker(server, args, link)
    if not args.no_banner:
        say(args, banner(server, one, args.processes))
    vital = Vital(one)
    place = health.place_of(args)
    if not link.is_numbered:
        health.clear(place)
    ready = Readiness(one, lambda: _on_ready(args, link, one))
    label = link.label if link.is_numbered else ""
    with ExitStack() as stack:
        stack.callback(leftovers.end_below, leftovers.below())
        stack.enter_context(
            health.Pulse(place, label=label, worker=one.name, is_ready=vital.is_ready)
        )
        if args.health_port is not None and not link.is_numbered:
            stack.enter_context(
                health.serve(args.health_host, args.health_port, lambda: True, vital.is_ready)
            )
        orders.follow(
            lambda level: one.abort() if level == STOP_NOW else one.quit(),
            grace=f" (at most {one.shutdown_timeout:g} s; once more to stop now)",
        )
        one.on_failure = stack.enter_context(Guard(link, one.blame)).look
        try:
            code = _launch(one, ready)
        finally:
            link.tell("over")
    server.close()
    return code


def new_worker(server: Server, args: argparse.Namespace, link: ParentPipe) -> Worker:
    """The worker that the options ask for."""
    name = args.name and (f"{args.name}-{link.label}" if link.is_numbered else args.name)
    return server.new_worker(
        name or f"{socket.gethostname()}-{os.getpid()}",
        server.config.concurrency if args.concurrency is None else args.concurrency,
        queues=args.queues,
        burst=args.burst,
        shutdown_timeout=args.shutdown_timeout,
        scheduler=not args.no_scheduler,
    )


def _launch(one: Worker, ready: Readiness) -> int:
    try:
        return one.launch(signals=False)
    except MachineryError as error:
        if not ready.was_ready or isinstance(error, (BrokerUnavailable, BackendUnavailable)):
            raise  # it could not even start, or gave up waiting for its store: 2 or 3, see main
        logger.error("%s", error)
        return BROKEN


def _on_ready(args: argparse.Namespace, link: ParentPipe, one: Worker) -> None:
    link.tell(f"ready {one.shutdown_timeout}")
    if not args.no_banner and not link.is_numbered:
        say(args, READY)


class Readiness:
    """Calls a function, once, when the worker has its session and before its first claim: what it claims may end the process."""

    def __init__(self, one: Worker, then: Callable[[], object]) -> None:
        self.was_ready = False
        self._then = then
        one.app.events.subscribe(WorkerOnline, self._on_online)

    def _on_online(self, _: WorkerOnline) -> None:
        if not self.was_ready:
            self.was_ready = True
            self._then()


class Vital:
    """Whether the broker answered at the worker's last beat."""

    def __init__(self, one: Worker) -> None:
        self._worker = one
        self._answered_at: float | None = None
        one.on_beat = self._on_beat

    def _on_beat(self) -> None:
        self._answered_at = time.monotonic()

    def is_ready(self) -> bool:
        """Beats come each quarter of a lease; where a store hangs they stay away without an error."""
        return (
            self._answered_at is not None
            and time.monotonic() - self._answered_at <= self._worker.app.config.lease
            and self._worker.ready
        )

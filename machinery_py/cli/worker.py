"""`machinery worker`: one worker, from its signals to its exit code."""

from __future__ import annotations

import argparse
import faulthandler
import os
import socket
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from machinery_py.cli import health, logs, orphans, reload
from machinery_py.cli.output import READY, clean, many, say, shown_url
from machinery_py.cli.processes import STACKS, STOP_NOW, Orders, ParentPipe, label_of
from machinery_py.cli.watchdog import BROKEN, Watchdog, copy_of_stderr
from machinery_py.errors import BackendUnavailable, BrokerUnavailable, MachineryError
from machinery_py.texts import get_logger
from machinery_py.version import __version__

if TYPE_CHECKING:
    from machinery_py.events import WorkerOnline
    from machinery_py.server import Server
    from machinery_py.worker.worker import Worker

logger = get_logger(__name__)

EMBEDDED = "   (embedded: one machine; set MACHINERY_URL for a server)"
WIDTH = 100  # columns of the banner
INDENT = 11  # columns in front of its values


def worker(args: argparse.Namespace) -> int:
    """Run `machinery worker`."""
    logs.configure(args.log_level, args.log_format)
    pipe = ParentPipe(args.child)
    try:
        if args.reload and args.reloaded is None:
            return reload.run(args, pipe)
        if not pipe.is_numbered and (args.processes > 1 or os.name == "posix"):
            from machinery_py.cli import supervisor

            return supervisor.run(args, pipe)
        return _work(args, pipe)
    except KeyboardInterrupt:  # asked to stop before there was anything to stop
        return 0


def _work(args: argparse.Namespace, pipe: ParentPipe) -> int:
    orders = Orders(pipe)
    orphans.hold_lifeline()
    stderr = copy_of_stderr()
    if stderr >= 0:
        faulthandler.register(STACKS, stderr)
    with reload.telling_files(args.reloaded):
        # Loads the library; a signal may interrupt that from here on.
        from machinery_py.cli import apps
        from machinery_py.worker import signs

        server = apps.load(args.app, args.app_dir)
    if pipe.is_numbered:
        signs.use(lambda line: pipe.tell(line, can_be_dropped=True))
    one = _new_worker(server, args, pipe)
    if not args.no_banner:
        say(args, banner(server, one, args.processes))
    readiness = Readiness(one, lambda: _on_ready(args, pipe, one))
    place = health.place_of(args)
    if not pipe.is_numbered:
        health.clear(place)
    is_ready = readiness.is_ready
    with ExitStack() as stack:
        stack.callback(orphans.end_below, orphans.below())
        pulse = health.Pulse(
            place,
            label=label_of(args, pipe.label),
            worker=one.name,
            is_ready=is_ready,
            tell=lambda answers: pipe.tell(f"answering {answers:d}", can_be_dropped=True),
        )
        stack.enter_context(pulse)
        if args.health_port is not None and not pipe.is_numbered:
            stack.enter_context(
                health.serve(args.health_host, args.health_port, lambda: True, is_ready)
            )
        orders.follow(
            lambda level: one.abort() if level == STOP_NOW else one.quit(),
            grace=f" (at most {one.shutdown_timeout:g} s; once more to stop now)",
        )
        one.on_failure = stack.enter_context(Watchdog(stderr, one.blame)).check
        try:
            code = _launch(one, readiness)
        finally:
            pipe.tell("worn" if one.is_worn else "over")
    server.close()
    return code


def _new_worker(server: Server, args: argparse.Namespace, pipe: ParentPipe) -> Worker:
    from machinery_py.worker.processes import ChildApp  # loads the library, as `_work` does

    label = label_of(args, pipe.label)
    name = args.name and (f"{args.name}-{label}" if label else args.name)
    one = server.new_worker(
        name or f"{socket.gethostname()}-{os.getpid()}",
        server.config.concurrency if args.concurrency is None else args.concurrency,
        queues=args.queues,
        burst=args.burst,
        shutdown_timeout=args.shutdown_timeout,
        scheduler=not args.no_scheduler,
        autoscale=args.autoscale,
        pool=args.pool or "",
        max_tasks_per_child=args.max_tasks_per_child or 0,
        max_memory_per_child=args.max_memory_per_child or 0,
    )
    folder = os.path.abspath(args.app_dir or ".")
    one.child_app = lambda: ChildApp(
        app=args.app, folder=folder, log_level=args.log_level, log_format=args.log_format
    )
    return one


def _launch(one: Worker, readiness: Readiness) -> int:
    try:
        return one.launch(signals=False)
    except MachineryError as error:
        if not readiness.was_ready or isinstance(error, (BrokerUnavailable, BackendUnavailable)):
            raise  # it could not even start, or gave up waiting for its store: 2 or 3, see main
        logger.error("%s", error)
        return BROKEN


def _on_ready(args: argparse.Namespace, pipe: ParentPipe, one: Worker) -> None:
    pipe.tell(f"ready {one.shutdown_timeout} {one.app.config.stall_timeout}")
    if not args.no_banner and not pipe.is_numbered:
        say(args, READY)


class Readiness:
    """Knows whether a worker has started and whether its broker answers.

    Calls `on_start` once, when the worker has its session and before its first claim: what it
    claims may end the process.
    """

    def __init__(self, one: Worker, on_start: Callable[[], object]) -> None:
        self.was_ready = False
        self._worker = one
        self._on_start = on_start
        self._answered_at: float | None = None  # of the broker, at the last beat
        from machinery_py.events import WorkerOnline  # not for the supervisor, which is to be small

        one.app.events.subscribe(WorkerOnline, self._on_online)
        one.on_beat = self._on_beat

    def _on_online(self, _: WorkerOnline) -> None:
        if not self.was_ready:
            self.was_ready = True
            self._on_start()

    def _on_beat(self) -> None:
        self._answered_at = time.monotonic()

    def is_ready(self) -> bool:
        """Whether the broker answered within the last lease.

        Beats come each quarter of a lease; where a store hangs they stay away without an error.
        """
        return (
            self._answered_at is not None
            and time.monotonic() - self._answered_at <= self._worker.app.config.lease
            and self._worker.ready
        )


# The banner


def banner(server: Server, one: Worker, processes: int) -> str:
    """Describe the worker: name, stores, queues, tasks."""
    config = server.config
    words = ("thread",) if one.pool == "thread" else ("task process", "task processes")
    much = many(one.concurrency, *words)
    if one.autoscale is not None:
        much = f"{one.autoscale[0]:,} to {many(one.autoscale[1], *words)}"
    if processes > 1:
        much = f"{many(processes, 'process', 'processes')} of {much}"
    broker = shown_url(config.broker, config.multiple_broker_separator)
    rows = [("broker", [broker + (EMBEDDED if server.broker.features.embedded else "")])]
    if config.backend_url != config.broker:
        rows.append(("results", [shown_url(config.backend_url, config.multiple_broker_separator)]))
    names = _wrapped(server.get_registered_task_names())
    rows.append(("queue" if len(one.queues) == 1 else "queues", _wrapped(one.order.shown())))
    rows.append(("tasks", names or ["none (is their module imported?)"]))
    lines = [f"machinery {__version__} · worker {clean(one.name)} · {much}"]
    for name, values in rows:
        for at, value in enumerate(values):
            lines.append(f"  {'' if at else name:<{INDENT - 2}}{value}")
    return "\n".join(lines)


def _wrapped(names: Sequence[str]) -> list[str]:
    text = ", ".join(clean(name) for name in names)
    return textwrap.wrap(text, WIDTH - INDENT, break_long_words=False, break_on_hyphens=False)

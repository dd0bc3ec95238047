"""Worker: starts its parts (see Engine), runs until it is told to stop, and stops them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Final

from machinery_py.async_twins import twin
from machinery_py.clock import ABOVE_ZERO, Seconds, seconds_of
from machinery_py.connections import proc
from machinery_py.errors import MachineryError
from machinery_py.registry.hooks import WorkerPart, added_part
from machinery_py.texts import get_logger
from machinery_py.worker.engine import Engine
from machinery_py.worker.loops.timer import TimerEntry
from machinery_py.worker.parts import RunningParts

logger = get_logger(__name__)

GRACEFUL, ABRUPT = 0, 1  # what `launch` returns; the exit codes of the command line


class Worker(Engine):
    """Worker for one or more queues, made by `Server.new_worker`.

    It does not run before `launch`, `start` or `with`.

    Args:
        concurrency: tasks at a time; 0 is two for each processor, as with Go's Redis broker.
        queues: names are in strict order: the second is served when the first is empty. With a
            mapping of names to weights each claim goes through them in an order drawn by weight.
            By default those of the setting `queues`.
        burst: end when there is nothing left to do; what waits in a paused queue is left there.
        pool: "thread" or "process", for tasks that do not say; by default the setting `pool`.
        max_tasks_per_child: runs after which a task process is renewed; 0: any number. After
            about as many runs in threads the worker itself ends in order.
        max_memory_per_child: bytes in memory after which it is renewed, or ends; 0: any.
        autoscale: in place of `concurrency`, the least and the most tasks at a time.
        child_app: what task processes import.
        declared: the schedules that code declares; None: it runs no scheduler.

    Raises:
        ConfigError: a number is not what the setting of its name may be.
    """

    # Beside the tasks

    def after(self, seconds: Seconds, function: Callable[[], object]) -> TimerEntry:
        """Call a function, or a coroutine function, once: so many seconds from now.

        Before the worker runs: from its start. It is called in this process, in one thread for
        all; an exception is logged. The result's `cancel` takes it back.

        Raises:
            TypeError, ValueError: the seconds are no length, negative, or endless.
        """
        return self._timer.after(seconds_of("seconds", seconds), self._waited(function))

    def every(
        self, seconds: Seconds, function: Callable[[], object], *, first: Seconds | None = None
    ) -> TimerEntry:
        """Call it again and again while the worker runs, at a fixed beat; else as `after`.

        Args:
            first: seconds until the first call; by default as between two.

        Raises:
            TypeError, ValueError: as `after`; or the seconds are not more than 0.
        """
        pause = seconds_of("seconds", seconds, least=ABOVE_ZERO)
        wait = pause if first is None else seconds_of("first", first)
        return self._timer.every(pause, self._waited(function), first=wait)

    def _waited(self, function: Callable[[], object]) -> Callable[[], object]:
        def call() -> None:
            found = function()
            if inspect.iscoroutine(found):
                self._hooks.run_coroutine(found)

        return call

    def add_part(
        self, part: WorkerPart, *, name: str = "", after: str | Sequence[str] = "broker"
    ) -> None:
        """Start and stop it with this worker; see `Server.worker_part`."""
        self._added.append(added_part(lambda: part, name or type(part).__name__, after))

    # Running

    def launch(self, *, signals: bool | None = None) -> int:
        """Run until SIGTERM, SIGINT or `quit`; return 0, or 1 when a second signal cut it short.

        Args:
            signals: whether to handle signals, in the main thread only; by default unless
                `no_unix_signals` is set.

        Raises:
            StoreUnusable, ConfigError: the worker could not start; a store that is away is awaited.
            BrokerUnavailable: the attempts that `broker_connection_max_retries` allows have failed.
        """
        handle = not self.app.config.no_unix_signals if signals is None else signals
        request = self._stop_request
        with request.by_signals(handle):
            self._start_parts(patiently=True)
            try:
                self._wait()
            finally:
                self.stop()
            return ABRUPT if request.is_abrupt else GRACEFUL

    def launch_async(
        self, errors: Callable[[BaseException], object] | None = None
    ) -> threading.Thread:
        """Call `launch` in a new thread (Go's LaunchAsync), and `errors` with what it raises.

        `quit` ends it, also before it has begun.
        """

        def run() -> None:
            try:
                self.launch(signals=False)
            except BaseException as error:  # logged or handed over: nothing else sees it
                if errors is None:
                    logger.exception("worker %s has ended", self.name)
                else:
                    errors(error)

        thread = threading.Thread(target=run, name=f"{self.name}-launch", daemon=True)
        thread.start()
        return thread

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all parts in the background. They run until `stop`, `quit` or the end of a burst.

        Unlike `launch` it does not wait for a store that is away. An error that ends it is logged.

        Raises:
            BrokerUnavailable, BackendUnavailable, StoreUnusable: the worker could not start; it may
                be started again.
        """
        with self._stopped:
            self._start_parts()
            self._attendant = threading.Thread(
                target=self._attend, name=f"{self.name}-attendant", daemon=True
            )
            self._attendant.start()

    def _attend(self) -> None:
        try:
            self._wait()
        except MachineryError as error:
            logger.error("%s", error)
        self.stop()

    start_async: Final = twin(start)

    def _start_parts(self, *, patiently: bool = False) -> None:
        """Start all parts; `patiently`: wait for a store that is away, until asked to stop."""
        with self._stopped:
            if self._parts is not None:
                raise MachineryError(f"worker {self.name} runs already (make another one)")
            if not self._is_new:
                self._stop_request.clear()
            self._runs += 1
            self._is_new, self._is_patient = False, patiently
            parts = RunningParts(self.parts())
            parts.start(lambda: self._stop_request.is_made)
            self._parts = parts

    def quit(self) -> None:
        """Ask the worker to end when the running tasks are done; return at once.

        May be called from any thread, and again. `launch` returns when the worker has ended; after
        `start` it ends in the background, and `stop` waits for that.
        """
        self._stop_request.quit()

    def abort(self) -> None:
        """Ask the worker to end now: tasks that run go back to their queues."""
        self._stop_request.abort()

    def stop(self) -> bool:
        """End the worker in order, and wait for that. False: `abort` cut it short."""
        run, attendant = max(1, self._runs), None
        self._stop_request.quit()  # for a start that goes on, and for the attendant
        with self._stopped:
            if self._runs <= run:  # else that one is over, and somebody has started the next
                self._is_new = False
                # Inside a start there are none yet: who started them stops them.
                parts, self._parts = self._parts, None
                if parts is not None:
                    parts.stop()
                attendant = self._attendant
        if attendant is not None and attendant is not threading.current_thread():
            attendant.join()
        return not self._stop_request.is_abrupt

    stop_async: Final = twin(stop, goes_on=True)

    # Inside

    def _wait(self) -> None:
        connected = self._connected  # None if it was stopped before
        while connected is not None and not self._stop_request.is_made:
            self._stop_request.wait(0.1 if self.burst or self._max_per_child[1] else 0.5)
            if self._reconnect.given_up is not None:
                raise self._reconnect.given_up
            failure = connected.failure or self._timer.failure
            if failure is not None:
                self.on_failure()
                raise MachineryError(f"worker {self.name} cannot go on: {failure!r}") from failure
            if self._is_worn():
                self.is_worn = True
                logger.info("this worker ends after %d tasks, to be renewed", self.processed)
                return
            if self.burst and connected.receiver.is_idle:
                return

    def _is_worn(self) -> bool:
        max_tasks, max_memory = self._max_per_child
        # In threads, since its last start: the pool counts from there, too.
        runs = self.processed - self._count[0] - self._processes.calls
        return runs > 0 and (0 < max_tasks <= runs or 0 < max_memory < proc.memory())

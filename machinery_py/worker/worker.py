"""Worker: starts its parts in order, runs until it is told to stop, and stops them in order.

Claims stop first, so that nothing new comes; running tasks may finish, for at most
`shutdown_timeout`; what is not finished goes back to its queue; the settler ends when all that is
over has been committed; the session is closed last.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from machinery_py.app import Application
from machinery_py.async_twins import twin
from machinery_py.config.config import OPTIONS
from machinery_py.config.options import raise_all
from machinery_py.connections import proc
from machinery_py.errors import MachineryError
from machinery_py.events import WorkerOffline, WorkerOnline
from machinery_py.queues import QueueOrder, Queues
from machinery_py.schedules.scheduler import Declared
from machinery_py.schedules.thread import SchedulerThread
from machinery_py.stores.base import Session
from machinery_py.tasks.signature import Signature
from machinery_py.texts import get_logger
from machinery_py.worker.agent import Agent
from machinery_py.worker.autoscale import Autoscaler, check_autoscale
from machinery_py.worker.chords import settle_ready_groups
from machinery_py.worker.executors import Executors
from machinery_py.worker.frames import Setup
from machinery_py.worker.go_groups import GoGroupPoller
from machinery_py.worker.hooks import WorkerHooks
from machinery_py.worker.maintenance import Maintenance
from machinery_py.worker.processes import ProcessPool
from machinery_py.worker.receiver import Receiver
from machinery_py.worker.reconnect import Handler, Reconnect, open_patiently
from machinery_py.worker.settler import Settler
from machinery_py.worker.signs import Signs, signs_for
from machinery_py.worker.steering import Steering
from machinery_py.worker.stopping import StopRequest
from machinery_py.worker.surroundings import Surroundings

logger = get_logger(__name__)

LOOP_WAIT = 10.0  # seconds for a thread to end
SETTLER_WAIT = 2.0  # seconds for a task that has ended to reach the settler

GRACEFUL, ABRUPT = 0, 1  # what `launch` returns; the exit codes of the command line


class Worker:
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

    def __init__(
        self,
        app: Application,
        name: str = "",
        *,
        concurrency: int = 0,
        queues: Queues = (),
        burst: bool = False,
        shutdown_timeout: float | None = None,
        pool: str = "",
        max_tasks_per_child: int = 0,
        max_memory_per_child: int = 0,
        autoscale: tuple[int, int] | None = None,
        child_app: Callable[[], Setup] | None = None,
        declared: Declared | None = None,
    ) -> None:
        given: dict[str, object] = {"concurrency": concurrency, "pool": pool or app.config.pool}
        if shutdown_timeout is not None:
            given["shutdown_timeout"] = shutdown_timeout
        raise_all([text for key, value in given.items() if (text := OPTIONS[key].problem(value))])
        check_autoscale(autoscale)
        self.autoscale = autoscale
        self.app = app
        self.name = name or f"{proc.hostname()}-{os.getpid()}"
        if autoscale is not None:
            concurrency = autoscale[0]
        self.concurrency = concurrency or app.config.concurrency or 2 * (os.cpu_count() or 1)
        self.order = QueueOrder.of(queues or app.config.worker_queues)
        self.queues = self.order.names
        self.burst = burst
        self.pool = pool or app.config.pool
        self.child_app = child_app
        self._max_per_child = max_tasks_per_child, max_memory_per_child
        self.shutdown_timeout = (
            app.config.shutdown_timeout if shutdown_timeout is None else shutdown_timeout
        )
        self.beat_at = -math.inf  # monotonic seconds; the last beat that the broker answered
        self.on_failure: Callable[[], object] = lambda: None  # before it stops by a failure
        self.on_retire: Callable[[], object] = lambda: None  # before it stops by an order
        self.is_worn = False  # it has ended to be renewed
        self._hooks = WorkerHooks()
        self._stop_request = StopRequest(self.shutdown_timeout)
        self._stopped = threading.Lock()
        self._attendant: threading.Thread | None = None  # ends what `start` began
        self._has_ended = False
        self._session: Session | None = None
        self._agent = Agent(app, self.name)
        self._signs: Signs | None = None
        self._processes = ProcessPool(self.name)
        self._processes.close()
        self._processed_before = 0
        self._reconnect = Reconnect(app, self.name)
        self._declared = declared
        self._scheduler: SchedulerThread | None = None

    # The setters, usable as decorators; Go's names

    def set_error_handler(
        self, handler: Callable[[Exception], object]
    ) -> Callable[[Exception], object]:
        """Set what is called with the exception of each task that fails for good.

        It replaces the log line, and runs in the task's thread.
        """
        self._hooks.error = handler
        return handler

    def set_pre_task_handler(
        self, handler: Callable[[Signature[Any]], object]
    ) -> Callable[[Signature[Any]], object]:
        """Set what is called before each run; what it raises fails the run."""
        self._hooks.pre_task = handler
        return handler

    def set_post_task_handler(
        self, handler: Callable[[Signature[Any]], object]
    ) -> Callable[[Signature[Any]], object]:
        """Set what is called after each run, however it ended."""
        self._hooks.post_task = handler
        return handler

    def set_pre_consume_handler(
        self, handler: Callable[[Worker], bool]
    ) -> Callable[[Worker], bool]:
        """Set what is called before each claim: while it returns False, nothing is claimed."""
        self._hooks.pre_consume = lambda: handler(self)
        return handler

    def set_connection_error_handler(self, handler: Handler) -> Handler:
        """Set what is called when the broker is lost, and after each attempt that failed.

        It may return the seconds to the next attempt.
        """
        self._reconnect.handler = handler
        return handler

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
            with self._starting():
                session = open_patiently(self._open, self._reconnect, request, name=self.name)
            if session is None:
                self._give_up()
            else:
                self._begin(session)
                try:
                    self._wait()
                finally:
                    self.stop()
            return ABRUPT if request.is_abrupt else GRACEFUL

    def launch_async(
        self, errors: Callable[[BaseException], object] | None = None
    ) -> threading.Thread:
        """Call `launch` in a new thread (Go's LaunchAsync), and `errors` with what it raises."""

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
        if self._has_ended:
            self._has_ended = False
            self._stop_request.clear()
        with self._starting():
            session = self._open()
        self._begin(session)
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

    start_async = twin(start)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """Enter what is around the tasks; leave it again if the worker does not start."""
        if self._session is not None:
            raise MachineryError(f"worker {self.name} runs already (make another one)")
        self._surroundings = Surroundings(self.app, self._hooks, name=self.name)
        try:
            self._surroundings.enter(self._stop_request)
            yield
        except BaseException:
            self._give_up()
            raise

    def _give_up(self) -> None:
        self._processes.close()
        self._agent.stop(LOOP_WAIT)
        self._surroundings.leave(LOOP_WAIT)

    def _open(self) -> Session:
        app = self.app
        if self._processes.is_closed:
            self._processes = ProcessPool(
                self.name,
                setup=self.child_app,
                by_default=self.pool == "process",
                max_tasks=self._max_per_child[0],
                max_memory=self._max_per_child[1],
            )
        # Before there is a session, which nobody beats for yet.
        self._processes.start(map(app.registry.get, app.registry.names()))
        self._agent.listen()  # before others know of the session
        session = app.store.open_session(self.queues, worker=self.name)
        try:
            # A dead worker's messages go back to their queues, its ready groups are settled.
            app.store.tend()
            settle_ready_groups(app)
        except BaseException:
            with contextlib.suppress(MachineryError):
                session.close()
            raise
        self._signs = signs_for(app.store.broker, app.config)
        return session

    def _begin(self, session: Session) -> None:
        app = self.app
        self._reconnect.succeeded()
        self._groups = GoGroupPoller(app.store.backend)
        self._processed_before = self.processed
        self._settler = Settler(
            app, session, self._groups, reconnect=self._reconnect, name=self.name
        )
        self._executors = Executors(
            self.concurrency,
            session,
            name=self.name,
            on_done=self._settler.put,
            on_mark=self._settler.mark,
            processes=self._processes,
            loop=self._surroundings.loop,
        )
        self._receiver = Receiver(
            app,
            self._hooks,
            session,
            self._executors,
            self._settler,
            order=self.order,
            reconnect=self._reconnect,
            name=self.name,
            burst=self.burst,
            autoscaler=Autoscaler(*self.autoscale) if self.autoscale else None,
        )
        self._maintenance = Maintenance(
            app,
            session,
            self._receiver,
            self._executors,
            self._settler,
            self._groups,
            name=self.name,
            on_beat=self._on_beat,
        )
        self._session = session
        self._serve(self.order)
        app.events.emit(WorkerOnline(worker=self.name))
        self._settler.start(self._receiver.settled, self._receiver.reported)
        self._maintenance.timer.start()
        self._receiver.loop.start()
        steering = Steering(
            app,
            self._receiver,
            self._executors,
            on_queues=self._serve,
            on_shutdown=self._retire,
            pool=self.pool,
            processed=lambda: self.processed,
        )
        self._agent.start(steering.handlers())
        if self._declared is not None:
            self._scheduler = SchedulerThread(app, self._declared, name=self.name)
            self._scheduler.start()

    def _serve(self, order: QueueOrder) -> None:
        self.order, self.queues = order, order.names
        if self._signs is not None and self._session is not None:
            self._signs.keep(self._session.consumer, self.queues, self.app.config)

    def _retire(self) -> None:
        logger.info("worker %s was ordered to end when the running tasks are done", self.name)
        self.on_retire()
        self.quit()

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
        self._end()
        if self._attendant is not None and self._attendant is not threading.current_thread():
            self._attendant.join()
        return not self._stop_request.is_abrupt

    def _end(self) -> None:
        with self._stopped:
            session, self._session = self._session, None
            if session is None:
                return
            self._has_ended = True
            self._stop_request.quit()  # for the attendant
            if self._scheduler is not None:
                self._scheduler.stop()
            self._receiver.stop()
            self._receiver.hand_back()
            self._wait_while(
                lambda: bool(self._executors.busy()) and not self._stop_request.is_abrupt,
                self.shutdown_timeout,
            )
            unfinished = self._receiver.hand_back(started=True)
            for execution in unfinished:
                self._executors.cancel(execution)
            # Ended tasks must be with the settler before it is closed.
            self._wait_while(lambda: self._executors.are_ending(unfinished), SETTLER_WAIT)
            back = [one.signature.uuid for one in unfinished if not one.is_final]
            if back:
                logger.warning(
                    "%d unfinished tasks go back to their queues: %s",
                    len(back),
                    ", ".join(back[:5]),
                )
            if not self._settler.close(timeout=max(5.0, self.shutdown_timeout)):
                logger.error("some results could not be stored; their tasks will run again")
            self._maintenance.timer.stop()
            self._maintenance.timer.join(LOOP_WAIT)
            if self._scheduler is not None:
                self._scheduler.join(LOOP_WAIT)
            self._executors.close()
            self._agent.stop(LOOP_WAIT)
            self.app.locks.flush()
            try:
                session.close()
            except MachineryError as error:
                logger.warning("this worker could not sign off, and will be found gone: %s", error)
            if self._signs is not None:
                self._signs.drop(session.consumer)
            self._surroundings.leave(LOOP_WAIT)
            self.app.events.emit(WorkerOffline(worker=self.name, processed=self.processed))
            self.app.publisher.close()

    stop_async = twin(stop)

    def blame(self) -> None:
        """Give a strike to all begun tasks that are not settled, should this process die now."""
        session = self._session
        if session is not None:
            for execution in self._receiver.held():
                if execution.call_started:
                    session.consumer.run_begins(execution.delivery)

    @property
    def ready(self) -> bool:
        """Whether tasks can be received and settled."""
        return self._session is not None and self._receiver.connected and self._settler.healthy

    @property
    def processed(self) -> int:
        """Number of tasks that have ended here."""
        settler = getattr(self, "_settler", None)
        return self._processed_before + (settler.processed if settler is not None else 0)

    @property
    def active(self) -> int:
        """Number of tasks that run now."""
        return len(self._executors.running()) if self._session is not None else 0

    # Inside

    def _wait(self) -> None:
        while not self._stop_request.is_made:
            self._stop_request.wait(0.1 if self.burst else 0.5)
            if self._reconnect.given_up is not None:
                raise self._reconnect.given_up
            failure = self._receiver.loop.failure or self._settler.loop.failure
            if failure is not None:
                self.on_failure()
                raise MachineryError(f"worker {self.name} cannot go on: {failure!r}") from failure
            if self._is_worn():
                self.is_worn = True
                logger.info("this worker ends after %d tasks, to be renewed", self.processed)
                return
            if self.burst and self._receiver.idle_since is not None and not self._receiver.held():
                return

    def _is_worn(self) -> bool:
        max_tasks, max_memory = self._max_per_child
        # In threads, since its last start: the pool counts from there, too.
        runs = self.processed - self._processed_before - self._processes.calls
        return runs > 0 and (0 < max_tasks <= runs or 0 < max_memory < proc.memory())

    def _wait_while(self, is_so: Callable[[], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while is_so() and time.monotonic() < deadline:
            self._stop_request.wait(0.02)

    def _on_beat(self) -> None:
        if self._signs is not None:
            self._signs.give()
        self.beat_at = time.monotonic()
        self.app.publisher.emit_heartbeat(
            worker=self.name,
            active=self.active,
            processed=self.processed,
            interval=self._maintenance.beat_every,
        )

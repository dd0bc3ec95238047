"""Engine of a worker: its settings, and its parts, started in order and stopped in reverse.

So claims stop first, and nothing new comes; running tasks may finish, for at most
`shutdown_timeout`; what is not finished goes back to its queue; the settler ends when all that is
over has been committed; then the session is closed, and the lifespans are left.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable

from machinery_py.app import Application
from machinery_py.clock import Seconds, boottime, seconds_of
from machinery_py.config.config import OPTIONS
from machinery_py.config.options import raise_all
from machinery_py.connections import proc
from machinery_py.errors import MachineryError
from machinery_py.events import WorkerOffline, WorkerOnline
from machinery_py.queues import QueueOrder, Queues
from machinery_py.registry.hooks import AddedPart
from machinery_py.schedules.scheduler import Declared
from machinery_py.schedules.thread import SchedulerThread
from machinery_py.stores.base import Session
from machinery_py.texts import get_logger
from machinery_py.unique import report_unkept_keys
from machinery_py.worker.admission.limit_watch import LimitWatch
from machinery_py.worker.autoscale import Autoscaler, check_autoscale
from machinery_py.worker.connected import Connected
from machinery_py.worker.control.agent import Agent
from machinery_py.worker.control.signs import signs_for
from machinery_py.worker.control.steering import Steering
from machinery_py.worker.lease import WorkerLease
from machinery_py.worker.lifespans import Lifespans
from machinery_py.worker.loops.chords import settle_ready_groups
from machinery_py.worker.loops.go_groups import GoGroupPoller
from machinery_py.worker.loops.maintenance import Maintenance
from machinery_py.worker.loops.receiver import Receiver
from machinery_py.worker.loops.settler import Settler
from machinery_py.worker.loops.timer import Timer
from machinery_py.worker.parts import CONSUMER, Part, RunningParts, added
from machinery_py.worker.processes.frames import Setup
from machinery_py.worker.processes.pool import ProcessPool
from machinery_py.worker.reconnect import Reconnect, open_patiently
from machinery_py.worker.running.executors import Executors
from machinery_py.worker.running.hooks import HandlerSetters
from machinery_py.worker.stopping import StopRequest

logger = get_logger(__name__)

LOOP_WAIT = 10.0  # seconds for a thread to end


class Engine(HandlerSetters):
    """Engine of one Worker, which starts and stops its parts."""

    def __init__(
        self,
        app: Application,
        name: str = "",
        *,
        concurrency: int = 0,
        queues: Queues = (),
        burst: bool = False,
        shutdown_timeout: Seconds | None = None,
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
        self.name: str = name or f"{proc.hostname()}-{os.getpid()}"
        super().__init__(Reconnect(app, self.name))
        if autoscale is not None:
            concurrency = autoscale[0]
        self._concurrency = concurrency or app.config.concurrency or 2 * (os.cpu_count() or 1)
        self.order: QueueOrder = QueueOrder.of(queues or app.config.worker_queues)
        self.queues: tuple[str, ...] = self.order.names
        self.burst = burst
        self.pool: str = pool or app.config.pool
        self.child_app = child_app
        self._max_per_child = max_tasks_per_child, max_memory_per_child
        self.shutdown_timeout: float = (
            app.config.shutdown_timeout
            if shutdown_timeout is None
            else seconds_of("shutdown_timeout", shutdown_timeout)
        )
        self.beat_at: float = (
            -math.inf
        )  # seconds of `boottime`; the last beat that the broker answered
        self.on_failure: Callable[[], object] = lambda: None  # before it stops by a failure
        self.on_retire: Callable[[], object] = lambda: None  # before it stops by an order
        self.is_worn = False  # it has ended to be renewed
        self._stop_request = StopRequest(self.shutdown_timeout)
        self._stopped = threading.RLock()  # held while parts start, and while they stop
        self._attendant: threading.Thread | None = None  # ends what `start` began
        self._runs = 0  # that were started
        self._is_new = True  # so a request to stop is for its first run, not for one that is over
        self._connected: Connected | None = None
        self._parts: RunningParts | None = None  # while it runs
        self._added: list[AddedPart] = []
        self._is_patient = self._is_online = False
        self._timer = Timer(f"{self.name}-timer")
        self._agent = Agent(app, self.name)
        self._limits = LimitWatch(app, self.name)
        self._processes = ProcessPool(self.name)
        self._processes.close()
        self._count: tuple[int, Settler | None] = (0, None)  # of ended tasks: before, and by whom
        self._declared = declared
        self._scheduler: SchedulerThread | None = None

    # The parts

    def parts(self) -> list[Part]:
        """Return its own parts and those added, as they are started and stopped."""
        own = [
            Part("events", stop=self._go_offline),
            Part("lifespan", ("events",), self._enter, lambda: self._lifespans.leave(LOOP_WAIT)),
            Part("broker", ("lifespan",), self._connect, self._disconnect),  # and its beats
            Part("control", ("broker",), lambda: self._agent.start(self._live.steering.handlers())),
            Part("timer", ("broker",), self._timer.start, lambda: self._timer.close(LOOP_WAIT)),
            Part("pool", ("broker",), stop=self._close_pool),
            Part("settler", ("pool",), self._settle, self._close_settler),
            Part("limits", ("broker",), self._limits.start, lambda: self._limits.stop(LOOP_WAIT)),
            Part(CONSUMER, ("control", "limits", "settler"), self._consume, self._drain),
            Part("scheduler", (CONSUMER,), self._schedule, self._end_schedule),
        ]
        given = [*self.app.hooks.parts, *self._added]
        return own + [added(one, self, self._hooks) for one in given]

    def _enter(self) -> None:
        self._lifespans = Lifespans(self.app, self._hooks, name=self.name)
        self._lifespans.enter(self._stop_request)

    def _connect(self) -> None:
        if self._is_patient:
            session = open_patiently(
                self._open, self._reconnect, self._stop_request, name=self.name
            )
        else:
            session = self._open()
        if session is not None:
            try:
                self._connected = self._around(session)
            except BaseException:
                session.close()
                raise
            self._serve(self.order)
            self._connected.maintenance.timer.start()

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
        return session

    def _around(self, session: Session) -> Connected:
        """Make the parts around the session; none of them runs yet."""
        app = self.app
        self._reconnect.succeeded()
        groups = GoGroupPoller(app.store.backend)
        settler = Settler(app, session, groups, reconnect=self._reconnect, name=self.name)
        self._count = self.processed, settler
        lease = WorkerLease(session, app.config.lease)
        executors = Executors(
            self._concurrency,
            session,
            name=self.name,
            lease=lease,
            on_done=settler.put,
            on_mark=settler.mark,
            processes=self._processes,
            loop=self._lifespans.loop,
        )
        receiver = Receiver(
            app,
            self._hooks,
            session,
            executors,
            settler,
            order=self.order,
            reconnect=self._reconnect,
            lease=lease,
            name=self.name,
            burst=self.burst,
            autoscaler=Autoscaler(*self.autoscale) if self.autoscale else None,
        )
        executors.on_room = receiver.has_room
        return Connected(
            session=session,
            signs=signs_for(app.store.broker, app.config),
            settler=settler,
            executors=executors,
            receiver=receiver,
            maintenance=Maintenance(
                app,
                session,
                receiver,
                executors,
                settler,
                groups,
                lease=lease,
                name=self.name,
                on_beat=self._on_beat,
            ),
            steering=Steering(
                app,
                self.name,
                receiver,
                executors,
                settler,
                resize=self.resize,
                on_queues=self._serve,
                on_shutdown=self._retire,
                pool=self.pool,
            ),
        )

    @property
    def _live(self) -> Connected:
        """The parts around the session. For those that are started after it, and stopped before."""
        assert self._connected is not None
        return self._connected

    def _settle(self) -> None:
        self._live.settler.start(self._live.receiver.settled, self._live.receiver.reported)

    def _consume(self) -> None:
        # Before its first claim: what it claims may end the process.
        report_unkept_keys(self.app)
        self.app.events.emit(WorkerOnline(worker=self.name))
        self._is_online = True
        self._emit_heartbeat(self._live)
        self._live.receiver.start()

    def _schedule(self) -> None:
        if self._declared is not None:
            self._scheduler = SchedulerThread(self.app, self._declared, name=self.name)
            self._scheduler.start()

    def _serve(self, order: QueueOrder) -> None:
        self.order = order
        self.queues = order.names
        if self._connected is not None:
            self._connected.tell_signs(order.names, self.app.config)

    def _retire(self) -> None:
        logger.info("worker %s was ordered to end when the running tasks are done", self.name)
        self.on_retire()
        self._stop_request.quit()

    def _end_schedule(self) -> None:
        if self._scheduler is not None:
            self._scheduler.stop()  # claims must not go on until it has ended

    def _drain(self) -> None:
        self._live.drain(self._stop_request, self.shutdown_timeout)

    def _close_settler(self) -> None:
        if not self._live.settler.close(timeout=max(5.0, self.shutdown_timeout)):
            logger.error("some results could not be stored; their tasks will run again")
        self._lifespans.call_ends(LOOP_WAIT)  # before what they may need is stopped

    def _close_pool(self) -> None:
        self._live.executors.close()

    def _disconnect(self) -> None:
        self._agent.stop(LOOP_WAIT)
        if self._scheduler is not None:
            self._scheduler.join(LOOP_WAIT)
        connected, self._connected = self._connected, None
        if connected is not None:
            connected.maintenance.timer.close(LOOP_WAIT)
            self.app.locks.flush()
            connected.close()
        self._processes.close()

    def _go_offline(self) -> None:
        if self._is_online:
            self._is_online = False
            self.app.events.emit(WorkerOffline(worker=self.name, processed=self.processed))
        self.app.publisher.close()

    def resize(self, concurrency: int) -> None:
        """Run so many tasks at a time from now on; 0: two for each processor. What runs goes on.

        Raises:
            MachineryError: with `autoscale`, or if no claim came to an end in time.
        """
        if self.autoscale is not None:
            raise MachineryError(f"worker {self.name} scales itself (start it without autoscale)")
        concurrency = concurrency or 2 * (os.cpu_count() or 1)
        if self._connected is not None:
            self._connected.receiver.resize(concurrency)
        self._concurrency = concurrency

    @property
    def concurrency(self) -> int:
        """Number of tasks that may run at a time now; with `autoscale` it changes by itself."""
        connected = self._connected
        return connected.executors.concurrency if connected is not None else self._concurrency

    def blame(self) -> None:
        """Give a strike to all begun tasks that are not settled, should this process die now."""
        if (connected := self._connected) is not None:
            connected.blame()

    @property
    def ready(self) -> bool:
        """Whether tasks can be received and settled."""
        connected = self._connected
        return connected is not None and connected.is_ready

    @property
    def processed(self) -> int:
        """Number of tasks that have ended here."""
        before, settler = self._count
        return before + (settler.processed if settler is not None else 0)

    @property
    def active(self) -> int:
        """Number of tasks that run now."""
        connected = self._connected
        return len(connected.executors.running()) if connected is not None else 0

    def _on_beat(self) -> None:
        connected = self._connected
        if connected is not None and connected.signs is not None:
            connected.signs.give()
        self.beat_at = boottime()
        if connected is not None and self._is_online:  # the first event of a worker says that
            self._emit_heartbeat(connected)

    def _emit_heartbeat(self, connected: Connected) -> None:
        self.app.publisher.emit_heartbeat(
            worker=self.name,
            active=self.active,
            processed=self.processed,
            slots=self.concurrency,
            interval=connected.maintenance.beat_every,
        )

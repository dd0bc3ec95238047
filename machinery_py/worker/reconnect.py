"""Reconnecting to a store that is away: attempts, pauses, log lines and events, and giving up.

An attempt is a request that failed while the store was known to be away. At the start each failure
is one; later the first failure only reports that the connection is lost. With several URLs an
attempt is a round over them, and counts as many as there are URLs.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from machinery_py.app import Application
from machinery_py.clock import Seconds, seconds_of
from machinery_py.errors import (
    BackendUnavailable,
    BrokerUnavailable,
    PublishRefused,
    PublishUnknown,
    StoreUnusable,
)
from machinery_py.events import ConnectionLost, ConnectionRestored
from machinery_py.stores.base import Session
from machinery_py.tasks.backoff import reconnect_delay
from machinery_py.texts import get_logger
from machinery_py.worker.stopping import StopRequest

logger = get_logger(__name__)

# Seconds between two lines of the log, doubled each time.
FIRST_SILENCE, LONGEST_SILENCE = 10.0, 300.0

# Errors after which a start tries again, unless they are StoreUnusable.
PASSES = (PublishRefused, PublishUnknown, BackendUnavailable)

#: Called with each failure; may return how long to wait.
Handler = Callable[[ConnectionLost], Seconds | None]


class Reconnect:
    """State of one worker's connection to its store. May be used from any thread.

    Attributes:
        is_there: the store has answered since the last failure.
        given_up: raised by the worker; set when `broker_connection_max_retries` was reached.
    """

    def __init__(self, app: Application, worker: str) -> None:
        self._app = app
        self._worker = worker
        self.handler: Handler | None = None
        self._lock = threading.Lock()
        self.is_there: bool = False
        self._since: float | None = None  # when the store went away
        self._attempts = 0
        self._rounds = 0
        self._log_at = self._silence = 0.0
        self.given_up: BrokerUnavailable | None = None

    def failed(self, error: Exception, *, is_told: bool = False) -> float:
        """Count a failure, and return the seconds to wait before the next attempt.

        Args:
            is_told: the caller has logged the first failure.
        """
        with self._lock:
            now = time.monotonic()
            if self._since is None:
                self._since, self._silence = now, FIRST_SILENCE
                self._log_at = now + self._silence if is_told else now
            if self.is_there:
                self.is_there = False
            else:
                self._rounds += 1
                self._attempts += len(self._app.config.broker_urls)
            config = self._app.config
            limit = config.broker_connection_max_retries if config.broker_connection_retry else 1
            if limit and self._attempts >= limit and self.given_up is None:
                option = "max_retries" if config.broker_connection_retry else "retry is off"
                self.given_up = BrokerUnavailable(
                    f"worker {self._worker} gives up after {self._attempts} "
                    f"attempt{'s' if self._attempts != 1 else ''} "
                    f"(broker_connection_{option}): {error}"
                )
                self.given_up.__cause__ = error
            lost = ConnectionLost(
                worker=self._worker,
                error=str(error),
                attempt=self._attempts,
                limit=limit,
                delay=reconnect_delay(config.broker_connection_backoff, max(1, self._rounds)),
            )
        delay = self._ask(lost)
        self._log(lost, delay, now)
        if ConnectionLost in self._app.events.wanted:
            self._app.events.emit(lost)
        return delay

    def reset(self) -> None:
        """Count anew, for a worker that starts."""
        with self._lock:
            self._since, self._attempts, self._rounds, self.is_there = None, 0, 0, False
            self.given_up = None

    def succeeded(self) -> None:
        """Note that the store has answered."""
        with self._lock:
            since, attempts = self._since, self._attempts
            self._since, self._attempts, self._rounds, self.is_there = None, 0, 0, True
            self.given_up = None
        if since is not None:
            seconds = time.monotonic() - since
            logger.warning("tasks can be received again, after %.1f s", seconds)
            if ConnectionRestored in self._app.events.wanted:
                self._app.events.emit(
                    ConnectionRestored(worker=self._worker, attempts=attempts, seconds=seconds)
                )

    def _ask(self, lost: ConnectionLost) -> float:
        if self.handler is None:
            return lost.delay
        try:
            chosen = self.handler(lost)
            if chosen is None:
                return lost.delay
            return max(0.0, seconds_of("what it returned", chosen, least=-math.inf))
        except Exception:  # user code
            logger.exception("the connection error handler failed")
            return lost.delay

    def _log(self, lost: ConnectionLost, delay: float, now: float) -> None:
        due = now >= self._log_at
        if due:
            self._log_at = now + self._silence
            self._silence = min(LONGEST_SILENCE, self._silence * 2)
        tries = f"attempt {lost.attempt}" + (f" of {lost.limit}" if lost.limit else "")
        then = "giving up" if self.given_up is not None else f"trying again in {delay:.1f} s"
        logger.log(
            logging.ERROR if due else logging.DEBUG,
            "no tasks can be received: %s; %s (%s)",
            lost.error,
            then,
            tries,
        )


def open_patiently(
    open_session: Callable[[], Session], reconnect: Reconnect, request: StopRequest, *, name: str
) -> Session | None:
    """Open a session, as soon as the store is there; None if the worker was asked to end before.

    Raises:
        BrokerUnavailable: the store was away for too many attempts.
        MachineryError: waiting does not help: a wrong password, a wrong setting.
    """
    reconnect.reset()
    while not request.is_made:
        opening = _open_in_thread(open_session, request.wake, name=name)
        while not opening.done() and not request.is_made:
            request.wait(0.5)
        try:
            return None if opening.cancel() else opening.result()
        except StoreUnusable:
            raise
        except PASSES as error:
            if error.permanent:
                raise
            deadline = time.monotonic() + reconnect.failed(error)
            if reconnect.given_up is not None:
                raise reconnect.given_up from error
            while (left := deadline - time.monotonic()) > 0 and not request.is_made:
                request.wait(left)
    return None


def _open_in_thread(
    open_session: Callable[[], Session], then: Callable[[], object], *, name: str
) -> Future[Session]:
    """Open a session in a thread of its own, so that a worker can end meanwhile.

    If the future is cancelled, the session is closed as soon as it is open.
    """
    future: Future[Session] = Future()

    def work() -> None:
        session, failure = None, None
        try:
            session = open_session()
        except BaseException as error:  # raised by `result`, in the thread that wants it
            failure = error
        if not future.set_running_or_notify_cancel():
            if session is not None:
                session.close()
        elif session is not None:
            future.set_result(session)
        else:
            future.set_exception(failure)
        then()

    threading.Thread(target=work, name=f"{name}-connect", daemon=True).start()
    return future

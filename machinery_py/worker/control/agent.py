"""Agent: one thread of a worker that receives orders (`server.control`), and answers them.

It listens before the worker is known to others: whom a caller sees, it can reach. An order that
cannot be read, or that no worker knows, is ignored, with a warning a minute; one with wrong
arguments, or that fails, is answered with the error. None is begun more than READ_TIMEOUT after its
sender has given up, also by a process that was stopped meanwhile. An order of SLOW has a thread of
its own, so that others are answered meanwhile; a second one is refused until it is done. An idle
agent asks the store for orders once a second at most.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from machinery_py.app import Application
from machinery_py.brokers.topics import Subscription
from machinery_py.connections import proc
from machinery_py.control.orders import (
    KINDS,
    NOTHING,
    ORDERS,
    Answer,
    ControlOrder,
    arguments,
    decode_order,
    encode_answer,
    matches,
)
from machinery_py.errors import MachineryError
from machinery_py.texts import cut, get_logger, quoted
from machinery_py.threads import LoopThread
from machinery_py.worker.running.hooks import text_of

logger = get_logger(__name__)

READ_TIMEOUT = 2.0  # seconds of one wait for orders
PAUSE = 2.0  # seconds until a store that is away is asked again
WARN_EVERY = 60.0  # seconds
ANSWER_TTL = 60.0  # seconds; its caller waits, or is gone
MAX_ERROR = 2_000  # bytes of an error in an answer
SLOW = ("set_concurrency", "add_queue", "cancel_queue", "restart_pool")  # wait for other threads

Handlers = Mapping[str, Callable[[Any], object]]


class Agent:
    """Agent of one worker, which may start it again."""

    def __init__(self, app: Application, name: str) -> None:
        self._app = app
        self._name = name
        self._host = proc.hostname()
        self._handlers: Handlers = {}
        self._subscription: Subscription | None = None
        self._warn_at = 0.0
        self._loop: LoopThread | None = None
        self._changing = threading.Lock()  # held by an order of SLOW

    def listen(self) -> None:
        """Keep the orders from now on; `start` carries them out. A worker can do without.

        Does nothing if the setting `control` is off, or the broker has no topics.
        """
        self._drop()
        if self._app.config.control and self._app.store.broker.features.topics:
            loop = LoopThread(f"{self._name}-agent", lambda: self._work(loop), wake=self._wake)
            self._loop = loop
            try:
                self._subscription = self._app.store.broker.subscribe(ORDERS)
            except MachineryError as error:
                self._tell(error)

    def start(self, handlers: Handlers) -> None:
        """Carry out orders by these functions, each called with its arguments.

        What a function returns is the answer.
        """
        self._handlers = handlers
        if self._loop is not None:
            self._loop.start()

    def stop(self, timeout: float) -> None:
        """End it, after orders that are being carried out. May be called before `start`."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop()
            loop.join(timeout)
        if self._changing.acquire(timeout=timeout):
            self._changing.release()
        self._drop()

    def _drop(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            subscription.close()

    def _wake(self) -> None:
        if self._subscription is not None:
            self._subscription.wake()

    # In the thread

    def _work(self, loop: LoopThread) -> None:
        while not loop.is_stopping():
            try:
                subscription = self._subscription
                if subscription is None:
                    self._subscription = self._app.store.broker.subscribe(ORDERS)
                    continue  # `stop` may have come meanwhile
                begun = time.monotonic()
                for record in subscription.read(READ_TIMEOUT):
                    self._receive(record, begun)
            except MachineryError as error:
                self._tell(error)
                loop.pause(PAUSE)
            except Exception:  # the loop must live on: without it nobody can steer this worker
                logger.exception("an order could not be dealt with")
                loop.pause(PAUSE)

    def _receive(self, record: bytes, begun: float) -> None:
        try:
            order = decode_order(record)
        except ValueError as error:
            text = "order ignored: a record of %s bytes is no order: %s"
            self._warn(text, f"{len(record):,}", cut(str(error), 200))
            return
        if not matches(self._name, order.to):
            return
        if time.monotonic() - begun > READ_TIMEOUT + order.timeout:
            # A stopped process reads it from its connection when it goes on, days later perhaps.
            self._warn("order ignored: %s: its sender had given up", quoted(order.kind))
            return
        if order.kind not in KINDS:
            self._warn("order ignored: %s (known: %s)", quoted(order.kind), ", ".join(KINDS))
            return
        self._app.lamport.adjust(order.clock)
        if order.kind not in SLOW:
            self._answer(order, *self._carried_out(order))
        elif self._changing.locked():
            self._answer(order, NOTHING, "another change is being made; repeat this one")
        else:
            threading.Thread(
                target=self._change, args=(order,), name=f"{self._name}-change", daemon=True
            ).start()

    def _change(self, order: ControlOrder) -> None:
        with self._changing:
            done = self._carried_out(order)
        self._answer(order, *done)

    def _answer(self, order: ControlOrder, value: msgspec.Raw, problem: str) -> None:
        answer = Answer(
            worker=self._name,
            host=self._host,
            pid=os.getpid(),
            clock=self._app.lamport.forward(),
            value=value,
            error=problem,
        )
        try:
            self._app.store.broker.broadcast(order.replies, [encode_answer(answer)], ttl=ANSWER_TTL)
        except MachineryError as error:
            logger.debug("order %s cannot be answered: %s", order.kind, error)

    def _carried_out(self, order: ControlOrder) -> tuple[msgspec.Raw, str]:
        """Carry the order out; return the answer, and why it failed."""
        try:
            value = self._handlers[order.kind](arguments(order.kind, order.args))
            return msgspec.Raw(msgspec.json.encode(value)), ""
        except Exception as error:  # a wrong order must not end the agent
            if not isinstance(error, MachineryError):
                logger.exception("order %s failed", order.kind)
            return NOTHING, cut(text_of(error), MAX_ERROR)

    def _tell(self, error: MachineryError) -> None:
        # Of a store that is away the worker tells: it can receive no tasks either.
        tell = self._warn if error.permanent else logger.debug
        tell("no orders can be received: %s", error)

    def _warn(self, text: str, *facts: object) -> None:
        if time.monotonic() >= self._warn_at:
            self._warn_at = time.monotonic() + WARN_EVERY
            logger.warning(text, *facts)

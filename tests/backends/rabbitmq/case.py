"""For results in RabbitMQ: a backend that records its writes, a clock that lets them expire."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator, Sequence

import pytest

from machinery_py.backends.rabbitmq.backend import AMQPBackend
from machinery_py.backends.rabbitmq.documents import name_of
from machinery_py.backends.rabbitmq.steps import RabbitMQSteps
from machinery_py.backends.transactional import Row
from machinery_py.connections.rabbitmq.client import AmqpDriver
from machinery_py.connections.rabbitmq.queue_records import QueueTransaction
from machinery_py.testing.clocks import ManualClock
from machinery_py.testing.waiting import HANG
from tests.support.fixtures import Vhosts


class LapsingClock(ManualClock):
    """Expires states by its own time, as the server does: see `test_amqp_results.py`."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self._noting = threading.Lock()
        self._kept_until: dict[str, dt.datetime] = {}

    def note(self, queue: str, expire_in: float) -> None:
        with self._noting:
            self._kept_until[queue] = self.now() + dt.timedelta(seconds=expire_in)

    def advance(self, seconds: float = 0.0, **more: float) -> None:
        super().advance(seconds, **more)
        with self._noting:
            over = [queue for queue, until in self._kept_until.items() if until <= self.now()]
            for queue in over:
                del self._kept_until[queue]
        if over:
            with AmqpDriver(self._url).visit("expiring") as channel:
                for queue in over:
                    channel.rpc("queue_delete", queue=queue, timeout=HANG)


class NotingSteps(RabbitMQSteps):
    clock: LapsingClock

    def _save(self, rows: Sequence[tuple[str, Row]]) -> None:
        super()._save(rows)
        for uuid, row in rows:
            life = self._expire_in if row.state is None else row.state.life(self._expire_in)
            self.clock.note(name_of(uuid), min(life, self._expire_in))


class NotingBackend(AMQPBackend):
    def _steps(self, transaction: QueueTransaction) -> RabbitMQSteps:
        steps = super()._steps(transaction)
        if isinstance(clock := self.driver.clock, LapsingClock):
            steps.__class__ = NotingSteps
            assert isinstance(steps, NotingSteps)
            steps.clock = clock
        return steps


class Backends:
    """Each call opens connections of its own, as another process would."""

    def __init__(self, url: str, clock: ManualClock, expire_in: float = 3600.0) -> None:
        self.url = url
        self._clock = clock
        self._expire_in = expire_in
        self._open: list[AMQPBackend] = []

    def __call__(self) -> AMQPBackend:
        backend = NotingBackend(AmqpDriver(self.url, clock=self._clock), expire_in=self._expire_in)
        self._open.append(backend)
        return backend

    def close(self) -> None:
        for backend in self._open:
            backend.close()
            backend.driver.close()


@pytest.fixture
def results_url(vhosts: Vhosts) -> Iterator[str]:
    """A vhost for results alone: tests call tasks and queues by the same short names."""
    url = vhosts()
    yield url
    vhosts.give_back(url)


@pytest.fixture
def open_backends(results_url: str, clock: ManualClock) -> Iterator[Backends]:
    backends = Backends(results_url, clock)
    yield backends
    backends.close()

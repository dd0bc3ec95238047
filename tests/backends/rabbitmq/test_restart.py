"""What of the results in RabbitMQ is there after its server was killed."""

from __future__ import annotations

import random
import threading

import pytest

from machinery_py.backends.base import SETTLED, Change
from machinery_py.backends.rabbitmq.backend import AMQPBackend
from machinery_py.errors import BackendUnavailable
from machinery_py.tasks.states import State
from machinery_py.testing.conformance.groups import ready
from machinery_py.testing.waiting import HANG, wait_until
from tests.backends.rabbitmq.test_backend import Open, finish, open_backend
from tests.support.servers import RabbitMQServer, require

__all__ = ["open_backend"]


def test_all_but_states_survives_a_kill_of_the_server(open_backend: Open) -> None:
    require(RabbitMQServer)
    with RabbitMQServer() as server:
        backend = open_backend(server.url, timeout=3.0)
        backend.init_group("g", ["t"])
        assert finish(backend) == SETTLED.word
        # A queue declared just before a kill is lost (F70 of the fault model); this takes a second.
        server.ctl("list_queues", "--silent")
        server.kill()
        server.start()

        def answers() -> bool:
            try:
                return backend.get_states(["t"]) == {}
            except BackendUnavailable:
                return False

        wait_until(answers, HANG)
        assert [list(bodies) for _, bodies in backend.unsent(9, older_than=0.0)] == [[b"callback"]]
        assert set(ready(backend)) == {"g"}
        assert [state.state for state in backend.group_task_states("g")] == [State.SUCCESS]
        assert backend.trigger_chord("g") is True
        assert backend.trigger_chord("g") is False


@pytest.mark.timeout(6 * HANG)
def test_server_killed_between_changes_keeps_each_once(open_backend: Open) -> None:
    require(RabbitMQServer)
    chance = random.Random(9)
    with RabbitMQServer() as server:
        backend = open_backend(server.url, timeout=3.0)
        counter = Counting(backend)
        server.ctl(
            "list_queues", "--silent"
        )  # what was declared a moment before a kill is lost with its queue
        for _ in range(3):
            killing = threading.Timer(chance.uniform(0.2, 1.0), server.kill)
            killing.start()
            with pytest.raises(BackendUnavailable):
                counter.count_on()
            killing.join()
            server.start()
            wait_until(counter.is_found, HANG)
        assert counter.done > 1


class Counting:
    """Outboxes with numbers, each of a change of its own."""

    def __init__(self, backend: AMQPBackend) -> None:
        self._backend = backend
        self.done = 0  # changes that were accepted

    def count_on(self) -> None:
        """Until the server is away."""
        while True:
            change = Change(key=f"t{self.done}", outbox=(b"%d" % self.done,))
            assert self._backend.apply([change]) == [SETTLED]
            self.done += 1

    def is_found(self) -> bool:
        """Whether the server answers; then all of them must be there, and at most one more."""
        try:
            found = self._backend.unsent(100_000, older_than=0.0)
        except BackendUnavailable:
            return False
        numbers = [int(body) for _, bodies in found for body in bodies]
        assert numbers in (list(range(self.done)), list(range(self.done + 1)))
        self.done = len(numbers)
        return True

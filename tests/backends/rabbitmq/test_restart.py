"""What of the results in RabbitMQ is there after its server was killed."""

from __future__ import annotations

import random
import threading

import pytest

from machinery_py.backends.base import SETTLED, Rider
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
        backend.revoke(["r"])
        assert backend.amend(Rider(name="every minute", expected=None, body=b"paused"))
        assert backend.amend(Rider(name="key", expected=None, body=b"held", life=100.0))
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
        assert backend.revoked(["r", "t"]) == {"r"}
        assert dict(backend.records().bodies or {}) == {"every minute": b"paused"}
        assert backend.claims(["key"]) == [b"held"]
        assert backend.trigger_chord("g") is True
        assert backend.trigger_chord("g") is False


@pytest.mark.timeout(6 * HANG)
def test_server_killed_between_changes_has_one_of_the_two(
    open_backend: Open,
) -> None:
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
        assert min(counter.done.values()) > 1


class Counting:
    """A record and a claim that count, each change from what was before it."""

    def __init__(self, backend: AMQPBackend) -> None:
        self._backend = backend
        self.done = {0.0: 0, 1000.0: 0}  # life → the last number that was accepted
        for life in self.done:
            assert backend.amend(Rider(name="n", expected=None, body=b"0", life=life))

    def count_on(self) -> None:
        """Until the server is away."""
        while True:
            for life, number in self.done.items():
                assert self._backend.amend(
                    Rider(name="n", expected=b"%d" % number, body=b"%d" % (number + 1), life=life)
                )
                self.done[life] = number + 1

    def is_found(self) -> bool:
        """Whether the server answers; then both must be there, with the last number or the next."""
        try:
            (record,), (claim,) = (
                (self._backend.records().bodies or {}).values(),
                self._backend.claims(["n"]),
            )
        except BackendUnavailable:
            return False
        found = {0.0: int(record), 1000.0: int(claim or -1)}
        assert all(found[life] - number in (0, 1) for life, number in self.done.items()), (
            found,
            self.done,
        )
        self.done = found
        return True

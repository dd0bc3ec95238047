"""What of the results in RabbitMQ is there after its server was killed."""

from __future__ import annotations

from machinery_py.backends.base import SETTLED
from machinery_py.errors import BackendUnavailable
from machinery_py.states import State
from machinery_py.testing.conformance.groups import ready
from machinery_py.testing.servers import RabbitMQServer, require
from machinery_py.testing.waiting import HANG, wait_until
from tests.stores.test_amqp_results import Open, finish, open_backend

__all__ = ["open_backend"]


def test_outboxes_chords_and_revocations_survive_a_kill_of_the_server(open_backend: Open) -> None:
    require(RabbitMQServer)
    with RabbitMQServer() as server:
        backend = open_backend(server.url, timeout=3.0)
        backend.init_group("g", ["t"])
        backend.revoke(["r"])
        assert finish(backend) == SETTLED.word
        # What was declared a moment before a kill is lost with its queue (F70 of the fault model): this takes a second.
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
        assert backend.trigger_chord("g") is True
        assert backend.trigger_chord("g") is False

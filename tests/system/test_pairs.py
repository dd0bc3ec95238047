"""Whole applications on a broker and another kind of backend; see docs/reference/matrix.md.

`make matrix` (MACHINERY_TEST_PAIRS=1) and `make chaos` (MACHINERY_TEST_FULL=1) run every pair
whole. Otherwise one pair of two servers runs whole, and each further broker and backend runs what
depends on the pair: how a task ends, retries, groups, paused queues, dead letters. One store alone:
test_workflows.py.
"""

from __future__ import annotations

import itertools

import pytest

from machinery_py import Config, Server
from machinery_py.config.sections import AMQPConfig
from machinery_py.testing.conformance.workflows import WorkflowConformance
from tests.matrix import stores
from tests.stores.pair_case import ALL_PAIRS, Place, place

#: Run whole.
WHOLE = frozenset({("amqp", "redis")})
#: Run with what depends on the pair: each kind of broker and of backend is in one of them. Memory
#: and SQLite are one kind, rows.
IN_PART = frozenset(
    {
        ("amqp", "sqlite"),
        ("amqp", "amqp"),
        ("mongodb", "redis"),
        ("redis", "mongodb"),
        ("sqlite", "memcache"),
    }
)
OF_THE_PAIR = {
    "test_task_returns_its_result",
    "test_retry_keeps_the_uuid_and_counts_attempts",
    "test_on_error_callback_is_sent_once_after_last_attempt",
    "test_chain_of_a_hundred_steps_runs",
    "test_large_chord_runs",
    "test_chord_with_a_failed_member_fails",
    "test_task_with_an_eta_runs_at_it",
    "test_revoked_task_is_never_started",
    "test_bytes_that_are_no_signature_become_a_dead_letter",
    "test_unregistered_task_waits_for_a_worker_that_knows_it",
    "test_pausing_a_queue_lets_running_tasks_go_on",
    "test_two_workers_run_no_task_twice",
    "test_task_unfinished_at_shutdown_is_run_by_another_worker",
    "test_burst_worker_ends_when_its_queues_are_empty",
    "test_begun_run_of_a_lost_worker_fails",
    "test_begun_task_fails_when_its_worker_ends",
    "test_lost_run_is_a_dead_letter_if_wanted",
    "test_rejected_message_becomes_a_dead_letter",
}


class Pair(WorkflowConformance):
    LONG = 60
    __test__ = False

    @pytest.fixture
    def server(
        self, broker_place: Place, backend_place: Place, request: pytest.FixtureRequest
    ) -> Server:
        arguments = {"x-max-priority": 10} if "priorit" in request.node.name else {}
        amqp = AMQPConfig(queue_declare_args=arguments)
        is_alone = broker_place.kind == backend_place.kind and not ALL_PAIRS
        backend = "" if is_alone else backend_place.url
        return Server(Config(broker=broker_place.url, result_backend=backend, amqp=amqp))


LEFT_OUT = {
    name: None for name in dir(Pair) if name.startswith("test_") and name not in OF_THE_PAIR
}
# A thousand tasks are a thousand queues: `make matrix` has the time.
WITH_RESULTS_IN_RABBITMQ = {**LEFT_OUT, "test_large_chord_runs": None}


def left_out(broker: str, backend: str) -> dict[str, None]:
    """Return the tests of the suite that are not run over the pair."""
    if ALL_PAIRS or (broker, backend) in WHOLE:
        return {}
    return WITH_RESULTS_IN_RABBITMQ if backend == "amqp" else LEFT_OUT


for _broker, _backend in itertools.product(*stores()):
    _pair = (_broker, _backend)
    if (_broker != _backend or _broker == "amqp") and (ALL_PAIRS or _pair in WHOLE | IN_PART):
        _name = f"Test{_broker.capitalize()}BrokerAnd{_backend.capitalize()}Backend"
        globals()[_name] = type(
            _name,
            (Pair,),
            {
                "__test__": True,
                "broker_place": place(_broker, "broker"),
                "backend_place": place(_backend, "backend"),
                **left_out(*_pair),
            },
        )


def test_parts_of_the_suite_name_tests_that_there_are() -> None:
    assert set(dir(WorkflowConformance)) >= OF_THE_PAIR

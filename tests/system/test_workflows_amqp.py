"""Whole applications over RabbitMQ, with real workers in threads and results elsewhere."""

from __future__ import annotations

import pytest

from machinery_py import Config, Server
from machinery_py.config import AMQPConfig
from machinery_py.testing.conformance.workflows import WorkflowConformance
from tests.servers import rabbitmq_server
from tests.stores.amqp_case import amqp_url, vhosts

__all__ = ["amqp_url", "rabbitmq_server", "vhosts"]


class TestRabbitMQAndMemoryBackend(WorkflowConformance):
    LONG = 300

    # Its callback is published twice, with one UUID, if the duplicate comes before the first outbox is cleared: at least once.
    test_a_message_that_comes_twice_counts_once = None  # type: ignore[assignment]

    @pytest.fixture
    def server(self, amqp_url: str, request: pytest.FixtureRequest) -> Server:
        arguments = {"x-max-priority": 10} if "priorit" in request.node.name else {}
        amqp = AMQPConfig(queue_declare_args=arguments)
        return Server(Config(broker=amqp_url, result_backend="memory://amqp-workflows", amqp=amqp))

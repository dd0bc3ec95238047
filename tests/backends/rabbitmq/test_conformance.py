"""The contracts with RabbitMQ for a result backend: alone, and beside brokers of two kinds."""

from __future__ import annotations

import os

import pytest

from machinery_py.testing.conformance.backends import BackendConformance, OpenBackend
from tests.backends.rabbitmq.case import Backends, LapsingClock, open_backends, results_url
from tests.stores.rabbitmq.case import amqp_config, open_brokers

__all__ = ["amqp_config", "open_backends", "open_brokers", "results_url"]


class TestAMQPBackend(BackendConformance):
    MANY = 10_000 if os.environ.get("MACHINERY_TEST_FULL") else 500  # each has a queue of its own

    @pytest.fixture
    def clock(self, results_url: str) -> LapsingClock:
        return LapsingClock(results_url)

    @pytest.fixture
    def open_backend(self, open_backends: Backends) -> OpenBackend:
        return open_backends

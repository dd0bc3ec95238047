"""The contract of limits over MongoDB."""

from __future__ import annotations

import pytest

from machinery_py.limits.mongodb import MongoLimits
from machinery_py.testing.conformance.limits import LimitsConformance, OpenLimits
from tests.stores.mongodb.case import Drivers, clock, open_driver

__all__ = ["clock", "open_driver"]


class TestMongoLimits(LimitsConformance):
    @pytest.fixture
    def open_limits(self, open_driver: Drivers) -> OpenLimits:
        return lambda: MongoLimits(open_driver())

"""Three days in no time, and a worker that is killed wherever it can be."""

from __future__ import annotations

import pytest
from onboarding import onboard
from services import mails, payments

from machinery_py.testing import CrashPoints, Harness


@pytest.fixture(autouse=True)
def new_services() -> None:
    mails.clear()
    payments.clear()


def test_customer_pays_after_three_days(machinery: Harness) -> None:
    result = onboard.send("ada")
    machinery.drain()
    assert mails == [("ada", "welcome")]

    machinery.advance(days=3)
    machinery.drain()

    assert result.get(timeout=5) == "receipt-1"
    assert mails[1:] == [("ada", "thank you, receipt-1")]
    assert list(payments.values()) == [990]


def test_declined_customer_pays_nothing(machinery: Harness) -> None:
    onboard.send("mallory")
    machinery.drain()

    machinery.advance(days=3)
    machinery.drain()

    assert mails == [("mallory", "welcome"), ("mallory", "sorry")]
    assert payments == {}


@pytest.mark.parametrize("customer", ["ada", "mallory"])
def test_onboarding_survives_every_crash(crash_points: CrashPoints, customer: str) -> None:
    report = crash_points.run(
        onboard, customer, effects={"payment": payments}, at_least_once={"mail": mails}
    )

    assert report.points > 20
    assert report.lost == [] and report.doubled == []
    print(report)

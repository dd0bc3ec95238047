"""Three days in no time, and a worker that is killed wherever it can be."""

from __future__ import annotations

import pytest
from onboarding import onboard, server
from services import mails, payments

from machinery_py.testing import CrashPoints, Harness


@pytest.fixture(autouse=True)
def new_services() -> None:
    mails.clear()
    payments.clear()


def test_customer_pays_when_somebody_has_approved(machinery: Harness) -> None:
    result = onboard.send("ada")
    machinery.drain()
    assert mails == [("ada", "welcome")]

    machinery.advance(days=3)
    machinery.drain()
    assert payments == {}
    server.signal(result.uuid, "approval", {"by": "grace", "yes": True})
    machinery.drain()

    assert result.get(timeout=5) == "receipt-1"
    assert mails[1:] == [("ada", "thank you, receipt-1")]
    assert list(payments.values()) == [990]


def test_customer_whom_nobody_approves_pays_nothing(machinery: Harness) -> None:
    onboard.send("mallory")
    machinery.drain()

    for days in (3, 7):
        machinery.advance(days=days)
        machinery.drain()

    assert mails == [("mallory", "welcome"), ("mallory", "sorry")]
    assert payments == {}


@pytest.mark.parametrize("yes", [True, False])
def test_onboarding_survives_every_crash(crash_points: CrashPoints, yes: bool) -> None:
    report = crash_points.run(
        onboard,
        "ada",
        signals={"approval": {"by": "grace", "yes": yes}},
        effects={"payment": payments},
        at_least_once={"mail": mails},
    )

    assert report.points > 20
    assert report.lost == [] and report.doubled == []
    print(report)

"""Onboarding of a customer: a mail, three days later an approval, the first payment, a receipt.

    welcome ──► sleep, 3 days ──► wait for approval ──► charge ──► receipt
                                     └─ no, or 7 days ──► sorry

Each box is a step: what it has returned is stored, and read in every later run. While the task
sleeps or waits it holds no slot, and workers may be restarted. Somebody approves by

    machinery signal onboarding UUID approval '{"by": "grace", "yes": true}'

DAY is the length of a day in seconds: `DAY=1 machinery worker onboarding`.
"""

from __future__ import annotations

import os
from datetime import timedelta

from services import deliver, pay

from machinery_py import Server, current_task
from machinery_py.errors import SignalTimeout

DAY = timedelta(seconds=float(os.environ.get("DAY", "86400")))
PRICE = 990  # cents

server = Server()


@server.task(retries=8, backoff="exponential")
def onboard(customer: str) -> str:
    """Return the receipt of the first payment; "" if there is none."""
    task = current_task()
    task.step("welcome", deliver, customer, "welcome")
    task.sleep(3 * DAY)
    if not is_approved():
        task.step("sorry", deliver, customer, "sorry")
        return ""
    receipt = task.step("charge", charge, customer)
    task.step("receipt", deliver, customer, f"thank you, {receipt}")
    return receipt


def is_approved() -> bool:
    """Wait a week for somebody who says whether the customer may go on."""
    try:
        answer = current_task().wait_for("approval", timeout=7 * DAY)
    except SignalTimeout:
        return False
    return bool(answer["yes"])


def charge(customer: str) -> str:
    # The key is the same in each try of the step: a second try is no second payment.
    return pay(customer, PRICE, key=current_task().step_key)

"""Stand-ins for a mail server and a payment service. They log what they do."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

#: Mails as (customer, text), each that was sent: a mail server takes the same mail twice.
mails: list[tuple[str, str]] = []

#: Payments by idempotency key: a payment service acts once for each key.
payments: dict[str, int] = {}


def deliver(customer: str, text: str) -> None:
    mails.append((customer, text))
    logger.info("mail to %s: %s", customer, text)


def pay(customer: str, cents: int, *, key: str) -> str:
    """Return the number of the receipt, which is the same for the same key."""
    if key not in payments:
        payments[key] = cents
        logger.info("%s pays %.2f (%s)", customer, cents / 100, key)
    return f"receipt-{list(payments).index(key) + 1}"

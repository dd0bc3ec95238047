"""Periodic mails: a digest each working day, monthly invoices, a check every five minutes.

    digest      8:00 in Berlin, Monday to Friday; without a worker then, the latest one comes later
    invoices    18:00 on the last day of the month
    watch       every five minutes; left out while the one before it still runs

A mail is a file in the folder that OUTBOX names, so that the example needs no mail server.
DIGEST_SPEC is another time for the digest: `DIGEST_SPEC='* * * * *'` is every minute.
"""

from __future__ import annotations

import os
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path

from machinery_py import Replace, Server, current_task, group

OUTBOX = Path(os.environ.get("OUTBOX", "outbox"))
READERS = ("ada@example.com", "grace@example.com")
ZONE = "Europe/Berlin"

server = Server()


@server.task(retries=5, backoff="exponential", retry_on=OSError)
def post(to: str, subject: str, text: str) -> None:
    """Put one mail into the outbox.

    A repeat after a crash writes the same file again: the name is the task's UUID.
    """
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = "shop@example.com", to, subject
    message["Date"] = format_datetime(server.now())
    message["Message-ID"] = f"<{current_task().uuid}@example.com>"
    message.set_content(text)
    OUTBOX.mkdir(parents=True, exist_ok=True)
    (OUTBOX / f"{current_task().uuid}.eml").write_bytes(message.as_bytes())


@server.periodic(os.environ.get("DIGEST_SPEC", "0 8 * * MON-FRI"), tz=ZONE, catch_up=True)
@server.task
def digest() -> None:
    """Give way to a mail to every reader. All are sent when this task ends, in one step."""
    # The time at which it was due, also if it runs later.
    due_at = current_task().headers["machinery_tick"]
    subject, text = f"News of {due_at[:10]}", f"Nothing has happened by {due_at}."
    raise Replace(group(post.signature(reader, subject, text) for reader in READERS))


@server.periodic("0 18 L * *", tz=ZONE, catch_up=True)
@server.task
def invoices() -> None:
    raise Replace(post.signature("accounting@example.com", "Invoices", "All of this month's."))


@server.periodic("@every 5m", overlap="skip")
def watch() -> int:
    """Return the number of mails in the outbox."""
    return len(list(OUTBOX.glob("*.eml"))) if OUTBOX.exists() else 0

"""Sending e-mail in the background: one mail a task, one SMTP transaction a mail.

    send_mail       one mail; queue "mail"
    send_bulk_mail  one of many; queue "bulk", behind all of "mail"; a refused address is a result,
                    no failure
    report          what a bulk came to, when the last of its mails is through

What the mail server says, and what is done:

    250 after the text      delivered; what happens to the connection later sends no mail again
    4xx                     the server asks for patience: again in PATIENCE seconds, without limit
    5xx                     refused for good: no retry
    anything else           no connection, or it broke: again after 1, 2, 4 … s, up to TRIES times

A mail whose connection breaks between its text and the 250 may have been accepted; the sender
cannot know. It is sent again, with the same Message-ID, by which the receiver recognises it.
"""

from __future__ import annotations

import os
import smtplib
import threading
from collections.abc import Iterable
from email.message import EmailMessage
from email.utils import formatdate

from machinery_py import ChordResult, NoRetry, RetryTaskLater, Server, chord, current_task, group

HOST = os.environ.get("SMTP_HOST", "localhost")
PORT = int(os.environ.get("SMTP_PORT", "1025"))
SENDER = os.environ.get("MAIL_FROM", "shop@example.com")
PATIENCE = float(os.environ.get("MAIL_PATIENCE", "300"))  # seconds to wait when the server says 4xx
TIMEOUT = 10.0  # seconds for each answer of the server
TRIES = 20  # with waits of up to 10 minutes: about two hours without a mail server

FOR_GOOD = 500  # the first SMTP code that means: never

server = Server()


@server.task(queue="mail", retries=TRIES, backoff="exponential", retry_on=OSError)
def send_mail(to: str, subject: str, text: str) -> str:
    """Deliver one mail to the mail server; return its Message-ID. (SMTPException is an OSError.)"""
    message = EmailMessage()
    message["From"], message["To"], message["Subject"] = SENDER, to, subject
    message["Date"] = formatdate(localtime=True)
    message["Message-ID"] = (
        f"<{current_task().uuid}@{SENDER.partition('@')[2]}>"  # the same on every attempt
    )
    message.set_content(text, cte="quoted-printable")  # every server takes that
    smtp = connection()
    try:
        smtp.send_message(message)
    except smtplib.SMTPRecipientsRefused as refused:
        raise _verdict(to, *refused.recipients[to]) from refused
    except smtplib.SMTPResponseException as answer:
        raise _verdict(to, answer.smtp_code, answer.smtp_error) from answer
    return str(message["Message-ID"])


@server.task(queue="bulk", retries=TRIES, backoff="exponential", retry_on=OSError)
def send_bulk_mail(to: str, subject: str, text: str) -> bool:
    """Deliver one mail of a bulk; return False for an address that is refused.

    An error would leave the chord without a callback: it has none when a member fails.
    """
    try:
        send_mail(to, subject, text)
    except NoRetry:
        return False
    return True


@server.task(queue="mail")
def report(campaign: str, delivered: list[bool]) -> str:
    """The callback of a bulk. Here one would tell the people who ordered it."""
    good, total = sum(delivered), len(delivered)
    return f"{campaign}: {good:,} of {total:,} delivered, {total - good:,} refused"


def bulk(campaign: str, recipients: Iterable[tuple[str, str]], text: str) -> ChordResult[str]:
    """Send a text to many, each (address, name); `{name}` becomes the name.

    All are stored in one step, or none.
    """
    mails = group(
        send_bulk_mail.signature(address, campaign, text.replace("{name}", name))
        for address, name in recipients
    )
    return server.send_chord(chord(mails, report.partial(campaign), collect=True))


def _verdict(to: str, code: int, answer: bytes | str) -> NoRetry | RetryTaskLater:
    words = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer
    if code >= FOR_GOOD:
        return NoRetry(f"{to} refused for good: {code} {words}")
    return RetryTaskLater(f"{to} refused for now: {code} {words}", PATIENCE)


_kept = threading.local()


def connection() -> smtplib.SMTP:
    """This thread's connection, if the server still answers on it; else a new one.

    Nothing sends QUIT after a mail: a failing QUIT would make an accepted mail look undelivered.
    """
    kept: smtplib.SMTP | None = getattr(_kept, "smtp", None)
    if kept is not None:
        try:
            if kept.noop()[0] == 250:
                return kept
        except OSError:
            pass
        kept.close()
        _kept.smtp = None
    _kept.smtp = smtplib.SMTP(HOST, PORT, timeout=TIMEOUT)
    fresh: smtplib.SMTP = _kept.smtp
    return fresh
